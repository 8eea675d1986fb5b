"""What workers, node agents and the coordinator say to each other.

Owns the message types and their encoding. Every message is schema-checked when decoded (msgspec); nothing that
comes over a socket is ever unpickled. Must not import torch: the agent and the coordinator read these too.

Worker messages travel worker -> agent -> coordinator; the agent wraps them in :class:`FromWorker`, so that the
coordinator knows who speaks. Coordinator messages for workers travel wrapped in :class:`ToWorkers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from resilient.protocol.alike import Alike
from resilient.protocol.checkpoint_pace import CheckpointPace
from resilient.protocol.job_config import JobConfig
from resilient.protocol.progress import StepOutcome, WorkerProgress
from resilient.state.manifest import SavedStates
from resilient.state.recipe import Recipe
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.state.witnesses import HeldCopy
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan, Sharding
from resilient.templates.replan.transfer import Transfer
from resilient.templates.template import PipelineTemplate

MAX_MESSAGE_BYTES = 16 << 20
"""Larger messages are refused, on every connection."""

INIT = "init"
"""The source of states that are still at their initial values."""


@dataclass(frozen=True, kw_only=True)
class JobSpec(JobConfig):
    """What a script's ``Trainer`` asks for, as the coordinator needs it.

    Args:
        profile: As measured where this worker runs: on other machines the times are others.
        recipe: What a checkpoint must have been written under to be resumed.
        num_steps: Steps of the whole job.
        memory_bytes: What training may use of a device's memory; None for no limit.
        alike: What must be equal on all workers of a job, as it is on this one.
        templates: The pipelines that a planner of units answered, by rising numbers of nodes; empty for chains.
    """

    profile: ModelProfile
    recipe: Recipe
    num_steps: int
    memory_bytes: int | None = None
    alike: Alike = field(default_factory=Alike)
    templates: tuple[PipelineTemplate, ...] = ()


class Injection(msgspec.Struct, frozen=True, kw_only=True):
    """A failure to cause: SIGKILL of a whole node or of one worker.

    Args:
        node: The node to hit.
        at_step: Fire in this step (1 = the first); at once or at the next ``at_phase`` when None.
        at_phase: One of :data:`resilient.protocol.phases.PHASES`, of any unit or, as in ``vision.forward``, of one;
            None for "as the step begins", or at once when ``at_step`` is None too.
        worker_only: Kill only a worker process, its agent survives.
        worker: Which of the node's workers that is, from 0; one that the node does not have is never killed.
    """

    node: int
    at_step: int | None = None
    at_phase: str | None = None
    worker_only: bool = False
    worker: int = 0


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for a node to be let go at the next step boundary, on behalf of its agent."""

    node: int


# ---------------------------------------------------------------- worker -> coordinator


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker is up, has built its job and can be given a place. Sent once per process."""

    job: JobSpec
    store_address: str
    pid: int
    device: str


class Suspect(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Communication of this generation failed here, with the rank ``peer`` if it is known; asks for a new one."""

    generation: int
    reason: str
    peer: int | None = None


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Copies of states of the committed ``step`` were not those of most witnesses, among them the sender's, who has
    dropped its own. Asks for a new generation, which gives new ones. ``odd``: the states, by holder as a witness."""

    generation: int
    step: int
    odd: dict[int, tuple[str, ...]]


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A step was committed; sent by global rank 0. ``waited_ms``: the part of it in which nothing was done but wait for
    the assignment of a later step. ``checkpoint_s``: what a checkpoint was last measured to cost, under "auto"."""

    generation: int
    outcome: StepOutcome
    num_samples: int
    step_ms: float
    learning_rate: float
    at: float
    waited_ms: float = 0.0
    checkpoint_s: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers ``Regroup`` out of all communication; ``steps``: committed here, but nobody may have told of them yet."""

    generation: int
    progress: WorkerProgress
    steps: tuple[StepDone, ...] = ()


class Installed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The worker has its groups and states for this generation, or has sent what it was to. Times are Unix seconds."""

    generation: int
    started_at: float
    regrouped_at: float
    installed_at: float
    bytes_copied: int


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This worker's part of the checkpoint of ``step`` is on disk, by state.

    ``skipped``: steps that were skipped up to it. ``held``: all states held here, of an answer to ``Save``; of states
    that it lists in ``compared``, by piece (:func:`resilient.state.witnesses.piece_name`).
    """

    generation: int
    step: int
    states: SavedStates
    skipped: SkippedSteps = NONE_SKIPPED
    held: dict[str, HeldCopy] = {}


class NotSaved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This worker's part of the checkpoint of ``step`` cannot be written; it trains on. ``error`` names the path."""

    step: int
    error: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All steps are committed and the final checkpoint's part is saved; waits for ``Finish``."""

    generation: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This worker cannot go on. ``error`` is a one-paragraph message.

    ``is_sound``: the states are worth a checkpoint. ``kind``: type and place in the code of an error that this node
    alone may have; "" for one of the job. ``damaged``: a checkpoint; ``instead``: a sound one.
    """

    error: str
    traceback: str = ""
    is_sound: bool = True
    kind: str = ""
    damaged: str = ""
    instead: str = ""


class Output(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A line of the worker that speaks for the job (global rank 0); ``is_logged``: the script printed it."""

    text: str
    is_logged: bool = False


class Note(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A named value from the script for the report (``trainer.note("accuracy", 0.93)``)."""

    name: str
    value: float | int | str


FromWorkerMessage = (
    Ready | Suspect | Dropped | Report | Installed | StepDone | Saved | NotSaved | Finished | Failed | Output | Note
)

# ---------------------------------------------------------------- coordinator -> worker


class Regroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave the current generation and report for ``generation``.

    ``at_boundary``: finish the running step first (joins, announced departures): all workers agree on the
    boundary through the prepare barrier, no work is lost. Otherwise abort communication at once.
    ``heard_step``: the last step the coordinator has heard of.
    """

    generation: int
    at_boundary: bool = False
    heard_step: int = 0


class Generation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A new generation begins. Sent as :mod:`resilient.protocol.generation_packing` packs it.

    Args:
        rank: Global rank of the addressee; None when it takes no part (it stands by). Ranks from ``len(plan.slots)``
            on have no place in the plan: they send the copies asked of them and then stand by or are let go.
        num_sources: How many ranks there are of these.
        version: Committed steps to go on from.
        skipped: Those of them that were skipped.
        roll_forward: Outcome of step ``version`` for workers still at ``version - 1``: they apply it.
        transfers: Copies between ranks of this generation; a worker is told of those that it sends or receives.
        source: Where states without a transfer that a worker lacks come from: ``INIT`` or a checkpoint folder.
        store_address: host:port of the store to meet in (rank 0's).
        checkpoint_due: The generation before was to write a checkpoint of ``version`` and could not: this one does.
        pace: Of checkpoints, under "auto".
    """

    generation: int
    rank: int | None
    plan: Plan
    version: int
    roll_forward: StepOutcome | None
    transfers: tuple[Transfer, ...]
    source: str
    store_address: str
    num_sources: int = 0
    skipped: SkippedSteps = NONE_SKIPPED
    checkpoint_due: bool = False
    pace: CheckpointPace | None = None


class PackedGeneration(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A :class:`Generation` on its way: ``common`` is the same bytes for all, ``copies`` those of ``rank``, if any.

    ``base``: the generation that ``common`` is the difference to, which the addressee was told of last; 0 for none."""

    rank: int | None
    common: bytes
    copies: bytes = b""
    base: int = 0


class Save(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job ends early: roll forward if told, write these states to ``path``, if any, answer ``Saved``, then wait.

    ``parts``: of those that are not to be written whole, which bytes. ``compared``: of states that some hold parts of,
    the pieces whose copies are compared.
    """

    generation: int
    version: int
    roll_forward: StepOutcome | None
    states: tuple[str, ...]
    path: str
    skipped: SkippedSteps = NONE_SKIPPED
    parts: dict[str, ByteIntervals] = {}
    compared: dict[str, tuple[ByteIntervals, ...]] = {}


class Finish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job is done, or over: ``fit`` returns. ``is_main``: this worker speaks for the job from now on."""

    is_main: bool = False


class Arm(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Cause this failure when its time has come."""

    injection: Injection


ToWorkerMessage = Regroup | Generation | Save | Finish | Arm
SentToWorker = Regroup | PackedGeneration | Save | Finish | Arm

# ---------------------------------------------------------------- agent <-> coordinator


class Welcome(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node's number and what to start; workers from before are killed. ``orphan_s``: how long to train on without
    a coordinator. ``num_nodes``: nodes the job was started with. ``trace``: steps of which workers write down when they
    did what (:func:`resilient.observability.step_trace.parse_steps`). ``planner``, ``schedule``: what they use for the
    script's. ``network``: between two nodes, for each worker. ``tp_degree``: workers that share each microbatch;
    None for what makes steps shortest. ``sharding``: whether workers divide states. ``is_planned``: the job is known,
    and what its planner answered. ``tp_chunks``: what they use for the script's; 0 for none."""

    node: int
    script: str
    arguments: tuple[str, ...]
    directory: str
    run_directory: str
    heartbeat_s: float
    orphan_s: float = 600.0
    num_nodes: int = 1
    trace: str = ""
    planner: str = ""
    schedule: str = ""
    tp_chunks: int = 0
    network: Link = Link()
    tp_degree: int | None = 1
    sharding: Sharding = Sharding.OFF
    is_planned: bool = False


class FromWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    local_rank: int
    message: FromWorkerMessage


class ToWorkers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """For one worker of the node (``local_rank``) or, when None, all of them."""

    message: SentToWorker
    local_rank: int | None = None


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker process ended: ``exit_code``, negative for a signal; ``error`` from its error file, if any."""

    local_rank: int
    exit_code: int
    error: str = ""


class Leaving(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node will go away soon (spot notice, drain): leave it out from the next step boundary on."""

    reason: str


class Health(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load of the node, sent with every heartbeat."""

    cpu_percent: float
    memory_bytes: int


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fail now, as the injection says."""

    injection: Injection


class ShowStacks(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Have a worker write the Python stacks of all its threads to the end of its log: it does not answer."""

    local_rank: int


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Stop the workers (those that are not done) and exit with this code."""

    exit_code: int
    reason: str


FromAgentMessage = FromWorker | WorkerExited | Leaving | Health
ToAgentMessage = Welcome | ToWorkers | Kill | ShowStacks | Shutdown

encode = msgspec.msgpack.encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorkerMessage).decode
decode_to_worker = msgspec.msgpack.Decoder(SentToWorker).decode
