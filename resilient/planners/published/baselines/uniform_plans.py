"""The uniform plans there are for a job, and an estimate of what each takes.

One number of replicas and one tensor-parallel degree for the whole model. Encoders lie on the language model's
devices, with as many stages, or have groups of devices of their own, of one or several lanes in each pipeline. Layers
are cut such that the slowest stage is as fast as it can be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.balance import Cuts, largest, loads
from resilient.planners.packing.proportion import proportional
from resilient.planners.planner import Configuration, Encoders, Parallelism, Planner, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import Stages, chained, common_degrees, fits
from resilient.planners.stages.stage_work import by_stage, exposed_sum_ms, shared_sum_ms
from resilient.templates.common.arrays import Flags, Floats

_LANES = (1, 2, 3, 4, 6, 8)
_MICROBATCHES = (1, 2, 4, 8, 16)
"""Samples of a microbatch."""


def uniform_plans(setting: Setting, samples: SampleTable) -> Iterator[Configuration]:
    """Yield the uniform plans that use the devices, whether they fit or not.

    Stages that make the slowest one no faster than fewer do are left out, and so are encoders' groups far from the
    part of the work that encoders have.

    Args:
        setting: The job.
        samples: A sample of the data set.
    """
    for tp, cp in common_degrees(setting.costs):
        if cp == 1 and tp <= setting.cluster.devices_per_node:
            cuts = {unit.name: _cuts(unit, samples, tp) for unit in setting.costs.units}
            shapes = _shapes if setting.num_pipelines is None else _on_all_devices
            for shape in shapes(setting, cuts, tp):
                for size in _MICROBATCHES:
                    dp = shape.units[LLM].dp
                    if size * dp < 2 * setting.global_batch:  # the largest has all samples of a replica
                        yield replace(shape, num_microbatches=-(-setting.global_batch // (dp * size)))


def _cuts(unit: UnitCosts, samples: SampleTable, tp: int) -> Cuts:
    lengths = samples.units[unit.name]
    forward, backward = unit.layer_ms(float(lengths.tokens.mean()), float(lengths.squares.mean()), tp)
    return Cuts(forward + backward, len(unit.layers))


def _shapes(setting: Setting, cuts: dict[str, Cuts], tp: int) -> Iterator[Configuration]:
    """Yield plans of one tensor-parallel degree, with one microbatch."""
    encoders = [name for name in cuts if name != LLM]
    slowest = cuts[LLM].slowest
    counts = [1, *(pp for pp, (one, other) in enumerate(pairwise(slowest.tolist()), 2) if other < one)]
    for pp in counts:
        if pp <= min(len(each.slowest) for each in cuts.values()):
            yield from _shape(setting, cuts, tp, dict.fromkeys(cuts, (1, pp)), Encoders.PARALLEL, colocated=True)
        found: list[tuple[Encoders, dict[str, tuple[int, int]]]] = []
        for way in (Encoders.PARALLEL, Encoders.COLOCATED) if len(encoders) > 1 else (Encoders.PARALLEL,):
            parts = {name: pp * cuts[name].slowest[0] / slowest[0] if slowest[0] else 1.0 for name in encoders}
            if way is Encoders.COLOCATED:
                parts = dict.fromkeys(encoders, sum(parts.values()))
            for share in (0.5, 1.0, 1.5):
                for lanes in _LANES:
                    groups = {LLM: (1, pp)}
                    for name, part in parts.items():
                        size = max(1, round(share * part + 0.25))
                        most = min(
                            len(cuts[each].slowest) for each in (encoders if way is not way.PARALLEL else [name])
                        )
                        own = min(lanes, size)
                        groups[name] = own, min(size // own, most)
                    if (way, groups) not in found:
                        found.append((way, groups))
        for way, groups in found:
            yield from _shape(setting, cuts, tp, groups, way, colocated=not encoders)


def _on_all_devices(setting: Setting, cuts: dict[str, Cuts], tp: int) -> Iterator[Configuration]:
    """Yield plans of as many pipelines as the job asks for, with one microbatch.

    Each number of the language model's stages leaves encoders the rest, which is divided in proportion to their work.
    """
    devices = setting.num_devices // (tp * (setting.num_pipelines or 1))
    most = {name: len(each.slowest) for name, each in cuts.items()}
    encoders = [name for name in cuts if name != LLM]
    if devices <= min(most.values()):
        yield from _shape(setting, cuts, tp, dict.fromkeys(cuts, (1, devices)), Encoders.PARALLEL, colocated=True)
    for pp in range(1, min(devices - 1, most[LLM]) + 1):
        left, language = devices - pp, {LLM: (1, pp)}
        if encoders and left >= len(encoders):
            sizes = proportional([cuts[name].slowest[0] for name in encoders], [1] * len(encoders), left)
            ways = (_lanes(size, most[name]) for name, size in zip(encoders, sizes, strict=True))
            for groups in product(*ways):
                own = dict(zip(encoders, groups, strict=True))
                yield from _shape(setting, cuts, tp, language | own, Encoders.PARALLEL, colocated=False)
        if len(encoders) > 1:
            for group in _lanes(left, min(most[name] for name in encoders)):
                own = dict.fromkeys(encoders, group)
                yield from _shape(setting, cuts, tp, language | own, Encoders.COLOCATED, colocated=False)


def _lanes(size: int, most: int) -> list[tuple[int, int]]:
    """Return the ways to make lanes of so many devices: how many, and their stages, at most so many."""
    return [(size // pp, pp) for pp in range(1, most + 1) if size % pp == 0]


def _shape(
    setting: Setting,
    cuts: dict[str, Cuts],
    tp: int,
    groups: dict[str, tuple[int, int]],
    way: Encoders,
    *,
    colocated: bool,
) -> Iterator[Configuration]:
    """Yield the plan with so many lanes and stages of each unit in a pipeline, if there are devices for one."""
    sizes = {name: lanes * stages * tp for name, (lanes, stages) in groups.items()}
    apart = [size for name, size in sizes.items() if name != LLM]
    beside = max(apart, default=0) if way is Encoders.COLOCATED else sum(apart)
    dp = min(setting.num_devices // (sizes[LLM] + (0 if colocated else beside)), setting.global_batch)
    if dp:
        units = {
            name: Parallelism(
                dp=dp * groups[name][0], pp=groups[name][1], tp=tp, stage_layers=cuts[name].layers(groups[name][1])
            )
            for name in cuts
        }
        yield Configuration(units=units, num_microbatches=1, colocated=colocated, encoders=way)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Cells:
    """What a unit has to do in each microbatch of all replicas; all arrays ``[dp, num_microbatches]``."""

    tokens: Floats
    squares: Floats
    most_tokens: Floats
    most_squares: Floats

    @property
    def used(self) -> Flags:
        return self.tokens > 0


class Estimates:
    """What plans take with one known batch as a planner assigns it, roughly: many are estimated, few simulated.

    A microbatch is as slow as its slowest stage, and waits for those around it. Where encoders lie on
    the language model's devices one unit comes after the other.

    Args:
        planner: Who assigns.
        setting: The job.
        batch: The known batch.
    """

    def __init__(self, planner: Planner, setting: Setting, batch: SampleTable) -> None:
        self._planner, self._setting, self._batch = planner, setting, batch
        self._known: dict[tuple[int, int, int], dict[str, _Cells]] = {}

    def step_ms(self, plan: Configuration) -> float:
        """Return what a step takes."""
        cells, number = self._cells(plan), plan.num_microbatches
        slow: list[Floats] = []
        fill, afterwards = 0.0, 0.0
        backward_ms: dict[str, Floats] = {}
        for unit in self._setting.costs.units:
            spread, own = plan.units[unit.name], cells[unit.name]
            lanes = spread.dp // plan.units[LLM].dp
            curves = by_stage(spread, unit.coefficients(spread.tp))
            mean = np.array([own.squares.mean() / lanes, own.tokens.mean() / lanes, float(own.used.any())])
            forward, backward_ms[unit.name] = np.tensordot(mean, curves, axes=1)
            stages = forward + backward_ms[unit.name]
            attention, linear, fixed = curves[:, :, stages.argmax()].sum(axis=1)
            squares = np.maximum(own.squares / lanes, own.most_squares)
            tokens = np.maximum(own.tokens / lanes, own.most_tokens)
            slow.append(attention * squares + linear * tokens + fixed * own.used)
            fill += float(stages.sum())
            if plan.colocated:
                fill -= float(stages.max())
                afterwards += float(number * backward_ms[unit.name].max()) if unit.name != LLM else 0.0
        if plan.colocated:
            chains = [(each, plan.units[LLM].pp) for each in slow]
        else:
            longest = np.max(slow, axis=0)
            beside = max((spread.pp for name, spread in plan.units.items() if name != LLM), default=0)
            chains = [(longest, plan.units[LLM].pp + beside)]
            fill -= float(longest.mean())
        busy = sum((_paced(each, pp) for each, pp in chains), np.zeros(len(slow[0]))).max()
        return float(busy) + fill + max(0.0, self._sums_ms(plan, backward_ms, afterwards))

    def _sums_ms(self, plan: Configuration, backward_ms: dict[str, Floats], afterwards: float) -> float:
        units, cluster = self._setting.costs.units, self._setting.cluster
        if not plan.colocated:
            return exposed_sum_ms(units, plan.units, cluster, backward_ms)
        return shared_sum_ms(units, plan.units, cluster, backward_ms, afterwards)

    def _cells(self, plan: Configuration) -> dict[str, _Cells]:
        language, number = plan.units[LLM], plan.num_microbatches
        key = language.tp, language.dp, number
        if key not in self._known:
            replicas = [Replica(num_microbatches=number)] * language.dp
            assignment = self._planner.assign(self._setting, plan, self._batch, replicas)
            found: dict[str, _Cells] = {}
            for name, place in assignment.units.items():
                cell, lengths = place.replica * number + place.microbatch, self._batch.units[name]
                tables = [
                    of_cell(each, cell, language.dp * number).reshape(language.dp, number)
                    for of_cell in (loads, largest)
                    for each in (lengths.tokens, lengths.squares)
                ]
                found[name] = _Cells(tokens=tables[0], squares=tables[1], most_tokens=tables[2], most_squares=tables[3])
            self._known[key] = found
        return self._known[key]


def _paced(slow_ms: Floats, num_stages: int) -> Floats:
    """Return what replicas take for microbatches of such slowest stages. [dp]

    That is midway, as simulated steps are, between their sum, where no stage waits for a microbatch in another one, and
    what it is where all wait for the slowest that is in one of them.
    """
    from scipy.ndimage import maximum_filter1d  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    together = maximum_filter1d(slow_ms, min(num_stages, slow_ms.shape[1]), axis=1, mode="nearest")
    return (slow_ms + np.asarray(together)).sum(axis=1) / 2


def has_room(setting: Setting, plan: Configuration, samples: SampleTable) -> bool:
    """Return whether devices have memory for a plan, by the mean microbatch and what samples differ from it."""
    language, number = plan.units[LLM], plan.num_microbatches
    mean = setting.global_batch / (language.dp * number)
    stages: dict[str, Stages] = {}
    for unit in setting.costs.units:
        spread = plan.units[unit.name]
        stages[unit.name] = Stages.of(unit, spread, samples.units[unit.name], mean * language.dp / spread.dp)
    if plan.colocated:
        ahead = np.minimum(np.arange(language.pp, 0, -1), number)
        needs = [
            each.state_bytes(setting.sharded_part(plan.units[name].dp))
            + each.activation_bytes(ahead if name == LLM else number)
            for name, each in stages.items()
        ]
        return fits(setting, np.sum(needs, axis=0))
    return all(
        fits(setting, _chain_bytes([stages[name], stages[LLM]], number, setting.sharded_part(plan.units[name].dp)))
        for name in plan.units
        if name != LLM
    )


def _chain_bytes(chain: Sequence[Stages], number: int, optimizer_part: npt.ArrayLike) -> Floats:
    stages = chained(chain)
    ahead = np.minimum(np.arange(len(stages.forward_ms), 0, -1), number)
    return stages.state_bytes(optimizer_part) + stages.activation_bytes(ahead)
