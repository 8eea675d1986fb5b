"""A step is applied to every state or to none, whatever the failure left behind."""

from __future__ import annotations

import pytest
import torch

from resilient.comm import SingleProcessCommunicator
from resilient.optim import SGD, AdamW, WarmupCosine
from resilient.protocol.messages import StepOutcome
from resilient.runtime.commit import Ballot, Ledger, Verdict
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.skipped import SkippedSteps
from resilient.templates.common.byte_intervals import ByteIntervals
from tests.resilient.small import CPU, TiedModel

NAMES = ("embed", "block.0", "head")


def state(name: str, value: float = 1.0, lr: float = 0.5) -> LayerState:
    spec = next(spec for spec in TiedModel(num_blocks=1).layers if spec.name == name)
    made = LayerState(spec, BufferLayout.of(spec, SGD(lr=lr).rates), (), torch.float64, CPU)
    made.buffer.fill_(value)
    return made


def ledger_at(version: int, *names: str, lr: float = 0.5, clip: float | None = None) -> Ledger:
    """Make a ledger in a running generation, whose gradients are all 1."""
    ledger = Ledger(SGD(lr=lr), clip)
    ledger.begin_install(version, None)
    ledger.current = {name: state(name, lr=lr) for name in names}
    ledger.start()
    for held in ledger.current.values():
        held.grad.fill_(1)
    return ledger


def outcome(step: int, grad_norm: float = 1.0) -> StepOutcome:
    return StepOutcome(step=step, loss=1.0, grad_norm=grad_norm)


def values(ledger: Ledger) -> dict[str, float]:
    return {name: held.buffer.unique().item() for name, held in (ledger.retained | ledger.current).items()}


def intervals_of(ledger: Ledger, *names: str) -> dict[str, ByteIntervals]:
    return {name: (ledger.retained | ledger.current)[name].held for name in names}


def test_new_worker_has_no_version_and_no_states() -> None:
    progress = Ledger(SGD(lr=1.0), None).progress()
    assert (progress.version, progress.complete, progress.passed) == (-1, False, None)
    assert progress.current == progress.retained == ()


def test_committed_step_moves_every_current_state_to_its_version() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.complete = True
    ledger.apply(outcome(5))
    assert values(ledger) == dict.fromkeys(NAMES, 0.5)
    progress = ledger.progress()
    assert (progress.version, progress.complete, progress.passed) == (5, False, outcome(5))


def test_complete_worker_rolls_forward_to_a_step_another_committed() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.complete = True
    ledger.begin_install(5, roll_forward=outcome(5))
    assert ledger.version == 5
    assert ledger.passed == outcome(5)
    assert values(ledger) == dict.fromkeys(NAMES, 0.5)
    assert ledger.progress().retained == NAMES


def test_worker_that_committed_already_does_not_apply_the_step_twice() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.apply(outcome(5))
    ledger.begin_install(5, roll_forward=outcome(5))
    assert values(ledger) == dict.fromkeys(NAMES, 0.5)


def test_half_done_step_is_dropped_when_nobody_passed() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.complete = True
    ledger.begin_install(4, roll_forward=None)
    assert values(ledger) == dict.fromkeys(NAMES, 1.0)
    assert not ledger.progress().complete


def test_worker_that_cannot_roll_forward_drops_what_is_too_old() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.begin_install(5, roll_forward=outcome(5))
    assert (ledger.version, values(ledger), ledger.passed) == (5, {}, None)


def test_states_from_an_earlier_plan_stay_until_the_first_commit() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.begin_install(4, None)
    ledger.keep(intervals_of(ledger, "embed", "head") | {"not here": ByteIntervals.of(0, 8)})
    assert ledger.progress().current == ("embed", "head")
    assert ledger.progress().retained == ("block.0",)
    ledger.begin_install(4, None)  # the next generation fails before its first commit
    assert set(ledger.progress().retained) == set(NAMES)
    ledger.keep(intervals_of(ledger, "block.0"))
    ledger.start()
    ledger.apply(outcome(5))
    assert ledger.progress().current == ("block.0",)
    assert ledger.progress().retained == ()


def test_state_of_which_another_part_is_needed_is_not_kept_as_it_is() -> None:
    ledger = ledger_at(4, "embed", "head")
    ledger.begin_install(4, None)
    ledger.keep(intervals_of(ledger, "head") | {"embed": ByteIntervals.of(0, 64)})
    assert (ledger.progress().current, ledger.progress().retained) == (("head",), ("embed",))


def test_failure_while_states_come_together_cannot_be_rolled_forward() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.complete = True
    ledger.begin_install(4, None)
    ledger.keep(intervals_of(ledger, *NAMES))
    ledger.begin_install(5, roll_forward=outcome(5))
    assert values(ledger) == {}


@pytest.mark.parametrize(
    ("clip", "norm", "change"), [(None, 8.0, 0.5), (2.0, 8.0, 0.125), (8.0, 8.0, 0.5), (2.0, 1.0, 0.5)]
)
def test_gradients_are_clipped_by_the_whole_models_norm(clip: float | None, norm: float, change: float) -> None:
    ledger = ledger_at(0, *NAMES, clip=clip)
    ledger.apply(outcome(1, grad_norm=norm))
    assert values(ledger) == dict.fromkeys(NAMES, 1 - change)


def test_learning_rate_follows_the_step_not_the_calls() -> None:
    ledger = Ledger(SGD(lr=1.0, lr_schedule=WarmupCosine(warmup_steps=10, total_steps=20)), None)
    ledger.begin_install(6, None)
    ledger.current = {"embed": state("embed", lr=1.0)}
    ledger.start()
    ledger.current["embed"].grad.fill_(1)
    ledger.apply(outcome(7))
    assert values(ledger)["embed"] == pytest.approx(1 - 0.7)


NAN = float("nan")


def prepared(ledger: Ledger, loss: float, square: float = 1.0) -> StepOutcome:
    ballot = Ballot(losses=torch.tensor([loss]), squares=torch.tensor(square), num_targets=1)
    return ledger.prepare(SingleProcessCommunicator(), ballot).outcome


@pytest.mark.parametrize(("loss", "square"), [(NAN, 1.0), (float("inf"), 1.0), (1.0, NAN), (1.0, float("inf"))])
def test_step_that_is_not_finite_counts_and_changes_nothing(loss: float, square: float) -> None:
    ledger = ledger_at(4, *NAMES)
    skipped = prepared(ledger, loss, square)
    assert (skipped.step, skipped.is_finite) == (5, False)
    ledger.apply(skipped)
    assert values(ledger) == dict.fromkeys(NAMES, 1.0)
    assert (ledger.version, ledger.skipped) == (5, SkippedSteps(total=1, in_a_row=1))
    assert (ledger.progress().complete, ledger.progress().passed) == (False, skipped)
    assert prepared(ledger, NAN).skipped == SkippedSteps(total=2, in_a_row=2)
    assert prepared(ledger, 1.0).skipped == SkippedSteps(total=1)


def test_complete_worker_rolls_forward_over_a_skipped_step() -> None:
    ledger = ledger_at(4, *NAMES)
    skipped = prepared(ledger, NAN)
    ledger.begin_install(5, skipped, skipped.skipped)
    assert (ledger.version, values(ledger)) == (5, dict.fromkeys(NAMES, 1.0))


@pytest.mark.parametrize("rebuilt", [False, True], ids=["goes on", "is rebuilt after it"])
def test_optimizer_does_not_count_a_skipped_step(rebuilt: bool) -> None:
    """The correction of Adam's averages for their beginning at zero goes by the number of updates."""
    optimizer = AdamW(lr=0.1)
    spec = TiedModel(num_blocks=1).layers[0]
    held = LayerState(spec, BufferLayout.of(spec, optimizer.rates), optimizer.slots, torch.float64, CPU)
    held.initialize(0)
    expected = held.parameters["weight"].detach().clone().requires_grad_()
    theirs = torch.optim.AdamW([expected], lr=0.1)
    ledger = Ledger(optimizer, None)
    ledger.begin_install(0, None)
    ledger.current = {"embed": held}
    ledger.start()
    for step in range(1, 5):
        gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        skips = step in (1, 3)
        held.grad.copy_(gradient.flatten() * (NAN if skips else 1))
        ledger.apply(prepared(ledger, NAN if skips else 1.0))
        if not skips:
            expected.grad = gradient
            theirs.step()
        if rebuilt:
            ledger.begin_install(step, None, ledger.skipped)
            ledger.keep({"embed": held.held})
            ledger.start()
    torch.testing.assert_close(held.parameters["weight"], expected, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("pause", [False, True])
def test_barrier_gives_loss_per_target_and_the_gradient_norm(pause: bool) -> None:
    ledger = ledger_at(0, *NAMES)
    carried = torch.tensor([7.0], dtype=torch.float64)
    ballot = Ballot(
        losses=torch.tensor([30.0]), squares=torch.tensor(16.0), num_targets=12, pause=pause, carried=carried
    )
    verdict = ledger.prepare(SingleProcessCommunicator(), ballot)
    expected = StepOutcome(step=1, loss=2.5, grad_norm=4.0)
    assert verdict == Verdict(outcome=expected, pause=pause, samples_agree=True, carried=verdict.carried)
    assert verdict.carried.tolist() == [7.0]
    assert ledger.progress().complete


def test_losses_of_several_units_are_told_apart_and_add_up() -> None:
    ballot = Ballot(
        losses=torch.tensor([30.0, 6.0]), squares=torch.tensor(16.0), num_targets=12, units=("llm", "image")
    )
    outcome = ledger_at(0, *NAMES).prepare(SingleProcessCommunicator(), ballot).outcome
    assert outcome == StepOutcome(step=1, loss=3.0, grad_norm=4.0, losses={"llm": 2.5, "image": 0.5})


@pytest.mark.parametrize("samples", [0, 1])
def test_barrier_tells_whether_samples_differ(samples: int) -> None:
    ballot = Ballot(losses=torch.tensor([1.0]), squares=torch.tensor(1.0), num_targets=1, samples=samples)
    verdict = ledger_at(0, *NAMES).prepare(SingleProcessCommunicator(), ballot)
    assert verdict.samples_agree is (samples == 0)


def test_dropped_state_is_reported_no_longer_and_the_others_stay() -> None:
    ledger = ledger_at(4, *NAMES)
    ledger.begin_step()
    ledger.drop(("block.0",))
    progress = ledger.progress()
    assert (progress.version, progress.begun, progress.complete) == (4, True, False)
    assert (progress.current, progress.retained) == (("embed", "head"), ())
