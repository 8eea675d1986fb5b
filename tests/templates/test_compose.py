from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import profile, template

from resilient.templates.batch import step_ns
from resilient.templates.compose import compose
from resilient.templates.partition import plan_templates
from resilient.templates.plan import Problem


def compositions(total: int, sizes: list[int]) -> Iterator[tuple[int, ...]]:
    """All multisets of ``sizes`` (ascending) that sum up to ``total``, descending."""
    if total == 0:
        yield ()
    for index, size in enumerate(sizes):
        if size <= total:
            for rest in compositions(total - size, sizes[: index + 1]):
                yield (size, *rest)


@given(st.data())
def test_step_time_equals_exhaustive_search(data: st.DataObject):
    sizes = sorted(data.draw(st.sets(st.integers(1, 7), min_size=1, max_size=5)))
    times = st.integers(1, 30)
    templates = {size: template(*data.draw(st.lists(times, min_size=size, max_size=size))) for size in sizes}
    num_nodes = data.draw(st.integers(1, 14))
    num_microbatches = data.draw(st.integers(1, 20))
    least = data.draw(st.integers(1, 3))
    allowed = [c for c in compositions(num_nodes, sizes) if least <= len(c) <= num_microbatches]
    if not allowed:
        with pytest.raises(ValueError, match=f"got {num_nodes}; leave nodes out or add templates$"):
            compose(templates, num_nodes, num_microbatches, least)
        return

    def step(composition: tuple[int, ...]) -> int:
        return step_ns([templates[size] for size in composition], num_microbatches)

    found = compose(templates, num_nodes, num_microbatches, least)
    assert found in allowed
    assert step(found) == min(step(composition) for composition in allowed)


def test_more_nodes_than_microbatches_make_deeper_pipelines():
    problem = Problem(profile=profile([3.0] * 4), num_microbatches=2)
    assert len(compose(plan_templates(problem, range(1, 5)), 6, 2, 2)) == 2


def test_a_sum_that_does_not_exist_is_refused():
    message = "num_nodes must be a sum of 2 to 8 template sizes out of [3, 4], got 5; leave nodes out or add templates"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compose({3: template(1, 1, 1), 4: template(1, 1, 1, 1)}, 5, 8, 2)
