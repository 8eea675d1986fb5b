"""The cells that units are measured on: of real samples, of several sizes, whatever the data set is like."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.errors import ArgumentError
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.profiling.unit_cells import DrawnSamples, draw_lengths
from tests.resilient.small import Tokens, make_job

UNITS = [EmulatedUnit(name=name, num_layers=1, cost=CostCurve()) for name in ("vision", "llm")]


def drawn(lengths: list[list[int]]) -> DrawnSamples:
    units = {"vision": Lengths.of(lengths)}
    return DrawnSamples(indices=np.arange(len(lengths)), table=SampleTable(units=units))


SAMPLES = st.lists(st.lists(st.integers(1, 999), max_size=3), min_size=1, max_size=40).filter(any)


@given(lengths=SAMPLES, microbatch=st.integers(1, 9))
def test_cells_have_four_sizes_from_the_shortest_sample_on(lengths: list[list[int]], microbatch: int) -> None:
    cells = drawn(lengths).cells("vision", microbatch)
    tokens = [sum(sum(lengths[place]) for place in cell) for cell in cells]
    some = [sum(each) for each in lengths if each]
    assert len(set(tokens)) >= 4
    assert min(tokens) == min(some)
    assert max(tokens) >= max(some)
    assert all(lengths[place] for cell in cells for place in cell)


def test_largest_cells_are_four_microbatches_of_samples_that_have_something() -> None:
    cells = drawn([[7], [], [3, 3], []] * 10).cells("vision", 4)
    assert [len(cell) for cell in cells] == [1, 1, 2, 4, 6, 8]


def test_unit_that_no_sample_is_for_is_named() -> None:
    message = (
        "dataset must have samples for vision, got none among 2; leave vision out of the model, or mix in samples "
        "that it is for"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        drawn([[], []]).cells("vision", 1)


def test_lengths_are_drawn_alike_for_all_seeds_and_without_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedDataset, "__getitem__", None)
    jobs = [make_job(model=EmulatedModel(UNITS), dataset=EmulatedDataset(UNITS), seed=seed) for seed in (1, 2)]
    one, other = (draw_lengths(job) for job in jobs)
    assert one.indices.tolist() == other.indices.tolist()
    said = EmulatedDataset(UNITS)
    for name, lengths in one.table.units.items():
        assert lengths.tokens.tolist() == [sum(said.lengths(index)[name]) for index in one.indices.tolist()]


class Collating(EmulatedDataset):
    """Joins samples in a way of its own."""

    def collate(self, samples: Any) -> Any:
        raise AssertionError("nobody collates")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "TiedModel has no collate_unit"),
        ({"model": EmulatedModel(UNITS), "dataset": Collating(UNITS)}, "Collating has a collate of its own"),
    ],
)
def test_samples_that_are_padded_are_refused(changes: dict[str, Any], why: str) -> None:
    message = f"model must pack the data set's samples, got a job in which {why}; change that"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        draw_lengths(make_job(**{"dataset": Tokens(), **changes}))
