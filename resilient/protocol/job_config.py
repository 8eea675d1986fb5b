"""The sizes and choices of a job: what the user's trainer, a worker and the coordinator all know of it.

Owns the checks of these arguments, so that a job that cannot run fails before anything is started.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from resilient.common.arguments import check_number, described, whole_number
from resilient.errors import ArgumentError
from resilient.protocol.checkpoint_pace import AUTO_CHECKPOINTS
from resilient.templates.common.words import look_up
from resilient.templates.composition.batch_split import check_batch
from resilient.templates.schedules.kind import CHUNK_KINDS, ScheduleKind, chunks_of

PRECISIONS = ("bf16", "fp32", "fp64")

ON_NONFINITE = ("stop", "skip")
"""What can be done about a step whose loss or gradient is not finite."""

SCHEDULES = tuple(kind.value for kind in ScheduleKind if kind is not ScheduleKind.FORWARD_ONLY)
"""Kinds of schedules a job can choose: those that train."""

AUTO_SCHEDULE = "auto"
"""Has the schedule chosen among these, by simulation, for the nodes that the job begins with."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The sizes and choices of a job, equal on all its workers; :class:`resilient.Trainer` tells users of them.

    Args:
        global_batch: Samples of one step.
        microbatch: Samples that go through a pipeline together; divides ``global_batch``.
        max_failures: Node failures that must be survivable at the same time.
        min_pipeline_nodes: Fewest nodes of a pipeline.
        seed: Of initial values, order of samples, and dropout.
        precision: One of ``PRECISIONS``.
        clip_grad_norm: Largest norm of the whole gradient; None for no limit.
        on_nonfinite: One of ``ON_NONFINITE``.
        checkpoint_every: Steps between checkpoints; 0 for one at the end; "auto" by measured cost and by risk.
        compare_replicas_every: Steps between comparisons of the copies of states; 0 for when they are installed.
        schedule: What pipelines run: one of ``SCHEDULES``, or ``AUTO_SCHEDULE``.
        num_chunks: Stages of each worker, of interleaved schedules; zb-v has 2, all others 1, whatever is given. Where
            the schedule is to be chosen, the most stages of each worker.
        tp_chunks: In how many chunks tensor-parallel devices exchange tokens, while they compute; 1 for one before or
            after that.
        planner: What places the samples of a model's units; "" for a chain of all units.
        comm_timeout_s: How long workers wait for each other before they give a generation up.

    Raises:
        ArgumentError: A field cannot be.
        ValueError: The global batch cannot be cut into microbatches; the message names those that can.
    """

    global_batch: int
    microbatch: int
    max_failures: int = 1
    min_pipeline_nodes: int = 1
    seed: int = 0
    precision: str = "fp32"
    clip_grad_norm: float | None = None
    on_nonfinite: str = "stop"
    checkpoint_every: int | Literal["auto"] = 0
    compare_replicas_every: int = 100
    schedule: str = ScheduleKind.ONE_F_ONE_B.value
    num_chunks: int = 2
    tp_chunks: int = 1
    planner: str = ""
    comm_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        self._take_whole("microbatch", 1, "give the samples of one microbatch")
        self._take_whole("global_batch", 1, "give the samples of one step, a multiple of {microbatch}")
        check_batch(self.global_batch, self.microbatch, 1)
        self._take_whole("max_failures", 0, "0 means no redundancy")
        self._take_whole("min_pipeline_nodes", 1, "a pipeline has at least one node")
        if self.checkpoint_every != AUTO_CHECKPOINTS:
            self._take_whole("checkpoint_every", 0, '0 means at the end only, "auto" by what one costs')
        self._take_whole("seed", 0, "choose any such number, 0 for example")
        self._take_whole("compare_replicas_every", 0, "0 means when they are installed only")
        if self.precision not in PRECISIONS:
            raise ArgumentError(
                "precision", f"be one of {list(PRECISIONS)}", repr(self.precision), "choose one of them"
            )
        object.__setattr__(self, "schedule", training_schedule(self.schedule))
        if self.schedule == AUTO_SCHEDULE:
            self._take_whole("num_chunks", 1, "1 leaves schedules with several stages on each worker out")
        else:
            object.__setattr__(self, "num_chunks", chunks_of(ScheduleKind(self.schedule), self.num_chunks))
        if self.schedule in CHUNK_KINDS:
            self._take_whole("num_chunks", 2, "1f1b is the schedule with one stage on each worker")
        self._take_whole("tp_chunks", 1, "1 exchanges tokens before or after they are computed with")
        if self.clip_grad_norm is not None:
            check_number("clip_grad_norm", self.clip_grad_norm, "pass None not to clip")
        if self.on_nonfinite not in ON_NONFINITE:
            fix = "stop ends the job at such a step, skip goes on without it"
            raise ArgumentError("on_nonfinite", f"be one of {list(ON_NONFINITE)}", repr(self.on_nonfinite), fix)
        check_number("comm_timeout_s", self.comm_timeout_s, "leave it out for 120")

    @property
    def first_schedule(self) -> tuple[ScheduleKind, int]:
        """What plans are made for, and the stages of each worker: 1f1b's as long as the schedule is to be chosen."""
        if self.schedule == AUTO_SCHEDULE:
            return ScheduleKind.ONE_F_ONE_B, 1
        return ScheduleKind(self.schedule), self.num_chunks

    def saves_after(self, step: int, *, is_chosen: bool) -> bool:
        """Return whether a checkpoint is to be written after a step on the way; ``is_chosen``: "auto" says so."""
        every = self.checkpoint_every
        return is_chosen if isinstance(every, str) else every > 0 and step % every == 0

    def _take_whole(self, name: str, least: int, fix: str) -> None:
        object.__setattr__(self, name, whole_number(name, getattr(self, name), least, fix))

    def config(self) -> dict[str, Any]:
        """Return the fields by name, to make another object that has them, too."""
        return {field.name: getattr(self, field.name) for field in fields(JobConfig)}


def training_schedule(name: str) -> str:
    """Return the name of the schedule that a job asks for.

    Raises:
        ArgumentError: There is none of that name, or it does not train.
    """
    known = {each: each for each in (*SCHEDULES, AUTO_SCHEDULE)}
    if not isinstance(name, str):
        fix = "choose one of them; learning rates are the optimizer's lr_schedule"
        raise ArgumentError("schedule", f"be one of {', '.join(known)}", described(name), fix)
    return look_up("schedule", name, known)
