"""What goes into the membership machine and what comes out of it.

Nothing here acts: the coordinator turns the world into events, and instructions into effects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from resilient.protocol.alike import Alike
from resilient.protocol.messages import (
    FromWorkerMessage,
    Injection,
    Kill,
    ShowStacks,
    Shutdown,
    ToWorkerMessage,
    Welcome,
)
from resilient.state.manifest import Manifest
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.schedule_choice import ScheduleChoice


@dataclass(frozen=True, kw_only=True)
class NodeConnected:
    """A node agent introduced itself; the number is its own and was never used before.

    ``is_guest``: somebody else than the launcher has started it. ``known_by``: the digest of the key with which it
    comes back. ``num_behind``: others are at the door, who may be nodes as well.
    """

    node: int
    host: str
    pid: int
    num_workers: int
    domain: str = ""
    alike: Alike = field(default_factory=Alike)
    is_guest: bool = False
    known_by: str = ""
    num_behind: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeCutOff:
    """The connection to a node's agent broke. It is back in time (:class:`NodeBack`), or lost (:class:`NodeLost`)."""

    node: int


@dataclass(frozen=True, kw_only=True)
class NodeBack:
    """An agent that was cut off goes on where it was: nothing that it said is missing."""

    node: int


@dataclass(frozen=True, kw_only=True)
class NodeLost:
    """A node's agent is gone, was cut off for too long, or its heartbeats stopped."""

    node: int
    cause: str


@dataclass(frozen=True, kw_only=True)
class WorkerSaid:
    """A worker's message arrived."""

    node: int
    local_rank: int
    message: FromWorkerMessage


@dataclass(frozen=True, kw_only=True)
class WorkerEnded:
    """A worker process ended; ``exit_code`` is negative for a signal."""

    node: int
    local_rank: int
    exit_code: int
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class NodeLeaving:
    """A node asks to be left out from the next step boundary on."""

    node: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class FailureWanted:
    """Somebody wants a failure injected."""

    injection: Injection


@dataclass(frozen=True, kw_only=True)
class PlansPrepared:
    """What :class:`PreparePlans` asked for is done, or cannot be done: planning then fails at once, with the reason.

    ``choice``: the schedule that was chosen, where that was asked for and there is one.
    """

    num_nodes: int
    choice: ScheduleChoice | None = None


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """The job is to end after the running step, with a checkpoint; said again, at once.

    ``is_orphaned``: nobody wants it to end, but nobody leads it either: it is to be resumed.
    """

    reason: str
    is_orphaned: bool = False


@dataclass(frozen=True, kw_only=True)
class ManifestWritten:
    """What :class:`WriteManifest` asked for is done: the folder is a checkpoint."""

    path: str


@dataclass(frozen=True, kw_only=True)
class ManifestFailed:
    """What :class:`WriteManifest` asked for could not be done.

    ``error`` names the path; ``node``: whose file is not there, if that is why.
    """

    path: str
    error: str
    node: int | None = None


@dataclass(frozen=True, kw_only=True)
class StopWanted:
    """The job is to end at once, by the launcher's wish or because it cannot go on."""

    exit_code: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tick:
    """Time passes; to be given about once a second."""


Stimulus = (
    NodeConnected
    | NodeCutOff
    | NodeBack
    | NodeLost
    | WorkerSaid
    | WorkerEnded
    | NodeLeaving
    | FailureWanted
    | PlansPrepared
    | Interrupted
    | ManifestWritten
    | ManifestFailed
    | StopWanted
    | Tick
)


@dataclass(frozen=True, kw_only=True)
class Send:
    """Send a message to one worker of a node, or to all of them (``local_rank`` None)."""

    node: int
    local_rank: int | None
    message: ToWorkerMessage


@dataclass(frozen=True, kw_only=True)
class Tell:
    """Send a message to a node's agent."""

    node: int
    message: Welcome | Kill | ShowStacks | Shutdown


@dataclass(frozen=True, kw_only=True)
class Record:
    """Write a line to the event log."""

    kind: str
    generation: int
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, kw_only=True)
class WriteManifest:
    """Make a folder a checkpoint; then answer with :class:`ManifestWritten` or :class:`ManifestFailed`.

    ``nodes``: who has written the files, by file.
    """

    path: str
    manifest: Manifest
    nodes: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class PreparePlans:
    """Compute off the event loop what plans for up to so many nodes need; then answer with :class:`PlansPrepared`.

    ``most_chunks``: a schedule is to be chosen first, with so many stages on each worker at most; 0 if not.
    """

    problem: PlanningProblem
    num_nodes: int
    most_chunks: int = 0


@dataclass(frozen=True, kw_only=True)
class Stop:
    """The job is over: shut down whoever is left and return this exit code."""

    exit_code: int
    reason: str


Instruction = Send | Tell | Record | WriteManifest | PreparePlans | Stop
