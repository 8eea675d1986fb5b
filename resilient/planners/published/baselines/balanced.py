"""What planners are compared with, beside :mod:`resilient.planners.published.baselines.uniform`.

All of them take samples as they come, but for :class:`RandomOrder`, which takes them in some other order; but for its,
their configurations are those with the least predicted time. In those where encoders lie on the language model's
devices, all units have the same replicas and the same stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.packing.balance import cut_chain
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import (
    AsTheyCome,
    Stages,
    common_degrees,
    fastest,
    fits,
    in_order,
    num_microbatches,
)
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.stages.stage_work import gathers_ms, shared_sum_ms, state_bytes
from resilient.templates.common.arrays import Floats


@dataclass(frozen=True)
class RandomOrder(Uniform):
    """Samples in an order drawn once per size of batch.

    Args:
        seed: Of the draw.
    """

    name: str = "random"
    source: str = "a baseline"
    seed: int = 0

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        """Draw an order, then place samples in it as :class:`Uniform` does."""
        order = np.random.default_rng(self.seed).permutation(len(batch))
        drawn = in_order(len(batch), replicas)
        place = Place(replica=drawn.replica[order], microbatch=drawn.microbatch[order])
        return Assignment(units=dict.fromkeys(batch.units, place))


@dataclass(frozen=True)
class FullySharded(AsTheyCome):
    """FSDP: every device is a replica, and all of them share the parameters, gradients and optimizer.

    A layer's parameters are gathered before its forward and again before its backward, its gradient is scattered after
    that; each of these is hidden behind the computation of other layers as far as that takes as long.
    """

    name: str = "fsdp"
    source: str = "Zhao et al. 2023 (PyTorch FSDP), full sharding"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the only configuration, if it fits.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        return fastest(self._candidates(setting, samples), self.name, setting)

    def _candidates(self, setting: Setting, samples: SampleTable) -> Iterable[Configuration]:
        dp = min(setting.num_devices, setting.global_batch)
        number = num_microbatches(setting, dp)
        mean = setting.global_batch / (dp * number)
        step_ms, kept, largest = 0.0, 0.0, 0
        units = setting.costs.units
        spread = {unit.name: Parallelism(dp=dp, pp=1, stage_layers=(len(unit.layers),)) for unit in units}
        for unit in units:
            stage = Stages.of(unit, spread[unit.name], samples.units[unit.name], mean)
            gather, scatter = gathers_ms(unit, spread[unit.name], setting.cluster, dp)
            step_ms += float(np.maximum(stage.forward_ms, gather)[0] + np.maximum(stage.backward_ms, scatter)[0])
            kept += float(stage.activation_bytes(1)[0])
            largest = max(largest, max(layer.parameter_bytes + layer.gradient_bytes for layer in unit.layers))
        state = sum(float(state_bytes(setting, unit, spread[unit.name], shard=dp)[0]) for unit in units)
        # The layer that computes is whole, and so is the one whose parameters come in meanwhile.
        if fits(setting, np.array([state + kept + 2 * largest])):
            yield Configuration(
                units=spread,
                num_microbatches=number,
                colocated=True,
                shard=dp,
                predicted_ms=number * step_ms,
            )


@dataclass(frozen=True)
class EncoderFirst(AsTheyCome):
    """DIP: every device holds a stage of each unit; all encoder forwards come first, all encoder backwards last.

    Layers are cut such that the slowest stage of each unit is as fast as it can be.
    """

    name: str = "dip"
    source: str = "DIP, as Entrain's evaluation compares with it"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the fastest of all tensor-parallel degrees and numbers of stages.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        return fastest(self._candidates(setting, samples), self.name, setting)

    def _candidates(self, setting: Setting, samples: SampleTable) -> Iterable[Configuration]:
        most = min(len(unit.layers) for unit in setting.costs.units)
        for tp, cp in common_degrees(setting.costs):
            if cp == 1 and tp <= setting.cluster.devices_per_node:
                for pp in range(1, min(most, setting.num_devices // tp) + 1):
                    yield from _colocated(setting, samples, pp, tp, 1)


@dataclass(frozen=True)
class StaticContext(AsTheyCome):
    """One context-parallel degree for all sequences, large enough for the longest.

    There are no stages, and encoders lie on the language model's devices. Of twice as many blocks of a sequence as
    there are ranks, a rank has one from the front and one as far from the end: under a causal mask all have equal work.
    """

    name: str = "static-cp"
    source: str = "Grattafiori et al. 2024 (Llama 3), section 3.3.2; what DHP is compared with"

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        """Return the fastest of all degrees.

        Args:
            setting: The job.
            samples: A sample of the data set.

        Raises:
            ValueError: It does not fit.
        """
        return fastest(self._candidates(setting, samples), self.name, setting)

    def _candidates(self, setting: Setting, samples: SampleTable) -> Iterable[Configuration]:
        for tp, cp in common_degrees(setting.costs):
            if tp <= setting.cluster.devices_per_node and tp * cp <= setting.num_devices:
                yield from _colocated(setting, samples, 1, tp, cp)


def _colocated(setting: Setting, samples: SampleTable, pp: int, tp: int, cp: int) -> Iterable[Configuration]:
    """Return the configuration with all units on the same devices, if it fits."""
    dp = min(setting.num_devices // (pp * tp * cp), setting.global_batch)
    number = num_microbatches(setting, dp)
    mean = setting.global_batch / (dp * number)
    spread: dict[str, Parallelism] = {}
    num_bytes, predicted, afterwards = np.zeros(pp), 0.0, 0.0
    backward_ms: dict[str, Floats] = {}
    for unit in setting.costs.units:
        lengths = samples.units[unit.name]
        alone = Parallelism(dp=dp, pp=len(unit.layers), tp=tp, cp=cp, stage_layers=(1,) * len(unit.layers))
        by_layer = Stages.of(unit, alone, lengths, mean)
        spread[unit.name] = replace(alone, pp=pp, stage_layers=cut_chain(by_layer.work_ms, pp))
        stages = by_layer.joined(spread[unit.name].stage_layers)
        if unit.name == LLM:
            in_flight = np.minimum(np.arange(pp, 0, -1), number)
            stage_ms = stages.work_ms
            predicted += float(stage_ms.sum() + (number - 1) * stage_ms.max())
        else:
            in_flight = np.full(pp, number)
            for stage_ms in (stages.forward_ms, stages.backward_ms):
                predicted += float(stage_ms.sum() + (number - 1) * stage_ms.max())
            afterwards += float(stages.backward_ms.sum() + (number - 1) * stages.backward_ms.max())
        backward_ms[unit.name] = stages.backward_ms
        num_bytes += stages.state_bytes(setting.sharded_part(dp * cp)) + stages.activation_bytes(in_flight)
    if fits(setting, num_bytes):
        predicted += shared_sum_ms(setting.costs.units, spread, setting.cluster, backward_ms, afterwards)
        yield Configuration(units=spread, num_microbatches=number, colocated=True, predicted_ms=predicted)
