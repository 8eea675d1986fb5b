"""Digests of the contents of large files, kept in the user's cache as long as a file is not changed."""

from __future__ import annotations

import hashlib
import logging
import time
from pathlib import Path

import msgspec
import xxhash

from resilient.common.files import hash_file, write_whole
from resilient.common.user_cache import cache_folder, one_at_a_time

logger = logging.getLogger(__name__)

_SETTLED_NS = 2_000_000_000
"""Younger files may be changed once more without a later time: not all file systems count in nanoseconds."""


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a file was like when it had this digest."""

    path: str
    num_bytes: int
    mtime_ns: int
    inode: int
    digest: str = ""


def file_digest(path: str | Path) -> str:
    """Return a digest of 128 bits of a file's contents, computed once on a machine for all its processes.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read.
    """
    real = Path(path).resolve()
    kept = cache_folder("digests") / f"{hashlib.sha256(str(real).encode()).hexdigest()[:32]}.json"
    with one_at_a_time(kept):
        found, known = _seen(real), _read(kept)
        if known is not None and msgspec.structs.replace(known, digest="") == found:
            return known.digest
        digest = hash_file(real, xxhash.xxh3_128())
        if found == _seen(real) and time.time_ns() - found.mtime_ns > _SETTLED_NS:
            _keep(kept, msgspec.structs.replace(found, digest=digest))
    return digest


def _seen(path: Path) -> _Known:
    status = path.stat()
    return _Known(path=str(path), num_bytes=status.st_size, mtime_ns=status.st_mtime_ns, inode=status.st_ino)


def _read(kept: Path) -> _Known | None:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=_Known)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read and is made again: %s", kept, error)
        return None


def _keep(kept: Path, known: _Known) -> None:
    try:
        write_whole(kept, msgspec.json.encode(known))
    except OSError as error:
        logger.warning("the digest of %s is not kept, the next worker reads it again: %s", known.path, error)
