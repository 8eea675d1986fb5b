"""The drawing example: its data, its scoring, and what it learns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from resilient.data import IGNORED_LABEL
from resilient.data.lengths import SampleLengths
from resilient.examples import draw_digits as example
from resilient.observability.event_log import steps_of
from tests.examples.learning import trained
from tests.integration.harness import Run, check_recovered, started

SCRIPT = Path(example.__file__)


def test_samples_suit_the_model_and_are_what_is_said_of_them() -> None:
    model = example.build_model()
    dataset = example.DrawingsDataset("train", 200)
    lengths = SampleLengths(dataset, model)
    for i in range(len(dataset)):
        sample = dataset[i]
        model.check(sample, f"sample {i}")
        lengths.check(i, model.lengths(sample), f"sample {i}", {})
        assert model.num_targets(sample) == dataset.num_targets(i)
    drawn = [bool(dataset.lengths(i)["image"]) for i in range(len(dataset))]
    assert sum(drawn) / len(drawn) == pytest.approx(1 - example.NAMED_ALONE, abs=0.06)


def test_a_sample_is_a_function_of_split_seed_and_index() -> None:
    one, again = (example.DrawingsDataset("train", 10, seed=3) for _ in range(2))
    others = example.DrawingsDataset("train", 10, seed=4), example.DrawingsDataset("held-out", 10, seed=3)
    for i in reversed(range(10)):
        assert one[i].keys() == again[i].keys()
        torch.testing.assert_close(dict(one[i]), dict(again[i]), rtol=0, atol=0)
    for other in others:
        assert any(not torch.equal(one[i]["input_ids"], other[i]["input_ids"]) for i in range(10))


def test_pictures_are_of_the_digits_that_are_told_and_the_next_ones_are_named() -> None:
    dataset = example.DrawingsDataset("train", 40)
    seen = {
        tuple(scan.flatten().tolist()): int(digit) for scan, digit in zip(dataset.pixels, dataset.digits, strict=True)
    }
    for i in range(len(dataset)):
        sample = dataset[i]
        told = sample["input_ids"][sample["input_ids"] >= example.ZERO] - example.ZERO
        named = sample["labels"][sample["labels"] != IGNORED_LABEL] - example.ZERO
        assert torch.equal(named, (told + 1) % 10)
        drawn = [seen[tuple(image.flatten().tolist())] for image in sample.get("image.pixels", ())]
        assert drawn in ([], told.tolist())


class MeanPicture(torch.nn.Module):
    """Draws the same for every digit."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = example.scans("train")[0].mean(dim=0)[None, None]
        patches = torch.nn.functional.unfold(mean, example.PATCH_SIZE, stride=example.PATCH_SIZE).transpose(1, 2)
        return {"image.drawn": patches.expand(len(batch["image.pixels"]), -1, -1)}


def test_error_is_that_of_each_pixel() -> None:
    dataset = example.DrawingsDataset("held-out", 80)
    of_mean = example.error_of_mean(dataset)
    assert 0.1 < of_mean < 0.5
    assert example.drawing_error(MeanPicture(), dataset) == pytest.approx(of_mean, rel=1e-5)


def test_few_steps_draw_digits_better_than_their_mean() -> None:
    model = example.build_model()
    whole = trained(model, example.DrawingsDataset("train", 50_000), steps=75, lr=5e-3)
    held_out = example.DrawingsDataset("held-out", 100)
    assert example.drawing_error(whole, held_out) < 0.85 * example.error_of_mean(held_out)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without failures."""
    return run(tmp_path_factory.mktemp("undisturbed"))


def run(folder: Path, options: str = "") -> Run:
    arguments = ("--steps", 5, "--batch", 16, "--microbatch", 2, "--precision", "fp64")
    with started(folder, *arguments, nodes=5, options=options, script=SCRIPT) as job:
        ended = job.wait()
    assert "  loss " in job.output
    return ended


def losses_by_unit(of: Run) -> dict[int, dict[str, float]]:
    return {number: step["losses"] for number, step in steps_of(of.events).items()}


@pytest.mark.parametrize("planner", ["", "--planner uniform"])
def test_run_with_a_node_killed_is_the_undisturbed_run_in_each_of_its_losses(
    planner: str, undisturbed: Run, tmp_path: Path
) -> None:
    killed = run(tmp_path, f"--inject node=1,step=3,phase=backward {planner}")
    assert [failure["node"] for failure in killed.failures] == [1]
    check_recovered(killed, undisturbed)
    for number, losses in losses_by_unit(killed).items():
        assert losses == pytest.approx(losses_by_unit(undisturbed)[number], rel=1e-9)
        assert list(losses) == ["llm", "image"]
        assert min(losses.values()) > 0
        assert sum(losses.values()) == pytest.approx(killed.losses[number], rel=1e-12)
