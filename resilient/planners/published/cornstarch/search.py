"""Cornstarch's configuration search: for each place of the encoders, the cuts and degrees that promise most.

A step of K microbatches is predicted as the stages of the longest branch and K - 1 times the slowest stage. For each
combination of degrees and each bound on the slowest stage every unit has the fewest stages that hold it; more of them
would not make that faster, as the sum over a branch does not depend on its cuts. Beyond the paper, the sums of
gradients that no backward hides count, too, and a stage's gradients are a second bound. So the search is exact under
the prediction, as long as it is not memory, nor what a backward hides, that asks for more stages. Only those devices
share sequences (context parallelism) that have the language model.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.balance import Cuts
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.published.baselines.mean_microbatch import Stages, fits, num_microbatches
from resilient.planners.stages.one_pipeline import is_asked_for
from resilient.planners.stages.stage_work import ring_ms, unhidden_ms
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.inputs.cluster import Cluster


def cornstarch_configurations(
    setting: Setting, samples: SampleTable, encoders: Encoders, count: int
) -> list[Configuration]:
    """Return the best configurations of as many combinations of degrees, those that take least first.

    Of equals those on the fewest devices. There are less where no more fit, or can be better than what was found.

    Args:
        setting: The job.
        samples: A sample of the data set.
        encoders: Where they are.
        count: How many.
    """
    combinations = list(product(*_branches(setting, samples, encoders)))
    found: list[tuple[int, int, int, Configuration]] = []
    replicas = _replicas(setting)
    bounds = [_least_ns(setting, options) for options in combinations]
    for number in np.argsort(bounds, kind="stable").tolist():
        if len(found) >= count and bounds[number] > found[count - 1][0]:
            break
        best = _best(setting, combinations[number], encoders, *replicas)
        if best is not None:
            step_ns, num_devices, configuration = best
            bisect.insort(found, (step_ns, num_devices, number, configuration))
    return [configuration for *_, configuration in found[:count]]


def _branches(setting: Setting, samples: SampleTable, encoders: Encoders) -> list[list[list[_Option]]]:
    """Return, for each branch (the language model last) and its degrees, the ways to cut it that fit."""
    language = setting.costs.by_name[LLM]
    others = [unit for unit in setting.costs.units if unit is not language]
    if encoders is Encoders.REPLICATED:
        branches = [_options([language], others, setting, samples)]
    else:
        apart = [others] if encoders is Encoders.COLOCATED and others else [[each] for each in others]
        branches = [_options(units, [], setting, samples) for units in (*apart, [language])]
    return [
        [[option for option in options if fits(setting, option.least_bytes)] for options in by_degree]
        for by_degree in branches
    ]


def _least_ns(setting: Setting, options: Sequence[Sequence[_Option]]) -> float:
    """Return what a step is predicted to take at least: all work of the mean microbatches, spread over all devices."""
    if not all(options):
        return np.inf
    work = sum(ways[0].size * min(way.branch_ms for way in ways) for ways in options)
    return 1e6 * work * setting.global_batch / setting.microbatch / setting.num_devices


def _replicas(setting: Setting) -> tuple[Ints, Ints]:
    """Return numbers of microbatches, and for each the fewest replicas, and so the most devices of each."""
    most = min(setting.num_devices, setting.global_batch)
    several = range(most, 0, -1) if setting.num_pipelines is None else (setting.num_pipelines,)
    fewest = {num_microbatches(setting, dp): dp for dp in several}
    return np.array(list(fewest)), np.array(list(fewest.values()))


def _best(
    setting: Setting, options: Sequence[Sequence[_Option]], encoders: Encoders, number: Ints, dp: Ints
) -> tuple[int, int, Configuration] | None:
    """Return the time, the devices and the best configuration of a combination of degrees; None where none fits.

    Args:
        setting: The job.
        options: Of each branch.
        encoders: Where they are.
        number: Microbatches of a replica.
        dp: Replicas with which there are so many.
    """
    plans = _plans(options) if setting.num_pipelines is None else _on_all_devices(setting, options)
    branch_ms, slowest_ms, devices = np.array([plan[1:] for plan in plans]).reshape(-1, 3).T[:, :, None]
    sums_ms = _exposed_ms([plan[0] for plan in plans], dp, setting)
    step_ns = np.rint((branch_ms + (number - 1) * slowest_ms + sums_ms) * 1e6)
    used = devices * dp
    there = np.argwhere(used <= setting.num_devices)
    for place in np.lexsort((used[tuple(there.T)], step_ns[tuple(there.T)])):
        plan, row = there[place].tolist()
        chosen, replicas, microbatches = plans[plan][0], int(dp[row]), int(number[row])
        if all(
            fits(setting, option.num_bytes(setting.sharded_part(replicas * option.cp), microbatches, chosen[-1]))
            for option in chosen
        ):
            spread = {
                name: Parallelism(dp=replicas, pp=len(layers), tp=option.tp, cp=option.cp, stage_layers=layers)
                for option in chosen
                for name, layers in option.stage_layers.items()
            }
            found = Configuration(
                units={unit.name: spread[unit.name] for unit in setting.costs.units},
                num_microbatches=microbatches,
                encoders=encoders,
                colocated=encoders is Encoders.REPLICATED,
                predicted_ms=float(step_ns[plan, row]) / 1e6,
            )
            if is_asked_for(setting, found):
                return int(step_ns[plan, row]), int(used[plan, row]), found
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Option:
    """One way to cut a branch.

    Args:
        tp: Tensor-parallel degree.
        cp: Context-parallel degree.
        stage_layers: By unit, the layers of each stage.
        stage_ms: Of a microbatch, forward and backward. [num_stages]
        branch_ms: Of a microbatch through the branch.
        stages: Of the units; one after the other on the same devices.
    """

    tp: int
    cp: int
    stage_layers: dict[str, tuple[int, ...]]
    stage_ms: Floats
    branch_ms: float
    stages: tuple[Stages, ...]

    @property
    def size(self) -> int:
        """Devices of a stage."""
        return self.tp * self.cp

    @property
    def devices(self) -> int:
        """Devices of all stages."""
        return self.size * len(self.stage_ms)

    @property
    def least_bytes(self) -> Floats:
        """Memory that each stage needs however many replicas there are. [num_stages]"""
        return sum((each.held_bytes + each.activation_bytes(1) for each in self.stages), np.zeros(len(self.stage_ms)))

    @cached_property
    def backward_ms(self) -> Floats:
        """Time of a microbatch's backward on each stage. [num_stages]"""
        return sum((each.backward_ms for each in self.stages), np.zeros(len(self.stage_ms)))

    @cached_property
    def gradient_bytes(self) -> Floats:
        """Bytes of gradients on each device of each stage. [num_stages]"""
        return sum((each.gradient_bytes for each in self.stages), np.zeros(len(self.stage_ms)))

    def unhidden_ms(self, dp: Ints, cluster: Cluster) -> Floats:
        """Return :func:`~resilient.planners.stages.stage_work.unhidden_ms` for each number of replicas.

        A unit that each stage has whole is summed over stages, too.
        """
        pp, replicas = len(self.stage_ms), dp[:, None]
        sums, last = np.zeros((2, len(dp), pp))
        for each in self.stages:
            copies = replicas * self.cp * (pp // len(each.gradient_bytes))
            own = ring_ms(each.gradient_bytes, copies, replicas * pp * self.size, cluster)
            sums += own
            last = np.maximum(last, own * each.last_bytes / np.maximum(each.gradient_bytes, 1))
        return unhidden_ms(sums, self.backward_ms, last)

    def num_bytes(self, optimizer_part: Floats, number: int, language: _Option) -> Floats:
        """Return what each stage needs, with the microbatches that 1F1B has between its forward and its backward."""
        after = 0 if self is language else len(language.stage_ms)
        in_flight = np.minimum(np.arange(len(self.stage_ms), 0, -1) + after, number)
        return sum(
            (each.state_bytes(optimizer_part) + each.activation_bytes(in_flight) for each in self.stages),
            np.zeros(len(in_flight)),
        )


_Plan = tuple[tuple[_Option, ...], float, float, int]
"""Options of all branches, the longest branch, the slowest stage, and devices."""


def _options(
    units: Sequence[UnitCosts], everywhere: Sequence[UnitCosts], setting: Setting, samples: SampleTable
) -> list[list[_Option]]:
    """Return the ways to cut units that share stages, with other units whole in each stage, by degrees."""
    together = (*units, *everywhere)
    degrees = sorted(set.intersection(*(set(unit.degrees) for unit in together)))
    found: list[list[_Option]] = []
    for tp, cp in degrees:
        if (cp > 1 and all(unit.name != LLM for unit in units)) or tp > setting.cluster.devices_per_node:
            continue
        most = min(setting.num_devices // (tp * cp), *(len(unit.layers) for unit in units))
        if not most:
            continue
        single = {unit.name: _layers(unit, tp, cp, setting, samples) for unit in together}
        whole = [single[unit.name].joined((len(unit.layers),)) for unit in everywhere]
        extra_ms = sum(float(each.work_ms.sum()) for each in whole)
        cuts = {unit.name: Cuts(single[unit.name].work_ms, most) for unit in units}
        options: list[_Option] = []
        for pp in range(1, most + 1):
            layers = {name: each.layers(pp) for name, each in cuts.items()}
            stages = [single[name].joined(counts) for name, counts in layers.items()]
            stage_ms = sum((each.work_ms for each in stages), np.full(pp, extra_ms))
            options.append(
                _Option(
                    tp=tp,
                    cp=cp,
                    stage_layers=layers | {unit.name: (len(unit.layers),) for unit in everywhere},
                    stage_ms=stage_ms,
                    branch_ms=float(stage_ms.sum()) - (pp - 1) * extra_ms,
                    stages=(*stages, *whole),
                )
            )
        found.append(options)
    return found


def _layers(unit: UnitCosts, tp: int, cp: int, setting: Setting, samples: SampleTable) -> Stages:
    """Return a unit with a stage for each layer."""
    spread = Parallelism(dp=1, pp=len(unit.layers), tp=tp, cp=cp, stage_layers=(1,) * len(unit.layers))
    return Stages.of(unit, spread, samples.units[unit.name], setting.microbatch)


def _plans(branches: Sequence[Sequence[_Option]]) -> list[_Plan]:
    """Return, for each bound on any stage's time and on its gradients, options within both on the fewest devices.

    Gradients of the language model have a bound of their own: its sums may take another link, and encoders hide them.

    Args:
        branches: Ways to cut each branch into 1, 2, ... stages; the language model last.
    """
    slowest = [np.array([option.stage_ms.max() for option in options]) for options in branches]
    most = [np.array([option.gradient_bytes.max() for option in options]) for options in branches]
    if not all(len(each) for each in slowest):
        return []
    times = _bounds(slowest)[:, None, None, None]
    sizes = [*(_bounds(most[:-1])[:, None, None] for _ in most[:-1]), _bounds(most[-1:])[:, None]]
    within = [
        (of_time <= times) & (of_size <= bounds) for of_time, of_size, bounds in zip(slowest, most, sizes, strict=True)
    ]  # [times, encoders' gradients, the language model's, options], 1 where it does not matter
    possible = np.all(np.broadcast_arrays(*(each.any(axis=-1) for each in within)), axis=0)
    fewest = np.broadcast_arrays(*(each.argmax(axis=-1) for each in within))
    first: Ints = np.stack([each[possible] for each in fewest], axis=1)
    return [
        _plan([options[pick] for options, pick in zip(branches, picks, strict=True)])
        for picks in np.unique(first, axis=0).tolist()
    ]


def _on_all_devices(setting: Setting, branches: Sequence[Sequence[_Option]]) -> list[_Plan]:
    """Return what :func:`_plans` does, of all options that leave no device out."""
    devices = setting.num_devices // (setting.num_pipelines or 1)
    languages = {option.devices: option for option in branches[-1]}
    found: list[_Plan] = []
    for encoders in product(*branches[:-1]):
        left = devices - sum(option.devices for option in encoders)
        if left in languages:
            found.append(_plan([*encoders, languages[left]]))
    return found


def _plan(chosen: Sequence[_Option]) -> _Plan:
    longest = max((option.branch_ms for option in chosen[:-1]), default=0.0) + chosen[-1].branch_ms
    stage = max(float(option.stage_ms.max()) for option in chosen)
    return tuple(chosen), longest, stage, sum(option.devices for option in chosen)


def _bounds(values: Sequence[Floats]) -> Floats:
    """Return all values that every branch can be within, ascending."""
    bounds = np.unique(np.concatenate(values))
    return bounds[bounds >= max(each.min() for each in values)]


def _exposed_ms(plans: Sequence[tuple[_Option, ...]], dp: Ints, setting: Setting) -> Floats:
    """Return :func:`~resilient.planners.stages.stage_work.exposed_sum_ms` by plan and number of replicas."""
    options = {id(option): option for plan in plans for option in plan}
    unhidden = {key: option.unhidden_ms(dp, setting.cluster) for key, option in options.items()}
    exposed = np.zeros((len(plans), len(dp)))
    for row, (*encoders, language) in zip(exposed, plans, strict=True):
        hides = max((float(each.backward_ms.sum()) for each in encoders), default=0.0)
        for each in encoders:
            np.maximum(row, unhidden[id(each)], out=row)
        np.maximum(row, unhidden[id(language)] - hides, out=row)
    return exposed
