"""What calls of a unit take, and the microbatches that they are parts of, at any context-parallel degree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve
from resilient.planners.planner import Parallelism
from resilient.planners.stages.stage_work import kept_by_layers, num_recomputed, stage_halves, token_bytes
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
class Taken:
    """Time and memory on each stage.

    Args:
        forward_ms: Time of the forward.
        backward_ms: Time of the backward; 0 on stages that need none.
        weights_ms: Its second half, where halves run apart; all of it where one half has all
            (:class:`~resilient.templates.halves.Halves`).
        kept_bytes: Activations on each device, of layers that have a backward.
        deferred_bytes: Gradients on each device that wait for that part.
    """

    forward_ms: Floats
    backward_ms: Floats
    weights_ms: Floats
    kept_bytes: Floats
    deferred_bytes: Floats

    def mapped(self, change: Callable[[Floats], Floats]) -> dict[str, Floats]:
        """Return each table, changed."""
        return {each.name: change(getattr(self, each.name)) for each in fields(Taken)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Work(Taken):
    """What microbatches take; all ``[num_stages, num_cells]``, or with their parts behind.

    Args:
        filled: Part of the devices' time in that of the microbatch: groups that are done earlier wait.
    """

    filled: Floats

    def in_parts(self, num_parts: int) -> Work:
        """Return the work of parts that follow each other, so many of each microbatch, as such."""

        def apart(table: Floats) -> Floats:
            return table.reshape(len(table), -1, num_parts)

        return Work(**self.mapped(apart), filled=apart(self.filled))

    def together(self) -> Work:
        """Return the work of microbatches, of that of their parts."""
        times = self.forward_ms + self.backward_ms
        total, filled = times.sum(axis=-1), (times * self.filled).sum(axis=-1)
        return Work(
            **self.mapped(lambda table: table.sum(axis=-1)),
            filled=np.divide(filled, total, out=np.ones_like(total), where=total > 0),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CallWork(Taken):
    """What calls take; as :class:`Work` has it, but ``[num_stages, num_calls]``."""

    calls: Calls

    @classmethod
    def of(cls, unit: UnitCosts, spread: Parallelism, calls: Calls) -> CallWork:
        """Return what calls of a unit take.

        Args:
            unit: The unit.
            spread: How it is spread.
            calls: What it processes.
        """
        forward, backward, weights, kept, deferred = np.zeros((5, spread.num_stages, len(calls.cell)))
        firsts = np.concatenate(([0], np.cumsum(spread.stage_layers)))
        halves = stage_halves(unit, spread)
        for degree in np.unique(calls.degree).tolist():
            chosen = calls.degree == degree
            tokens, squares = calls.tokens[chosen], calls.squares[chosen]
            for stage in range(spread.num_stages):
                layers = unit.layers[firsts[stage] : firsts[stage + 1]]
                curves = [curves_at(unit, layer, spread.tp, degree) for layer in layers]
                passed = [each for each in curves if each.backward != Curve()]
                again = [each.forward for each in passed[: num_recomputed(spread, len(passed))]]
                whole = sum((*(each.backward for each in passed), *again), Curve())
                later = sum((each.weights for each in passed), Curve())
                for table, curve in (
                    (forward, sum((each.forward for each in curves), Curve())),
                    (backward, whole),
                    (weights, later if halves[stage].both else whole * float(halves[stage].weights)),
                ):
                    work = curve.attention * squares + curve.linear * tokens + curve.fixed
                    table[stage, chosen] = np.where(tokens > 0, work, 0.0)
                of_layers = kept_by_layers([(each.kept_bytes, each.entered_bytes, each.given_bytes) for each in passed])
                kept[stage, chosen] = tokens * token_bytes(unit, spread, degree, of_layers)
                if halves[stage].both:
                    deferred[stage, chosen] = tokens * sum(each.deferred_bytes for each in passed)
        return cls(
            calls=calls,
            forward_ms=forward,
            backward_ms=backward,
            weights_ms=weights,
            kept_bytes=kept,
            deferred_bytes=deferred,
        )

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
        tables = vars(self), vars(other)
        return CallWork(
            calls=replace(other.calls, cell=cell, group=group, degree=degree, tokens=tokens, squares=squares),
            **{each.name: together(*(of[each.name] for of in tables)) for each in fields(Taken)},
        )

    def by_cell(self, cp: int) -> Work:
        """Return what microbatches take, on ``cp`` ranks each."""
        shape = (len(self.forward_ms), self.calls.num_cells)

        def longest(values: Floats) -> Floats:
            table = np.zeros(shape)
            np.maximum.at(table.T, self.calls.cell, values.T)
            return table

        found, used = self.mapped(longest), np.zeros(shape)
        np.add.at(used.T, self.calls.cell, ((self.forward_ms + self.backward_ms) * (self.calls.degree / cp)).T)
        total = found["forward_ms"] + found["backward_ms"]
        filled = np.divide(used, total, out=np.ones(shape), where=total > 0)
        return Work(**found, filled=np.minimum(filled, 1.0))


class LayerCall(NamedTuple):
    """What a layer takes for a call: curves, and bytes per token; of its backward and these what something needs."""

    forward: Curve
    backward: Curve
    weights: Curve
    kept_bytes: float
    entered_bytes: float
    given_bytes: float
    deferred_bytes: float


def curves_at(unit: UnitCosts, layer: UnitLayer, tp: int, cp: int) -> LayerCall:
    """Return what a layer takes at any degree of context parallelism.

    Between profiled degrees of context parallelism curves go linearly in ``1 / cp``, as shares of work and the bytes
    that a ring sends do; beyond the largest, too, but there all devices together have no less than of the largest. A
    profile in which a ring of two is a little more than twice as fast would have one of many take no time.

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

    def between(one: float, other: float) -> float:
        return max(least * other, one + weight * (other - one))

    def curve_between(one: Curve, other: Curve) -> Curve:
        return Curve(
            attention=between(one.attention, other.attention),
            linear=between(one.linear, other.linear),
            fixed=between(one.fixed, other.fixed),
        )

    return LayerCall(
        forward=curve_between(one.forward, other.forward),
        backward=curve_between(one.backward, other.backward),
        weights=curve_between(one.weights, other.weights),
        kept_bytes=between(one.kept_bytes, other.kept_bytes),
        entered_bytes=between(one.entered_bytes, other.entered_bytes),
        given_bytes=between(one.given_bytes, other.given_bytes),
        deferred_bytes=between(one.deferred_bytes, other.deferred_bytes),
    )


def _profiled(unit: UnitCosts, layer: UnitLayer, tp: int, cp: int) -> LayerCall:
    index = unit.index(tp, cp)
    curves, trains = layer.curves[index], float(layer.trainable)
    return LayerCall(
        forward=curves.forward,
        backward=layer.backward(index),
        weights=curves.backward_weight * trains,
        kept_bytes=curves.activation_bytes,
        entered_bytes=curves.entered_bytes,
        given_bytes=curves.given_bytes,
        deferred_bytes=curves.deferred_bytes * trains,
    )
