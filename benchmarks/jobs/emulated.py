"""A chain of emulated layers, run by ``resilient run``: an encoder and a language model."""

from __future__ import annotations

import argparse

import torch

import resilient as rs
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit


def units(num_layers: int, scale: float) -> list[EmulatedUnit]:
    """Return an encoder with a quarter of the layers, and a language model; ``scale`` makes all of them slower."""
    vision = CostCurve(fixed_ms=2 * scale, token_ms=0.005 * scale)
    language = CostCurve(fixed_ms=2 * scale, token_ms=0.01 * scale, square_ms=2e-6 * scale)
    num_vision = num_layers // 4
    return [
        EmulatedUnit(name="vision", num_layers=num_vision, cost=vision),
        EmulatedUnit(name="llm", num_layers=num_layers - num_vision, cost=language),
    ]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--mix", default="mixed")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = units(args.layers, args.scale)
    trainer = rs.Trainer(
        EmulatedModel(parts),
        EmulatedDataset(parts, args.mix),
        optimizer=rs.AdamW(lr=1e-2),
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        precision="fp64",
        schedule=args.schedule,
        device="cpu",
    )
    trainer.fit(args.steps)


if __name__ == "__main__":
    main()
