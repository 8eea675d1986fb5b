"""The least step of pipelines that nodes make up is the shortest of all ways to make them up."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import assume, given
from hypothesis import strategies as st

from resilient.templates.composition.batch_split import Line, Lines, line_table
from resilient.templates.composition.knapsack import Composed, is_enough, least_step
from tests.templates.composition.test_compose import sums
from tests.templates.jobs import step_ns

_LINE = st.builds(Line, st.integers(0, 20), st.integers(1, 12), st.sampled_from([1, 1, 2, 3]))
_LINES = st.lists(_LINE, min_size=1, max_size=3).map(tuple)


@given(st.data())
def test_least_step_is_that_of_the_best_way_to_make_up_the_nodes(data: st.DataObject) -> None:
    smallest, may_idle = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    own: list[Lines] = data.draw(st.lists(_LINES, min_size=1, max_size=4))
    num_nodes, num_microbatches = data.draw(st.integers(smallest, 12)), data.draw(st.integers(1, 12))
    most = min(num_microbatches, num_nodes // smallest)
    least = data.draw(st.integers(1, most))
    # A pipeline of whose nodes some stand by has the lines of any size up to its own.
    choices = list(accumulate(own)) if may_idle else own
    steps = [
        step_ns([choices[size - smallest] for size in sizes], num_microbatches)
        for sizes in sums(num_nodes, range(smallest, smallest + len(own)))
        if least <= len(sizes) <= most
    ]
    assume(steps)
    asked = Composed(*line_table(own), smallest, may_idle, most, least, num_nodes, num_microbatches)
    longest = max(min(line.finish_ns(num_microbatches) for line in lines) for lines in own)
    assert least_step(asked, longest) == min(steps)
    assert is_enough(asked, min(steps))
    assert not is_enough(asked, min(steps) - 1)
