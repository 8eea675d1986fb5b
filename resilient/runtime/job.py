"""A job as one worker sees it: model, data, optimizer, sizes; and the description the coordinator plans with.

Owns the checks of the user's arguments, so that a job that cannot run fails before anything is started.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from resilient.data.dataset import Dataset
from resilient.models.layer import LayerSpec, Model
from resilient.optim import Optimizer
from resilient.protocol.messages import JobSpec
from resilient.state.layer_state import BufferLayout
from resilient.state.recipe import Recipe
from resilient.templates.composition.batch_split import check_batch
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.schedules.kind import ScheduleKind

PRECISIONS = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""Name -> type of parameters, gradients and optimizer slots; "bf16" computes matrix products in bfloat16."""

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "zb-h1", "zb-h2")
"""Kinds of schedules a job can choose: those that train."""

_USABLE_MEMORY = 0.9
"""Share of a device's memory that states and activations may take; the rest is for libraries and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything a worker needs to train; see :class:`resilient.Trainer` for the meaning of the fields."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    global_batch: int
    microbatch: int
    max_failures: int
    min_pipeline_nodes: int
    seed: int
    precision: str
    clip_grad_norm: float | None
    checkpoint_every: int
    schedule: str
    device: torch.device
    comm_timeout_s: float
    num_chunks: int = 2
    num_steps: int = 1

    def __post_init__(self) -> None:
        if not hasattr(self.model, "digest"):
            raise ValueError(
                f"model must be cut into layers, got a {type(self.model).__name__}; make it a resilient.Chain of "
                f"modules or a resilient.MultimodalModule"
            )
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"optimizer must be a description such as resilient.AdamW(lr=3e-4), got torch's "
                f"{type(self.optimizer).__name__}; each worker builds torch's own for the layers it holds"
            )
        check_batch(self.global_batch, self.microbatch, 1)
        _check("num_steps", self.num_steps, 1, "train for at least one step")
        _check("max_failures", self.max_failures, 0, "0 means no redundancy")
        _check("min_pipeline_nodes", self.min_pipeline_nodes, 1, "a pipeline has at least one node")
        _check("checkpoint_every", self.checkpoint_every, 0, "0 means at the end only")
        if self.precision not in PRECISIONS:
            raise ValueError(
                f"precision must be one of {sorted(PRECISIONS)}, got {self.precision!r}; choose one of them"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(
                f"schedule must be one of {list(SCHEDULES)}, got {self.schedule!r}; choose one of them, 1f1b needs the "
                f"least memory"
            )
        if self.kind is ScheduleKind.INTERLEAVED:
            _check("num_chunks", self.num_chunks, 2, "1f1b is the schedule with one stage on each worker")
            if self.device.type == "cuda":
                raise ValueError(
                    f"schedule must not be {self.schedule} on {self.device} (NCCL's messages carry no tags, and both "
                    f"ends do not order theirs alike); choose another"
                )
        if self.clip_grad_norm is not None and not self.clip_grad_norm > 0:
            raise ValueError(f"clip_grad_norm must be > 0, got {self.clip_grad_norm}; pass None not to clip")
        if not self.comm_timeout_s > 0:
            raise ValueError(f"comm_timeout_s must be > 0, got {self.comm_timeout_s}; leave it out for 120")
        if len(self.dataset) == 0:
            raise ValueError("dataset must hold at least one sample, got 0; check how it is built")

    def until(self, num_steps: int) -> Job:
        """Return the job with its number of steps set."""
        return replace(self, num_steps=num_steps)

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters, gradients and optimizer slots."""
        return PRECISIONS[self.precision]

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of matrix products, when it differs."""
        return torch.bfloat16 if self.precision == "bf16" else None

    @property
    def kind(self) -> ScheduleKind:
        """The kind of schedule."""
        return ScheduleKind(self.schedule)

    def layer(self, name: str) -> LayerSpec:
        """Return the layer called ``name``."""
        return next(spec for spec in self.model.layers if spec.name == name)

    def layouts(self) -> dict[str, BufferLayout]:
        """Return the buffer layout of every layer."""
        return {spec.name: BufferLayout.of(spec) for spec in self.model.layers}

    def spec(self, profile: ModelProfile) -> JobSpec:
        """Describe the job to the coordinator.

        Args:
            profile: Of the model, on this device.
        """
        recipe = self.recipe()
        return JobSpec(
            profile=profile,
            recipe=recipe,
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            max_failures=self.max_failures,
            min_pipeline_nodes=self.min_pipeline_nodes,
            num_steps=self.num_steps,
            comm_timeout_s=self.comm_timeout_s,
            checkpoint_every=self.checkpoint_every,
            memory_bytes=_memory_bytes(self.device),
            schedule=self.kind,
            num_chunks=self.num_chunks if self.kind is ScheduleKind.INTERLEAVED else 1,
            digest=self._digest(recipe),
        )

    def recipe(self) -> Recipe:
        """Return what decides the values that are trained."""
        options = sorted((name, value) for name, value in vars(self.optimizer).items() if name != "schedule")
        return Recipe(
            model=self.model.digest(),
            num_layers=len(self.model.layers),
            num_parameters=sum(layout.numel(0) for layout in self.layouts().values()),
            dataset=type(self.dataset).__qualname__,
            num_samples=len(self.dataset),
            global_batch=self.global_batch,
            optimizer=f"{type(self.optimizer).__qualname__}({', '.join(f'{name}={value}' for name, value in options)})",
            seed=self.seed,
            precision=self.precision,
            clip_grad_norm=self.clip_grad_norm,
        )

    def _digest(self, recipe: Recipe) -> str:
        """Hash what must be equal on all workers for their steps to be those of one job."""
        parts: tuple[Any, ...] = (
            recipe,
            self.microbatch,
            self.max_failures,
            self.min_pipeline_nodes,
            self.schedule,
            self.num_chunks,
            self.num_steps,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


def _memory_bytes(device: torch.device) -> int | None:
    return int(_USABLE_MEMORY * torch.cuda.mem_get_info(device)[1]) if device.type == "cuda" else None


def _check(name: str, value: int, least: int, fix: str) -> None:
    if value < least:
        raise ValueError(f"{name} must be >= {least}, got {value}; {fix}")
