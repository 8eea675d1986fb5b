"""A job as one worker sees it: model, data, optimizer, sizes; and the description the coordinator plans with."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from importlib import import_module

import torch

from resilient.data.dataset import Dataset
from resilient.models.layer import LayerSpec, Model
from resilient.optim import Optimizer, check_groups
from resilient.protocol.alike import Alike
from resilient.protocol.job_config import AUTO_SCHEDULE, JobConfig
from resilient.protocol.messages import JobSpec
from resilient.runtime.job_arguments import check_dataset, check_model, check_optimizer, check_planner
from resilient.state.layout import BufferLayout
from resilient.state.recipe import Recipe
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.template import PipelineTemplate

_TYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""Precision -> type of parameters, gradients and optimizer slots; "bf16" computes matrix products in bfloat16."""

_USABLE_MEMORY = 0.9
"""Share of a device's memory that states and activations may take; the rest is for libraries and fragmentation."""


@dataclass(frozen=True, kw_only=True)
class Job(JobConfig):
    """A job as a worker trains it: the sizes and choices that all know, and what only workers have.

    Args:
        model: What is trained.
        dataset: What it is trained on.
        optimizer: Describes torch's optimizer, which each worker builds for the layers it holds.
        device: Where this worker trains.
        num_steps: Steps of the whole job.
        num_workers: Processes of each worker that read samples ahead of time; 0 for none, None for as many as the time
            that a sample takes to read calls for.
        read_ahead: Steps whose samples these processes read ahead of time; equal on all workers.

    Raises:
        ArgumentError: An argument cannot be.
    """

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    device: torch.device
    num_steps: int = 1
    num_workers: int | None = None
    read_ahead: int = 1

    def __post_init__(self) -> None:
        check_model(self.model)
        check_dataset(self.dataset)
        check_optimizer(self.optimizer)
        super().__post_init__()
        self._take_whole("num_steps", 1, "train for at least one step")
        if self.num_workers is not None:
            self._take_whole("num_workers", 0, "0 reads samples in the worker itself")
        self._take_whole("read_ahead", 1, "num_workers=0 reads none ahead of time")
        if self.schedule == AUTO_SCHEDULE and self.device.type == "cuda":  # NCCL is not used for several
            object.__setattr__(self, "num_chunks", 1)
        if self.planner:
            check_planner(self.planner, self.model, self.dataset, self.schedule)
        if self.optimizer.groups:
            check_groups(self.optimizer, self.parameter_names())

    def until(self, num_steps: int) -> Job:
        """Return the job with its number of steps set."""
        return replace(self, num_steps=num_steps)

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters, gradients and optimizer slots."""
        return _TYPES[self.precision]

    @property
    def autocast(self) -> torch.dtype | None:
        """Type of matrix products, when it differs."""
        return torch.bfloat16 if self.precision == "bf16" else None

    @property
    def device_name(self) -> str:
        """What kind of device this worker trains on: equal for devices that compute equally fast."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.machine()

    def use_device(self) -> None:
        """Make it this process's, before anything is put there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # seeds and timing events are the current device's
            import_module("torch._dynamo")  # by the first layer that is recomputed, which may be in a recovery

    def layer(self, name: str) -> LayerSpec:
        """Return the layer called ``name``."""
        return next(spec for spec in self.model.layers if spec.name == name)

    def layouts(self) -> dict[str, BufferLayout]:
        """Return the buffer layout of every layer."""
        return {spec.name: BufferLayout.of(spec, self.optimizer.rates) for spec in self.model.layers}

    def parameter_names(self) -> tuple[str, ...]:
        """Return the full names, ``<layer>.<parameter>``, of what is trained; tied parameters once, as the owner's."""
        return tuple(
            f"{layer}.{entry.name}"
            for layer, layout in self.layouts().items()
            for entry in layout.entries
            if entry.trainable
        )

    def spec(self, profile: ModelProfile, alike: Alike, templates: tuple[PipelineTemplate, ...] = ()) -> JobSpec:
        """Describe the job to the coordinator.

        Args:
            profile: Of the model, on this device.
            alike: What must be equal on all workers, as it is here.
            templates: What the job's planner of units answered; empty for a chain.
        """
        return JobSpec(
            **self.config(),
            profile=profile,
            recipe=self.recipe(),
            num_steps=self.num_steps,
            memory_bytes=self.memory_bytes,
            alike=alike,
            templates=templates,
        )

    @property
    def memory_bytes(self) -> int | None:
        """What training may use of the device's memory; None for no limit."""
        if self.device.type != "cuda":
            return None
        return int(_USABLE_MEMORY * torch.cuda.mem_get_info(self.device)[1])

    def recipe(self) -> Recipe:
        """Return what decides the values that are trained."""
        options = sorted((name, value) for name, value in vars(self.optimizer).items() if name != "lr_schedule")
        return Recipe(
            model=self.model.digest(),
            num_layers=len(self.model.layers),
            num_parameters=sum(entry.numel for layout in self.layouts().values() for entry in layout.entries),
            dataset=type(self.dataset).__qualname__,
            num_samples=len(self.dataset),
            global_batch=self.global_batch,
            optimizer=f"{type(self.optimizer).__qualname__}({', '.join(f'{name}={value}' for name, value in options)})",
            seed=self.seed,
            precision=self.precision,
            clip_grad_norm=self.clip_grad_norm,
        )
