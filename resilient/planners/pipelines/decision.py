"""A planner's configuration for one pipeline as a template: its lanes on devices, what they take, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import msgspec
import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.memory_budget import windows
from resilient.planners.stages.one_pipeline import several
from resilient.planners.stages.stage_work import (
    by_stage,
    exposed_sum_ms,
    kept_bytes,
    num_recomputed,
    shared_sum_ms,
    state_bytes,
)
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec


def template_of(setting: Setting, configuration: Configuration, samples: SampleTable) -> PipelineTemplate:
    """Return the pipeline that a planner answered.

    Times are those of a microbatch of the language model with mean samples: of each lane its share.

    Args:
        setting: A job on as many nodes as the pipeline has.
        configuration: The planner's, of one replica of the language model, each stage on one device.
        samples: Of the data set.

    Raises:
        ArgumentError: A stage is on several devices, there are several replicas, or stages run encoders again.
    """
    _check(configuration)
    layout = DeviceLayout(configuration, 1)
    devices = setting.cluster.devices_per_node
    stages: list[StageSpec] = []
    first_layer = 0
    for unit in setting.costs.units:
        spread, rows = configuration.units[unit.name], layout.rows[LLM if layout.replicated else unit.name]
        forward, backward = _cell_ms(setting, unit, spread, samples, len(rows))
        send = _send_ms(setting, unit, samples, layout)
        memory = _held_bytes(setting, configuration, unit, samples, len(rows))
        recomputed = _recomputed_layers(unit, spread)
        for lane, of_lane in enumerate(rows.tolist()):
            first = first_layer
            for stage, row in enumerate(of_lane):
                end = first + spread.stage_layers[stage]
                stages.append(
                    StageSpec(
                        lane=LaneName(unit.name, lane),
                        first_layer=first,
                        end_layer=end,
                        node_index=row // devices,
                        first_device=row % devices,
                        recomputed_layers=int(recomputed[stage]),
                        forward_ms=float(forward[stage]),
                        backward_ms=float(backward[stage]),
                        send_ms=float(send[lane, stage]),
                        memory_bytes=round(float(memory[stage])),
                    )
                )
                first = end
        first_layer += len(unit.layers)
    return PipelineTemplate(
        num_nodes=setting.num_nodes,
        stages=tuple(stages),
        sync_ms=_sync_ms(setting, configuration, samples, 2),
        lone_sync_ms=_sync_ms(setting, configuration, samples, 1),
        decision=msgspec.json.encode(configuration).decode(),
    )


def decision_of(template: PipelineTemplate) -> Configuration:
    """Return the configuration that a template was made of."""
    return msgspec.json.decode(template.decision, type=Configuration)


def _check(configuration: Configuration) -> None:
    for name, spread in configuration.units.items():
        if spread.tp * spread.cp > 1:
            got = f"{spread.tp} x {spread.cp} in {name!r}"
            raise ArgumentError("devices of a stage", "be one", got, "profile no other degrees")
        if spread.chunks > 1:
            got = f"{spread.chunks} of {name!r}"
            raise ArgumentError("stages of a device", "be one", got, "interleaved stages are for simulation alone")
    if configuration.units[LLM].dp != 1:
        got = configuration.units[LLM].dp
        raise ArgumentError("replicas of the language model", "be one in a pipeline", got, "ask for one pipeline")
    if configuration.encoders is Encoders.REPLICATED and configuration.units[LLM].pp > 1:
        got = f"{configuration.units[LLM].pp} stages that run encoders for themselves"
        raise ArgumentError("replicated encoders", "be beside one stage of the language model", got, "place them apart")


def _cell_ms(
    setting: Setting, unit: UnitCosts, spread: Parallelism, samples: SampleTable, num_lanes: int
) -> tuple[Floats, Floats]:
    """Return forward and backward of each stage for a lane's share of a mean microbatch."""
    tokens, squares = _mean(setting, unit, samples)
    forward, backward = unit.layer_ms(tokens / num_lanes, squares / num_lanes)
    places = np.arange(len(unit.layers)) - np.repeat(spread.first_layers, spread.stage_layers)
    again = places < np.repeat(_recomputed_layers(unit, spread), spread.stage_layers)
    again &= np.array([layer.has_backward for layer in unit.layers])
    return by_stage(spread, forward), by_stage(spread, backward + forward * again)


def _recomputed_layers(unit: UnitCosts, spread: Parallelism) -> Ints:
    """Return how many layers of each stage, from its first one on, run again in the backward, if they have one."""
    found: list[int] = []
    for first, count in zip(spread.first_layers.tolist(), spread.stage_layers, strict=True):
        passed = [layer.has_backward for layer in unit.layers[first : first + count]]
        number = num_recomputed(spread, sum(passed))
        found.append(count - sum(passed) + number if number else 0)
    return np.array(found)


def _held_bytes(
    setting: Setting, configuration: Configuration, unit: UnitCosts, samples: SampleTable, num_lanes: int
) -> Floats:
    """Return what each stage holds at most: state, and what mean microbatches in flight keep. [num_stages]"""
    spread = configuration.units[unit.name]
    kept = windows(configuration, unit.name) * kept_bytes(unit, spread)
    return state_bytes(setting, unit, spread) + kept * _mean(setting, unit, samples)[0] / num_lanes


def _mean(setting: Setting, unit: UnitCosts, samples: SampleTable) -> tuple[float, float]:
    """Return tokens and squares of a unit in a microbatch of the language model."""
    lengths = samples.units[unit.name]
    if not len(lengths.tokens):
        return 0.0, 0.0
    return setting.microbatch * float(lengths.tokens.mean()), setting.microbatch * float(lengths.squares.mean())


def _send_ms(setting: Setting, unit: UnitCosts, samples: SampleTable, layout: DeviceLayout) -> Floats:
    """Return what both messages over the boundary before each stage take; the first gets what other units make.

    Stages of one row send each other nothing, those of one node send over what is inside it. ``[num_lanes,
    num_stages]``
    """
    cluster, rows = setting.cluster, layout.rows[LLM if layout.replicated else unit.name]

    def both_ms(source: int, target: int, num_bytes: float) -> float:
        if source == target or not num_bytes:
            return 0.0
        within = source // cluster.devices_per_node == target // cluster.devices_per_node
        return 2 * (cluster.intra_node if within else cluster.inter_node).transfer_ms(num_bytes)

    num_bytes = _mean(setting, unit, samples)[0] / len(rows) * unit.boundary_bytes
    language = setting.language
    position = setting.costs.units.index(unit)
    sources = setting.costs.units[:language] if position == language else setting.costs.units[language:][:1]
    sent = np.zeros(rows.shape)
    for lane, of_lane in enumerate(rows.tolist()):
        sent[lane, 1:] = [both_ms(source, target, num_bytes) for source, target in pairwise(of_lane)]
        for source in () if layout.replicated or position < language else sources:
            lasts = layout.rows[source.name][:, -1].tolist()
            beside = source if position == language else unit  # of it the tokens that are handed on are
            handed = _mean(setting, beside, samples)[0] * beside.output_bytes / (len(lasts) * len(rows))
            sent[lane, 0] += sum(both_ms(last, of_lane[0], handed) for last in lasts)
    return sent


def _sync_ms(setting: Setting, configuration: Configuration, samples: SampleTable, num_pipelines: int) -> float:
    """Return what of the sums of gradients no backward hides, of so many pipelines like this one."""
    backward: Mapping[str, Floats] = {
        unit.name: _cell_ms(setting, unit, configuration.units[unit.name], samples, configuration.units[unit.name].dp)[
            1
        ]
        for unit in setting.costs.units
    }
    units, spreads = setting.costs.units, several(configuration, num_pipelines).units
    if not configuration.colocated:
        return exposed_sum_ms(units, spreads, setting.cluster, backward)
    encoding_ms = sum(float(each.sum()) for name, each in backward.items() if name != LLM)
    return shared_sum_ms(units, spreads, setting.cluster, backward, encoding_ms)
