"""The simulation uses no device that is gone, and as many microbatches as it is given."""

from __future__ import annotations

import re

import numpy as np
import pytest

from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Place, Replica
from tests.resilient.planners.evaluation.test_evaluate import place, setting, spread, table, unit


def test_the_number_of_microbatches_is_part_of_the_answer() -> None:
    one, two = (
        evaluate(
            setting(unit("llm", [1.0, 1.0])),
            Configuration(units={"llm": spread(1, 2)}, num_microbatches=1),
            Assignment(units={"llm": place([0, 0], [0, 1])}),
            table(llm=[3, 3]),
            [Replica(num_microbatches=number)],
        )
        for number in (1, 2)
    )
    assert (one.iteration_ms, one.peak_bytes) == (two.iteration_ms, two.peak_bytes)


def test_groups_are_as_fast_as_the_whole_ranks_that_are_left() -> None:
    def taken_ms(degree: int, devices: float) -> float:
        where = Place(
            replica=np.zeros(1, int), microbatch=np.zeros(1, int), group=np.zeros(1, int), degree=np.array([degree])
        )
        return evaluate(
            setting(unit("llm", [1.0])),
            Configuration(units={"llm": spread(1, 1, cp=4)}, num_microbatches=1),
            Assignment(units={"llm": where}),
            table(llm=[16]),
            [Replica(num_microbatches=1, speed=devices, devices=devices)],
        ).iteration_ms

    assert [taken_ms(2, devices) for devices in (1.0, 0.75, 0.5)] == [3 * 8] * 3
    assert taken_ms(1, 0.125) == 3 * 16 / 0.5
    message = (
        "groups in 'llm' must be of the 3 ranks that are there, got 4 ranks in microbatch 0 of replica 0; "
        "assign the batch to these replicas"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        taken_ms(4, 0.75)


def test_an_encoder_that_worked_for_lost_pipelines_lost_their_share_of_devices() -> None:
    costs = (unit("vision", [1.0], parameter_bytes=100, optimizer_bytes=100), unit("llm", [1.0]))
    configuration = Configuration(units={"vision": spread(1, 1), "llm": spread(4, 1)}, num_microbatches=1)
    assignment = Assignment(units=dict.fromkeys(("vision", "llm"), place([0], [0])))
    whole, quarter = (
        evaluate(
            setting(*costs), configuration, assignment, table(vision=[2], llm=[2]), [Replica(num_microbatches=1)] * left
        )
        for left in (4, 1)
    )
    assert (whole.iteration_ms, quarter.iteration_ms) == (3 * 2 + 3 * 2, 4 * 3 * 2 + 3 * 2)
    assert quarter.peak_bytes == 4 * 200 + 2 * 8
