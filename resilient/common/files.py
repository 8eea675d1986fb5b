"""Writes files so that a reader finds all of them or what was there before: to another name, then in its place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_PIECE_BYTES = 4 << 20


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
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


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
