"""Keeps measured profiles in the user's cache folder, by the content of what they were measured on.

Owns the files and the lock that lets one of several workers measure while the others wait for what it finds. A profile
that cannot be kept or read is no reason to stop a job: it is measured again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch

from resilient.common.files import write_whole
from resilient.common.user_cache import cache_folder, one_at_a_time
from resilient.models.digests import code_text
from resilient.planners.costs.cost_model import COST_MODEL_VERSION, CostModel
from resilient.profiling import profiler, unit_costs
from resilient.profiling.profiler import ProfiledBatch
from resilient.profiling.unit_cells import DrawnSamples, draw_lengths
from resilient.profiling.user_code import settings_digest, sources_digest
from resilient.runtime.job import Job
from resilient.state.layout import BufferLayout
from resilient.templates.inputs.profile import ModelProfile

logger = logging.getLogger(__name__)


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True):
    """All that the numbers depend on.

    Args:
        model: Its digest.
        code: Hash of the loss's and of the data set's collate's code, of the modules' settings and of all sources of
            the user's that are loaded: they were verified together.
        layouts: Hash of every layer's parameters, trainable or not, and of the number of optimizer slots.
        shapes: Hash of the shapes of the microbatches looked at, or of the lengths of the samples drawn.
        microbatch: Samples of a microbatch.
        precision: The job's.
        tp_chunks: The job's: tensor-parallel devices compute and keep other tensors where they exchange chunks.
        device: What kind of device.
        torch: Version.
        num_threads: Threads of an operator, on the CPU.
        profiler: :data:`resilient.profiling.profiler.PROFILER_VERSION`, or that of unit costs.
    """

    model: str
    code: str
    layouts: str
    shapes: str
    microbatch: int
    precision: str
    tp_chunks: int
    device: str
    torch: str
    num_threads: int
    profiler: int

    @classmethod
    def of(cls, job: Job, layouts: Mapping[str, BufferLayout], samples: Sequence[ProfiledBatch]) -> ProfileKey:
        """Return the key of the profile of a job on its device."""
        shapes = _hash(*sorted((repr(sample.shapes), sample.count) for sample in samples))
        return cls._of(job, layouts, shapes, profiler.PROFILER_VERSION)

    @classmethod
    def of_units(cls, job: Job, drawn: DrawnSamples) -> ProfileKey:
        """Return the key of the costs of a job's units on its device."""
        units = drawn.table.units.items()
        lengths = [(name, each.tokens.tolist(), each.squares.tolist()) for name, each in units]
        return cls._of(job, job.layouts(), _hash(COST_MODEL_VERSION, *lengths), unit_costs.UNIT_COSTS_VERSION)

    @classmethod
    def _of(cls, job: Job, layouts: Mapping[str, BufferLayout], shapes: str, version: int) -> ProfileKey:
        sizes = [(name, each.num_trainable, each.num_frozen, each.own_bytes) for name, each in layouts.items()]
        return cls(
            model=job.model.digest(),
            code=_hash(
                code_text(job.model.loss),
                code_text(getattr(type(job.dataset), "collate", None)),
                settings_digest(job.model.layers),
                sources_digest(),
            ),
            layouts=_hash(sizes, len(job.optimizer.slots)),
            shapes=shapes,
            microbatch=job.microbatch,
            precision=job.precision,
            tp_chunks=job.tp_chunks,
            device=job.device_name,
            torch=str(torch.__version__),
            num_threads=torch.get_num_threads(),
            profiler=version,
        )

    def file(self, folder: Path) -> Path:
        """Return the file that keeps what was measured."""
        return folder / f"{hashlib.sha256(msgspec.json.encode(self)).hexdigest()}.json"


_Profile = TypeVar("_Profile", ModelProfile, CostModel)


class _File(msgspec.Struct, Generic[_Profile], frozen=True, kw_only=True):
    key: ProfileKey
    profile: _Profile


def job_profile(job: Job, samples: Sequence[ProfiledBatch], announce: Callable[[str], None]) -> ModelProfile:
    """Return the profile of a job on this device, measured now if it never was.

    Args:
        job: The job.
        samples: Of :func:`resilient.profiling.profiler.draw_samples`; they may end up at the model's end.
        announce: Told, in words, that it takes a moment.
    """
    layouts = job.layouts()
    folder, key = cache_folder("profiles"), ProfileKey.of(job, layouts, samples)
    with one_at_a_time(key.file(folder)):
        known = load_kept(folder, key, ModelProfile)
        if known is not None:
            return known
        announce(f"profiling {len(layouts)} layers (first run of this model here)")
        profile = profiler.measure(job, layouts, samples, on_layer=lambda _: None)
        keep(folder, key, profile)
    return profile


def fresh_profile(job: Job, on_layer: Callable[[str], None]) -> tuple[ModelProfile, Path]:
    """Measure a job's profile, whatever is known of it, and keep it; return it and the file it is in.

    Of a planned job the units are measured by themselves, on cells of several sizes: the profile is that of mean cells.

    Args:
        job: The job.
        on_layer: Called with the name of each layer that is done.

    Raises:
        SampleError: One of the samples looked at cannot be trained on.
    """
    if job.planner:
        return _fresh_units(job, on_layer)
    layouts, samples = job.layouts(), profiler.draw_samples(job)
    folder, key = cache_folder("profiles"), ProfileKey.of(job, layouts, samples)
    with one_at_a_time(key.file(folder)):
        profile = profiler.measure(job, layouts, samples, on_layer=on_layer)
        keep(folder, key, profile)
    return profile, key.file(folder)


def job_unit_costs(job: Job, drawn: DrawnSamples, announce: Callable[[str], None]) -> CostModel:
    """Return what the units of a job's model cost on this device, measured now if they never were.

    Args:
        job: The job, whose model packs its data set's samples.
        drawn: Samples of :func:`resilient.profiling.unit_cells.draw_lengths`.
        announce: Told, in words, that it takes a moment.
    """
    folder, key = cache_folder("unit_costs"), ProfileKey.of_units(job, drawn)
    with one_at_a_time(key.file(folder)):
        known = load_kept(folder, key, CostModel)
        if known is not None:
            return known
        announce(f"profiling units {', '.join(drawn.table.units)} (first run of this model here)")
        costs = unit_costs.measure_units(job, drawn, on_layer=lambda _: None)
        keep(folder, key, costs)
    return costs


def load_kept(folder: Path, key: ProfileKey, kind: type[_Profile]) -> _Profile | None:
    """Return what was kept under a key; None for nothing, or (with a warning) for a file that cannot be read."""
    path, of_kind = key.file(folder), _File[kind]
    try:
        file = msgspec.json.decode(path.read_bytes(), type=of_kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read and is measured again: %s", path, error)
        return None
    if file.key != key:
        logger.warning("%s holds the profile of something else and is measured again", path)
        return None
    return file.profile


def keep(folder: Path, key: ProfileKey, profile: _Profile) -> None:
    """Write what was measured, whole or not at all."""
    path = key.file(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, msgspec.json.format(msgspec.json.encode(_File(key=key, profile=profile))))
    except OSError as error:
        logger.warning("the profile is not kept, the next run measures again: %s", error)


def _fresh_units(job: Job, on_layer: Callable[[str], None]) -> tuple[ModelProfile, Path]:
    drawn = draw_lengths(job)
    folder, key = cache_folder("unit_costs"), ProfileKey.of_units(job, drawn)
    with one_at_a_time(key.file(folder)):
        costs = unit_costs.measure_units(job, drawn, on_layer=on_layer)
        keep(folder, key, costs)
    return unit_costs.mean_profile(job, costs, drawn.table), key.file(folder)


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
