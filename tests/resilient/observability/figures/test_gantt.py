"""Gantt pictures: what is there is to be seen, however short it is."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib.image
import pytest

from resilient.observability.figures.bars import Bar, Chart
from resilient.observability.figures.gantt import draw_charts


def part_of_colour(path: Path, colour: str) -> float:
    image = matplotlib.image.imread(path)[..., :3]
    rgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return float((abs(image - rgb).max(axis=-1) < 0.02).mean())


@pytest.mark.parametrize("num_bars", [1, 20, 3000])
def test_bars_fill_their_time_however_many_they_are(tmp_path: Path, num_bars: int) -> None:
    length = 6_000_000
    ends = [length * number // num_bars for number in range(num_bars + 1)]
    bars = tuple(
        Bar(row=row, kind="FB"[row], start_ns=start, end_ns=end) for row in range(2) for start, end in pairwise(ends)
    )
    draw_charts([Chart(title="step", rows=("a", "b"), length_ns=length, bars=bars)], tmp_path / "p.png")
    # Two rows of 0.36 inches less the gaps between them, in a picture 10.5 inches wide.
    assert part_of_colour(tmp_path / "p.png", "#4a90d9") > 0.08
    assert part_of_colour(tmp_path / "p.png", "#2b8a3e") > 0.08


def test_the_legend_says_what_is_lighter(tmp_path: Path) -> None:
    bars = (Bar(row=0, kind="F", start_ns=0, end_ns=5), Bar(row=0, kind="F", start_ns=5, end_ns=9, chunk=1))
    pictures: list[bytes] = []
    for odd_chunks in ("every other stage", "encoders"):
        chart = Chart(title="step", rows=("a",), length_ns=10, bars=bars, odd_chunks=odd_chunks)
        draw_charts([chart], tmp_path / "p.png")
        pictures.append((tmp_path / "p.png").read_bytes())
    assert pictures[0] != pictures[1]
