"""Tells what decides the result of a job in this process: its sources, its code, and a few of its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import nn

from resilient.common.sources import PACKAGE, user_sources
from resilient.data.checksums import entry_checksum
from resilient.data.reader import Read
from resilient.models.digests import code_text
from resilient.models.layer import FromFiles, Model
from resilient.protocol.alike import Alike, short
from resilient.runtime.job import Job

_MOST_SAMPLES = 64
_OTHERS = (PACKAGE, "torch", "transformers")
"""Packages whose modules are not the user's."""


def alike(job: Job, samples: Iterable[Read]) -> Alike:
    """Return what must be the same on all workers of a job.

    Args:
        job: The job.
        samples: Some of its data set, the same on all workers.
    """
    model, recipe = job.model, job.recipe()
    structure, values = getattr(model, "structure_digest", model.digest), getattr(model, "values_digest", None)
    fields = {name: getattr(recipe, name) for name in recipe.__struct_fields__ if name != "model"}
    files = model.contents() if isinstance(model, FromFiles) else {}
    told = {**job.config(), **fields, "num_steps": job.num_steps, "read_ahead": job.read_ahead}
    return {
        "script": {name: short(digest) for name, digest in user_sources().items()},
        "files": {name: short(digest) for name, digest in files.items()},
        "job": {"model": short(structure()), **{name: str(value) for name, value in told.items()}},
        "model": _classes(model),
        "values": {"initial values": short(values())} if values is not None else {},
        "schedule": {"code": _code(job.optimizer.lr_schedule)},
        "loss": {"code": _code(getattr(model, "loss_function", model.loss))},
        "data": {f"sample {read.index}": f"{entry_checksum(read.sample):016x}" for read in _few(samples)},
    }


def _few(samples: Iterable[Read]) -> list[Read]:
    return sorted(samples, key=lambda read: read.index)[:_MOST_SAMPLES]


def _classes(model: Model) -> dict[str, str]:
    """Return a digest of the forward code of each of the user's classes in the layers."""
    classes: set[type[nn.Module]] = set()
    for spec in model.layers:
        with torch.device("meta"):
            classes |= {type(module) for module in spec.build().modules()}
    own = [kind for kind in classes if kind.__module__.partition(".")[0] not in _OTHERS]
    return dict(sorted((kind.__qualname__, _code(kind.forward)) for kind in own))


def _code(function: object) -> str:
    return short(hashlib.sha256(code_text(function).encode()).hexdigest())
