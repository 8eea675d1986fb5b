"""What attention costs under multimodal masks, block by block, and who computes which block.

A packed sequence is documents one after the other, with tokens of modality instances (pictures, clips) among their
text. Text attends causally within its document, to text and to the modality tokens before it; a modality token attends
to all tokens of its own instance, and to nothing else. Kernels compute whole blocks of 128 x 128 tokens, so the work of
a block of queries is the number of key blocks in which one of its tokens attends to something.

Source: Cornstarch (chapter 3 of Jang's dissertation), context parallelism. Its mask knows only modalities; here
documents and instances are told apart, else one picture would see another and documents would see each other. Its
greedy assignment does not sort, without which the bound below still holds and the result is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resilient.planners.balance import longest_first
from resilient.planners.samples import Ints

BLOCK = 128
"""Tokens of a block."""

MAX_SUB_BLOCK = 32
"""Key blocks of a sub-block; rows that are split have sub-blocks of half as many at least."""

TEXT = -1
"""The instance of tokens that are text."""


@dataclass(frozen=True, eq=False)
class PackedSequence:
    """Runs of tokens, in order; all arrays ``[num_runs]``.

    Args:
        lengths: Tokens of each run.
        document: Each run's document, numbered >= 0 in any way; a document may be in several places.
        instance: Its modality instance, numbered >= 0 through all documents, or :data:`TEXT`. An instance may be in
            several runs, with text between them.
    """

    lengths: Ints
    document: Ints
    instance: Ints

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int]]) -> PackedSequence:
        """Return the sequence of runs given as (length, document, instance)."""
        columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T.copy()
        return cls(columns[0], columns[1], columns[2])

    def __post_init__(self) -> None:
        shapes = (self.lengths.shape, self.document.shape, self.instance.shape)
        if len(set(shapes)) != 1 or self.lengths.ndim != 1:
            raise ValueError(
                f"lengths, document and instance must have one shape [num_runs], got {shapes}; give each run all three"
            )
        for name, least in (("lengths", 0), ("document", 0), ("instance", TEXT)):
            if getattr(self, name).min(initial=least) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name).min()}; number them anew")

    @property
    def num_tokens(self) -> int:
        """Tokens of all runs."""
        return int(self.lengths.sum())


@dataclass(frozen=True, eq=False)
class BlockRows:
    """The key blocks to compute for each block of queries, as ranges that neither touch nor overlap.

    Args:
        num_blocks: Blocks of the sequence; the last one may be short.
        row: The query block of each range, ascending. [num_ranges]
        first: Its first key block, ascending within a row. [num_ranges]
        end: One past its last. [num_ranges]
    """

    num_blocks: int
    row: Ints
    first: Ints
    end: Ints

    @property
    def work(self) -> Ints:
        """Key blocks of each row: W_b. [num_blocks]"""
        return np.bincount(self.row, weights=self.end - self.first, minlength=self.num_blocks).astype(np.int64)

    def key_blocks(self, row: int) -> Ints:
        """Return the key blocks of one row, ascending."""
        ranges = np.flatnonzero(self.row == row)
        return np.concatenate(
            [np.arange(0), *(np.arange(self.first[each], self.end[each]) for each in ranges)], dtype=np.int64
        )


def block_rows(sequence: PackedSequence, block: int = BLOCK) -> BlockRows:
    """Return which blocks of the mask have something to compute, without the mask.

    The blocks that a document or an instance touches are a few ranges. A row is the union of the ranges of all
    instances that it has tokens of, and of all documents that it has text of, up to the row itself.

    Args:
        sequence: What is attended over.
        block: Tokens of a block.

    Raises:
        ValueError: ``block`` is no size.
    """
    if block < 1:
        raise ValueError(f"block must be >= 1 tokens, got {block}; kernels take {BLOCK}")
    some = sequence.lengths > 0
    ends = np.cumsum(sequence.lengths[some])
    num_blocks = -(-sequence.num_tokens // block)
    first, end = (ends - sequence.lengths[some]) // block, -(-ends // block)
    document = np.unique(sequence.document[some], return_inverse=True)[1].reshape(-1)
    instance = np.unique(sequence.instance[some], return_inverse=True)[1].reshape(-1)
    text = sequence.instance[some] == TEXT
    num_documents = int(document.max(initial=-1)) + 1
    # Sets of tokens: documents first, with text and all else, then instances.
    tokens = np.concatenate([document, num_documents + instance[~text]])
    tokens, start, stop = _united(
        tokens, np.concatenate([first, first[~text]]), np.concatenate([end, end[~text]]), num_blocks
    )
    row, run = _expanded(first, end)
    attended = np.where(text, document, num_documents + instance)[run]
    pairs = np.unique(row * (tokens.max(initial=0) + 1) + attended)
    row, attended = np.divmod(pairs, tokens.max(initial=0) + 1)
    bounds = np.searchsorted(tokens, attended), np.searchsorted(tokens, attended, side="right")
    of_set, pair = _expanded(*bounds)
    row, start, stop = row[pair], start[of_set], stop[of_set]
    causal = attended[pair] < num_documents
    stop = np.where(causal, np.minimum(stop, row + 1), stop)
    seen = start < stop
    return BlockRows(num_blocks, *_united(row[seen], start[seen], stop[seen], num_blocks))


def balance_blocks(work: npt.ArrayLike, num_ranks: int) -> Ints:
    """Give blocks of queries to the ranks of a context-parallel group, the most work first.

    No rank has more than ``sum(work) / num_ranks + max(work)``.

    Args:
        work: Of each block, :attr:`BlockRows.work`. [num_blocks]
        num_ranks: Of the group.

    Returns:
        The rank of each block. [num_blocks]
    """
    return longest_first(work, np.ones(num_ranks))


@dataclass(frozen=True, eq=False)
class SubBlocks:
    """Parts of rows that a GPU's processors compute independently; all arrays ``[num_sub_blocks]``.

    Partial outputs of a row come with their log-sum-exp and are aggregated once.

    Args:
        row: The block of queries.
        first: The first of the row's key blocks, counted among them.
        end: One past the last.
    """

    row: Ints
    first: Ints
    end: Ints


def sub_blocks(work: npt.ArrayLike) -> SubBlocks:
    """Split rows of more than :data:`MAX_SUB_BLOCK` key blocks into as few parts as can be, nearly equal ones.

    Args:
        work: Key blocks of each row. [num_blocks]
    """
    sizes = np.asarray(work, dtype=np.int64)
    parts = -(-sizes // MAX_SUB_BLOCK)
    number, row = _expanded(np.zeros_like(parts), parts)
    return SubBlocks(row, number * sizes[row] // parts[row], (number + 1) * sizes[row] // parts[row])


def _expanded(first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Return all members of ranges, and which range each is of."""
    counts = end - first
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(owner)) - (np.cumsum(counts) - counts - first)[owner], owner


def _united(group: Ints, first: Ints, end: Ints, limit: int) -> tuple[Ints, Ints, Ints]:
    """Unite the ranges of each group that touch or overlap; sorted by group, then by place. Ends are <= limit."""
    order = np.lexsort((first, group))
    group, first = group[order], first[order]
    offset = group * (limit + 1)  # groups are laid out one after the other, with a gap between them
    reached = np.maximum.accumulate(offset + end[order])
    opens = np.ones(len(group), dtype=np.bool_)
    opens[1:] = (offset + first)[1:] > reached[:-1]
    closes = np.append(opens[1:], True)[: len(group)]
    return group[opens], first[opens], (reached - offset)[closes]
