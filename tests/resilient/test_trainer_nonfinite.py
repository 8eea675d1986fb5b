"""A script run by itself does with steps that are not finite what many workers do."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from resilient.data.reader import Cell
from resilient.data.sampler import StepSampler
from resilient.errors import NonFiniteError
from resilient.models.layer import Activations, Batch
from resilient.optim import AdamW
from resilient.runtime.batches import Batches
from resilient.state.manifest import read_manifest
from resilient.state.skipped import MOST_IN_A_ROW, SkippedSteps
from resilient.trainer import Trainer
from tests.integration.jobs.chain import InfiniteGradient
from tests.resilient.small import CPU, TiedModel, Tokens, assemble, make_job, split_decay

pytestmark = pytest.mark.usefixtures("one_process")

NUM_STEPS = 6
INF = float("inf")
ADVICE = "mend that, or leave such steps out with Trainer(on_nonfinite='skip')"


class Marked(Tokens):
    """Tokens of which some samples are marked."""

    def __init__(self, marked: Sequence[int]) -> None:
        super().__init__(num_samples=16 * NUM_STEPS)
        self._marked = frozenset(marked)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"marked": torch.tensor(float(index in self._marked))}


class InfiniteLoss(TiedModel):
    """The loss is infinite for samples that are marked."""

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        return super().loss(activations, batch) / (1 - batch["marked"].max())


class BrokenBackward(TiedModel):
    """The gradient of the loss is infinite for samples that are marked."""

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        loss = super().loss(activations, batch)
        return InfiniteGradient.apply(loss, batch["marked"].max())  # pyright: ignore[reportReturnType]


def samples_of(step: int) -> list[int]:
    return [int(i) for i in StepSampler(num_samples=16 * NUM_STEPS, global_batch=16, seed=3).indices(step)]


def make_trainer(model: TiedModel, *steps: int, **changes: Any) -> Trainer:
    """Make a trainer to which in these steps the first sample of the second microbatch is trouble."""
    arguments: dict[str, Any] = {
        "optimizer": AdamW(lr=0.05, weight_decay=0.1),
        "global_batch": 16,
        "microbatch": 4,
        "seed": 3,
        "precision": "fp64",
        "device": CPU,
        **changes,
    }
    return Trainer(model, Marked([samples_of(step)[4] for step in steps]), **arguments)


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.whole_model().named_parameters())


@pytest.mark.parametrize("model", [InfiniteLoss, BrokenBackward])
def test_training_with_skipped_steps_equals_a_hand_written_loop(model: Callable[..., TiedModel]) -> None:
    trainer = make_trainer(model(num_blocks=2), 1, 4, on_nonfinite="skip")
    path = trainer.fit(NUM_STEPS).checkpoint
    assert read_manifest(path).skipped == SkippedSteps(total=2)
    whole = assemble(TiedModel(num_blocks=2), seed=3, dtype=torch.float64)
    optimizer = torch.optim.AdamW(split_decay(whole.parameters(), 0.1), lr=0.05)
    batches = Batches(make_job(microbatch=16, dataset=Marked([])))
    for step in (2, 3, 5, 6):
        optimizer.zero_grad()
        (whole.loss(batches.batch(step, Cell.of_chain(0, 16))) / (16 * 5)).backward()
        optimizer.step()
    torch.testing.assert_close(parameters(trainer), dict(whole.named_parameters()), rtol=1e-11, atol=1e-12)


def test_losses_of_skipped_steps_are_told_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make_trainer(InfiniteLoss(num_blocks=2), 2, on_nonfinite="skip")
    trainer.fit(3)
    assert trainer.losses[2] == INF
    assert "step 2 was skipped: gradient norm nan" in [record.getMessage() for record in caplog.records]


def test_resumed_training_remembers_skipped_steps(tmp_path: Path) -> None:
    through = make_trainer(InfiniteLoss(num_blocks=2), 2, on_nonfinite="skip", checkpoint_every=3)
    through.fit(NUM_STEPS)
    expected = parameters(through)
    resumed = make_trainer(InfiniteLoss(num_blocks=2), 2, on_nonfinite="skip")
    result = resumed.fit(NUM_STEPS, resume=tmp_path / "run" / "checkpoints" / "step-00000003")
    assert read_manifest(result.checkpoint).skipped == SkippedSteps(total=1)
    for key, value in parameters(resumed).items():
        assert torch.equal(value, expected[key])


@pytest.mark.parametrize(
    ("model", "got", "what"),
    [
        (
            InfiniteLoss,
            "loss inf and gradient norm nan",
            f"the loss is not finite (inf), though the output of layer 'head' is, for samples {samples_of(4)[4:8]} "
            "of Marked",
        ),
        (
            BrokenBackward,
            r"loss LOSS and gradient norm nan",
            "the gradient of layer 'head' is not finite, though the loss is",
        ),
    ],
)
def test_training_stops_at_a_step_that_is_not_finite_with_a_checkpoint_of_the_one_before(
    model: Callable[..., TiedModel], got: str, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(model(num_blocks=2), 4)
    with pytest.raises(NonFiniteError) as raised:
        trainer.fit(NUM_STEPS)
    message = f"a step must have a finite loss and gradient, got {got}: {what}; {ADVICE} (generation 1, step 4)"
    assert re.fullmatch(re.escape(message).replace("LOSS", r"\d\.\d+"), str(raised.value)), str(raised.value)
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    assert [checkpoint.name for checkpoint in path.parent.iterdir()] == [path.name]
    advice = f"training failed; go on with fit(num_steps, resume='{path}')"
    assert caplog.records[-1].getMessage() == advice
    good = make_trainer(model(num_blocks=2))
    good.fit(3)
    resumed = make_trainer(model(num_blocks=2), 4, on_nonfinite="skip")
    resumed.fit(4, resume=path)
    for key, value in parameters(resumed).items():
        assert torch.equal(value, parameters(good)[key])


def test_step_that_was_read_ahead_of_time_is_read_once_more() -> None:
    trainer = make_trainer(InfiniteLoss(num_blocks=2), 4, num_workers=1)
    with pytest.raises(
        NonFiniteError, match=rf"though the output .*, for samples {re.escape(str(samples_of(4)[4:8]))}"
    ):
        trainer.fit(NUM_STEPS)


def test_parameter_that_is_not_finite_from_the_beginning_is_named(tmp_path: Path) -> None:
    model = TiedModel(num_blocks=2)

    def fill(module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, INF)

    object.__setattr__(model.layers[2], "initialize", fill)
    with pytest.raises(NonFiniteError) as raised:
        make_trainer(model).fit(1)
    assert (
        "got loss nan and gradient norm nan: parameter 'linear.weight' of layer 'block.1' is not finite (inf), "
        in str(raised.value)
    )
    assert not (tmp_path / "run").exists(), "there is nothing to go on from"


def test_training_stops_when_no_step_is_finite_any_more(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    class Dead(TiedModel):
        def loss(self, activations: Activations, batch: Batch) -> Tensor:
            return super().loss(activations, batch) * float("nan")

    trainer = make_trainer(Dead(num_blocks=1), on_nonfinite="skip")
    with pytest.raises(NonFiniteError) as raised:
        trainer.fit(MOST_IN_A_ROW + 1)
    assert re.fullmatch(
        rf"one of {MOST_IN_A_ROW} steps in a row must have a finite loss and gradient, got loss nan and gradient norm "
        r"nan: the loss is not finite \(nan\), though the output of layer 'head' is, for samples \[.*\] of Marked; "
        rf"mend that \(generation 1, step {MOST_IN_A_ROW}\)",
        str(raised.value),
    ), str(raised.value)
    last = tmp_path / "run" / "checkpoints" / f"step-{MOST_IN_A_ROW - 1:08d}"
    assert read_manifest(last).skipped == SkippedSteps(total=MOST_IN_A_ROW - 1, in_a_row=MOST_IN_A_ROW - 1)
