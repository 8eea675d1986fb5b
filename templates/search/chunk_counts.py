"""How many microbatches of each of its stages a row holds at a time, where it has several.

Stages of a row do not hold their most at the same time. So what a row holds is known by *counts*: of each chunk how
many microbatches are in flight before their backward, or the first part of it, is over, and how many wait between the
parts. What a row
holds at most is what it does at one of the moments at which it has more of something than any other, and than any two
others on average, however these are weighted.

Interleaved, a row goes through its chunks group after group of microbatches. While its forwards and its backwards are
of the same chunks counts change evenly, so that the moments at which a chunk's turn begins or ends are enough. Numbers
of microbatches differ in the sizes of their groups alone, the larger ones of which come first; a row is in few of them
at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.schedules.generators import there_and_back
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Op

_SEEN = 3
"""Groups of one size after each other that a row is in at most, if only in part."""


@cache
def chunk_counts(kind: ScheduleKind, num_rows: int, num_chunks: int, fewest: int, most: int) -> Ints:
    """Return the counts of each row, those before and those that wait. [rows, moments, chunks, 2]

    Those while backwards for weights run are left out: right before, when the gradients were made that they use and the
    one that came back was still there, no less was held. Rows with fewer moments than others have some several times.

    Args:
        kind: One of ``CHUNK_KINDS``.
        num_rows: Rows of the pipeline.
        num_chunks: Stages of each; a pipeline of one row has one.
        fewest: The fewest microbatches that it can get.
        most: The most.
    """
    if num_chunks == 1:
        return np.array([[[[1, 0]]]])
    if kind is ScheduleKind.ZB_V:
        return _most(_there_and_back(num_rows, most))
    moments = [_interleaved(kind, num_rows, num_chunks, groups) for groups in _groups(kind, num_rows, fewest, most)]
    return _most(np.concatenate(moments, axis=1))


def _there_and_back(num_rows: int, num_microbatches: int) -> Ints:
    """Return the counts under zb-v.

    The order of fewer microbatches is that of more where these are left out, and of more than that what is in flight
    is as before.
    """
    counts: list[Ints] = []
    for row in range(num_rows):
        codes = there_and_back(row, num_rows, min(num_microbatches, 2 * num_rows + 1))
        op, is_chunk = codes[:, 0, None], codes[:, 1, None] // num_rows == np.arange(2)
        begun, halfway, ended = (
            np.cumsum((op == each) & is_chunk, axis=0) for each in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
        )
        for over in (halfway, ended):
            over[1:], over[0] = over[:-1].copy(), 0  # while an action runs
        counts.append(np.stack([begun - halfway, halfway - ended], axis=-1)[codes[:, 0] != Op.BACKWARD_WEIGHT])
    return np.stack(counts)


def _groups(kind: ScheduleKind, num_rows: int, fewest: int, most: int) -> Iterable[tuple[int, ...]]:
    """Return the sizes of groups, in order, that numbers of microbatches have; without what is part of others."""
    number = np.arange(fewest, max(fewest, min(most, num_rows * (num_rows + _SEEN))) + 1)  # later ones are as before
    rounds = np.maximum(1, number // num_rows)
    larger = -(-number // rounds)
    num_larger = number - rounds * (larger - 1)
    kinds = np.stack([larger, np.minimum(num_larger, _SEEN), np.minimum(rounds - num_larger, _SEEN)], axis=1)
    kinds = np.unique(kinds, axis=0)
    if kind is ScheduleKind.INTERLEAVED:  # of groups in the same order larger ones have more in flight
        kinds = kinds[np.lexsort(kinds.T)]
        kinds = kinds[np.append((np.diff(kinds[:, 1:], axis=0) != 0).any(axis=1), True)]
    for size in np.unique(kinds[:, 0]).tolist():
        numbers = kinds[kinds[:, 0] == size, 1:]
        for many, few in numbers[_maximal(numbers)].tolist():
            yield (size,) * many + (size - 1,) * few


def _interleaved(kind: ScheduleKind, num_rows: int, num_chunks: int, groups: tuple[int, ...]) -> Ints:
    """Return the counts of rows that go through groups of some sizes. [rows, moments, chunks, 2]

    In turn i a row has done ``i + warmup + 1`` forwards, ``i`` backwards and, where they are apart, ``i - row`` of
    those for weights: it runs one more backward.
    """
    splits = kind is ScheduleKind.INTERLEAVED_ZB
    row, sizes, total = np.arange(num_rows)[:, None], np.array(groups), sum(groups) * num_chunks
    warmup = (num_chunks - 1) * groups[0] + (num_rows - 1 - row) * (1 if splits else 2)
    lag = row if splits else 0
    begins = num_chunks * (np.cumsum(sizes) - sizes)
    bounds = np.append((begins[:, None] + np.arange(num_chunks) * sizes[:, None]).ravel(), total)
    turns = np.concatenate([bounds - np.minimum(warmup, total) - 1, bounds + row * 0, bounds + lag + row * 0], axis=1)
    turns = np.clip(turns, 0, total - 1)

    def done(actions: Ints) -> Ints:
        """Return how many of so many of a row's forwards are of each chunk. [..., chunks]"""
        group = np.clip(np.searchsorted(begins, actions, side="right") - 1, 0, None)
        rest = (actions - begins[group])[..., None] - np.arange(num_chunks) * sizes[group][..., None]
        return (begins[group] // num_chunks)[..., None] + np.clip(rest, 0, sizes[group][..., None])

    ended = done(np.maximum(turns - lag, 0))[..., ::-1]
    halfway = done(turns)[..., ::-1]
    before = done(np.minimum(turns + warmup + 1, total)) - halfway
    return np.stack([before, halfway - ended], axis=-1)


def _most(counts: Ints) -> Ints:
    """Return the counts without moments at which nothing is held that is not at others, whatever the stages' sizes."""
    num_rows, _, num_chunks, _ = counts.shape
    of_rows: list[Ints] = []
    for each in counts.reshape(num_rows, -1, 2 * num_chunks):
        moments = np.unique(each[_maximal(each)], axis=0)
        of_rows.append(moments[compiled(_corners)(moments)])
    longest = max(map(len, of_rows))
    padded = [np.pad(each, ((0, longest - len(each)), (0, 0)), mode="edge") for each in of_rows]
    return np.stack(padded).reshape(num_rows, longest, num_chunks, 2)


def _corners(vectors: Ints) -> Ints:
    """Return which of different vectors are not covered by any mean of two others, however these are weighted."""
    num_vectors, size = vectors.shape
    left = np.ones(num_vectors, dtype=np.bool_)
    for index in range(num_vectors):
        for one in range(num_vectors):
            for other in range(one):
                if not (left[one] and left[other] and left[index]) or index in (one, other):
                    continue
                least, most = 0.0, 1.0  # of the first one's weight
                for each in range(size):
                    more = vectors[one, each] - vectors[other, each]
                    lacks = vectors[index, each] - vectors[other, each]
                    if more > 0:
                        least = max(least, lacks / more)
                    elif more < 0:
                        most = min(most, lacks / more)
                    elif lacks > 0:
                        least = 2.0
                left[index] = least > most
    return np.flatnonzero(left)


def _maximal(vectors: Ints) -> list[int]:
    """Return which vectors no other has as much of everything as; of equal ones the first."""
    kept: list[int] = []
    left = np.argsort(-vectors.sum(axis=1), kind="stable")
    while len(left):
        most = int(left[0])  # those with less in all come behind it
        kept.append(most)
        left = left[(vectors[left] > vectors[most]).any(axis=1)]
    return kept
