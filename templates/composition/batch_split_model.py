"""The batch split as a mixed-integer model (Pyomo, solved by HiGHS), for what users want to constrain.

:func:`resilient.templates.composition.batch_split.split_microbatches` is exact and far faster where nothing is
constrained.

The model: pipeline i has ``m_i`` microbatches and runs one of its layouts, j: ``z_ij`` is 1 and ``m_ij = m_i`` for that
one, both are 0 for the others. It takes ``sum_j (fill_ij z_ij + slowest_ij r_ij)``: of rounds with several microbatches
``r_ij`` is a whole number that holds ``m_ij``, else it is ``m_ij``. The solver works with tolerances; so what it finds
is taken as whole numbers, and that there is nothing better by a nanosecond is proved with bounds on ``m_i`` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from resilient.common.extras import require
from resilient.errors import ArgumentError
from resilient.templates.composition.batch_split import Lines, finish_ns, line_table


def split_with_constraints(
    pipelines: Sequence[Lines],
    num_microbatches: int,
    *,
    min_microbatches: Sequence[int] | None = None,
    max_microbatches: Sequence[int] | None = None,
    multiple_of: Sequence[int] | None = None,
    constrain: Callable[[Any], None] | None = None,
) -> tuple[int, ...]:
    """Return the microbatches of each pipeline, at least one each, under constraints.

    The latest finish is as early as can be; then the fewest pipelines finish that late; then the sum of all finishing
    times is least. Without constraints that is the split of
    :func:`resilient.templates.composition.batch_split.split_microbatches`, save that pipelines which are done before
    one that a single microbatch keeps longest may share otherwise.

    Args:
        pipelines: The pipelines.
        num_microbatches: Of the step; never changed.
        min_microbatches: The fewest of each pipeline: its number of stages, where it is to be full at some time.
        max_microbatches: The most of each pipeline: what its memory holds, where a schedule keeps all activations.
        multiple_of: What the number of each pipeline must be a multiple of: interleaved schedules ask for its stages.
        constrain: Adds further linear constraints to the Pyomo model it is called with. There, ``microbatches[i]`` is
            the number of pipeline i; the name ``split`` is taken.

    Raises:
        ValueError: There is no such split; the message names the nearest numbers of microbatches that have one.
        MissingPackageError: Pyomo or HiGHS is not installed.
    """
    if not pipelines:
        raise ArgumentError("pipelines", "be one or more", "none", "give the lines of each")
    for name, values in (
        ("min_microbatches", min_microbatches),
        ("max_microbatches", max_microbatches),
        ("multiple_of", multiple_of),
    ):
        if values is not None and (len(values) != len(pipelines) or min(values) < 1):
            raise ArgumentError(
                name,
                f"be a number >= 1 for each of {len(pipelines)} pipelines",
                list(values),
                "give 1, or num_microbatches as a maximum, where there is no constraint",
            )
    least = list(min_microbatches or [1] * len(pipelines))
    model = _Model(least, max_microbatches, multiple_of, constrain)
    below = model.nearest_total(num_microbatches, above=False)
    if below != num_microbatches:
        nearest = [total for total in (below, model.nearest_total(num_microbatches, above=True)) if total is not None]
        most = "any number" if max_microbatches is None else sum(max_microbatches)
        raise ArgumentError(
            "num_microbatches",
            f"be a sum that the constraints of {len(pipelines)} pipelines allow (minima and maxima: {sum(least)} to "
            f"{most})",
            num_microbatches,
            f"use {' or '.join(map(str, nearest))}" if nearest else "no sum is allowed: take constraints back",
        )
    return model.best_split(pipelines, num_microbatches)


class _Model:
    """What the numbers of microbatches must fulfil; times come in with :meth:`best_split`."""

    def __init__(
        self,
        least: Sequence[int],
        most: Sequence[int] | None,
        multiples: Sequence[int] | None,
        constrain: Callable[[Any], None] | None,
    ) -> None:
        self._pyo, self._highs = _pyomo_and_highs()
        self._indices = range(len(least))
        self._model = self._pyo.ConcreteModel()
        self._counts = self._model.microbatches = self._pyo.Var(
            self._indices,
            within=self._pyo.Integers,
            bounds=lambda model, i: (least[i], most[i] if most else None),
        )
        self._own = self._model.split = self._pyo.Block()
        if multiples:
            self._own.units = self._pyo.Var(self._indices, within=self._pyo.Integers)
            self._own.multiple = self._pyo.Constraint(
                self._indices, rule=lambda own, i: self._counts[i] == multiples[i] * own.units[i]
            )
        if constrain:
            constrain(self._model)

    def nearest_total(self, total: int, *, above: bool) -> int | None:
        """Return the number of microbatches nearest to ``total``, from it on or up to it, that has a split."""
        counts = sum(self._counts[i] for i in self._indices)
        self._own.total = self._pyo.Constraint(expr=counts >= total if above else counts <= total)
        found = self._solve(counts if above else -counts)
        self._own.del_component("total")
        return sum(found) if found else None

    def best_split(self, pipelines: Sequence[Lines], num_microbatches: int) -> tuple[int, ...]:
        """Return the best split; there must be one."""
        self._own.total = self._pyo.Constraint(expr=sum(self._counts[i] for i in self._indices) == num_microbatches)
        # In units of a slow microbatch, so that the solver's tolerances are small beside every time.
        unit = max(line.slowest_ns for pipeline in pipelines for line in pipeline)
        times = [self._time(i, pipeline, num_microbatches, unit) for i, pipeline in enumerate(pipelines)]
        self._own.latest = self._pyo.Var()
        self._own.until = self._pyo.Constraint(self._indices, rule=lambda own, i: times[i] <= own.latest)
        table = line_table(pipelines)
        self._own.room = self._pyo.Param(self._indices, mutable=True, initialize=num_microbatches)
        self._own.in_time = self._pyo.Constraint(self._indices, rule=lambda own, i: self._counts[i] <= own.room[i])
        counts = self._solve(self._own.latest)
        while True:
            assert counts
            tau = max(map(finish_ns, pipelines, counts))
            before, by_then = (table.capacities(time).tolist() for time in (tau - 1, tau))
            self._own.room.store_values(dict(enumerate(before)))
            better = self._solve(self._own.latest)
            if better is None:
                break
            counts = better
        # Whoever takes more than there was time for before is done at tau itself.
        self._own.last = self._pyo.Var(self._indices, within=self._pyo.Binary)
        self._own.room.store_values(dict(enumerate(by_then)))
        self._own.before = self._pyo.Constraint(
            self._indices,
            rule=lambda own, i: self._counts[i] <= before[i] + max(1, by_then[i] - before[i]) * own.last[i],
        )
        num_last = sum(self._own.last[i] for i in self._indices)
        # Weighed by more than the sum of all finishing times can be.
        counts = self._solve(num_last * (len(pipelines) + 1) * (tau / unit) + sum(times))
        assert counts
        return tuple(counts)

    def _time(self, index: int, pipeline: Lines, num_microbatches: int, unit: int) -> Any:
        """Return the expression of a pipeline's time, in units; add what a choice of layouts needs."""
        first, *others = pipeline
        if not others and first.round_size == 1:
            return first.fill_ns / unit + first.slowest_ns / unit * self._counts[index]
        block = self._pyo.Block()
        self._own.add_component(f"layouts{index}", block)
        layouts = range(len(pipeline))
        block.chosen = self._pyo.Var(layouts, within=self._pyo.Binary)
        block.share = self._pyo.Var(layouts, within=self._pyo.NonNegativeReals)
        block.one = self._pyo.Constraint(expr=sum(block.chosen[j] for j in layouts) == 1)
        block.whole = self._pyo.Constraint(expr=sum(block.share[j] for j in layouts) == self._counts[index])
        block.only = self._pyo.Constraint(layouts, rule=lambda b, j: b.share[j] <= num_microbatches * b.chosen[j])
        rounds = dict(block.share.items())
        several = [j for j in layouts if pipeline[j].round_size > 1]
        if several:
            block.rounds = self._pyo.Var(several, within=self._pyo.NonNegativeIntegers)
            block.hold = self._pyo.Constraint(
                several, rule=lambda b, j: b.share[j] <= pipeline[j].round_size * b.rounds[j]
            )
            rounds |= dict(block.rounds.items())
        return sum(
            line.fill_ns / unit * block.chosen[j] + line.slowest_ns / unit * rounds[j]
            for j, line in enumerate(pipeline)
        )

    def _solve(self, objective: Any) -> list[int] | None:
        """Return the numbers for which the objective is least; None where there are none."""
        self._own.objective = self._pyo.Objective(expr=objective)
        results = self._highs.solve(self._model)
        self._own.del_component("objective")
        if results.best_feasible_objective is None:
            return None
        results.solution_loader.load_vars()
        return [round(self._counts[i].value) for i in self._indices]


def _pyomo_and_highs() -> tuple[Any, Any]:
    for package in ("pyomo", "highspy"):
        require(package, "a batch split under constraints")
    import pyomo.environ as pyo  # pyright: ignore[reportMissingTypeStubs]
    from pyomo.contrib.appsi.solvers import Highs  # pyright: ignore[reportMissingTypeStubs]

    highs: Any = Highs()
    highs.config.load_solution = False
    highs.highs_options = {"mip_rel_gap": 0.0, "mip_abs_gap": 1e-9}
    return pyo, highs
