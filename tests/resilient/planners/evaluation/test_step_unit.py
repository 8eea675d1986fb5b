"""What cells of a unit take: groups of devices that go by themselves, samples that are padded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Encoders, Place, Replica
from tests.resilient.planners.evaluation.test_evaluate import place, setting, spread, table, unit


@pytest.mark.parametrize(("encoders", "taken_ms"), [(Encoders.REPLICATED, 15.0), (Encoders.PARALLEL, 24.0)])
def test_a_group_is_done_with_a_microbatch_when_it_is_with_both_units(encoders: Encoders, taken_ms: float) -> None:
    """But where all encoding comes first: there the language model waits for all groups."""
    units = {"vision": spread(1, 1, cp=2), "llm": spread(1, 1, cp=2)}
    configuration = Configuration(units=units, num_microbatches=1, colocated=True, encoders=encoders)
    two = Place(replica=np.zeros(2, int), microbatch=np.zeros(2, int), group=np.arange(2), degree=np.ones(2, int))
    result = evaluate(
        setting(unit("vision", [1.0]), unit("llm", [1.0])),
        configuration,
        Assignment(units=dict.fromkeys(units, two)),
        table(vision=[4, 1], llm=[1, 4]),
        [Replica(num_microbatches=1)],
    )
    assert result.iteration_ms == taken_ms
    assert result.peak_bytes == (8 * 5 if encoders is Encoders.REPLICATED else 8 * 8)


def test_a_unit_that_pads_computes_all_samples_of_a_call_as_long_as_the_longest() -> None:
    def step(padded: bool, pictures: SampleTable) -> tuple[float, int]:
        audio = replace(unit("audio", [1.0]), padded=padded)
        units = {"audio": spread(1, 1), "llm": spread(1, 1)}
        result = evaluate(
            setting(audio, unit("llm", [0.0])),
            Configuration(units=units, num_microbatches=2),
            Assignment(units=dict.fromkeys(units, place([0] * 4, [0, 0, 0, 1]))),
            pictures,
            [Replica(num_microbatches=2)],
        )
        return result.iteration_ms, result.peak_bytes

    batch = table(audio=[5, 2, 0, 3], llm=[0, 0, 0, 0])
    assert [step(padded, batch)[0] for padded in (False, True)] == [3 * 10, 3 * (5 + 5 + 3)]
    # A clip of two windows of 5 is two sequences.
    windows = SampleTable(units={"audio": Lengths.of([[5, 5], [2], [], [3]]), "llm": batch.units["llm"]})
    assert step(True, windows)[0] == 3 * (3 * 5 + 3)
