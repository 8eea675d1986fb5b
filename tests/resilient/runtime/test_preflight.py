"""Each job that would train wrongly without a word ends before its first step, with a message that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, ViTConfig

import resilient as rs
from resilient.data.sampler import StepSampler
from resilient.testing import train_here

pytestmark = pytest.mark.usefixtures("empty_cache")

NUM_SAMPLES = 32
FIRST = int(StepSampler(num_samples=NUM_SAMPLES, global_batch=8, seed=0).indices(1)[0])


class Made:
    """A data set of what a function makes of the index; with ``num_targets`` where there are some to tell."""

    def __init__(self, make: Callable[[int], Mapping[str, Any]]) -> None:
        self._make = make

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._make(index)


class Counted(Made):
    """Samples of three targets, or of as many as are said."""

    def __init__(self, make: Callable[[int], Mapping[str, Any]], num_targets: int = 3) -> None:
        super().__init__(make)
        self._num_targets = num_targets

    def num_targets(self, index: int) -> int:
        return self._num_targets


def train(model: Any, dataset: Any, folder: Path, **changes: Any) -> dict[int, float]:
    """Train two steps; what is refused is refused before anything is written."""
    arguments: dict[str, Any] = {"global_batch": 8, "microbatch": 4, "device": "cpu", **changes}
    _, losses = train_here(
        rs.Trainer(model, dataset, optimizer=rs.SGD(lr=0.01), **arguments), 2, directory=folder / "run"
    )
    return losses


def check_refused(message: str, model: Any, dataset: Any, folder: Path, **changes: Any) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        train(model, dataset, folder, **changes)
    assert not (folder / "run").exists()


def language_model(**options: Any) -> rs.MultimodalModule:
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return rs.MultimodalModule(**{"encoders": {}, "language_model": config, **options})


def shifted(index: int) -> dict[str, Tensor]:
    tokens = 3 + torch.arange(index, index + 4) % 17
    return {"input_ids": tokens[:-1], "labels": tokens[1:]}


def unshifted(index: int) -> dict[str, Tensor]:
    """As transformers wants them; the first token is no target, whoever shifts."""
    tokens = 3 + torch.arange(index, index + 4) % 17
    return {"input_ids": tokens, "labels": torch.cat((torch.tensor([-100]), tokens[1:]))}


def test_labels_that_repeat_the_inputs_are_refused(tmp_path: Path) -> None:
    message = (
        f"sample {FIRST} of Counted: labels must be the tokens that follow (labels[t] is predicted from "
        "input_ids[: t + 1]), got those of input_ids themselves, as in all samples looked at; pass "
        'MultimodalModule(labels="unshifted") to have the model shift them, as transformers does, or labels="shifted" '
        "if it is really to copy"
    )
    check_refused(message, language_model(), Counted(unshifted), tmp_path)


@pytest.mark.parametrize(
    ("labels", "make"),
    [
        (None, shifted),
        ("shifted", shifted),
        ("shifted", unshifted),
        ("unshifted", unshifted),
        (None, lambda index: unshifted(index) if index != FIRST else shifted(index)),
    ],
)
def test_labels_that_are_said_or_differ_somewhere_are_trained_on(labels: Any, make: Any, tmp_path: Path) -> None:
    assert len(train(language_model(labels=labels), Counted(make), tmp_path)) == 2


def labelled(name: str) -> Callable[[int], Mapping[str, Tensor]]:
    return lambda index: {"input": torch.ones(3), name: torch.tensor([1, 2, -100, 4])}


RENAME = "; or, if they are not the loss's targets, rename the sample's entry of labels or targets"


@pytest.mark.parametrize(
    ("model", "dataset", "message"),
    [
        (
            lambda: summing(nn.Linear(3, 2)),
            Made(labelled("label")),
            f"sample {FIRST} of Made: num_targets({FIRST}) must be 3, the targets in the sample, got 1, the default; "
            f"give Made a method num_targets(self, index) -> int that returns 3 for it{RENAME}",
        ),
        (
            language_model,
            Counted(shifted, 4),
            f"sample {FIRST} of Counted: num_targets({FIRST}) must be 3, the targets in the sample, got 4; have "
            "Counted.num_targets return 3 for it",
        ),
        (
            lambda: language_model(labels="unshifted"),
            Counted(lambda index: {"input_ids": torch.arange(4), "labels": torch.arange(4)}, 4),
            f"sample {FIRST} of Counted: num_targets({FIRST}) must be 3, the targets in the sample, got 4; have "
            "Counted.num_targets return 3 for it",
        ),
    ],
    ids=["missing", "wrong", "of shifted labels"],
)
def test_numbers_of_targets_that_are_not_the_samples_are_refused(
    model: Any, dataset: Any, message: str, tmp_path: Path
) -> None:
    check_refused(message, model(), dataset, tmp_path)


def test_integers_by_another_name_are_no_targets(tmp_path: Path) -> None:
    assert len(train(summing(nn.Linear(3, 2)), Made(labelled("kinds")), tmp_path)) == 2


def summing(*layers: Any) -> rs.Chain:
    return rs.Chain(layers, lambda output, batch: output.square().sum())


def points(index: int) -> dict[str, Tensor]:
    return {"input": torch.linspace(-1, 1, 3) * (index + 1), "target": torch.zeros(2)}


@pytest.mark.parametrize(
    ("model", "got", "fix"),
    [
        (summing(nn.Linear(3, 2).requires_grad_(False), nn.Tanh()), "8 frozen ones in 2 layers", "unfreeze a layer"),
        (summing(nn.Tanh), "none at all in 1 layers", "give it layers that learn"),
        (language_model(frozen_language_model=True), "792 frozen ones in 3 layers", "unfreeze a layer"),
    ],
)
def test_models_of_which_nothing_is_trained_are_refused(model: Any, got: str, fix: str, tmp_path: Path) -> None:
    check_refused(f"model must have parameters that are trained, got {got}; {fix}", model, Made(points), tmp_path)


def pictures(image: Tensor) -> Counted:
    tokens = torch.tensor([1, 3, 5, 6])
    return Counted(
        lambda index: {"input_ids": tokens, "labels": torch.tensor([-100, 5, 6, 2]), "vision.pixels": image},
    )


@pytest.mark.parametrize(
    ("image", "got"),
    [
        (
            torch.full((1, 4, 4), 200, dtype=torch.uint8),
            "be of floating-point values, got torch.uint8; convert it to float and normalise it",
        ),
        (
            torch.full((1, 4, 4), 200.0),
            "be normalised, got values up to 200; divide by 255, then subtract the mean and divide by the deviation "
            "that the encoder was trained with",
        ),
    ],
)
def test_pictures_that_are_not_normalised_are_refused(image: Tensor, got: str, tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4,
        num_channels=1,
    )  # fmt: skip
    model = language_model(encoders={"vision": rs.EncoderModule(config, placeholder_id=3)})
    message = f"sample {FIRST} of Counted: vision image must {got}"
    check_refused(message, model, pictures(image), tmp_path)
    assert len(train(model, pictures(torch.full((1, 4, 4), 2.5)), tmp_path)) == 2


def test_pictures_for_a_chain_are_refused_where_they_are_plainly_not_normalised(tmp_path: Path) -> None:
    def model() -> rs.Chain:
        return summing(nn.Sequential(nn.Flatten(), nn.Linear(48, 2)))

    def data(scale: float) -> Made:
        return Made(lambda index: {"input": torch.arange(48.0).reshape(3, 4, 4) * scale})

    message = (
        f"sample {FIRST} of Made: 'input' must be normalised, got an image of whole numbers up to 235; divide by 255, "
        "then subtract the mean and divide by the deviation; or leave it uint8 if the first layer does so"
    )
    check_refused(message, model(), data(5.0), tmp_path)
    assert len(train(model(), data(5.001), tmp_path)) == 2


class Float(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.float() / 255


def test_chain_may_normalise_bytes_by_itself(tmp_path: Path) -> None:
    data = Made(lambda index: {"input": torch.full((3, 4, 4), 200, dtype=torch.uint8)})
    model = summing(Float(), nn.Sequential(nn.Flatten(), nn.Linear(48, 2)))
    assert len(train(model, data, tmp_path)) == 2
