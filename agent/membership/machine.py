"""The membership machine: who takes part, which generation is the current one, how one follows another.

Pure: stimuli in, instructions out; the clock is an argument. Every change goes the same way: ``Regroup(g + 1)`` to all
workers, a ``Report`` from each placed one, an agreement (:mod:`resilient.agent.membership.next_generation.agreement`),
a plan (:mod:`resilient.agent.membership.next_generation.forming`), ``Generation(g + 1)``. A further loss before that
shrinks the set that is waited for; one after it begins g + 2. Messages of other generations are ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from resilient.agent.membership.credibility import is_credible
from resilient.agent.membership.handlers import Handlers
from resilient.agent.membership.invariants import Invariants
from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.next_generation.members import Member, WorkerId
from resilient.agent.membership.parts.context import TRAINING, Phase, Settings
from resilient.agent.membership.parts.events import (
    FailureWanted,
    Instruction,
    Interrupted,
    ManifestFailed,
    ManifestWritten,
    NodeBack,
    NodeConnected,
    NodeCutOff,
    NodeLeaving,
    NodeLost,
    PlansPrepared,
    Stimulus,
    StopWanted,
    Tick,
    WorkerEnded,
    WorkerSaid,
)
from resilient.agent.membership.parts.training import step_fields
from resilient.errors import ResilientError
from resilient.protocol.messages import (
    Dropped,
    Failed,
    Finished,
    FromWorkerMessage,
    Installed,
    Note,
    NotSaved,
    Output,
    Ready,
    Report,
    Saved,
    StepDone,
    StepOutcome,
    Suspect,
)
from resilient.templates.plan import Plan

STARTING, INSTALLING, RUNNING, AGREEING, SAVING, FINISHED, STOPPED = Phase
GOING_ON = (STARTING, *TRAINING, SAVING)
LIVE = (*GOING_ON, FINISHED)

ROWS: tuple[tuple[type, str, tuple[Phase, ...]], ...] = (
    # what happens      what is done about it           in which phases
    (NodeConnected, "on_node_connected", (STARTING, *TRAINING)),
    (NodeConnected, "on_late_node", (SAVING, FINISHED)),
    (NodeConnected, "send_away", (STOPPED,)),  # it was on its way when the job stopped
    (NodeCutOff, "on_node_cut_off", LIVE),
    (NodeBack, "on_node_back", LIVE),
    (NodeLost, "on_node_lost", LIVE),
    (NodeLeaving, "on_early_leave", (STARTING,)),
    (NodeLeaving, "on_node_leaving", (*TRAINING, SAVING, FINISHED)),
    (WorkerEnded, "on_worker_ended_early", (STARTING,)),
    (WorkerEnded, "on_worker_ended", (*TRAINING, SAVING)),
    (WorkerEnded, "on_worker_done", (FINISHED,)),
    (WorkerSaid, "on_worker_said", LIVE),
    (FailureWanted, "on_failure_wanted", LIVE),
    (PlansPrepared, "on_plans_prepared", LIVE),
    (Interrupted, "on_interrupted", LIVE),
    (ManifestWritten, "on_manifest_written", (*TRAINING, SAVING)),
    (ManifestFailed, "on_manifest_failed", (*TRAINING, SAVING)),
    (StopWanted, "on_stop_wanted", LIVE),
    (Tick, "on_tick_while_starting", (STARTING,)),
    (Tick, "on_tick_while_training", TRAINING),
    (Tick, "on_tick_while_saving", (SAVING,)),
    # what workers say
    (Ready, "on_ready", GOING_ON),
    (Suspect, "on_suspect", TRAINING),
    (Dropped, "on_dropped", TRAINING),
    (Report, "on_report", (AGREEING,)),
    (Installed, "on_installed", TRAINING),
    (StepDone, "on_step_done", TRAINING),
    (Saved, "on_saved", (*TRAINING, SAVING)),
    (NotSaved, "on_not_saved", LIVE),
    (Finished, "on_finished", TRAINING),
    (Failed, "on_failed", LIVE),
    (Output, "on_output", LIVE),
    (Note, "on_note", LIVE),
)

IGNORED: tuple[tuple[type, tuple[Phase, ...], str], ...] = (
    # what happens      in which phases     why nothing is done about it
    (NodeCutOff, (STOPPED,), "everybody is being shut down"),
    (NodeBack, (STOPPED,), "everybody is being shut down"),
    (NodeLost, (STOPPED,), "everybody is being shut down"),
    (NodeLeaving, (STOPPED,), "everybody is being shut down"),
    (WorkerEnded, (STOPPED,), "everybody is being shut down"),
    (WorkerSaid, (STOPPED,), "the job is over"),
    (FailureWanted, (STOPPED,), "the job is over"),
    (PlansPrepared, (STOPPED,), "nothing is planned any more"),
    (Interrupted, (STOPPED,), "the job is over"),
    (ManifestWritten, (FINISHED, STOPPED), "the job needs no further one"),
    (ManifestFailed, (FINISHED, STOPPED), "the job needs no further one"),
    (StopWanted, (STOPPED,), "the job is over"),
    (Tick, (FINISHED, STOPPED), "scripts may take as long as they like after the last step"),
    (Ready, (FINISHED,), "nothing is trained any more"),
    (Suspect, (STARTING, SAVING, FINISHED), "no generation is to go on"),
    (Dropped, (STARTING, SAVING, FINISHED), "no generation is to go on"),
    (Report, (STARTING, INSTALLING, RUNNING, SAVING, FINISHED), "nobody is asked, or no longer"),
    (Installed, (STARTING, SAVING, FINISHED), "it is of a generation that was left, or said again"),
    (StepDone, (STARTING, SAVING, FINISHED), "it is of a generation that was left, or said again"),
    (Saved, (STARTING, FINISHED), "all parts were there before the job was finished"),
    (Finished, (STARTING, SAVING, FINISHED), "it is of a generation that was left, or said again"),
)

TABLE: Mapping[tuple[Phase, type], str] = {
    (phase, kind): handler
    for kind, handler, phases in (*ROWS, *((kind, "ignore", phases) for kind, phases, _ in IGNORED))
    for phase in phases
}
"""The handler of everything that can happen, by phase; what is not in it is refused with a TypeError."""


_MOST_STIMULI = 20
_COLUMNS = 160


class MembershipError(ResilientError):
    """The membership machine is broken, by a fault of its own: the job cannot go on.

    The message tells the last stimuli.

    Args:
        reason: What is wrong.
        story: What came before, a line for each stimulus.
    """

    def __init__(self, reason: str, story: str) -> None:
        super().__init__(f"{reason}\n{story}")
        self.reason = reason


class Story:
    """Remembers the last stimuli, each with its time and with where the job was when it came."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, Phase, int, Stimulus]] = deque(maxlen=_MOST_STIMULI)

    def note(self, now: float, phase: Phase, generation: int, stimulus: Stimulus) -> None:
        """Take in a stimulus before it is handled."""
        self._told.append((now, phase, generation, stimulus))

    def error(self, reason: str) -> MembershipError:
        """Return the error to raise now."""
        lines = [
            f"  {now:.3f} s  generation {generation}, {phase.value}: {_shortened(repr(stimulus))}"
            for now, phase, generation, stimulus in self._told
        ]
        return MembershipError(reason, "\n".join(["the last stimuli, the newest at the end:", *lines]))


def _shortened(text: str) -> str:
    return text if len(text) <= _COLUMNS else f"{text[: _COLUMNS - 1]}…"


class Membership:
    """The machine. Feed it stimuli with :meth:`handle`, in the order in which they happen."""

    def __init__(self, settings: Settings) -> None:
        self.parts = JobParts(settings)
        self._context = self.parts.context
        self._handlers = Handlers(self.parts)
        self._story = Story()
        self._invariants = Invariants()

    @property
    def settings(self) -> Settings:
        """What the job was started with."""
        return self._context.settings

    @property
    def phase(self) -> Phase:
        """Where the job is."""
        return self.parts.phase

    @property
    def generation(self) -> int:
        """The one in force; 0 before the first."""
        return self._context.generation

    @property
    def members(self) -> Mapping[int, Member]:
        """The live nodes by number."""
        return self._context.members

    def takes_part(self, node: int) -> bool:
        """Return whether the steps of the generation in force need a node."""
        return self.parts.participants.is_placed(node)

    @property
    def is_ending(self) -> bool:
        """Whether the job is to end before its last step, for a failure of its own or because it was interrupted."""
        return bool(self.parts.ending.reason)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first generation."""
        return self.parts.participants.plan

    @property
    def outcome(self) -> StepOutcome | None:
        """Of the last committed step; None when none was seen to be."""
        return self.parts.progress.outcome

    @property
    def awaiting(self) -> set[WorkerId]:
        """The workers whose report or saved part is waited for."""
        return self.parts.awaiting

    def status(self) -> dict[str, Any]:
        """Return where the job is, ready for JSON."""
        fields = step_fields(self.outcome) if self.outcome else {"loss": None}
        return {
            "phase": self.phase.value,
            "generation": self.generation,
            "step": self.parts.progress.step,
            "loss": fields["loss"],
            "losses": fields.get("losses", {}),
            "num_skipped": self.parts.progress.skipped.total,
            "needed_nodes": self.parts.ending.needed_nodes,
            "nodes": [
                {"node": member.node, "host": member.host, "ready": member.is_ready, "leaving": member.leaving}
                for member in self.members.values()
            ],
            "pipelines": [list(pipeline.nodes) for pipeline in self.plan.pipelines] if self.plan else [],
        }

    def handle(self, stimulus: Stimulus, now: float) -> list[Instruction]:
        """Take in what happened; return what is to be done, in this order.

        Args:
            stimulus: What happened.
            now: Seconds on a clock that never goes back.

        Raises:
            MembershipError: This code is wrong; end the job, with a further ``StopWanted``.
        """
        self._story.note(now, self.phase, self.generation, stimulus)
        out = self._context.begin(now)
        try:
            if isinstance(stimulus, WorkerSaid):
                self._hear(stimulus)
            else:
                self._handler(stimulus)(stimulus)
        except Exception as error:
            raise self._story.error(repr(error)) from error
        return out

    def _hear(self, said: WorkerSaid) -> None:
        """Take in what a worker says, if that counts: not if its node is given up, or the job over."""
        worker = (said.node, said.local_rank)
        if self.phase is STOPPED or said.node not in self.members or not is_credible(self.parts, said.message, worker):
            return
        self._handler(said)(said)
        self._handler(said.message)(said.message, worker)

    def _handler(self, happened: Stimulus | FromWorkerMessage) -> Callable[..., None]:
        kind = type(happened)
        handler = TABLE.get((self.phase, kind))
        if handler is None:
            raise TypeError(f"stimulus must be in the table of phase {self.phase.value}, got {kind.__name__}")
        return getattr(self._handlers, handler)

    def validate(self) -> None:
        """Check that what the machine knows is consistent; to be called after any stimulus.

        Raises:
            MembershipError: It is not: this code is wrong.
        """
        broken = self._invariants.broken(self.parts)
        if broken:
            raise self._story.error(f"the membership is inconsistent: {'; '.join(broken)}")
