from __future__ import annotations

from dataclasses import replace

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.common.digests import content_digest
from resilient.templates.inputs.profile import LayerCost, ModelProfile
from resilient.templates.plan import PlanningProblem
from tests.templates.jobs import problems, profile

numbers = st.integers(0, 3) | st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, 3.0, 1e300, 2**70])


SAME = profile([1.0] * 3).layers


def of_times(times: list[float]) -> ModelProfile:
    costs = [(LayerCost(forward_ms=ms),) for ms in times]
    return ModelProfile(layers=tuple(replace(each, costs=of) for each, of in zip(SAME, costs, strict=True)))


@given(st.lists(numbers, min_size=3, max_size=3), st.lists(numbers, min_size=3, max_size=3))
def test_profiles_have_the_same_digest_exactly_when_they_are_equal(one: list[float], other: list[float]) -> None:
    first, second = of_times(one), of_times(other)
    assert (first.digest == second.digest) is (first == second)


@given(problems())
def test_problems_from_files_have_the_digest_of_those_they_were_written_from(problem: PlanningProblem) -> None:
    whole = replace(problem, failure_interval_s=3600)
    read = msgspec.json.decode(msgspec.json.encode(whole), type=PlanningProblem)
    assert read.digest == whole.digest
    assert replace(whole, num_microbatches=whole.num_microbatches + 1).digest != whole.digest


def test_whole_numbers_are_the_same_however_they_are_written() -> None:
    assert content_digest({"a": [1, True]}) == content_digest({"a": (1.0, 1)}) != content_digest({"a": [1, 2]})
