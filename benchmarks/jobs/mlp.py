"""The benchmarks' job, run by ``resilient run``."""

from __future__ import annotations

import argparse

import torch
from mlp_model import Points, factories, summed_loss

import resilient as rs


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--microbatch", type=int, default=64)
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = rs.Chain(factories(), lambda output, batch: summed_loss(output, batch["target"]))
    trainer = rs.Trainer(
        model,
        Points(),
        optimizer=rs.AdamW(lr=1e-4),
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        device="cpu",
    )
    trainer.fit(args.steps)


if __name__ == "__main__":
    main()
