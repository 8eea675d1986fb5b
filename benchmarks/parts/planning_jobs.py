"""Jobs of any size to plan for: blocks of a known model, equal ones or of times as measured ones have."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import cluster_of
from resilient.templates.inputs.profile import LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem, Sharding
from resilient.templates.schedules.kind import ScheduleKind

MODEL, DEVICE = "gpt3-6.7b", "a100-80gb"


@lru_cache(maxsize=16)  # one object, as a job has: equal ones are compared layer by layer wherever one is looked up
def model(num_layers: int, device: str, *, equal: bool) -> ModelProfile:
    """Make a model of that many blocks; the times of different ones are 5 per cent more or less."""
    derived = derive_profile(MODEL, device)
    block = derived.layers[1]
    draw = random.Random(0)

    def layer(index: int) -> LayerProfile:
        factor = 1.0 if equal else draw.uniform(0.95, 1.05)
        costs = (
            replace(
                cost,
                forward_ms=cost.forward_ms * factor,
                backward_input_ms=cost.backward_input_ms * factor,
                backward_weight_ms=cost.backward_weight_ms * factor,
            )
            for cost in block.costs
        )
        return replace(block, name=f"block.{index}", costs=tuple(costs), input_gradient=index > 0)

    return replace(derived, layers=tuple(map(layer, range(num_layers))))


def job(
    num_layers: int, devices: int, *, equal: bool = False, device: str = DEVICE, **more: int | ScheduleKind | Sharding
) -> PlanningProblem:
    """Plan for nodes of that many devices; ``more`` are fields of the problem."""
    settings = {"num_microbatches": 1024, "max_failures": 0} | more
    return PlanningProblem(
        profile=model(num_layers, device, equal=equal),
        cluster=cluster_of(device, devices),
        **settings,  # pyright: ignore[reportArgumentType]
    )
