"""Units with several stages on each device (virtual stages): what rows of devices keep, and layers for them.

Stage ``s`` of a unit is on the row ``s % pp`` of its replica. Microbatches go through its rounds in groups of ``pp``
(:mod:`resilient.templates.schedules.rounds`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from resilient.planners.planner import Parallelism
from resilient.templates.common.arrays import Floats, Ints


def by_row(spread: Parallelism, values: Floats) -> Floats:
    """Return the sums over each row's stages. [..., num_stages] to [..., pp]"""
    return values.reshape(*values.shape[:-1], spread.chunks, spread.pp).sum(axis=-2)


def in_flight(spread: Parallelism, behind: int, lead: int) -> Ints:
    """Return how many microbatches in a row each stage holds under 1F1B, eager or interleaved 1F1B. [num_stages]

    Args:
        spread: How the unit is spread.
        behind: Microbatches that go on meanwhile in units after it.
        lead: Microbatches that a stage runs ahead of the next one.
    """
    after = np.arange(spread.num_stages)[::-1]
    if spread.chunks == 1:
        return 1 + lead * (after + behind)
    # From its forward to its backward, in parts of a microbatch's time. A stage has the first pp of every num_stages.
    groups, rest = np.divmod((1 + lead) * after + 1 + lead * spread.chunks * behind, spread.num_stages)
    return groups * spread.pp + np.minimum(rest, spread.pp)


def held_together(spread: Parallelism, behind: int, lead: int, kept: Ints) -> Ints:
    """Return how many microbatches each of several stages of a row holds when the row holds most. [num_stages]

    Each holds the most at another time than the others.

    Args:
        spread: How the unit is spread, in several stages a row.
        behind: As for :func:`in_flight`.
        lead: Microbatches that a stage runs ahead of the next one.
        kept: Of each microbatch. [num_stages]
    """
    stages = np.arange(spread.num_stages)

    def begun(parts: Ints) -> Ints:
        groups, rest = np.divmod(parts, spread.num_stages)
        return groups * spread.pp + np.minimum(rest + 1, spread.pp)

    # While as many begin as end, the stages of a row take turns that come again with each group.
    own = stages[:, None] - stages
    held = begun(own) - begun(own - (1 + lead) * stages[::-1] - 1 - lead * spread.chunks * behind)
    fullest = by_row(spread, (held * kept).astype(np.float64)).argmax(axis=0)
    return held[np.tile(fullest, spread.chunks), stages]


def passed(spread: Parallelism) -> int:
    """Return how many microbatches go on in units before it until one comes back from a unit."""
    if spread.chunks == 1:
        return spread.pp
    # Those of a group are made evenly, before it begins.
    return (2 * (spread.num_stages - 1) + (spread.pp - 1) * (spread.chunks - 1)) // spread.chunks + 1


def room_parts(spread: Parallelism, own: Floats) -> Floats:
    """Return the part of a row's memory that each of its stages may fill. [num_stages]

    As they keep it where each holds as many microbatches as it ever does, which they do at different times: a row with
    several stages has some memory left.

    Args:
        spread: How the unit is spread.
        own: What a token of each microbatch that each stage holds takes. [num_stages]
    """
    of_row = np.tile(by_row(spread, own), spread.chunks)
    return np.divide(own, of_row, out=np.full(spread.num_stages, 1 / spread.chunks), where=own > 0)


def cut_rounds(costs: npt.ArrayLike, depth: int, chunks: int) -> tuple[int, ...]:
    """Cut a chain into ``depth * chunks`` stages, of which each row of devices has every ``depth``-th, evenly.

    From equal numbers of layers, one layer at a time goes from one stage to another as long as the slowest rows get
    faster: mostly, but not always, no cut is better.

    Args:
        costs: Of each layer, ``[num_layers]``, >= 0.
        depth: Rows.
        chunks: Stages of each. There are no more stages than layers.

    Returns:
        The number of layers of each stage, at least one.
    """
    layers = np.asarray(costs, dtype=np.float64)
    sums, number = np.concatenate(([0.0], np.cumsum(layers))), depth * chunks
    best = np.arange(number + 1) * len(layers) // number

    def rated(bounds: Ints) -> Floats:
        stages = sums[bounds[..., 1:]] - sums[bounds[..., :-1]]
        rounds = stages.reshape(*stages.shape[:-1], chunks, depth)
        rows = -np.sort(-rounds.sum(axis=-2), axis=-1)
        return np.concatenate([rounds.max(axis=-1).sum(axis=-1, keepdims=True), rows], axis=-1)

    while True:
        moved = _moved(best)
        if not len(moved):
            return tuple(np.diff(best).tolist())
        rates = np.round(rated(moved), 9)
        first = np.lexsort(rates.T[::-1])[0]
        if rates[first].tolist() >= np.round(rated(best), 9).tolist():
            return tuple(np.diff(best).tolist())
        best = moved[first]


def _moved(bounds: Ints) -> Ints:
    """Return all cuts in which a stage is a layer longer at the cost of another. [cuts, num_stages + 1]"""
    number = len(bounds) - 1
    giver, taker = np.nonzero(~np.eye(number, dtype=bool) & (np.diff(bounds) > 1)[:, None])
    between = np.arange(number + 1)
    lower = (giver[:, None] < between) & (between <= taker[:, None])
    higher = (taker[:, None] < between) & (between <= giver[:, None])
    return bounds - lower + higher
