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

    actions = np.stack([turns + warmup + 1, turns, turns - lag])
    begun, halfway, ended = compiled(_done)(np.clip(actions, 0, total), sizes, begins, num_chunks)
    halfway = halfway[..., ::-1]
    return np.stack([begun - halfway, halfway - ended[..., ::-1]], axis=-1)


def _done(actions: Ints, sizes: Ints, begins: Ints, num_chunks: int) -> Ints:
    """Return how many of so many of a row's forwards are of each chunk. [..., rows, moments, chunks]

    Args:
        actions: Numbers of forwards. [..., rows, moments]
        sizes: Microbatches of each group.
        begins: Forwards before each group.
        num_chunks: Stages of each row.
    """
    done = np.empty((actions.size, num_chunks), dtype=np.int64)
    for index, number in enumerate(actions.flat):
        group = len(begins) - 1
        while begins[group] > number:
            group -= 1
        for chunk in range(num_chunks):
            rest = number - begins[group] - chunk * sizes[group]
            done[index, chunk] = begins[group] // num_chunks + min(max(rest, 0), sizes[group])
    return done.reshape((*actions.shape, num_chunks))


def _most(counts: Ints) -> Ints:
    """Return the counts without moments at which nothing is held that is not at others, whatever the stages' sizes."""
    num_rows, _, num_chunks, _ = counts.shape
    of_rows: list[Ints] = []
    for each in counts.reshape(num_rows, -1, 2 * num_chunks):
        moments = each[_maximal(each)]
        moments = moments[np.lexsort(moments.T[::-1])]
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
            if one == index or not left[one]:
                continue
            lacking = 0  # where the first one has less, the other one has to have as much: tells most apart
            while lacking < size - 1 and vectors[one, lacking] >= vectors[index, lacking]:
                lacking += 1
            for other in range(one):
                if other == index or not left[other] or vectors[other, lacking] < vectors[index, lacking]:
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
                    if least > most:
                        break
                if least <= most:
                    left[index] = False
                    break
            if not left[index]:
                break
    return np.flatnonzero(left)


def _maximal(vectors: Ints) -> Ints:
    """Return which vectors no other has as much of everything as; of equal ones the first."""
    falling = np.argsort(-vectors.sum(axis=1), kind="stable")  # those with less in all come behind
    return falling[compiled(_not_covered)(np.ascontiguousarray(vectors[falling]))]


def _not_covered(vectors: Ints) -> Ints:
    """Return which vectors none before them has as much of everything as."""
    num_vectors, size = vectors.shape
    kept = np.empty(num_vectors, dtype=np.int64)
    number = 0
    for index in range(num_vectors):
        covered = False
        for before in kept[:number]:
            covered = True
            for each in range(size):
                if vectors[index, each] > vectors[before, each]:
                    covered = False
                    break
            if covered:
                break
        if not covered:
            kept[number] = index
            number += 1
    return kept[:number]
