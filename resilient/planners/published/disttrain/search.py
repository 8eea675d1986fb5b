"""The search for DistTrain's configuration, by the formulas of :mod:`resilient.planners.published.disttrain.planner`.

A device holds what parameters, gradients and the sharded optimizer take on the stage that has most of them, and the
activations of microbatches in flight: one for each of the unit's stages, as in the paper, and beyond it one for each
stage that microbatches pass before they come back: encoders wait for the language model, and both for a generator.
There is room for three standard deviations more than the mean, and for the longest sample among others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.stages.device_layout import used_devices
from resilient.planners.stages.expected_step import Expected, expected, longest_ms, parallelism, virtual_stages
from resilient.planners.stages.one_pipeline import is_asked_for
from resilient.planners.stages.redundancy import Redundant, possibly_redundant, surely_redundant
from resilient.templates.common.arrays import Flags, Floats, Ints
from resilient.templates.common.compiled import compiled

_SLACK = 1.25
"""How many times the least time steps may take of configurations that are simulated."""


def disttrain_configurations(setting: Setting, samples: SampleTable) -> list[Configuration]:
    """Return the fastest configuration for each number of the language model's replicas, the fastest of all first.

    Of equals, one on the fewest devices.

    Args:
        setting: The job.
        samples: A sample of the data set.

    Raises:
        ValueError: There is none.
    """
    for redundant in (possibly_redundant, surely_redundant):
        found = [each for each in _fastest(setting, samples, redundant) if is_asked_for(setting, each)]
        if found:
            return sorted(found, key=lambda each: (each.predicted_ms, used_devices(each)))
    return [fastest((), "disttrain", setting)]


def interleaved(
    setting: Setting, configurations: Sequence[Configuration], samples: SampleTable
) -> Iterator[Configuration]:
    """Yield configurations with two stages of the language model on each device instead of one (virtual stages).

    These halve its warm-up in the paper's formula. In truth they send more messages, their layers are harder to cut
    evenly, and encoders that are no faster than a stage do not let them begin sooner; three or four did not help where
    two do not. So which to take is a matter of simulation.

    Args:
        setting: The job.
        configurations: With one stage on each; those that have no layers or no stages for more are left out.
        samples: A sample of the data set.
    """
    unit = setting.costs.by_name[LLM]
    for each in configurations:
        spread = each.units[LLM]
        if spread.pp > 1 and 2 * spread.pp <= len(unit.layers):
            twice = virtual_stages(unit, samples.units[LLM], spread, 2)
            yield replace(each, units={**each.units, LLM: twice})


def _fastest(setting: Setting, samples: SampleTable, redundant: Redundant) -> Iterator[Configuration]:
    names, language = [unit.name for unit in setting.costs.units], setting.language
    total = -(-setting.global_batch // setting.microbatch)
    # The language model, what comes after it, encoders: each unit after those that it waits for.
    order = sorted(range(len(names)), key=lambda position: (position != language, position < language))
    units = [setting.costs.units[position] for position in order]
    early = np.array([position < language for position in order])
    tables = [
        _Options.of(
            unit, samples, setting, _divisors(total * (1 if unit.name == LLM else setting.microbatch)), redundant
        )
        for unit in units
    ]
    limit_ns = np.iinfo(np.int64).max
    for dp in _divisors(total):
        if setting.num_pipelines not in (None, dp):
            continue
        picked: list[_Picked] = []
        for table in tables:
            picked.append(table.pick(dp, None if picked else dp, setting))
            if not len(picked[-1].index):
                break
        if not len(picked[-1].index):
            continue
        found = np.full(len(units), -1, np.int64)
        step_ns = compiled(_search)(
            np.cumsum([0, *(len(each.index) for each in picked)]),
            np.concatenate([each.counts for each in picked], axis=1),
            np.concatenate([each.room for each in picked], axis=1),
            early,
            total // dp,
            setting.num_devices,
            setting.least_devices,
            limit_ns,
            found,
        )
        if found[0] >= 0:
            limit_ns = min(limit_ns, int(_SLACK * step_ns))
            chosen = {
                unit.name: parallelism(
                    unit, samples.units[unit.name], int(table.dp[at]), int(table.pp[at]), int(table.tp[at])
                )
                for unit, table, at in zip(
                    units, tables, (each.index[at] for each, at in zip(picked, found, strict=True)), strict=True
                )
            }
            yield Configuration(
                units={name: chosen[name] for name in names},
                num_microbatches=total // dp,
                predicted_ms=step_ns / 1e6,
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Picked:
    """Options of one unit for one degree of data parallelism of the language model.

    Args:
        index: In all of the unit's options.
        counts: Devices, stages, and ns of the warm-up, of the slowest stage and of the sum. [5, num_options]
        room: Parts of a device's memory: state, a microbatch in flight, the deviation of one, and the excess of the
            longest sample. [4, num_options]
    """

    index: npt.NDArray[np.intp]
    counts: Ints
    room: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """All (tp, dp, pp) of a unit on at most all devices, as columns; of its samples' tokens, what memory goes by."""

    tp: Ints
    dp: Ints
    pp: Ints
    sample_ms: Floats
    longest_ms: Floats
    call_ms: Floats
    slowest_part: Floats
    sum_ns: Ints
    state_bytes: Floats
    token_bytes: Floats
    mean: float
    deviation: float
    longest: float

    @classmethod
    def of(
        cls, unit: UnitCosts, samples: SampleTable, setting: Setting, replicas: Sequence[int], redundant: Redundant
    ) -> _Options:
        lengths = samples.units[unit.name]
        degrees = expected(unit, lengths, setting.num_devices, setting.cluster.devices_per_node)
        columns = [
            _columns(
                each,
                longest_ms(unit.work(each.tp).of(lengths), setting.microbatch),
                replicas,
                setting,
                redundant,
            )
            for each in degrees
        ]
        tp, dp, pp, sample_ms, longest, call_ms, slowest_part, sum_ms, state_bytes, token_bytes = (
            np.concatenate(each) for each in zip(*columns, strict=True)
        )
        return cls(
            tp=tp.astype(np.int64),
            dp=dp.astype(np.int64),
            pp=pp.astype(np.int64),
            sample_ms=sample_ms,
            longest_ms=longest,
            call_ms=call_ms,
            slowest_part=slowest_part,
            sum_ns=np.rint(sum_ms * 1e6).astype(np.int64),
            state_bytes=state_bytes,
            token_bytes=token_bytes,
            mean=float(lengths.tokens.mean()),
            deviation=float(lengths.tokens.std()),
            longest=float(lengths.tokens.max()),
        )

    def pick(self, replicas: int, dp: int | None, setting: Setting) -> _Picked:
        """Return what may fit beside so many replicas of the language model, fastest first."""
        samples, number = replicas * setting.microbatch, -(-setting.global_batch // setting.microbatch) // replicas
        index = np.flatnonzero(samples % self.dp == 0 if dp is None else self.dp == dp)
        memory = float(setting.cluster.memory_bytes or np.inf)
        # A replica that works for several of the language model has a microbatch of each, the longest sample in all.
        several = -(-replicas // self.dp[index])
        share, pp = setting.microbatch * several / np.maximum(self.dp[index] // replicas, 1), self.pp[index]
        deviation = 3 * self.deviation * np.sqrt(share * several)
        excess = (self.longest - self.mean) * several
        held = self.token_bytes[index] * np.stack([share * self.mean, deviation, excess])
        room = np.concatenate([self.state_bytes[index][None], held]) / memory
        own = np.minimum(pp, number)
        fits = room[0] + room[1] * own + np.maximum(room[2] * np.sqrt(own), room[3]) <= 1
        index, share, pp, room = index[fits], share[fits], pp[fits], room[:, fits]
        lane_ms = np.maximum(share * self.sample_ms[index], self.longest_ms[index])
        warm = lane_ms + self.call_ms[index]
        stage = lane_ms * self.slowest_part[index] + self.call_ms[index] / pp
        warm_ns, stage_ns = np.rint(warm * 1e6).astype(np.int64), np.rint(stage * 1e6).astype(np.int64)
        order = np.argsort(stage_ns, kind="stable")
        counts = np.stack([self.tp[index] * self.dp[index] * pp, pp, warm_ns, stage_ns, self.sum_ns[index]])
        return _Picked(index=index[order], counts=counts[:, order], room=room[:, order])


def _columns(
    each: Expected, longest: float, replicas: Sequence[int], setting: Setting, redundant: Redundant
) -> tuple[Floats, ...]:
    dp, pp = (grid.ravel() for grid in np.meshgrid(replicas, np.arange(1, len(each.slowest_ms) + 1), indexing="ij"))
    few = (dp * pp * each.tp <= setting.num_devices) & redundant(setting, dp, pp * each.tp)
    dp, pp = dp[few], pp[few]
    values = (
        each.tp,
        dp,
        pp,
        each.sample_ms,
        longest,
        each.call_ms,
        each.slowest_ms[pp - 1] / max(each.sample_ms, 1e-30),
        each.sum_ms(dp, pp, setting.cluster),
        each.held_bytes[pp - 1] + each.optimizer_bytes[pp - 1] * setting.sharded_part(dp),
        each.token_bytes[pp - 1],
    )
    return tuple(np.broadcast_to(np.asarray(value, dtype=np.float64), dp.shape) for value in values)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _search(
    ends: Ints,
    counts: Ints,
    room: Floats,
    early: Flags,
    microbatches: int,
    devices: int,
    least_devices: int,
    best: int,
    found: Ints,
) -> int:
    """Choose one option per unit, depth first; fill in which, if a step takes no more than ``best`` ns, and return what
    it takes."""
    count, best_size = len(ends) - 1, devices + 1
    size, pp, warm, stage, after = counts
    # Of all units from one on: the least devices, warm-up and stage time, device times, and sums of gradients.
    least = np.zeros((5, count + 1), np.int64)
    for unit in range(count - 1, -1, -1):
        first, end = ends[unit], ends[unit + 1]
        least[0, unit] = least[0, unit + 1] + size[first:end].min()
        least[1, unit] = least[1, unit + 1] + warm[first:end].min()
        least[2, unit] = max(least[2, unit + 1], stage[first:end].min())
        least[3, unit] = least[3, unit + 1] + (size[first:end] * stage[first:end]).min()
        least[4, unit] = max(least[4, unit + 1], after[first:end].min())
    at = ends[:-1].copy()
    sums = np.zeros((4, count + 1), np.int64)
    depth = 0
    while depth >= 0:
        option = at[depth]
        if option == ends[depth + 1]:
            at[depth] = ends[depth]
            depth -= 1
            if depth >= 0:
                at[depth] += 1
            continue
        used = sums[0, depth] + size[option]
        warmed = sums[1, depth] + warm[option]
        slowest = max(sums[2, depth], stage[option])
        longest = max(sums[3, depth], after[option])
        fewest = used + least[0, depth + 1]
        if fewest <= devices:
            bound = max(slowest, least[2, depth + 1])
            if depth + 1 < count:
                bound = max(bound, least[3, depth + 1] // (devices - used))
            step = warmed + least[1, depth + 1] + (microbatches - 1) * bound + max(longest, least[4, depth + 1])
            if step < best or (step == best and fewest < best_size):
                fits, late = True, 0
                for unit in range(1, depth + 1):
                    if not early[unit]:
                        late = max(late, pp[at[unit]])
                for unit in range(depth + 1):
                    other = at[unit]
                    held = pp[other]
                    if unit == 0:
                        held += late
                    elif early[unit]:
                        held += pp[at[0]] + late
                    held = min(held, microbatches)
                    more = max(room[2, other] * np.sqrt(held), room[3, other])
                    fits = fits and room[0, other] + room[1, other] * held + more <= 1
                if fits and (depth + 1 < count or used >= least_devices):
                    if depth + 1 < count:
                        sums[0, depth + 1], sums[1, depth + 1] = used, warmed
                        sums[2, depth + 1], sums[3, depth + 1] = slowest, longest
                        depth += 1
                        continue
                    best, best_size = step, used
                    found[:] = at - ends[:-1]
        at[depth] += 1
    return best
