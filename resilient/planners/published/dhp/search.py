"""How many stages, ranks and microbatches DHP's groups work on: the paper takes them as given.

A replica is a pool of ranks, of ``tp`` devices each, of which groups are formed. Either each unit has stages of its
own, as many as it needs not to be slower than the others, or there is one stage of all units, and a rank encodes what
it then reads. The ranks of a stage lie in one node, and there are as many replicas as nodes have devices for; in the
paper's setting one replica has the ranks of all nodes. Groups are planned later and level the microbatches, so the
step is predicted as if each rank had the mean samples, without rings:

    own stages   sum(stages) + (K - 1) * slowest stage
    one stage    K * stage

and, beyond the paper, the part of the sums of gradients over ranks that no backward hides. The optimizer is sharded
over all ranks of all replicas. K is what the job asks for, or 1 in one stage, and more where the samples, packed, would
not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.published.baselines.mean_microbatch import Stages, chained, fastest, num_microbatches
from resilient.planners.published.dhp.groups import pack, pack_ranks
from resilient.planners.stages.expected_step import expected, parallelism
from resilient.planners.stages.memory_shares import kept_shares
from resilient.planners.stages.one_pipeline import is_asked_for
from resilient.planners.stages.stage_work import exposed_sum_ms, gradient_sum_ms, last_part, unhidden_ms
from resilient.templates.common.arrays import Floats

_LARGER = 1.25
"""Times the largest sample known that one of a batch may be."""

_DEVIATIONS = 3
"""Standard deviations of a batch's memory that it may have more than the mean."""


class _Layout(NamedTuple):
    least_ns: int  # of a step, whatever the number of microbatches
    num_devices: int
    tp: int
    dp: int
    ranks: int  # of each replica
    one_stage: bool
    stages: tuple[int, ...]  # of each unit


def dhp_configuration(setting: Setting, samples: SampleTable, name: str, *, across_nodes: bool) -> Configuration:
    """Return the configuration that takes least and holds the samples; of equals one on the fewest devices.

    Args:
        setting: The job.
        samples: A sample of the data set.
        name: Of the planner, for messages.
        across_nodes: Whether one replica has the ranks of all nodes, as published.

    Raises:
        ValueError: There is none; the message says what to change.
    """
    candidates = _Candidates(setting, samples, across_nodes)
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
    return fastest(found, name, setting)


def has_rings(setting: Setting, tp: int) -> bool:
    """Return whether groups may be of several ranks: a sample has the same one in all units, which must all know it."""
    return all(any(each == tp and cp > 1 for each, cp in unit.degrees) for unit in setting.costs.units)


class _Candidates:
    def __init__(self, setting: Setting, samples: SampleTable, across_nodes: bool) -> None:
        self.setting, self.samples, self.across_nodes = setting, samples, across_nodes
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
            apart = self._apart(slowest, tp)
            for one_stage, every in ((False, apart), (True, {(1,) * len(slowest)})):
                for stages in every:
                    times = [float(each[pp - 1]) for pp, each in zip(stages, slowest, strict=True)]
                    rank_ms = sum(times) if one_stage else max(times)
                    for dp, ranks in self._pools(tp * (1 if one_stage else sum(stages)), tp):
                        least = int(1e6 * setting.global_batch / (dp * ranks) * rank_ms)
                        used = dp * ranks * tp * (1 if one_stage else sum(stages))
                        yield _Layout(least, used, tp, dp, ranks, one_stage, stages)

    def _apart(self, slowest: Sequence[Floats], tp: int) -> set[tuple[int, ...]]:
        """Return the stages of units that have their own: as few as make all as fast, or as many as use all devices."""
        setting = self.setting
        if setting.num_pipelines:
            pipeline = tp * setting.num_pipelines
            ways = product(*(range(1, len(each) + 1) for each in slowest))
            return {way for way in ways if setting.num_devices % (pipeline * sum(way)) == 0}
        bounds = {ms for each in slowest for ms in each.tolist() if all(ms >= other[-1] for other in slowest)}
        return {tuple(int((each > bound).sum()) + 1 for each in slowest) for bound in bounds}

    def _pools(self, rank_devices: int, tp: int) -> Iterator[tuple[int, int]]:
        """Yield replicas, and the ranks of each, of so many devices in all stages."""
        setting, in_node = self.setting, self.setting.cluster.devices_per_node
        if self.across_nodes:
            pools = [setting.num_devices // rank_devices]
        else:
            pools = [ranks for ranks in range(1, in_node // tp + 1) if in_node % (ranks * tp) == 0]
        for ranks in pools:
            dp = setting.num_devices // (rank_devices * max(ranks, 1))
            # Ranks that form no groups are replicas.
            if ranks and dp and (ranks == 1 or has_rings(setting, tp) or not setting.num_pipelines):
                yield dp, ranks

    def with_room(self, layout: _Layout, *, careful: bool) -> Configuration | None:
        """Return the configuration with as many microbatches as hold the samples, None if no number does.

        Args:
            layout: Of the configuration.
            careful: Whether to leave room for batches that are not like the samples.
        """
        setting, samples = self.setting, self.samples
        units = {
            unit.name: replace(self.spread(unit, layout.tp, pp), dp=layout.dp, cp=layout.ranks)
            for unit, pp in zip(setting.costs.units, layout.stages, strict=True)
        }
        found = Configuration(
            units=units,
            num_microbatches=1 if layout.one_stage else num_microbatches(setting, layout.dp * layout.ranks),
            colocated=layout.one_stage,
            encoders=Encoders.REPLICATED if layout.one_stage else Encoders.PARALLEL,
        )
        if not is_asked_for(setting, found):
            return None
        largest_group = layout.ranks if has_rings(setting, layout.tp) else 1
        # More microbatches leave each less room, until stages hold as many as they do at a time.
        while True:
            try:
                shares = kept_shares(setting, found, samples)
            except ValueError:
                return None
            if shares.max() * (_LARGER if careful else 1.0) > largest_group:
                return None
            microbatches = pack_ranks(pack(shares)[1], layout.ranks).max() + 1
            deviation = float(shares.std() / max(shares.mean(), 1e-30)) / np.sqrt(setting.global_batch)
            spare = 1 + _DEVIATIONS * deviation if careful else 1.0
            least = int(np.ceil(spare * microbatches / len(samples) * setting.global_batch / layout.dp))
            if least <= found.num_microbatches:
                return replace(found, predicted_ms=self._predicted_ms(found))
            found = replace(found, num_microbatches=least)

    def _spread(self, unit: UnitCosts, tp: int, pp: int) -> Parallelism:
        return parallelism(unit, self.samples.units[unit.name], 1, pp, tp)

    def _predicted_ms(self, configuration: Configuration) -> float:
        setting, spreads, number = self.setting, configuration.units, configuration.num_microbatches
        mean = setting.global_batch / (number * spreads[LLM].dp * spreads[LLM].cp)
        units = setting.costs.units
        stages = {
            unit.name: Stages.of(unit, replace(spreads[unit.name], cp=1), self.samples.units[unit.name], mean)
            for unit in units
        }
        if configuration.encoders is Encoders.REPLICATED:
            backward_ms = sum((each.backward_ms for each in stages.values()), np.zeros(1))
            sums = [gradient_sum_ms(each, spreads[each.name], setting.cluster) for each in units]
            lasts = [ms * last_part(each, spreads[each.name]) for ms, each in zip(sums, units, strict=True)]
            last = next((each for each in lasts if each.any()), np.zeros(1))
            left = float(unhidden_ms(np.sum(sums, axis=0), backward_ms, last))
            return number * float(sum(each.work_ms.sum() for each in stages.values())) + left
        stage_ms = chained(stages.values()).work_ms
        backwards = {name: each.backward_ms for name, each in stages.items()}
        left = exposed_sum_ms(units, spreads, setting.cluster, backwards)
        return float(stage_ms.sum() + (number - 1) * stage_ms.max()) + left
