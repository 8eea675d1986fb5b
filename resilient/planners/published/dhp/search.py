"""How many stages, ranks and microbatches DHP's groups work on: the paper takes them as given.

All units share the ranks, of ``tp`` devices each, that are left after stages have been cut: either each unit has stages
of its own, as many as it needs not to be slower than the others, or all of them are on the same devices and encoders'
work comes first. Groups are planned later and level the microbatches, so the step is predicted as if each rank had the
mean samples, without rings:

    own stages    sum(stages) + (K - 1) * slowest stage
    same devices  the same for the language model, and for the encoders' forwards and backwards

and, beyond the paper, the part of the sums of gradients over ranks that no backward hides. K is what the job asks for,
and more where the samples, packed, would not fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Parallelism, Setting
from resilient.planners.published.baselines.mean_microbatch import Stages, chained, fastest, num_microbatches
from resilient.planners.published.dhp.groups import pack, pack_ranks
from resilient.planners.stages.expected_step import expected, parallelism
from resilient.planners.stages.memory_shares import kept_shares
from resilient.planners.stages.redundancy import is_redundant
from resilient.planners.stages.stage_work import exposed_sum_ms
from resilient.templates.common.arrays import Floats

_LARGER = 1.25
"""Times the largest sample known that one of a batch may be."""

_DEVIATIONS = 3
"""Standard deviations of a batch's memory that it may have more than the mean."""

_ROUNDS = 4
"""More microbatches leave each less room: where they do not suffice by then, they are not tried."""


class _Layout(NamedTuple):
    least_ns: int  # of a step, whatever the number of microbatches
    num_devices: int
    tp: int
    ranks: int
    colocated: bool
    stages: tuple[int, ...]  # of each unit


def dhp_configuration(setting: Setting, samples: SampleTable) -> Configuration:
    """Return the configuration that takes least and holds the samples; of equals one on the fewest devices.

    Args:
        setting: The job.
        samples: A sample of the data set.

    Raises:
        ValueError: There is none; the message says what to change.
    """
    candidates = _Candidates(setting, samples)
    layouts = sorted(candidates.layouts())
    found: list[Configuration] = []
    for careful in (True, False):
        best_ns = np.inf
        for layout in layouts:
            if layout.least_ns >= best_ns:
                break
            configuration = candidates.with_room(layout, careful=careful)
            if configuration is not None:
                found.append(configuration)
                best_ns = min(best_ns, round(configuration.predicted_ms * 1e6))
        if found:
            break
    return fastest(found, "dhp", setting)


class _Candidates:
    def __init__(self, setting: Setting, samples: SampleTable) -> None:
        self.setting, self.samples = setting, samples
        self.spread = cache(self._spread)

    def layouts(self) -> Iterator[_Layout]:
        """Yield what there are devices for."""
        setting, most_tp = self.setting, self.setting.cluster.devices_per_node
        by_unit = [
            {each.tp: each.slowest_ms for each in expected(unit, lengths, setting.num_devices, most_tp)}
            for unit, lengths in zip(setting.costs.units, self.samples.units.values(), strict=True)
        ]
        for tp in sorted(set.intersection(*(set(each) for each in by_unit))):
            slowest = [each[tp] for each in by_unit]
            bounds = {ms for each in slowest for ms in each.tolist() if all(ms >= other[-1] for other in slowest)}
            apart = {tuple(int((each > bound).sum()) + 1 for each in slowest) for bound in bounds}
            together = {(pp,) * len(slowest) for pp in range(1, 1 + min(len(each) for each in slowest))}
            for colocated, all_stages in ((False, apart), (True, together)):
                for stages in all_stages:
                    size = tp * (stages[0] if colocated else sum(stages))
                    ranks = setting.num_devices // size
                    if ranks:
                        times = [float(each[pp - 1]) for pp, each in zip(stages, slowest, strict=True)]
                        least = setting.global_batch / ranks * (sum(times) if colocated else max(times))
                        yield _Layout(int(least * 1e6), ranks * size, tp, ranks, colocated, stages)

    def with_room(self, layout: _Layout, *, careful: bool) -> Configuration | None:
        """Return the configuration with as many microbatches as hold the samples, None if no number is known to.

        Args:
            layout: Of the configuration.
            careful: Whether to leave room for batches that are not like the samples.
        """
        setting, samples = self.setting, self.samples
        units = {
            unit.name: replace(self.spread(unit, layout.tp, pp), cp=layout.ranks)
            for unit, pp in zip(setting.costs.units, layout.stages, strict=True)
        }
        number = num_microbatches(setting, layout.ranks)
        rings = any(tp == layout.tp and cp > 1 for tp, cp in setting.costs.by_name[LLM].degrees)
        largest_group = layout.ranks if rings else 1
        for _ in range(_ROUNDS):
            found = Configuration(units=units, num_microbatches=number, colocated=layout.colocated)
            if not is_redundant(setting, found):
                return None
            try:
                shares = kept_shares(setting, found, samples)
            except ValueError:
                return None
            if shares.max() * (_LARGER if careful else 1.0) > largest_group:
                return None
            microbatches = pack_ranks(pack(shares)[1], layout.ranks).max() + 1
            deviation = float(shares.std() / max(shares.mean(), 1e-30)) / np.sqrt(setting.global_batch)
            spare = 1 + _DEVIATIONS * deviation if careful else 1.0
            least = int(np.ceil(spare * microbatches / len(samples) * setting.global_batch))
            if least <= number:
                return replace(found, predicted_ms=self._predicted_ms(found))
            number = least
        return None

    def _spread(self, unit: UnitCosts, tp: int, pp: int) -> Parallelism:
        return parallelism(unit, self.samples.units[unit.name], 1, pp, tp)

    def _predicted_ms(self, configuration: Configuration) -> float:
        setting, number = self.setting, configuration.num_microbatches
        mean = setting.global_batch / (number * configuration.units[LLM].cp)
        stages: dict[str, Stages] = {}
        for unit in setting.costs.units:
            alone = replace(configuration.units[unit.name], cp=1)
            stages[unit.name] = Stages.of(unit, alone, self.samples.units[unit.name], mean)
        backward_ms = {name: each.backward_ms for name, each in stages.items()}

        def pipelined(stage_ms: Floats) -> float:
            return float(stage_ms.sum() + (number - 1) * stage_ms.max())

        def sums(*units: UnitCosts) -> float:
            return exposed_sum_ms(units, configuration.units, setting.cluster, backward_ms)

        if not configuration.colocated:
            return pipelined(chained(stages.values()).work_ms) + sums(*setting.costs.units)
        encoders = [unit for unit in setting.costs.units if unit.name != LLM]
        before = sum(pipelined(stages[unit.name].forward_ms) for unit in encoders)
        after = sum(pipelined(stages[unit.name].backward_ms) for unit in encoders)
        # While the language model's gradients are summed, encoders run all their backwards.
        left = max(sums(setting.costs.by_name[LLM]) - after, sums(*encoders))
        return before + pipelined(stages[LLM].work_ms) + after + left
