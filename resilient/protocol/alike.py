"""What must be alike on all nodes of a run, so that they train one job: what it is called, and what to do about it.

Owns the names, and how a difference is told. Nodes tell of themselves when they connect, workers when they are ready;
the coordinator holds each against the first of the launcher's own nodes. Must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from resilient.common.sources import package_digest

Alike = dict[str, dict[str, str]]
"""What one node or worker tells: by name of :data:`FIXES`, and within it by what is looked at, a short text."""

FIXES: Mapping[str, str] = {
    "versions": "install the same versions on all nodes",
    "package": "install the same version of resilient, unchanged, on all nodes",
    "script": "copy the script and its modules to all nodes",
    "files": "copy the same files to all nodes",
    "job": "start the script with the same arguments on all nodes",
    "model": "use the same code of the model on all nodes",
    "values": "read them from the same files, or draw them from the same seed (torch.manual_seed) on all nodes",
    "schedule": "have the learning rate's schedule depend on nothing that differs between nodes",
    "loss": "have the loss depend on nothing that differs between nodes",
    "data": "give the data set the same samples on all nodes",
}
"""What is to be alike, what others follow from first -> what to do where it is not."""

ALLOWABLE = ("versions", "package", "script", "model", "schedule", "loss", "data")
"""What may differ if the one who starts the job says so: nothing but results depends on it."""

_DIGITS = 12


def short(digest: str) -> str:
    """Return as much of a digest as people compare."""
    return digest[:_DIGITS]


def installed() -> Alike:
    """Tell what is installed here."""
    names = {"resilient": "resilient-train", "torch": "torch"}
    versions = {name: _version(distribution) for name, distribution in names.items()}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"versions": {**versions, "python": python}, "package": {"sources": short(package_digest())}}


def _version(distribution: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # as long to import as all else here together

    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
