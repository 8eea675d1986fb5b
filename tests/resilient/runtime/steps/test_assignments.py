"""Assignments are made ahead on rank 0, and all ranks know the same ones two steps ahead."""

from __future__ import annotations

import threading

import pytest
import torch

from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.assignments import AHEAD, Assignments, Make
from resilient.templates.schedules.graph import Flow, LaneName
from tests.resilient.ranks import as_threads, join

UNITS = ("vision", "llm")
VISION, LLM = LaneName("vision", 0), LaneName("llm", 0)


def assigned(step: int) -> StepAssignment:
    """Return one of three samples, the last of which is text, in two pipelines."""
    places = torch.tensor([[[0, 0, step], [1, 0, 0], [-1, -1, -1]], [[0, 0, 0], [1, 0, 1], [0, 0, 0]]])
    tokens = torch.tensor([[4, 2, 0], [9, 5, 3]])
    return StepAssignment(units=UNITS, places=places, tokens=tokens, squares=tokens**2)


def test_what_is_told_is_what_was_made() -> None:
    numbers = assigned(7).encoded()
    assert numbers.shape == (StepAssignment.encoded_size(2, 3),)
    again = StepAssignment.decoded(UNITS, numbers + torch.zeros_like(numbers))
    assert torch.equal(again.places, assigned(7).places)
    assert torch.equal(again.tokens, assigned(7).tokens)
    assert torch.equal(again.squares, assigned(7).squares)


def test_cells_of_a_pipeline_are_those_assigned_to_it() -> None:
    cells = assigned(5).cells(0, (VISION, LLM), [("vision", "llm")])
    assert cells.samples == {VISION: {5: (0,)}, LLM: {0: (0, 2)}}
    assert cells.flows == (Flow(VISION, 5, LLM, 0),)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_all_ranks_know_each_step_two_ahead(num_steps: int) -> None:
    def rank(number: int, address: str) -> list[list[int]]:
        asked: list[int] = []

        def prepared(step: int) -> Make:
            asked.append(step)
            return lambda: assigned(step)

        comm = join(address, number, 3, [])
        assignments = Assignments(comm, UNITS, 3, num_steps, prepared)
        assignments.begin(0)
        seen: list[list[int]] = []
        for step in range(1, num_steps + 1):
            known = [assignments.of(each) for each in range(1, num_steps + 2)]
            seen.append([each for each, found in enumerate(known, 1) if found is not None])
            of_step = assignments.of(step)
            assert of_step is not None
            assert int(of_step.places[0, 0, 2]) == step
            assignments.start(step)
            total = assignments.bring(step)
            comm.all_reduce(total, (0, 1, 2)).wait()
            assignments.take(step, total)
        assignments.close()
        assert asked == ([] if number else list(range(1, num_steps + 1)))
        return seen

    expected = [[each for each in range(step, step + AHEAD) if each <= num_steps] for step in range(1, num_steps + 1)]
    assert as_threads(3, rank) == [expected] * 3


def test_an_error_in_making_one_is_raised_where_it_is_to_travel() -> None:
    def rank(number: int, address: str) -> str:
        def prepared(step: int) -> Make:
            def make() -> StepAssignment:
                if step > AHEAD:
                    raise ValueError(f"no place in step {step}")
                return assigned(step)

            return make

        assignments = Assignments(join(address, number, 1, []), UNITS, 3, 9, prepared)
        assignments.begin(0)
        assignments.start(1)
        with pytest.raises(ValueError, match=r"^no place in step 3$"):
            assignments.bring(1)
        assignments.close()
        return threading.current_thread().name

    assert len(as_threads(1, rank)) == 1
