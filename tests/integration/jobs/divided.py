"""Has planners believe that each of several devices takes its part of what one takes: of small models it is not so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resilient import trainer
from resilient.planners.costs.cost_model import CostModel, LayerCurves, UnitCosts
from resilient.profiling import planned_job
from resilient.templates.inputs.profile import LayerCost, ModelProfile


def divide_times() -> None:
    """Change what is measured of this process's job."""
    profile, unit_costs = trainer.job_profile, planned_job.job_unit_costs

    def divided_profile(*given: Any) -> ModelProfile:
        found = profile(*given)
        layers = [
            replace(layer, costs=tuple(map(_cost, found.tp_degrees, layer.costs[:1] * len(layer.costs), layer.costs)))
            for layer in found.layers
        ]
        return replace(found, layers=tuple(layers))

    def divided_costs(*given: Any) -> CostModel:
        found = unit_costs(*given)
        return replace(found, units=tuple(map(_unit, found.units)))

    trainer.job_profile, planned_job.job_unit_costs = divided_profile, divided_costs


def _cost(degree: int, alone: LayerCost, shared: LayerCost) -> LayerCost:
    return replace(
        shared,
        forward_ms=alone.forward_ms / degree,
        backward_input_ms=alone.backward_input_ms / degree,
        backward_weight_ms=alone.backward_weight_ms / degree,
    )


def _unit(unit: UnitCosts) -> UnitCosts:
    degrees = [tp for tp, _ in unit.degrees]
    layers = [
        replace(layer, curves=tuple(map(_curves, degrees, layer.curves[:1] * len(degrees), layer.curves)))
        for layer in unit.layers
    ]
    return replace(unit, layers=tuple(layers))


def _curves(degree: int, alone: LayerCurves, shared: LayerCurves) -> LayerCurves:
    part = 1 / degree
    return replace(
        shared,
        forward=alone.forward * part,
        backward_input=alone.backward_input * part,
        backward_weight=alone.backward_weight * part,
    )
