"""What the layers of a unit cost for one cell: as chains' layers are described, whose rules of memory hold for both."""

from __future__ import annotations

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.curves import LayerCurves
from resilient.templates.inputs.profile import LayerCost, LayerProfile


def cell_layers(
    unit: UnitCosts, tokens: float, squares: float, received_bytes: float, degrees: tuple[tuple[int, int], ...] = ()
) -> tuple[LayerProfile, ...]:
    """Return the layers of a unit with their costs for one cell; those without a backward keep nothing of it.

    States that they share with other units are these units'.

    Args:
        unit: The unit.
        tokens: Sum of the cell's lengths.
        squares: Sum of their squares.
        received_bytes: What its first layer gets of other units.
        degrees: Those whose costs are asked for, of the unit's; all by default.

    Raises:
        ValueError: A degree was not profiled.
    """
    chosen = [unit.index(*degree) for degree in degrees or unit.degrees]
    names = {layer.name for layer in unit.layers}
    entering = [received_bytes, *(unit.boundary_bytes * tokens for _ in unit.layers[1:])]
    return tuple(
        LayerProfile(
            name=layer.name,
            costs=tuple(
                _cost(layer.curves[index], tokens, squares, keeps=layer.has_backward, defers=layer.trainable)
                for index in chosen
            ),
            parameter_bytes=layer.parameter_bytes,
            optimizer_bytes=layer.optimizer_bytes,
            gradient_bytes=layer.gradient_bytes,
            input_bytes=round(num_bytes),
            loaded_bytes=round(max(layer.curves[index].loaded_bytes for index in chosen) * tokens),
            segments=layer.segments,
            rows=layer.rows,
            trainable=layer.trainable,
            input_gradient=layer.input_gradient,
            shares=tuple(owner for owner in layer.shares if owner in names),
        )
        for layer, num_bytes in zip(unit.layers, entering, strict=True)
    )


def _cost(curves: LayerCurves, tokens: float, squares: float, *, keeps: bool, defers: bool) -> LayerCost:
    return LayerCost(
        forward_ms=curves.forward.call_ms(tokens, squares),
        backward_input_ms=curves.backward_input.call_ms(tokens, squares),
        backward_weight_ms=curves.backward_weight.call_ms(tokens, squares),
        activation_bytes=round(curves.activation_bytes * tokens) * keeps,
        entered_bytes=round(curves.entered_bytes * tokens) * keeps,
        given_bytes=round(curves.given_bytes * tokens) * keeps,
        deferred_bytes=round(curves.deferred_bytes * tokens) * defers,
        workspace_bytes=round(curves.workspace_bytes.call_ms(tokens, squares)),
        ending_workspace_bytes=round(curves.ending_workspace_bytes.call_ms(tokens, squares)),
        split_workspace_bytes=round(curves.split_workspace_bytes.call_ms(tokens, squares)),
        again_bytes=round(curves.again_bytes.call_ms(tokens, squares)) * keeps,
        ending_again_bytes=round(curves.ending_again_bytes.call_ms(tokens, squares)) * keeps,
    )
