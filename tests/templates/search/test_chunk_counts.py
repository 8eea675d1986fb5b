"""What rows are planned to hold of each of their stages is what they do in generated schedules."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.common.arrays import Ints
from resilient.templates.schedules.kind import CHUNK_KINDS, ScheduleKind, chunks_of
from resilient.templates.search.chunk_counts import chunk_counts
from tests.templates.search.every_cut import moments


def planned(kind: ScheduleKind, num_rows: int, num_chunks: int, fewest: int, most: int) -> list[Ints]:
    """Of each row the counts as schedules have them: in flight of all chunks, then those that wait."""
    counts = chunk_counts(kind, num_rows, num_chunks, fewest, most)
    return [np.concatenate([row[..., 0], row[..., 1]], axis=1) for row in counts]


@settings(max_examples=60)
@given(st.sampled_from(CHUNK_KINDS), st.integers(2, 6), st.integers(2, 4), st.integers(1, 45), st.booleans())
def test_rows_hold_what_they_do_in_schedules(
    kind: ScheduleKind, num_rows: int, num_chunks: int, most: int, is_any: bool
) -> None:
    """Of stages of any sizes, for one number of microbatches and for the one of several with which that is most."""
    num_chunks, fewest = chunks_of(kind, num_chunks), 1 if is_any else most
    schedules = [moments(kind, num_rows, num_chunks, number) for number in range(fewest, most + 1)]
    sizes = np.random.default_rng(most).integers(0, 9, (2 * num_chunks, 100))
    for row, counts in enumerate(planned(kind, num_rows, num_chunks, fewest, most)):
        seen = np.array(list(set[tuple[int, ...]]().union(*(of_rows[row] for of_rows in schedules))))
        assert ((counts @ sizes).max(axis=0) == (seen @ sizes).max(axis=0)).all()


def test_counts_are_those_of_moments_at_which_no_other_has_more() -> None:
    assert chunk_counts(ScheduleKind.INTERLEAVED, 2, 2, 8, 8).tolist() == [
        [[[3, 0], [2, 0]], [[4, 0], [1, 0]]],
        [[[2, 0], [1, 0]], [[3, 0], [0, 0]]],
    ]
    assert chunk_counts(ScheduleKind.INTERLEAVED, 1, 1, 1, 50).tolist() == [[[[1, 0]]]]
    assert chunk_counts(ScheduleKind.ZB_V, 4, 2, 1, 100).shape == (4, 4, 2, 2)
