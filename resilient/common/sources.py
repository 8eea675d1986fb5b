"""Digests of source files: those of this package, and the user's own that a process has loaded.

A process that imports modules before it is forked keeps the digests of what it has imported (:func:`keep_sources`): a
file that is edited later is not what runs in its children.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from pathlib import Path

PACKAGE = "resilient"

_ALIAS = "__mp_main__"
"""By which multiprocessing knows what the process was started by, once it is imported."""

_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}

_kept: dict[str, str] = {}
"""File -> digest, of modules that were imported before a fork."""

_instead: dict[str, str] = {}
"""Module -> file that counts in the place of its own."""


def keep_sources() -> None:
    """Remember what this package and all modules loaded so far are made of, for the processes forked from here."""
    package_digest()
    _kept.update({file: digest for file in _user_files().values() if (digest := _digest(file))})


def count_as_main(script: str) -> None:
    """Have a script that this process has run, and whose job it goes on with, count as what the process was started by.

    So that what is kept by its sources is found by the processes that are started to train the job.
    """
    _instead["__main__"] = os.path.abspath(script)


def user_sources() -> dict[str, str]:
    """Return a digest of the source of every module loaded that is neither installed nor a part of this package.

    Returns:
        Digest by module; that of the script goes by its file's name.
    """
    return {
        Path(file).name if module == "__main__" else module: digest
        for module, file in sorted(_user_files().items())
        if (digest := _digest(file) if module == "__main__" else _kept.get(file) or _digest(file))
    }


@functools.cache
def package_digest() -> str:
    """Return a digest of all source files of this package."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(root, followlinks=True):  # in a checkout some are links
        folders.sort()
        for file in sorted(file for file in files if file.endswith(".py")):
            source = (Path(folder) / file).read_bytes()
            digest.update(f"{Path(folder).relative_to(root) / file} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def _user_files() -> dict[str, str]:
    loaded = list(sys.modules.items())
    files = {name: _instead.get(name) or getattr(module, "__file__", None) for name, module in loaded}
    return {
        name: file
        for name, file in files.items()
        if isinstance(file, str)
        and name.partition(".")[0] not in (PACKAGE, _ALIAS)
        and not file.startswith(_STANDARD)
        and _INSTALLED.isdisjoint(Path(file).parts)
    }


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:  # within an archive, or made up: as good as installed
        return ""
