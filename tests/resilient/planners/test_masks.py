"""Work of mask blocks against masks written out, and who computes which block."""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.masks import TEXT, PackedSequence, balance_blocks, block_rows, sub_blocks

RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(-1, 3)), max_size=12)
"""Documents and instances in any order, in several places too."""


def dense(runs: list[tuple[int, int, int]], block: int) -> npt.NDArray[np.bool_]:
    """The mask of all tokens, then which of its blocks have anything. [num_blocks, num_blocks]"""
    lengths = np.array([length for length, _, _ in runs], dtype=np.int64)
    document, instance = (np.repeat(np.array([run[i] for run in runs], dtype=np.int64), lengths) for i in (1, 2))
    tokens = np.arange(len(document))
    causal = (document[:, None] == document) & (tokens[:, None] >= tokens) & (instance == TEXT)[:, None]
    mask = causal | ((instance[:, None] == instance) & (instance != TEXT)[:, None])
    found = np.zeros((-(-len(tokens) // block),) * 2, dtype=np.bool_)
    queries, keys = np.nonzero(mask)
    found[queries // block, keys // block] = True
    return found


@settings(max_examples=120, deadline=None)
@given(runs=RUNS, block=st.integers(1, 7))
def test_rows_are_those_of_the_mask(runs: list[tuple[int, int, int]], block: int) -> None:
    rows, expected = block_rows(PackedSequence.of(runs), block), dense(runs, block)
    assert rows.num_blocks == len(expected)
    assert rows.work.tolist() == expected.sum(axis=1).tolist()
    for row in range(len(expected)):
        assert rows.key_blocks(row).tolist() == np.flatnonzero(expected[row]).tolist()
    assert (rows.first < rows.end).all()


def test_causal_text_is_a_triangle_and_a_picture_a_square() -> None:
    assert block_rows(PackedSequence.of([(640, 0, TEXT)])).work.tolist() == [1, 2, 3, 4, 5]
    assert block_rows(PackedSequence.of([(512, 0, 7)])).work.tolist() == [4] * 4


def test_pictures_and_documents_do_not_see_each_other() -> None:
    pictures = PackedSequence.of([(256, 0, 0), (256, 0, 1), (128, 0, TEXT)])
    assert block_rows(pictures).work.tolist() == [2, 2, 2, 2, 5]
    documents = PackedSequence.of([(256, 0, TEXT), (256, 1, TEXT), (128, 1, TEXT)])
    assert block_rows(documents).work.tolist() == [1, 2, 1, 2, 3]


@settings(max_examples=100, deadline=None)
@given(work=st.lists(st.integers(0, 600), max_size=80), num_ranks=st.integers(1, 9))
def test_no_rank_has_more_than_its_share_and_one_block(work: list[int], num_ranks: int) -> None:
    ranks = balance_blocks(work, num_ranks)
    assert len(ranks) == len(work)
    loads = np.bincount(ranks, weights=np.array(work, dtype=float), minlength=num_ranks)
    assert len(loads) == num_ranks
    assert loads.max() <= sum(work) / num_ranks + max(work, default=0)
    np.testing.assert_array_equal(ranks, balance_blocks(work, num_ranks))


@settings(max_examples=100, deadline=None)
@given(work=st.lists(st.integers(0, 600), max_size=20))
def test_sub_blocks_cover_rows_in_parts_of_16_to_32(work: list[int]) -> None:
    parts = sub_blocks(work)
    for row, size in enumerate(work):
        mine = parts.row == row
        covered = [i for first, end in zip(parts.first[mine], parts.end[mine], strict=True) for i in range(first, end)]
        assert covered == list(range(size))
        sizes = parts.end[mine] - parts.first[mine]
        assert sizes.max(initial=0) <= 32
        assert size <= 32 or sizes.min() >= 16
        assert len(sizes) == -(-size // 32)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ((-1, 0, TEXT), "lengths must be >= 0, got -1; number them anew"),
        ((1, -1, TEXT), "document must be >= 0, got -1; number them anew"),
        ((1, 0, -2), "instance must be >= -1, got -2; number them anew"),
    ],
)
def test_numbers_that_name_nothing_are_refused(run: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PackedSequence.of([run])


def test_shapes_must_agree() -> None:
    message = (
        "lengths, document and instance must have one shape [num_runs], got ((2,), (1,), (1,)); give each run all three"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PackedSequence(np.ones(2, np.int64), np.ones(1, np.int64), np.ones(1, np.int64))


def test_blocks_have_tokens() -> None:
    message = "block must be >= 1 tokens, got 0; kernels take 128"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        block_rows(PackedSequence.of([(3, 0, TEXT)]), 0)
