"""What calls of a unit take, and the microbatches that they are parts of, at any context-parallel degree."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.cost_model import Curve, UnitCosts
from resilient.planners.planner import Parallelism
from resilient.planners.stages.stage_work import num_recomputed, token_bytes
from resilient.templates.common.arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class Calls:
    """Calls of a unit: the sequences that some of its devices process at once.

    Args:
        cell: Of each, the microbatch that it is a part of, ``[num_calls]``; a microbatch takes as long as the longest
            of its calls.
        group: Of each, which of the microbatch's groups of devices it is on.
        degree: Devices that share its sequences, in the direction of context parallelism, by a ring.
        tokens: Sum of the sequences' lengths.
        squares: Sum of their squares.
        num_cells: Microbatches.
    """

    cell: Ints
    group: Ints
    degree: Ints
    tokens: Floats
    squares: Floats
    num_cells: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """Time and memory of microbatches on each stage; all ``[num_stages, num_cells]``, or with their parts behind.

    Args:
        forward_ms: Time of the forward.
        backward_ms: Time of the backward; 0 on stages that need none.
        kept_bytes: Activations on each device, of layers that have a backward.
        filled: Part of the devices' time in that of the microbatch: groups that are done earlier wait.
    """

    forward_ms: Floats
    backward_ms: Floats
    kept_bytes: Floats
    filled: Floats

    def in_parts(self, num_parts: int) -> Work:
        """Return the work of parts that follow each other, so many of each microbatch, as such."""
        forward, backward, kept, filled = (
            each.reshape(len(each), -1, num_parts)
            for each in (self.forward_ms, self.backward_ms, self.kept_bytes, self.filled)
        )
        return Work(forward_ms=forward, backward_ms=backward, kept_bytes=kept, filled=filled)

    def together(self) -> Work:
        """Return the work of microbatches, of that of their parts."""
        times = self.forward_ms + self.backward_ms
        total = times.sum(axis=-1)
        filled = (times * self.filled).sum(axis=-1)
        return Work(
            forward_ms=self.forward_ms.sum(axis=-1),
            backward_ms=self.backward_ms.sum(axis=-1),
            kept_bytes=self.kept_bytes.sum(axis=-1),
            filled=np.divide(filled, total, out=np.ones_like(total), where=total > 0),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CallWork:
    """Time and memory of calls on each stage; as :class:`Work` has them, but ``[num_stages, num_calls]``."""

    calls: Calls
    forward_ms: Floats
    backward_ms: Floats
    kept_bytes: Floats

    @classmethod
    def of(cls, unit: UnitCosts, spread: Parallelism, calls: Calls) -> CallWork:
        """Return what calls of a unit take.

        Args:
            unit: The unit.
            spread: How it is spread.
            calls: What it processes.
        """
        forward, backward, kept = np.zeros((3, spread.num_stages, len(calls.cell)))
        firsts = np.concatenate(([0], np.cumsum(spread.stage_layers)))
        for degree in np.unique(calls.degree).tolist():
            chosen = calls.degree == degree
            tokens, squares = calls.tokens[chosen], calls.squares[chosen]
            for stage in range(spread.num_stages):
                layers = range(firsts[stage], firsts[stage + 1])
                curves = [curves_at(unit, layer, spread.tp, degree) for layer in layers]
                passed = [each for each in curves if each[1] != Curve()]
                again = [each[0] for each in passed[: num_recomputed(spread, len(passed))]]
                for table, curve in (
                    (forward, sum((each[0] for each in curves), Curve())),
                    (backward, sum((*(each[1] for each in passed), *again), Curve())),
                ):
                    work = curve.attention * squares + curve.linear * tokens + curve.fixed
                    table[stage, chosen] = np.where(tokens > 0, work, 0.0)
                kept[stage, chosen] = tokens * token_bytes(unit, spread, degree, np.array([each[2] for each in passed]))
        return cls(calls=calls, forward_ms=forward, backward_ms=backward, kept_bytes=kept)

    def followed_by(self, other: CallWork) -> CallWork:
        """Return the calls of two units, the second of which a group begins when it is done with the first.

        Args:
            other: Of the second, whose stages all run the first, too, and whose calls have the same cells and groups.
        """
        calls = self.calls, other.calls
        num_groups = 1 + max(int(each.group.max(initial=0)) for each in calls)
        keys = [each.cell * num_groups + each.group for each in calls]
        used, first, place = np.unique(np.concatenate(keys), return_index=True, return_inverse=True)
        places = np.split(place.ravel(), [len(keys[0])])

        def together(one: Floats, two: Floats) -> Floats:
            sums = np.zeros((len(two), len(used)))
            sums[:, places[0]] += one
            sums[:, places[1]] += two
            return sums

        cell, group, degree, tokens, squares = (
            np.concatenate(each)[first]
            for each in zip(*((c.cell, c.group, c.degree, c.tokens, c.squares) for c in calls), strict=True)
        )
        return CallWork(
            calls=replace(other.calls, cell=cell, group=group, degree=degree, tokens=tokens, squares=squares),
            forward_ms=together(self.forward_ms, other.forward_ms),
            backward_ms=together(self.backward_ms, other.backward_ms),
            kept_bytes=together(self.kept_bytes, other.kept_bytes),
        )

    def by_cell(self, cp: int) -> Work:
        """Return what microbatches take, on ``cp`` ranks each."""
        shape = (len(self.forward_ms), self.calls.num_cells)
        forward, backward, kept, used = np.zeros((4, *shape))
        for table, values in (
            (forward, self.forward_ms),
            (backward, self.backward_ms),
            (kept, self.kept_bytes),
        ):
            np.maximum.at(table.T, self.calls.cell, values.T)
        np.add.at(used.T, self.calls.cell, ((self.forward_ms + self.backward_ms) * (self.calls.degree / cp)).T)
        total = forward + backward
        filled = np.divide(used, total, out=np.ones(shape), where=total > 0)
        return Work(forward_ms=forward, backward_ms=backward, kept_bytes=kept, filled=np.minimum(filled, 1.0))


def curves_at(unit: UnitCosts, layer: int, tp: int, cp: int) -> tuple[Curve, Curve, float]:
    """Return a layer's forward, its backward and its activations per token.

    Between profiled degrees of context parallelism they go linearly in ``1 / cp``, as shares of work and the bytes that
    a ring sends do; beyond the largest, too, but there all devices together have no less than of the largest. A profile
    in which a ring of two is a little more than twice as fast would have one of many take no time.

    Raises:
        ValueError: The tensor-parallel degree was not profiled.
    """
    known = [degree for each, degree in unit.degrees if each == tp]
    if cp in known or len(known) < 2:
        return _profiled(unit, layer, tp, cp)
    above = min(int(np.searchsorted(known, cp)), len(known) - 1)
    low, high = known[max(above - 1, 0)], known[max(above, 1)]
    weight = (1 / low - 1 / cp) / (1 / low - 1 / high)
    least = high / cp if cp > high else 0.0
    one, other = _profiled(unit, layer, tp, low), _profiled(unit, layer, tp, high)

    return (
        _between(one[0], other[0], weight, least),
        _between(one[1], other[1], weight, least),
        max(least * other[2], one[2] + weight * (other[2] - one[2])),
    )


def _profiled(unit: UnitCosts, layer: int, tp: int, cp: int) -> tuple[Curve, Curve, float]:
    index = unit.index(tp, cp)
    of = unit.layers[layer]
    return of.curves[index].forward, of.backward(index), of.curves[index].activation_bytes


def _between(one: Curve, other: Curve, weight: float, least: float) -> Curve:
    return Curve(
        attention=max(least * other.attention, one.attention + weight * (other.attention - one.attention)),
        linear=max(least * other.linear, one.linear + weight * (other.linear - one.linear)),
        fixed=max(least * other.fixed, one.fixed + weight * (other.fixed - one.fixed)),
    )
