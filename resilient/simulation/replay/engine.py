"""Replays a trace: asks a policy at every change what the job does next, and counts what gets done.

Between two changes a job does the same over and over, so the replay goes from change to change, not from step to step.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from resilient.simulation.availability.traces import AvailabilityTrace
from resilient.simulation.replay.job import ReplayedJob, Response, Stretch

_MS_NS = 1_000_000


class When(enum.Enum):
    """When a policy answers to a change."""

    NOW = "now"
    """At once, in the middle of a step."""
    STEP = "step"
    """When the step under way is finished."""
    CHECKPOINT = "checkpoint"
    """When the next checkpoint is saved."""
    NEVER = "never"
    """Not at all: nothing changes for the job."""


@dataclass(frozen=True, kw_only=True)
class LiveNodes:
    """The live nodes after a change, as policies see them.

    Args:
        live: All live nodes, those first that were there first. Nodes that stay until the step is finished are not
            among them.
        joined: Those that joined since the policy last answered.
        lost: Those that were lost since.
        announced: Whether those stayed until the step was finished and can still send what they hold.
    """

    live: tuple[int, ...]
    joined: tuple[int, ...]
    lost: tuple[int, ...]
    announced: bool


class Policy(Protocol):
    """A way to train on nodes that come and go; the engine calls both for one run only, in the order of time."""

    name: str

    def when(self, change: LiveNodes) -> When:
        """Return when to answer to a change. Not asked when the job stands still: then the answer is due at once."""
        ...

    def respond(self, change: LiveNodes) -> Response:
        """Return what to do now."""
        ...


def replay(trace: AvailabilityTrace, policy: Policy, *, announced: bool = False) -> tuple[Stretch, ...]:
    """Replay a trace.

    Args:
        trace: What happens.
        policy: What the job makes of it; it is used up.
        announced: Whether nodes are told before they are taken and stay until the step under way is finished.

    Returns:
        The run, without gaps, from the first node's joining to the trace's end.
    """
    return _Replay(policy, announced).run(trace)


class _Replay:
    """A run in progress. ``_now`` only grows; the job's own state changes in :meth:`_advance` and :meth:`_respond`."""

    def __init__(self, policy: Policy, announced: bool) -> None:
        self._policy = policy
        self._announced = announced
        self._stretches: list[Stretch] = []
        self._now = 0
        self._live: dict[int, None] = {}
        self._leaving: list[int] = []
        self._joined: list[int] = []
        self._lost: list[int] = []
        self._due_ns: int | None = None
        self._job = ReplayedJob()

    def run(self, trace: AvailabilityTrace) -> tuple[Stretch, ...]:
        end_ns = trace.end_ms * _MS_NS
        self._now = trace.changes[0].time_ms * _MS_NS
        for change in trace.changes:
            self._advance_to(change.time_ms * _MS_NS)
            self._change(change.joined, change.lost)
        self._advance_to(end_ns)
        return tuple(self._stretches)

    def _advance_to(self, time_ns: int) -> None:
        while self._due_ns is not None and self._due_ns <= time_ns:
            self._advance(self._due_ns)
            self._respond()
        self._advance(time_ns)

    def _advance(self, time_ns: int) -> None:
        if time_ns > self._now:
            stretch = Stretch(
                start_ns=self._now,
                end_ns=time_ns,
                live=len(self._live) + len(self._leaving),
                working=self._job.work.num_nodes if self._job.work else 0,
            )
            self._job.advance(stretch)
            self._stretches.append(stretch)
            self._now = time_ns

    def _change(self, joined: Iterable[int], lost: Iterable[int]) -> None:
        for node in lost:
            del self._live[node]
            # It joined and went before the policy had anything to do with it.
            self._joined.remove(node) if node in self._joined else self._lost.append(node)
        for node in joined:
            self._live[node] = None
            self._joined.append(node)
        if not self._joined and not self._lost:
            self._due_ns = None
            return
        when = When.NOW if self._job.work is None else self._policy.when(self._membership())
        if when is When.NEVER:
            self._joined.clear()
            self._lost.clear()
        elif when is When.NOW and not (self._announced and self._job.work is not None):
            self._due_ns = None
            self._respond()
        else:
            self._due_ns = self._now + self._job.until_ns(checkpoint=when is When.CHECKPOINT)
        # Told that they are to go, they stay until then.
        self._leaving = list(self._lost) if self._announced and self._due_ns is not None else []

    def _respond(self) -> None:
        self._due_ns = None
        change = self._membership()
        self._leaving.clear()
        self._joined.clear()
        self._lost.clear()
        response = self._policy.respond(change)
        lost_ns, lost_steps = self._job.respond(response)
        if response.again:
            self._due_ns = self._now + self._job.until_next_step_ns()
        for stretch in reversed(self._stretches):
            if not lost_ns and not lost_steps:
                break
            stretch_ns, steps = min(lost_ns, stretch.training_ns), min(lost_steps, stretch.steps)
            if stretch.training_ns:
                stretch.redundant_ns -= stretch.redundant_ns * stretch_ns // stretch.training_ns
            stretch.training_ns -= stretch_ns
            stretch.redone_ns += stretch_ns
            stretch.steps -= steps
            lost_ns -= stretch_ns
            lost_steps -= steps

    def _membership(self) -> LiveNodes:
        return LiveNodes(
            live=tuple(self._live),
            joined=tuple(self._joined),
            lost=tuple(self._lost),
            announced=self._announced,
        )
