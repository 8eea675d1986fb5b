"""Commits steps atomically: keeps the version of this worker's states, applies a step to all of them or to none.

The protocol, for step k + 1: every worker holds complete reduced gradients (``complete``), then passes the *prepare*
barrier, an all-reduce of loss and gradient norm that tells it that everybody does, then applies the optimizer, which
makes its version k + 1. After a failure, if anyone passed the barrier all others roll forward with its outcome;
otherwise all drop the gradients. A step whose loss or gradient norm is not finite may be committed, too: its version
counts on, the states stay as they are. Source: three-phase commit, with the barrier as its pre-commit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from resilient.comm import Communicator
from resilient.comm.agreement import all_equal
from resilient.optim import Optimizer, set_learning_rates
from resilient.protocol.messages import StepOutcome, WorkerProgress
from resilient.state.layer_state import LayerState
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.common.byte_intervals import ByteIntervals

_NOTHING = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Ballot:
    """What a rank brings to the prepare barrier of a step.

    Args:
        losses: Summed losses of this worker's microbatches, one for each unit that has one, ``[num_losses]``.
        squares: Squared gradients of the states this worker counts, summed.
        num_targets: Targets of the global batch.
        units: Whose losses they are, where there are several.
        pause: Ask all workers to stop at the boundary after this step.
        saves: Ask all workers to write a checkpoint after this step.
        samples: This rank's shares of the checksums of what it read (:mod:`resilient.comm.agreement`).
        carried: What is summed over all ranks beside that, for later steps; float64, of equal size on all.
    """

    losses: Tensor
    squares: Tensor
    num_targets: int
    units: tuple[str, ...] = ()
    pause: bool = False
    saves: bool = False
    samples: int = 0
    carried: Tensor = _NOTHING


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the prepare barrier of a step gave: the same on every rank.

    Args:
        outcome: Of the step.
        pause: Some worker asked to stop at the boundary after it.
        samples_agree: Whoever read an entry of a cell read the same.
        carried: The sum of what all brought for later steps.
    """

    outcome: StepOutcome
    pause: bool
    samples_agree: bool
    carried: Tensor


class Ledger:
    """The layer states of this worker and the version they are at.

    ``current`` are the states the running generation trains here; ``retained`` those kept from an earlier plan,
    until the first commit shows that everybody has what the new plan gives them: a failure before may need them.

    Args:
        optimizer: The job's optimizer.
        clip_grad_norm: Largest norm of the whole model's gradient; None for no limit.
    """

    def __init__(self, optimizer: Optimizer, clip_grad_norm: float | None) -> None:
        self._optimizer = optimizer
        self._clip = clip_grad_norm
        self._torch_optimizer: torch.optim.Optimizer | None = None
        self.version = -1
        self.skipped = NONE_SKIPPED
        self.begun = False
        self.complete = False
        self.passed: StepOutcome | None = None
        self.current: dict[str, LayerState] = {}
        self.retained: dict[str, LayerState] = {}

    def progress(self) -> WorkerProgress:
        """Return what the coordinator needs to know to agree on the step to go on from."""
        return WorkerProgress(
            version=self.version,
            complete=self.complete,
            begun=self.begun,
            passed=self.passed,
            current=tuple(self.current),
            retained=tuple(self.retained),
            current_parts=_parts(self.current),
            retained_parts=_parts(self.retained),
        )

    def forget(self) -> None:
        """Drop all states: they are at no version anybody goes on from."""
        self.version = -1
        self.begun = self.complete = False
        self.passed = None
        self._torch_optimizer = None
        self.current.clear()
        self.retained.clear()

    def begin_install(
        self, version: int, roll_forward: StepOutcome | None, skipped: SkippedSteps = NONE_SKIPPED
    ) -> None:
        """Bring the states to the agreed version: roll forward, drop a half-done step, or drop what does not fit.

        Args:
            version: Committed steps.
            roll_forward: Outcome of the last of them, for who has not applied it.
            skipped: Those of the steps that were skipped.
        """
        if roll_forward is not None and self.complete and self.version == roll_forward.step - 1:
            self.apply(roll_forward)
        if self.version != version:
            self.forget()
            self.version = version
        self.skipped = skipped
        self.begun = self.complete = False
        for name, state in self.current.items():
            self.retained[name] = self.retained[name].joined(state) if name in self.retained else state
        self.current.clear()

    def drop(self, names: Iterable[str]) -> None:
        """Drop states that are damaged: others hold them."""
        for name in names:
            self.current.pop(name, None)
            self.retained.pop(name, None)

    def drop_replaced(self, received: Mapping[str, ByteIntervals]) -> None:
        """Drop what peers send though it is here: it is odd, and the regroup for others' cut the comparison short.

        Before ranks meet: if they do not, the next report must not tell of these states as of sound ones.
        """
        held = {name: state.held for name, state in self.retained.items()}
        self.drop(name for name, part in received.items() if name in held and held[name] & part)

    def keep(self, needed: Mapping[str, ByteIntervals]) -> None:
        """Move those of the retained states back to current of which the new plan needs here just what is held."""
        for name, intervals in needed.items():
            if name in self.retained and self.retained[name].held == intervals:
                self.current[name] = self.retained.pop(name)

    def start(self) -> None:
        """Make the optimizer of the current states, once all those of the generation are here."""
        self._torch_optimizer = self._optimizer.build(self.current.values(), self.version - self.skipped.total)

    def begin_step(self) -> None:
        """Take note that step ``version + 1`` is under way: a failure may cost it."""
        self.begun, self.complete = True, False

    def prepare(self, comm: Communicator, ballot: Ballot) -> Verdict:
        """Pass the barrier of step ``version + 1``; all ranks of the generation call this.

        Raises:
            CommunicationError: The barrier was not passed here; another rank may have.
        """
        self.complete = True
        brought = (*ballot.losses, ballot.squares, ballot.pause, ballot.saves, ballot.samples)
        own = torch.tensor([float(value) for value in brought], dtype=torch.float64)
        shared = torch.cat((own, ballot.carried))
        comm.all_reduce(shared, tuple(range(comm.size))).wait()
        *losses, squares, pauses, saves, samples = shared[: len(own)].tolist()
        losses = [each / ballot.num_targets for each in losses]
        loss, grad_norm = sum(losses), squares**0.5
        skipped = self.skipped.after(is_finite=math.isfinite(loss) and math.isfinite(grad_norm))
        of_units = dict(zip(ballot.units, losses, strict=True)) if ballot.units else {}
        outcome = StepOutcome(
            step=self.version + 1,
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped,
            losses=of_units,
            saves=saves > 0,
        )
        return Verdict(
            outcome=outcome,
            pause=pauses > 0,
            samples_agree=all_equal(samples),
            carried=shared[len(own) :],
        )

    def apply(self, outcome: StepOutcome) -> None:
        """Commit: apply the reduced gradients of step ``version + 1``, unless it is to be skipped."""
        assert outcome.step == self.version + 1, (outcome, self.version)
        if outcome.is_finite:
            self._update(outcome)
        self.version, self.skipped = outcome.step, outcome.skipped
        self.begun = self.complete = False
        self.passed = outcome
        self.retained.clear()

    def _update(self, outcome: StepOutcome) -> None:
        assert self._torch_optimizer is not None, "a step is committed only in a started generation"
        if self._clip is not None and outcome.grad_norm > self._clip:
            for state in self.current.values():
                state.grad.mul_(self._clip / outcome.grad_norm)
        set_learning_rates(self._optimizer, self._torch_optimizer, outcome.step)
        self._torch_optimizer.step()


def _parts(states: Mapping[str, LayerState]) -> dict[str, ByteIntervals]:
    """Return what is held of those that are not here whole."""
    return {name: state.held for name, state in states.items() if state.held != state.whole}
