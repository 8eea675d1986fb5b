from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jobs import template

from resilient.templates.batch import check_batch, split_microbatches, step_ns


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


templates = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)


@given(templates, st.integers(0, 8))
def test_latest_finish_equals_exhaustive_search(stages: list[list[int]], more: int):
    pipelines = [template(*stage_ms) for stage_ms in stages]
    total = len(pipelines) + more
    counts = split_microbatches(pipelines, total)
    assert sum(counts) == total
    assert min(counts) >= 1

    def finishes(split: tuple[int, ...]) -> list[float]:
        times = [pipeline.iteration_ms(count) for pipeline, count in zip(pipelines, split, strict=True)]
        return sorted(times, reverse=True)

    assert finishes(counts)[0] == min(finishes(split)[0] for split in splits(total, len(pipelines)))
    assert step_ns(pipelines, total) == finishes(counts)[0] * 1e6


def test_faster_pipeline_gets_more():
    assert split_microbatches([template(2, 2), template(4)], 12) == (8, 4)


def test_what_counts_is_when_a_pipeline_would_be_done_with_one_more():
    assert split_microbatches([template(9), template(4, 4, 4)], 3) == (1, 2)


def test_equal_pipelines_differ_by_one_at_most_and_the_first_gets_more():
    assert split_microbatches([template(1, 1)] * 3, 8) == (3, 3, 2)


@pytest.mark.parametrize(("pipelines", "num_microbatches"), [(3, 2), (0, 2)])
def test_split_refuses_pipelines_without_work(pipelines: int, num_microbatches: int):
    with pytest.raises(ValueError, match=f"got {num_microbatches} for {pipelines}; raise the global batch"):
        split_microbatches([template(1)] * pipelines, num_microbatches)


@pytest.mark.parametrize(("global_batch", "microbatch", "pipelines"), [(64, 4, 2), (8, 4, 2), (5, 1, 5)])
def test_batch_that_can_be_split_passes(global_batch: int, microbatch: int, pipelines: int):
    check_batch(global_batch, microbatch, pipelines)


@pytest.mark.parametrize(
    ("global_batch", "nearest"), [(62, "60 or 64"), (4, "8"), (7, "8"), (9, "8 or 12"), (0, "8"), (-3, "8")]
)
def test_batch_that_cannot_be_split_recommends_the_nearest(global_batch: int, nearest: str):
    message = (
        "global_batch must be a multiple of microbatch 4, at least 8 (one microbatch for each of 2 pipelines), "
        f"got {global_batch}; use {nearest}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_batch(global_batch, 4, 2)


def test_microbatch_must_hold_a_sample():
    with pytest.raises(ValueError, match=r"^microbatch must be >= 1, got 0; give the samples of one microbatch$"):
        check_batch(8, 0, 1)
