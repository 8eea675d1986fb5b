"""A loss is verified to be the sum of its samples', in the first microbatch, layer by layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from resilient.models.chain import Chain
from resilient.models.layer import Batch
from resilient.profiling.profiler import draw_samples, measure
from resilient.runtime.job import Job
from tests.resilient.small import TiedModel, Tokens, make_job, profiled

NOT_VERIFIED = "that the loss is a sum over its samples cannot be verified: "
DEPENDS = "a sample's loss must not depend on the other samples of its microbatch, got "
MEAN = (
    "loss must be summed over the microbatch's targets, got a mean (# for {} samples whose losses alone add up to #); "
    "use reduction='sum'"
)
FIX = "; mask what is padded, sum the loss, and use LayerNorm or GroupNorm for norms over the microbatch"


class Points:
    """Points of one to four numbers each, padded with zeros, and two numbers to predict."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.arange(1.0, 2 + index % 4), "target": torch.tensor([index % 3, -1.0])}

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        inputs = nn.utils.rnn.pad_sequence([sample["input"] for sample in samples], batch_first=True)
        return {
            "input": functional.pad(inputs, (0, 4 - inputs.shape[1])),
            "target": torch.stack([sample["target"] for sample in samples]),
        }


def squares(reduction: str) -> Callable[[Tensor, Batch], Tensor]:
    return lambda output, batch: functional.mse_loss(output, batch["target"], reduction=reduction)


def chain_job(loss: Callable[[Tensor, Batch], Tensor], *layers: Any, **changes: Any) -> Job:
    torch.manual_seed(0)
    arguments = {"dataset": Points(), "microbatch": 4, "global_batch": 8, "precision": "fp32", **changes}
    return make_job(model=Chain([nn.Linear(4, 2), *layers], loss), **arguments)


def verify(job: Job) -> None:
    measure(job, job.layouts(), draw_samples(job), on_layer=lambda _: None, timed=lambda run: float(run() is None))


def check_refused(message: str, job: Job) -> None:
    """Check the message, in which ``#`` is some number."""
    pattern = re.escape(message).replace(r"\#", r"\d+(\.\d+)?")
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        verify(job)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_sums_pass(microbatch: int, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    verify(chain_job(squares("sum"), nn.Dropout(), microbatch=microbatch, precision=precision))
    verify(make_job(model=TiedModel(dropout=0.5), microbatch=microbatch, precision=precision))
    assert caplog.messages == []


def mean_over_samples(output: Tensor, batch: Batch) -> Tensor:
    return functional.mse_loss(output, batch["target"], reduction="sum") / len(output)


@pytest.mark.parametrize("loss", [squares("mean"), mean_over_samples])
@pytest.mark.parametrize(("microbatch", "num"), [(4, 4), (2, 2), (1, 2)])
def test_mean_is_refused(loss: Callable[[Tensor, Batch], Tensor], microbatch: int, num: int) -> None:
    check_refused(MEAN.format(num), chain_job(loss, microbatch=microbatch))


def test_mean_over_tokens_of_samples_of_unequal_length_is_refused() -> None:
    class Texts(Tokens):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            text = super().__getitem__(index)
            return {"input": text["tokens"][: 1 + index % 5], "labels": text["labels"][: 1 + index % 5]}

        def num_targets(self, index: int) -> int:
            return 1 + index % 5

        def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
            def pad(key: str, value: int) -> Tensor:
                texts = [sample[key] for sample in samples]
                return nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=value)

            return {"input": pad("input", 0), "labels": pad("labels", -100)}

    def loss(output: Tensor, batch: Batch) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())

    model = Chain([lambda: nn.Embedding(11, 11)], loss)
    check_refused(MEAN.format(4), make_job(model=model, dataset=Texts(), microbatch=4))


class Centred(nn.Module):
    """Subtracts the microbatch's mean, as BatchNorm does."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden - 0.1 * hidden.mean(0)


def test_layer_that_mixes_samples_is_refused() -> None:
    message = f"{DEPENDS}# for 4 samples whose losses alone add up to #{FIX}"
    check_refused(message, chain_job(squares("sum"), Centred()))
    check_refused(message, chain_job(squares("sum"), Centred(), precision="fp64"))


def test_layer_that_cannot_run_a_sample_alone_is_refused() -> None:
    told = "ValueError: Expected more than 1 value per channel when training, got input size torch.Size([1, 2])"
    message = f"{DEPENDS}an error in layer 'layer.1' for one alone ({told}){FIX}"
    check_refused(message, chain_job(squares("sum"), nn.BatchNorm1d(2, track_running_stats=False)))


class Noise(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.randn_like(hidden)


class Moody(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError("no evaluation")
        return hidden


def not_a_number(output: Tensor, batch: Batch) -> Tensor:
    return output.sum() * float("nan")


class Fours(Points):
    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        assert len(samples) == 4
        return super().collate(samples)


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (chain_job(squares("mean"), Noise()), "the model draws random numbers in evaluation"),
        (
            chain_job(squares("mean"), Moody()),
            "layer 'layer.1' cannot be run in evaluation (NotImplementedError: no evaluation)",
        ),
        (chain_job(not_a_number), "it is not a number"),
        (
            chain_job(squares("sum"), dataset=Fours()),
            "a sample cannot be collated alone (AssertionError: assert 1 == 4\n +  where 1 = len([{'input': "
            "tensor([1., 2., 3., 4.]), 'target': tensor([ 0., -1.])}]))",
        ),
    ],
    ids=["random", "no evaluation", "not a number", "no sample alone"],
)
def test_what_cannot_be_verified_is_said(job: Job, why: str, caplog: pytest.LogCaptureFixture) -> None:
    verify(job)
    (told,) = caplog.messages
    assert told.startswith(NOT_VERIFIED + why.partition("(AssertionError")[0])


def test_layers_train_as_before_after_they_were_verified() -> None:
    modes: list[bool] = []

    class Watching(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            modes.append(self.training)
            return hidden

    verify(chain_job(squares("sum"), Watching()))
    evaluated = [index for index, training in enumerate(modes) if not training]
    assert len(evaluated) == 2 + 4, "the microbatch twice, and each sample"
    assert modes[0]
    assert modes[-1]


def test_a_loss_is_verified_again_when_its_code_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the model's own digest, and so the profile's key otherwise, does not know of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Mean(TiedModel):
        def loss(self, activations: Any, batch: Any) -> Tensor:
            return super().loss(activations, batch) / batch["labels"].numel()

    profiled(make_job(model=TiedModel(num_blocks=1)), lambda _: None)
    assert Mean(num_blocks=1).digest() == TiedModel(num_blocks=1).digest()
    with pytest.raises(ValueError, match=r"^loss must be summed over the microbatch's targets, got a mean "):
        profiled(make_job(model=Mean(num_blocks=1)), lambda _: None)
