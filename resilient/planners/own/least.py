"""What a step of one stage takes at the very least: what need not be simulated when something else is faster."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.own.dealing import work_ms
from resilient.planners.planner import Configuration, Encoders, Setting
from resilient.planners.stages.stage_work import gathers_ms, gradient_sum_ms


def least_ms(setting: Setting, configuration: Configuration, batches: Sequence[SampleTable]) -> float:
    """Return the mean over some batches.

    All devices do all work evenly, and call each unit once; or they gather its parameters, in each microbatch, and sum
    gradients, where that takes longer; or, where a device has whole samples, it does the longest of them. Of several
    microbatches all are taken to have samples of the language model everywhere.

    Args:
        setting: The job.
        configuration: Of one stage.
        batches: They.
    """
    return float(np.mean([_of_batch(setting, configuration, batch) for batch in batches]))


def _of_batch(setting: Setting, configuration: Configuration, batch: SampleTable) -> float:
    work = work_ms(setting, configuration, batch)
    step_ms, forwards_ms, sums_ms = 0.0, 0.0, 0.0
    for name, spread in configuration.units.items():
        unit, lengths = setting.costs.by_name[name], batch.units[name]
        forward, backward = unit.forward(spread.tp), unit.backward(spread.tp)
        there = int((lengths.tokens > 0).sum())
        ranks = spread.dp * spread.cp
        calls = min(1.0, there / ranks)
        forward_ms = float(forward.of(lengths).sum()) / ranks + calls * forward.fixed
        backward_ms = float(work[name].sum()) / ranks + calls * (forward.fixed + backward.fixed) - forward_ms
        if configuration.shard > 1 and there >= spread.dp:
            gathers = configuration.num_microbatches if name == LLM else 1
            gather, scatter = gathers_ms(unit, spread, setting.cluster, configuration.shard)
            forward_ms = max(forward_ms, gathers * float(gather[0]))
            backward_ms = max(backward_ms, gathers * float(scatter[0]))
        step_ms += forward_ms + backward_ms
        forwards_ms += forward_ms
        sums = gradient_sum_ms(unit, spread, setting.cluster, configuration.shard)
        sums_ms += float(sums[0])  # one after the other, as units share the network of their devices
    language = configuration.units[LLM]
    whole = language.cp == 1 and configuration.encoders is Encoders.REPLICATED
    longest_ms = float(sum(work.values(), np.zeros(1)).max(initial=0.0))
    return max(step_ms, forwards_ms + sums_ms, whole * longest_ms)
