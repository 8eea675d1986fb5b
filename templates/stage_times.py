"""What each stage of a pipeline is expected to take for a microbatch, kind by kind: what a run is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resilient.templates.halves import Halves
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.schedules.schedule import Action, Op
from resilient.templates.template import PipelineTemplate, StageSpec


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Times of one stage for one microbatch; for a round of them, one on each device, where it is sharded.

    Args:
        forward_ms: Forward.
        backward_input_ms: First half of the backward, for what it received.
        backward_weight_ms: Second half, for its parameters; all of it where one half has all
            (:class:`~resilient.templates.halves.Halves`).
        send_ms: One message over the boundary before it.
    """

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    send_ms: float


def stage_times(template: PipelineTemplate, profile: ModelProfile) -> tuple[StageTimes, ...]:
    """Return what the stages of a template take, whose backwards the profile divides into halves."""
    return tuple(_of_stage(stage, profile) for stage in template.stages)


def _of_stage(stage: StageSpec, profile: ModelProfile) -> StageTimes:
    degree = profile.tp_degrees.index(stage.tp_degree)
    layers = profile.layers[stage.first_layer : stage.end_layer]
    halves = Halves.of(
        trains=any(layer.trainable for layer in layers),
        wanted=layers[0].input_gradient,
        again=stage.checkpointing,
        sharded=stage.shard > 1,
    )
    of_inputs = sum(layer.costs[degree].backward_input_ms for layer in layers if layer.input_gradient)
    of_weights = sum(layer.costs[degree].backward_weight_ms for layer in layers if layer.trainable)
    weights_ms = stage.backward_ms * of_weights / (of_inputs + of_weights) if of_weights else 0.0
    first_ms, second_ms = halves.divide(stage.backward_ms - weights_ms, weights_ms)
    return StageTimes(
        forward_ms=stage.forward_ms,
        backward_input_ms=first_ms,
        backward_weight_ms=second_ms,
        send_ms=stage.send_ms / 2,
    )


def action_ms(stages: Sequence[StageTimes], action: Action) -> float:
    """Return what an action of a chain is expected to take; waiting is nothing, a message takes as long as it is sent.

    Args:
        stages: Of the pipeline.
        action: Of one of its rows.
    """
    times = stages[action.stage]
    if action.op is Op.FORWARD:
        return times.forward_ms
    if action.op is Op.SEND_F:
        return stages[action.stage + 1].send_ms
    of_inputs = times.backward_input_ms * (action.op in (Op.BACKWARD, Op.BACKWARD_INPUT))
    return of_inputs + times.backward_weight_ms * (action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT))
