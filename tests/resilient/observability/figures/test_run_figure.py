"""The picture of a run: that it is drawn, and that it shows what the report says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from resilient.observability.figures.run_figure import draw_report
from resilient.observability.run_report import build_run_report
from resilient.templates.common.arrays import Floats
from tests.resilient.observability.made_up_runs import Run, failure_and_join


def pixels(events: list[dict[str, Any]], path: Path, reference: list[dict[str, Any]] | None = None) -> Floats:
    draw_report(events, build_run_report(events), path, reference)
    return matplotlib.image.imread(path)[..., :3]


def has_colour(image: Floats, hexadecimal: str) -> bool:
    colour = np.array([int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    # A few pixels may have it by chance, where the edge of another colour is smoothed.
    return (np.abs(image - colour).max(axis=-1) < 0.01).sum() > 200


@pytest.mark.parametrize(
    ("what", "colour"), [("failure", "#c92a2a"), ("join", "#2b8a3e"), ("copy", "#4a90d9"), ("agree", "#e8890c")]
)
def test_picture_shows_failures_joins_and_parts_of_a_recovery(tmp_path: Path, what: str, colour: str) -> None:
    assert has_colour(pixels(failure_and_join().events, tmp_path / "a.png"), colour), what


def test_picture_of_a_run_without_failures_has_no_bars_and_is_lower(tmp_path: Path) -> None:
    quiet = Run()
    quiet.generation(0, 1, "start", 0, [0, 1, 2])
    quiet.installed(20, 50)
    for step in range(1, 5):
        quiet.step(100 * step, step)
    image = pixels(quiet.events, tmp_path / "quiet.png")
    assert not has_colour(image, "#c92a2a")
    assert image.shape[0] < pixels(failure_and_join().events, tmp_path / "a.png").shape[0]


def test_picture_shows_the_reference_only_when_there_is_one(tmp_path: Path) -> None:
    events = failure_and_join().events
    assert has_colour(pixels(events, tmp_path / "a.png", reference=events), "#a9c9ee")
    assert not has_colour(pixels(events, tmp_path / "b.png"), "#a9c9ee")


def test_loss_of_skipped_steps_leaves_a_gap(tmp_path: Path) -> None:
    def drawn(name: str, skipped: range) -> Floats:
        run = Run(num_steps=40)
        run.generation(0, 1, "start", 0, [0, 1, 2])
        for step in range(1, 41):
            run.step(100 * step, step, loss=float("nan") if step in skipped else 1.0)
        return pixels(run.events, tmp_path / name, reference=run.events)

    def amount(image: Floats) -> int:
        return int((np.abs(image - np.array([0xA9, 0xC9, 0xEE]) / 255).max(axis=-1) < 0.01).sum())

    assert 0 < amount(drawn("gap.png", range(10, 30))) < 0.7 * amount(drawn("whole.png", range(0)))


def test_picture_of_a_run_that_never_began_is_drawn(tmp_path: Path) -> None:
    assert pixels([], tmp_path / "empty.png").size


def test_matplotlib_and_torch_are_not_imported_before_a_picture_is_drawn() -> None:
    code = (
        "import sys, resilient.observability.figures.run_figure, resilient.observability.live_view\n"
        "sys.exit(bool({'matplotlib', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
