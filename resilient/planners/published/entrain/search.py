"""Entrain's configuration search: every unit as many stages as its work is worth.

For each number of replicas and each degree of tensor and context parallelism of each unit, the devices of a replica are
divided in proportion to the units' mean work, counted in device time at that degree; layers are cut into the stages
that this makes; and

    step = max(K, X) * slowest stage + X * (longest branch - slowest stage)
           + what no backward hides of the sum of gradients,

where X is 1 in the paper, and a branch is an encoder's stages, those of the language model after it, the messages
between stages, and *resharding*: each device of the smaller group sends or receives its part of the encoder's output,
and of its gradient. K = B / (DP * mu) microbatches, so DP divides B / mu. The last term is not in the paper; without
it, many replicas of few microbatches are chosen whose gradients take longer than the step. Nor is X: how many times as
long as that branch the longest sample of a batch is expected to take in all stages, if it does take longer.
Microbatches are made as large as it is (:mod:`resilient.planners.published.entrain.deferral`), so the pipeline fills
and empties that much slower; data with heavy tails take up to several times what is predicted without it.

Everything else is that of the mean microbatch: mu samples of mean length and mean square. Its activations count as
often as 1F1B holds them, and once more in encoders, because of deferred samples; one of those held may consist of the
largest sample. A replica's share of a batch may have two standard deviations more than its mean. The optimizer is
sharded over replicas.

Source: Entrain, sections 4.4.1 and 4.4.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.packing.balance import Cuts
from resilient.planners.packing.proportion import proportional
from resilient.planners.planner import Configuration, Parallelism, Setting
from resilient.planners.published.baselines.mean_microbatch import fastest
from resilient.planners.stages.expected_step import longest_ms
from resilient.planners.stages.one_pipeline import is_asked_for
from resilient.planners.stages.stage_work import exposed_sum_ms
from resilient.templates.common.arrays import Floats
from resilient.templates.inputs.cluster import Link

_MARGIN = 2.0
"""Standard deviations by which a replica's samples of a step may have more tokens than on average."""


def entrain_configurations(setting: Setting, samples: SampleTable) -> Iterator[Configuration]:
    """Yield configurations that fit, those that take least first; of equals those on the fewest devices.

    Args:
        setting: The job.
        samples: A sample of the data set.

    Raises:
        ValueError: There is none.
    """
    names, language = [unit.name for unit in setting.costs.units], setting.language
    if not len(samples):
        raise ArgumentError("samples", "be one or more", "none", "draw some from the data set")
    options = [_options(setting, unit, samples.units[unit.name]) for unit in setting.costs.units]
    number = -(-setting.global_batch // setting.microbatch)
    found = sorted(_candidates(setting, options, language, number), key=lambda each: (each.step_ns, each.num_devices))
    if not found:
        raise ArgumentError(
            "num_nodes",
            "let 'entrain' give every unit stages in proportion to its work, and no more than it has layers",
            f"{setting.num_nodes} of {setting.cluster.devices_per_node} devices for {number} microbatches",
            "use more nodes, or fewer",
        )
    memory, least, fits = setting.cluster.memory_bytes, np.inf, False
    for each in found:
        configuration = Configuration(
            units=_spread(names, each.dp, each.options, each.stages),
            num_microbatches=number // each.dp,
            predicted_ms=each.step_ns / 1e6,
        )
        if not is_asked_for(setting, configuration):
            continue
        needed = 0.0 if memory is None else _memory_bytes(each, language, number // each.dp)
        if memory is None or needed <= memory:
            fits = True
            yield configuration
        least = min(least, needed)
    if fits:
        return
    if least == np.inf:
        fastest((), "entrain", setting)
    raise ArgumentError(
        "memory_bytes",
        f"be >= {least:.0f}, what the least demanding configuration needs",
        memory,
        "use more nodes, a smaller microbatch, or larger devices",
    )


class _Option:
    """One unit at one degree: what the mean microbatch costs it.

    Attributes:
        tp: The degree.
        cp: Likewise.
        size: Devices of a stage.
        total_ms: Forward and backward of all layers.
        slowest_ms: Those of the slowest stage, by the number of stages less one.
        sample_ms: Forward and backward of each sample in all layers, with what calls take beside.
        send_ms: Messages over a boundary between two stages.
        output_bytes: Of what the next unit gets, and of the gradient that it returns.
    """

    def __init__(self, setting: Setting, unit: UnitCosts, lengths: Lengths, tp: int, cp: int) -> None:
        self.tp, self.cp, self.size = tp, cp, tp * cp
        tokens, squares = (setting.microbatch * float(each.mean()) for each in (lengths.tokens, lengths.squares))
        forward_ms, backward_ms = unit.layer_ms(tokens, squares, tp, cp)
        layer_ms = forward_ms + backward_ms
        self.total_ms = float(layer_ms.sum())
        work = unit.work(tp, cp)
        self.sample_ms = work.of(lengths) + work.fixed * (lengths.tokens > 0)
        self._cuts = Cuts(layer_ms, len(unit.layers))
        self.slowest_ms = self._cuts.slowest
        directions = 1 + any(layer.input_gradient for layer in unit.layers[1:])
        self.send_ms = directions * _link(setting).transfer_ms(unit.boundary_bytes * tokens / self.size)
        self.output_bytes = unit.output_bytes * tokens
        index = unit.index(tp, cp)
        kept = [layer.curves[index].activation_bytes * tokens * layer.has_backward for layer in unit.layers]
        self._excess = max(float(lengths.tokens.max()) / tokens - 1, 0.0) if tokens else 0.0
        # Of the mean of a batch, by the mean of samples.
        mean = float(lengths.tokens.mean())
        self._deviation = float(lengths.tokens.std()) / mean / setting.global_batch**0.5 if mean else 0.0
        held = [layer.parameter_bytes + layer.gradient_bytes for layer in unit.layers]
        optimizer = [layer.optimizer_bytes for layer in unit.layers]
        self._of_layers = np.stack([kept, np.array(held) / tp, np.array(optimizer) / tp, backward_ms])
        self._sharded_part = setting.sharded_part
        self._stages: dict[int, tuple[tuple[int, ...], Floats]] = {}

    def cut(self, num_stages: int) -> tuple[int, ...]:
        """Return the layers of each stage."""
        return self._cut(num_stages)[0]

    def backward_ms(self, num_stages: int) -> Floats:
        """Return what each stage's backward takes."""
        return self._cut(num_stages)[1][3]

    def memory_bytes(self, num_stages: int, dp: int, in_flight: Floats) -> float:
        """Return what the fullest stage needs on each device, with the microbatches in flight on each stage."""
        kept, held, optimizer, _ = self._cut(num_stages)[1]
        in_flight = in_flight * (1 + _MARGIN * self._deviation * dp**0.5)
        return float((held + optimizer * self._sharded_part(dp * self.cp) + kept * (in_flight + self._excess)).max())

    def _cut(self, num_stages: int) -> tuple[tuple[int, ...], Floats]:
        """Return each stage's layers, and of each its activations, the bytes of parameters and gradients and those of
        the optimizer, and the time of its backward. [4, num_stages]"""
        if num_stages not in self._stages:
            layers = self._cuts.layers(num_stages)
            self._stages[num_stages] = layers, np.add.reduceat(self._of_layers, np.cumsum((0, *layers[:-1])), axis=1)
        return self._stages[num_stages]


class _Candidate(NamedTuple):
    step_ns: int
    num_devices: int
    dp: int
    options: tuple[_Option, ...]
    stages: tuple[int, ...]


def _options(setting: Setting, unit: UnitCosts, lengths: Lengths) -> list[_Option]:
    most = setting.cluster.devices_per_node
    return [_Option(setting, unit, lengths, tp, cp) for tp, cp in unit.degrees if tp <= most and not most % tp]


def _link(setting: Setting) -> Link:
    return setting.cluster.inter_node if setting.num_nodes > 1 else setting.cluster.intra_node


def _candidates(
    setting: Setting, options: Sequence[Sequence[_Option]], language: int, number: int
) -> Iterator[_Candidate]:
    """Yield what has at most one stage for each layer, whether it fits into memory or not."""
    returns = setting.costs.units[language].layers[0].input_gradient
    link = _link(setting)
    longest: dict[tuple[_Option, ...], float] = {}
    names = [unit.name for unit in setting.costs.units]
    for dp in (each for each in range(1, min(number, setting.num_devices) + 1) if number % each == 0):
        if setting.num_pipelines not in (None, dp):
            continue
        devices = setting.num_devices // dp
        for chosen in itertools.product(*options):
            sizes = [each.size for each in chosen]
            if sum(sizes) > devices:
                continue
            allocated = proportional([each.total_ms * each.size for each in chosen], sizes, devices)
            stages = tuple(count // size for count, size in zip(allocated, sizes, strict=True))
            if any(pp > len(each.slowest_ms) for pp, each in zip(stages, chosen, strict=True)):
                continue
            slowest = max(float(each.slowest_ms[pp - 1]) for pp, each in zip(stages, chosen, strict=True))
            filled = [each.total_ms + (pp - 1) * each.send_ms for pp, each in zip(stages, chosen, strict=True)]
            reshard = [
                (1 + returns) * link.transfer_ms(each.output_bytes / min(each.size, chosen[language].size))
                for each in chosen[:language]
            ]
            branch = max(map(sum, zip(filled[:language], reshard, strict=True)), default=0.0)
            backward_ms = {name: each.backward_ms(pp) for name, each, pp in zip(names, chosen, stages, strict=True)}
            spread = _spread(names, dp, chosen, stages)
            sums = exposed_sum_ms(setting.costs.units, spread, setting.cluster, backward_ms)
            branch += sum(filled[language:])
            if chosen not in longest:
                longest[chosen] = _longest_ms(chosen, language, setting.global_batch)
            longer = max(1.0, longest[chosen] / branch)
            step_ms = max(number // dp, longer) * slowest + longer * (branch - slowest) + sums
            yield _Candidate(round(step_ms * 1e6), dp * sum(allocated), dp, chosen, stages)


def _longest_ms(chosen: Sequence[_Option], language: int, batch: int) -> float:
    """Return what the longest sample of a batch is expected to take on its way through the stages."""
    encoders = np.max([each.sample_ms for each in chosen[:language]] or [0.0], axis=0)
    return longest_ms(encoders + sum(each.sample_ms for each in chosen[language:]), batch)


def _spread(
    names: Sequence[str], dp: int, options: Sequence[_Option], stages: Sequence[int]
) -> Mapping[str, Parallelism]:
    return {
        name: Parallelism(dp=dp, pp=pp, tp=option.tp, cp=option.cp, stage_layers=option.cut(pp))
        for name, option, pp in zip(names, options, stages, strict=True)
    }


def _memory_bytes(candidate: _Candidate, language: int, num_microbatches: int) -> float:
    """Return what the fullest device needs."""
    fullest, behind = 0.0, 0
    for unit in range(len(candidate.options) - 1, -1, -1):
        pp = candidate.stages[unit]
        held = behind + np.arange(pp, 0, -1) + (unit < language)
        in_flight = np.minimum(held, num_microbatches).astype(np.float64)
        fullest = max(fullest, candidate.options[unit].memory_bytes(pp, candidate.dp, in_flight))
        behind += pp if unit >= language else 0  # encoders stand side by side
    return fullest
