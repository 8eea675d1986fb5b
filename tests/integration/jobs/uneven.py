"""An emulated encoder and language model whose samples a planner places; one node may be of a slower kind."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from unittest import mock

import torch

import resilient as rs
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.device import EmulatedDevice
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit

UNITS = [
    EmulatedUnit(name="vision", num_layers=2, cost=CostCurve(fixed_ms=0.5, token_ms=0.02)),
    EmulatedUnit(name="llm", num_layers=6, cost=CostCurve(fixed_ms=0.5, token_ms=0.02)),
]
SLOWDOWN = 2.0
wait = EmulatedDevice.wait


def slowed(device: EmulatedDevice, duration_s: float, since: float) -> None:
    """Wait as a slower device does, also when it is measured."""
    wait(device, SLOWDOWN * duration_s, since)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--planner")
    parser.add_argument("--slow-node", type=int, metavar="NODE")
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="what the slow node measures, it alone knows")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    slow = os.environ.get("RESILIENT_NODE") == str(arguments.slow_node)
    if slow:
        os.environ["XDG_CACHE_HOME"] = str(arguments.cache)
    with mock.patch.object(EmulatedDevice, "wait", slowed if slow else wait):
        rs.Trainer(
            EmulatedModel(UNITS),
            EmulatedDataset(UNITS, "heavy"),
            optimizer=rs.AdamW(lr=1e-2),
            global_batch=12,
            microbatch=4,
            min_pipeline_nodes=2,
            precision="fp64",
            planner=arguments.planner,
            device="cpu",
        ).fit(arguments.steps)


if __name__ == "__main__":
    main()
