"""Writes files so that a reader finds all of them or what was there before, even after the power was cut.

To another name first, down to the disk, then in their place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_PIECE_BYTES = 4 << 20


@contextlib.contextmanager
def partial_file(path: str | Path) -> Iterator[Path]:
    """Give a file to write beside another one, to be put somewhere by :func:`put`; it goes when the block ends.

    Args:
        path: A file in the folder, which must be there; the name given is like its name, and nobody else's.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # processes of two machines may have one number
    try:
        yield partial
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def put(partial: Path, path: Path) -> None:
    """Put a file that is written in the place of another one of its folder, once all of it is on the disk.

    That it has its new name is on the disk after :func:`sync` of the folder.

    Raises:
        OSError: It cannot be put there.
    """
    sync(partial)
    partial.replace(path)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a file to write in the place of another one, which it takes when the block ends without an error.

    After an error the file that was there stays, and what was written goes.

    Args:
        path: The file to replace; it need not be there, its folder must.

    Raises:
        OSError: The file cannot be put there.
    """
    path = Path(path)
    with partial_file(path) as partial:
        yield partial
        put(partial, path)
        sync(path.parent)


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file, whole or not at all.

    Args:
        path: The file; its folder must be there.
        data: All of its contents.

    Raises:
        OSError: It cannot be written; what was there stays.
    """
    with replacing(path) as partial:
        partial.write_bytes(data)


class Hash(Protocol):
    """A hash function under way, as those of ``hashlib`` and ``xxhash`` are."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def sync(path: str | Path) -> None:
    """Wait until a file's contents, or a folder's list of files, are on the disk.

    Raises:
        OSError: The disk does not take them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not Path(path).is_dir():
            raise  # some network file systems write lists of files at once, and know no other way
    finally:
        os.close(descriptor)


def hash_file(path: str | Path, digest: Hash) -> str:
    """Return the digest of a file's bytes, in hexadecimal; the file is read in pieces.

    Args:
        path: The file.
        digest: What nothing was put into yet, ``hashlib.sha256()`` for one.

    Raises:
        OSError: It cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
