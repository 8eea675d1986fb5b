"""An emulated encoder and language model; what was measured of the encoder is half of what it takes."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import resilient as rs
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.profiling import planned_job

UNITS = [
    EmulatedUnit(name="vision", num_layers=2, cost=CostCurve(token_ms=0.06)),
    EmulatedUnit(name="llm", num_layers=2, cost=CostCurve(token_ms=0.02)),
]
FACTOR = 2.0


def halved(unit: UnitCosts) -> UnitCosts:
    """Return what the encoder is thought to cost."""
    layers = tuple(
        replace(
            layer,
            curves=tuple(
                replace(
                    each,
                    forward=each.forward * (1 / FACTOR),
                    backward_input=each.backward_input * (1 / FACTOR),
                    backward_weight=each.backward_weight * (1 / FACTOR),
                )
                for each in layer.curves
            ),
        )
        for layer in unit.layers
    )
    return replace(unit, layers=layers)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--planner")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measured = planned_job.job_unit_costs

    def mistaken(*given: Any) -> CostModel:
        vision, llm = measured(*given).units
        return CostModel(units=(halved(vision), llm))

    with mock.patch.object(planned_job, "job_unit_costs", mistaken):
        rs.Trainer(
            EmulatedModel(UNITS),
            EmulatedDataset(UNITS, "mixed"),
            optimizer=rs.AdamW(lr=1e-2),
            global_batch=12,
            microbatch=2,
            max_failures=0,
            precision="fp64",
            planner=arguments.planner,
            device="cpu",
        ).fit(arguments.steps)


if __name__ == "__main__":
    main()
