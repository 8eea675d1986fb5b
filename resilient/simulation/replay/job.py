"""Advances a simulated job between two changes: steps, checkpoints, and the work that a loss would undo.

All times are whole nanoseconds: the parts of a run add up exactly.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class SteadyWork:
    """The work of a job while nothing changes: steps, and a checkpoint after every few of them.

    Args:
        step_ns: Time of one step, at least 1.
        num_nodes: Nodes that take part; other live nodes idle.
        redundant_ns: The part of a step that is spent on computing what others compute, too.
        checkpoint_steps: Steps between two checkpoints; None for no checkpoints.
        checkpoint_ns: How long saving one holds up the steps.
    """

    step_ns: int
    num_nodes: int
    redundant_ns: int = 0
    checkpoint_steps: int | None = None
    checkpoint_ns: int = 0


@dataclass(frozen=True, kw_only=True)
class Response:
    """A policy's answer to a change.

    Args:
        work: What the job does from now on; None: it stands still until the next change. What it has done is stored,
            unless it rolls back.
        pause_ns: How long until its next step begins.
        rolls_back: Whether it goes on from the last checkpoint, or from the beginning when there is none. Otherwise it
            goes on from the last finished step.
        keeps_step: Whether the step under way is not lost, unless it rolls back: what is left of it is done at the new
            work's pace.
        again: Whether the policy wants to answer once more when the next step is finished.
    """

    work: SteadyWork | None
    pause_ns: int = 0
    rolls_back: bool = False
    keeps_step: bool = False
    again: bool = False


@dataclass(kw_only=True)
class Stretch:
    """Time between two changes. What was done and lost later counts as ``redone_ns``, where it was first done.

    ``training_ns``, ``redone_ns``, ``recovery_ns``, ``checkpointing_ns`` and ``stopped_ns`` add up to its length;
    ``redundant_ns`` is part of ``training_ns``.

    Args:
        start_ns: Since the trace's beginning.
        end_ns: Likewise.
        live: Live nodes.
        working: Nodes of the job; 0 when it stands still.
        steps: Steps that were finished and not lost.
        training_ns: Time of these steps, and of the one under way.
        redundant_ns: The part of it that computes what others compute, too.
        redone_ns: Time of what was lost.
        recovery_ns: From a change to the next step.
        checkpointing_ns: Time the job waited for checkpoints.
        stopped_ns: Time the job stood still.
    """

    start_ns: int
    end_ns: int
    live: int
    working: int
    steps: int = 0
    training_ns: int = 0
    redundant_ns: int = 0
    redone_ns: int = 0
    recovery_ns: int = 0
    checkpointing_ns: int = 0
    stopped_ns: int = 0


class ReplayedJob:
    """The state of a replayed job: its work, and the steps that a loss would undo.

    ``_progress_ns`` says how far the step under way is, of ``work.step_ns``; ``_spent_ns`` how long that took, which
    may be at another pace. ``_at_risk_ns`` is the time of all ``_unsaved`` steps since the last checkpoint and of the
    step under way.
    """

    def __init__(self) -> None:
        self.work: SteadyWork | None = None
        self._pause_ns = 0
        self._progress_ns = 0
        self._spent_ns = 0
        self._saving_ns = 0
        self._unsaved = 0
        self._at_risk_ns = 0

    def advance(self, stretch: Stretch) -> None:
        """Go on until the stretch's end, and write down in it what is done."""
        left = stretch.end_ns - stretch.start_ns
        work = self.work
        if work is None:
            stretch.stopped_ns = left
            return
        stretch.recovery_ns = min(left, self._pause_ns)
        self._pause_ns -= stretch.recovery_ns
        left -= stretch.recovery_ns
        while left:
            if self._saves(work):
                spent = min(left, work.checkpoint_ns - self._saving_ns)
                stretch.checkpointing_ns += spent
                self._saving_ns += spent
            else:
                spent = self._step(stretch, work, left)
            left -= spent
            if self._saves(work) and self._saving_ns == work.checkpoint_ns:
                self._saving_ns = self._unsaved = 0
                self._at_risk_ns = self._spent_ns
                left -= self._cycles(stretch, work, left)
        stretch.redundant_ns = stretch.training_ns * work.redundant_ns // work.step_ns

    def _saves(self, work: SteadyWork) -> bool:
        """Return whether a checkpoint is due, and so being saved."""
        return work.checkpoint_steps is not None and self._unsaved >= work.checkpoint_steps

    def _step(self, stretch: Stretch, work: SteadyWork, left: int) -> int:
        """Do steps until the time is over or a checkpoint due; return how long that is."""
        if work.checkpoint_steps is not None:
            left = min(left, (work.checkpoint_steps - self._unsaved) * work.step_ns - self._progress_ns)
        steps, self._progress_ns = divmod(self._progress_ns + left, work.step_ns)
        self._spent_ns = self._progress_ns if steps else self._spent_ns + left
        stretch.training_ns += left
        stretch.steps += steps
        self._unsaved += steps
        self._at_risk_ns += left
        return left

    def _cycles(self, stretch: Stretch, work: SteadyWork, left: int) -> int:
        """Do all at once what fits of steps and checkpoint, steps and checkpoint, ...; return how long that is."""
        assert work.checkpoint_steps is not None
        training_ns = work.checkpoint_steps * work.step_ns
        cycles = left // (training_ns + work.checkpoint_ns)
        stretch.training_ns += cycles * training_ns
        stretch.checkpointing_ns += cycles * work.checkpoint_ns
        stretch.steps += cycles * work.checkpoint_steps
        return cycles * (training_ns + work.checkpoint_ns)

    def until_ns(self, *, checkpoint: bool) -> int:
        """Return how long until the step under way is finished, or the next checkpoint is saved; 0 between steps.

        In a pause that is its end, or the checkpoint after it.
        """
        work = self.work
        assert work is not None
        if self._pause_ns and not checkpoint:
            return self._pause_ns
        if self._saves(work):
            return self._pause_ns + work.checkpoint_ns - self._saving_ns
        if checkpoint and work.checkpoint_steps is not None:
            steps = work.checkpoint_steps - self._unsaved
            return self._pause_ns + steps * work.step_ns - self._progress_ns + work.checkpoint_ns
        if self._pause_ns:
            return self._pause_ns
        return work.step_ns - self._progress_ns if self._progress_ns else 0

    def until_next_step_ns(self) -> int:
        """Return how long until the step under way, or else the next one, is finished."""
        work = self.work
        assert work is not None
        saving_ns = work.checkpoint_ns - self._saving_ns if self._saves(work) else 0
        return self._pause_ns + saving_ns + work.step_ns - self._progress_ns

    def respond(self, response: Response) -> tuple[int, int]:
        """Take up other work; return the time that is lost and the number of finished steps among it."""
        lost_ns = lost_steps = 0
        if response.keeps_step and not response.rolls_back and self.work and response.work:
            self._progress_ns = self._progress_ns * response.work.step_ns // self.work.step_ns
        else:
            lost_ns = self._spent_ns
            self._progress_ns = self._spent_ns = 0
        if response.rolls_back:
            lost_ns, lost_steps = self._at_risk_ns, self._unsaved
        self._at_risk_ns -= lost_ns
        self._unsaved -= lost_steps
        if response.work is None:
            self._at_risk_ns = self._unsaved = 0
        self._saving_ns = 0
        self.work = response.work
        self._pause_ns = response.pause_ns
        return lost_ns, lost_steps
