"""Assignments are made ahead on rank 0, and all ranks know the same ones some steps ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from resilient.planners.costs.correction import Correction
from resilient.runtime.steps import assignments as module
from resilient.runtime.steps.assignment import StepAssignment
from resilient.runtime.steps.assignments import AHEAD, Assignments, Make
from resilient.runtime.steps.learning import Learning
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import Flow, LaneName
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.ranks import as_threads, join

UNITS = ("vision", "llm")
VISION, LLM = LaneName("vision", 0), LaneName("llm", 0)
STAGE = StageSpec(lane=VISION, first_layer=0, end_layer=1, node_index=0, forward_ms=1.0, backward_ms=2.0)
TEMPLATE = PipelineTemplate(num_nodes=1, stages=(STAGE, replace(STAGE, lane=LLM, first_layer=1, end_layer=2)))
PIPELINES = tuple(Pipeline(template=TEMPLATE, nodes=(node,), num_microbatches=2) for node in range(2))
LANES = PlanLanes(Plan(pipelines=PIPELINES), (("vision", "llm"),), (True, True))


Told = list[list[int]]


def assigned(step: int) -> StepAssignment:
    """Return one of three samples, the last of which is text, in two pipelines."""
    places = torch.tensor([[[0, 0, step], [1, 0, 0], [-1, -1, -1]], [[0, 0, 0], [1, 0, 1], [0, 0, 0]]])
    tokens = torch.tensor([[4, 2, 0], [9, 5, 3]])
    return StepAssignment(units=UNITS, places=places, tokens=tokens, squares=tokens**2, longest=tokens)


def test_what_is_told_is_what_was_made() -> None:
    numbers = assigned(7).encoded()
    assert numbers.shape == (StepAssignment.encoded_size(2, 3),)
    again = StepAssignment.decoded(UNITS, numbers + torch.zeros_like(numbers))
    assert torch.equal(again.places, assigned(7).places)
    assert torch.equal(again.tokens, assigned(7).tokens)
    assert torch.equal(again.squares, assigned(7).squares)


def test_cells_of_a_pipeline_are_those_assigned_to_it() -> None:
    cells = assigned(5).cells((0,), LANES)
    assert cells.samples == {VISION: {5: (0,)}, LLM: {0: (0, 2)}}
    assert cells.flows == (Flow(VISION, 5, LLM, 0),)
    second = assigned(5).cells((1,), LANES)
    assert second.flows == (Flow(LaneName("vision", 1), 0, LaneName("llm", 1), 1),)


def test_pipelines_are_joined_that_share_samples_be_it_through_others() -> None:
    def joined(*pipelines: tuple[int, int]) -> list[tuple[int, ...]]:
        places = torch.tensor([[[each[unit], 0, 0] for each in pipelines] for unit in range(2)])
        tokens = torch.ones(2, len(pipelines))
        found = StepAssignment(units=UNITS, places=places, tokens=tokens, squares=tokens, longest=tokens)
        return [found.joined(pipeline) for pipeline in range(4)]

    assert joined((0, 0), (1, 1), (2, 2), (-1, 3)) == [(0,), (1,), (2,), (3,)]
    assert joined((0, 2), (1, 1), (2, 2)) == [(0, 2), (1,), (0, 2), (3,)]
    assert joined((3, 1), (1, 2), (-1, 0)) == [(0,), (1, 2, 3), (1, 2, 3), (1, 2, 3)]


def test_cells_of_joined_pipelines_hand_features_from_one_to_the_other() -> None:
    places = torch.tensor([[[1, 0, 2], [0, 0, 0], [-1, -1, -1]], [[0, 0, 0], [1, 0, 1], [0, 0, 0]]])
    tokens = places[..., 0]
    found = StepAssignment(units=UNITS, places=places, tokens=tokens, squares=tokens, longest=tokens)
    other = LaneName("vision", 1), LaneName("llm", 1)
    assert found.joined(0) == (0, 1)
    cells = found.cells((0, 1), LANES)
    assert cells.samples == {VISION: {0: (1,)}, other[0]: {2: (0,)}, LLM: {0: (0, 2)}, other[1]: {1: (1,)}}
    assert cells.flows == (Flow(VISION, 0, other[1], 1), Flow(other[0], 2, LLM, 0))


class AtOnce:
    """Makes what it is asked for while it is asked."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, make: Callable[[], StepAssignment]) -> Future[StepAssignment]:
        made = Future[StepAssignment]()
        made.set_result(make())
        return made

    def shutdown(self, **_: bool) -> None: ...


def told(number: int, address: str, ahead: int, num_steps: int, prepared: Callable[[int, Correction], Make]) -> Told:
    """Do the steps of a job of three ranks; return which assignments are known as each begins."""
    comm = join(address, number, 3, [])
    assignments = Assignments(comm, UNITS, 3, num_steps, prepared, Learning(UNITS), ahead)
    assignments.begin(0)
    seen: Told = []
    for step in range(1, num_steps + 1):
        seen.append([each for each in range(1, num_steps + 2) if assignments.of(each) is not None])
        of_step = assignments.of(step)
        assert of_step is not None
        assert int(of_step.places[0, 0, 2]) == step
        assignments.start(step)
        total = assignments.bring(step)
        comm.all_reduce(total, (0, 1, 2)).wait()
        assignments.take(step, total)
    assignments.close()
    return seen


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_all_ranks_know_each_step_two_ahead(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    asked: list[int] = []

    def prepared(step: int, correction: Correction) -> Make:
        asked.append(step)
        return lambda: assigned(step)

    expected = [[each for each in range(step, step + AHEAD) if each <= num_steps] for step in range(1, num_steps + 1)]
    seen = as_threads(3, lambda number, address: told(number, address, AHEAD, num_steps, prepared))
    assert seen == [expected] * 3
    assert asked == list(range(1, num_steps + 1)), "by rank 0 alone, each once"


def test_what_is_to_be_known_further_ahead_is_told_two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ThreadPoolExecutor", AtOnce)
    seen = as_threads(3, lambda number, address: told(number, address, 4, 7, lambda step, _: lambda: assigned(step)))
    assert seen == [[[1, 2], [2, 3, 4], [3, 4, 5, 6], [4, 5, 6, 7], [5, 6, 7], [6, 7], [7]]] * 3


def test_only_the_next_step_waits_for_an_assignment_that_is_late() -> None:
    late = threading.Event()

    def prepared(step: int, correction: Correction) -> Make:
        if step == 4:  # as the second step begins: what it is to tell all is not there as the first ends
            late.set()

        def make() -> StepAssignment:
            assert step != 3 or late.wait(10)
            return assigned(step)

        return make

    seen = as_threads(3, lambda number, address: told(number, address, AHEAD, 4, prepared))
    assert seen[0][:3] in ([[1, 2], [2], [3]], [[1, 2], [2], [3, 4]])
    assert seen[0][3] == [4]
    assert seen == [seen[0]] * 3


def test_an_error_in_making_one_is_raised_where_it_is_to_travel() -> None:
    def rank(number: int, address: str) -> str:
        def prepared(step: int, correction: Correction) -> Make:
            def make() -> StepAssignment:
                if step > AHEAD:
                    raise ValueError(f"no place in step {step}")
                return assigned(step)

            return make

        assignments = Assignments(join(address, number, 1, []), UNITS, 3, 9, prepared, Learning(UNITS))
        assignments.begin(0)

        def first_steps() -> None:
            for done in (1, 2):  # it is there in time for the first barrier, or waited for in the second
                assignments.start(done)
                assignments.take(done, assignments.bring(done))

        with pytest.raises(ValueError, match=r"^no place in step 3$"):
            first_steps()
        assignments.close()
        return threading.current_thread().name

    assert len(as_threads(1, rank)) == 1
