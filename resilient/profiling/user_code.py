"""Content hashes of the user's own code and settings: what was verified of them holds for no others."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch

from resilient.models.layer import LayerSpec

_STANDARD = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def sources_digest() -> str:
    """Return a hash of the source of every module loaded that is neither installed nor a part of resilient."""
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name.partition(".")[0] == "resilient":
            continue
        if file.startswith(_STANDARD) or not _INSTALLED.isdisjoint(Path(file).parts):
            continue
        try:
            source = Path(file).read_bytes()
        except OSError:  # within an archive, or made up: as good as installed
            continue
        digest.update(f"{name} {len(source)}\n".encode() + source)
    return digest.hexdigest()


def settings_digest(layers: Iterable[LayerSpec]) -> str:
    """Return a hash of the classes of all modules in the layers, and of their attributes that are numbers or text."""
    digest = hashlib.sha256()
    for spec in layers:
        with torch.device("meta"):
            built = spec.build()
        for path, module in built.named_modules():
            simple = {key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)}
            digest.update(repr((spec.name, path, type(module).__qualname__, simple)).encode())
    return digest.hexdigest()
