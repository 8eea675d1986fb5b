"""A Llama-shaped job, run by ``resilient run``, on any device."""

from __future__ import annotations

import argparse

import torch
from llama_model import SEQ_LEN, SMALL, Tokens, factories, layer_names, shape_of, summed_loss

import resilient as rs


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--shape", default=SMALL, help="name of a known model")
    parser.add_argument("--blocks", type=int, default=0, help="other than the model's own")
    parser.add_argument("--vocabulary", type=int, default=0, help="other than the model's own")
    parser.add_argument("--seq", type=int, default=SEQ_LEN, help="tokens of a sample")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--compile", action="store_true", help="compile each block")
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = shape_of(args.shape, args.blocks, args.vocabulary)
    model = rs.Chain(
        factories(shape, compiled=args.compile),
        lambda output, batch: summed_loss(output, batch["target"]),
        layer_names(shape),
    )
    trainer = rs.Trainer(
        model,
        Tokens(shape.vocabulary, args.seq),
        optimizer=rs.AdamW(lr=1e-4),
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        precision=args.precision,
        device=args.device,
    )
    trainer.fit(args.steps)


if __name__ == "__main__":
    main()
