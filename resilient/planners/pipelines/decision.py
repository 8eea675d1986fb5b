"""A planner's configuration for one pipeline as a template: its lanes on devices, what they take, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.one_pipeline import several, why_not_run
from resilient.planners.stages.pipeline_memory import held_bytes, mean_size, unit_rows
from resilient.planners.stages.stage_work import (
    by_stage,
    exposed_sum_ms,
    gathers_ms,
    num_recomputed,
    shared_sum_ms,
)
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec


def template_of(setting: Setting, configuration: Configuration, samples: SampleTable) -> PipelineTemplate:
    """Return the pipeline that a planner answered.

    Times are those of a microbatch of the language model with mean samples: of each lane its share.

    Args:
        setting: A job on as many nodes as the pipeline has.
        configuration: The planner's, of one replica of the language model, each stage on one device or on several of
            a node that are tensor parallel; or of those on a node that divide a copy, each with all units of its
            samples: these are one lane of each unit.
        samples: Of the data set.

    Raises:
        ArgumentError: There are several copies, or stages that cannot be run.
    """
    devices = setting.cluster.devices_per_node
    _check(configuration, devices)
    layout = DeviceLayout(configuration, 1)
    firsts = layout.firsts.tolist()
    stages: list[StageSpec] = []
    held = held_bytes(setting, configuration, samples)
    first_layer = 0
    for unit in setting.costs.units:
        spread, rows = configuration.units[unit.name], unit_rows(layout, unit.name)
        forward, backward = _cell_ms(setting, configuration, unit, samples, len(rows))
        send = _send_ms(setting, unit, samples, layout, spread.tp)
        memory = held[unit.name]
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
                        node_index=firsts[row] // devices,
                        first_device=firsts[row] % devices,
                        num_devices=configuration.shard * spread.tp,
                        shard=configuration.shard,
                        recomputed_layers=int(recomputed[stage]),
                        forward_ms=float(forward[stage]),
                        backward_ms=float(backward[stage]),
                        send_ms=float(send[lane, stage]),
                        memory_bytes=int(memory[lane, stage]),
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


def with_lanes(configuration: Configuration) -> Configuration:
    """Return a configuration in which encoders that every stage of the language model has are lanes of one stage each.

    Only the first stage uses what they make: they share the samples of a microbatch instead of all doing them again.
    """
    depth = configuration.units[LLM].pp if configuration.encoders is Encoders.REPLICATED else 1
    units = {
        name: each if name == LLM else replace(each, dp=each.dp * depth) for name, each in configuration.units.items()
    }
    return replace(configuration, units=units)


def _check(configuration: Configuration, devices_per_node: int) -> None:
    why = why_not_run(configuration, devices_per_node)
    if why:
        wanted = "be one, or tensor parallel in one node"
        raise ArgumentError("devices of a stage", wanted, f"a plan in which {why}", "profile no other degrees")
    if configuration.units[LLM].dp != configuration.shard:
        wanted = "one" if configuration.shard == 1 else f"the {configuration.shard} that divide a copy"
        got = configuration.units[LLM].dp
        raise ArgumentError("replicas of the language model", f"be {wanted} in a pipeline", got, "ask for one pipeline")
    if configuration.shard > 1 and configuration.encoders is not Encoders.REPLICATED:
        fix = "devices that divide a copy do not send each other features: each has all units of its samples"
        raise ArgumentError("encoders", f"be {Encoders.REPLICATED.value}", configuration.encoders.value, fix)


def _cell_ms(
    setting: Setting, configuration: Configuration, unit: UnitCosts, samples: SampleTable, num_lanes: int
) -> tuple[Floats, Floats]:
    """Return forward and backward of each stage for a lane's share of a mean microbatch.

    Where devices divide a copy that is a mean microbatch of each, or what they gather for it, if that takes longer.
    """
    spread = configuration.units[unit.name]
    tokens, squares = mean_size(setting, unit, samples)
    forward, backward = unit.layer_ms(tokens / num_lanes, squares / num_lanes, spread.tp)
    places = np.arange(len(unit.layers)) - np.repeat(spread.first_layers, spread.stage_layers)
    again = places < np.repeat(_recomputed_layers(unit, spread), spread.stage_layers)
    again &= np.array([layer.has_backward for layer in unit.layers])
    found = by_stage(spread, forward), by_stage(spread, backward + forward * again)
    if configuration.shard == 1:
        return found
    gather, scatter = gathers_ms(unit, spread, setting.cluster, configuration.shard)
    return np.maximum(found[0], gather), np.maximum(found[1], scatter)


def _recomputed_layers(unit: UnitCosts, spread: Parallelism) -> Ints:
    """Return how many layers of each stage, from its first one on, run again in the backward, if they have one."""
    found: list[int] = []
    for first, count in zip(spread.first_layers.tolist(), spread.stage_layers, strict=True):
        passed = [layer.has_backward for layer in unit.layers[first : first + count]]
        number = num_recomputed(spread, sum(passed))
        found.append(count - sum(passed) + number if number else 0)
    return np.array(found)


def _send_ms(setting: Setting, unit: UnitCosts, samples: SampleTable, layout: DeviceLayout, degree: int) -> Floats:
    """Return what both messages over the boundary before each stage take; the first gets what other units make.

    Stages of one row send each other nothing, those of one node send over what is inside it. Within a lane each device
    sends its tokens, to another unit all features. ``[num_lanes, num_stages]``
    """
    cluster, rows = setting.cluster, unit_rows(layout, unit.name)

    def both_ms(source: int, target: int, num_bytes: float) -> float:
        if source == target or not num_bytes:
            return 0.0
        nodes = layout.firsts[[source, target]] // cluster.devices_per_node
        within = nodes[0] == nodes[1]
        return 2 * (cluster.intra_node if within else cluster.inter_node).transfer_ms(num_bytes)

    num_bytes = mean_size(setting, unit, samples)[0] / len(rows) * unit.boundary_bytes / degree
    language = setting.language
    position = setting.costs.units.index(unit)
    sources = setting.costs.units[:language] if position == language else setting.costs.units[language:][:1]
    sent = np.zeros(rows.shape)
    for lane, of_lane in enumerate(rows.tolist()):
        sent[lane, 1:] = [both_ms(source, target, num_bytes) for source, target in pairwise(of_lane)]
        for source in () if position < language else sources:
            lasts = unit_rows(layout, source.name)[:, -1].tolist()
            beside = source if position == language else unit  # of it the tokens that are handed on are
            handed = mean_size(setting, beside, samples)[0] * beside.output_bytes / (len(lasts) * len(rows))
            sent[lane, 0] += sum(both_ms(last, of_lane[0], handed) for last in lasts)
    return sent


def _sync_ms(setting: Setting, configuration: Configuration, samples: SampleTable, num_pipelines: int) -> float:
    """Return what of the sums of gradients no backward hides, of so many pipelines like this one."""
    lanes, shard = with_lanes(configuration), configuration.shard
    backward: Mapping[str, Floats] = {
        unit.name: _cell_ms(setting, lanes, unit, samples, lanes.units[unit.name].dp // shard)[1]
        for unit in setting.costs.units
    }
    units, spreads = setting.costs.units, several(lanes, num_pipelines).units
    if not configuration.colocated:
        return exposed_sum_ms(units, spreads, setting.cluster, backward, shard)
    encoding_ms = sum(float(each.sum()) for name, each in backward.items() if name != LLM)
    return shared_sum_ms(units, spreads, setting.cluster, backward, encoding_ms, shard)
