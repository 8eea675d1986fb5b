"""A planner's configuration for one pipeline as a template: its lanes on devices, what they take, and back again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Parallelism, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.stage_work import by_stage, exposed_sum_ms, state_bytes
from resilient.templates.common.arrays import Floats
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
        send = _send_ms(setting, configuration, unit, samples, len(rows))
        memory = state_bytes(setting, unit, spread)
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
                        checkpointing=spread.recompute > 0,
                        forward_ms=float(forward[stage]),
                        backward_ms=float(backward[stage]),
                        send_ms=float(send[stage]),
                        memory_bytes=round(float(memory[stage])),
                    )
                )
                first = end
        first_layer += len(unit.layers)
    return PipelineTemplate(
        num_nodes=setting.num_nodes,
        stages=tuple(stages),
        sync_ms=_sync_ms(setting, configuration, samples),
        decision=msgspec.json.encode(configuration).decode(),
    )


def decision_of(template: PipelineTemplate) -> Configuration:
    """Return the configuration that a template was made of."""
    return msgspec.json.decode(template.decision, type=Configuration)


def encoders_come_first(configuration: Configuration) -> bool:
    """Return whether encoders do all their forwards before the language model's, and their backwards after them."""
    return configuration.colocated and configuration.encoders is not Encoders.REPLICATED


def several(configuration: Configuration, count: int) -> Configuration:
    """Return the configuration of so many pipelines like the one that it is of."""
    units = {name: replace(each, dp=each.dp * count) for name, each in configuration.units.items()}
    return replace(configuration, units=units)


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
    again = spread.recompute * by_stage(spread, forward)
    return by_stage(spread, forward), by_stage(spread, backward) + again


def _mean(setting: Setting, unit: UnitCosts, samples: SampleTable) -> tuple[float, float]:
    """Return tokens and squares of a unit in a microbatch of the language model."""
    lengths = samples.units[unit.name]
    if not len(lengths.tokens):
        return 0.0, 0.0
    return setting.microbatch * float(lengths.tokens.mean()), setting.microbatch * float(lengths.squares.mean())


def _send_ms(
    setting: Setting, configuration: Configuration, unit: UnitCosts, samples: SampleTable, num_lanes: int
) -> Floats:
    """Return what both messages over the boundary before each stage take; the first gets what other units make."""
    one_node = setting.num_nodes == 1
    link = setting.cluster.intra_node if one_node else setting.cluster.inter_node
    tokens = _mean(setting, unit, samples)[0] / num_lanes
    sent = np.full(configuration.units[unit.name].pp, 2 * link.transfer_ms(tokens * unit.boundary_bytes))
    sent[0] = 0.0
    position = setting.costs.units.index(unit)
    if position >= setting.language and not configuration.colocated:
        others = setting.costs.units[: setting.language] if unit.name == LLM else (unit,)
        made = (_mean(setting, other, samples)[0] * other.output_bytes for other in others)
        sent[0] = sum(2 * link.transfer_ms(each) for each in made if each)
    return sent


def _sync_ms(setting: Setting, configuration: Configuration, samples: SampleTable) -> float:
    """Return what of the sums of gradients no backward hides, of two pipelines like this one."""
    backward: Mapping[str, Floats] = {
        unit.name: _cell_ms(setting, unit, configuration.units[unit.name], samples, configuration.units[unit.name].dp)[
            1
        ]
        for unit in setting.costs.units
    }
    groups: Sequence[Sequence[UnitCosts]] = [setting.costs.units]
    if configuration.colocated:  # all of the encoders' backwards come last
        groups = [[unit] for unit in setting.costs.units]
    spreads = several(configuration, 2).units
    return max(exposed_sum_ms(group, spreads, setting.cluster, backward) for group in groups)
