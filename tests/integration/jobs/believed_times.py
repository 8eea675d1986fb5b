"""Has planners believe other times than were measured: those of small models are as busy machines make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from resilient import trainer
from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.profiling import planned_job
from resilient.templates.inputs.profile import LayerCost, ModelProfile

_EVEN = Curve(linear=0.01)
"""Of each token, in each layer of a unit and each of its passes."""


def even_times() -> None:
    """Let a token take as long in all layers of units of this process's job."""
    unit_costs = planned_job.job_unit_costs

    def even(layer: UnitLayer) -> UnitLayer:
        curves = [replace(each, forward=_EVEN, backward_input=_EVEN, backward_weight=_EVEN) for each in layer.curves]
        return replace(layer, curves=tuple(curves))

    def even_costs(*given: Any) -> CostModel:
        found = unit_costs(*given)
        units = [replace(unit, layers=tuple(map(even, unit.layers))) for unit in found.units]
        return replace(found, units=tuple(units))

    planned_job.job_unit_costs = even_costs


def divide_times() -> None:
    """Let each of several devices of this process's job take its part of what one takes: of small models it is more."""
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
