"""Checks that a command can write its files, before it computes. Must not import torch."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from resilient.cli.shared.errors import console
from resilient.common.extras import MissingPackageError, require
from resilient.errors import ArgumentError


def check_outputs(outputs: Iterable[tuple[str, Path | None]], inputs: Iterable[Path | None] = ()) -> None:
    """Refuse files that could not be written later, and make the folders of the others.

    What is there stays as it is. Nothing but trying tells what a file system allows.

    Args:
        outputs: Option and file; None where the option is not given. What ``--png`` names must end in ``.png``.
        inputs: Files that the command reads; none of them may be written over.

    Raises:
        ArgumentError: A file cannot be written, or is another of them; the message names the option and the path.
        MissingPackageError: ``--png`` is given, and nothing can draw.
    """
    owners = {os.path.realpath(path): "what is read" for path in inputs if path is not None}
    for option, path in outputs:
        if path is None:
            continue
        if option == "--png" and path.suffix.lower() != ".png":
            raise ArgumentError(option, "be a file that ends in .png", path, "choose another")
        if option == "--png":
            require("matplotlib", option)
        try:
            owner = owners.setdefault(os.path.realpath(path), option) if _try(path) else option
        except OSError as error:
            no_folder = isinstance(error, (FileExistsError, NotADirectoryError))
            reason = f"{error.filename} is no folder" if no_folder else error.strerror
            raise ArgumentError(
                option,
                "be a file that can be written",
                f"{path} ({reason})",
                "choose another, or make this one writable",
            ) from None
        if owner != option:
            raise ArgumentError(option, f"be another file than {owner}", f"{path} for both", "choose another")


@contextmanager
def drawing(path: Path) -> Iterator[Path]:
    """Draw a picture that comes along with something else, inside; say that there is none where matplotlib is missing.

    Args:
        path: The file that is drawn, which is what ``as`` gives.
    """
    try:
        yield path
    except MissingPackageError as error:
        console.print(f"no {path.name}: {error}", markup=False, soft_wrap=True)


def _try(path: Path) -> bool:
    """Open a file to write, and return whether it is one: a pipe would lose its reader when it is closed again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.open("xb").close()
        path.unlink()
    elif path.is_file() or path.is_dir():
        path.open("ab").close()
    else:
        return False
    return True
