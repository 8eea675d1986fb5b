"""The Llama-shaped model of ``llama.py`` as a language model that the runtime knows, run by ``resilient run --tp``."""

from __future__ import annotations

import argparse

import torch
from llama_model import SEQ_LEN, SMALL, Tokens, config_of, shape_of
from torch import Tensor

import resilient as rs


class Texts(Tokens):
    """The same sequences under the names that language models read."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {"input_ids": sample["input"], "labels": sample["target"]}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--microbatch", type=int, default=8)
    parser.add_argument("--max-failures", type=int, default=0)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = shape_of(SMALL)
    trainer = rs.Trainer(
        rs.MultimodalModule(encoders={}, language_model=config_of(shape)),
        Texts(shape.vocabulary, SEQ_LEN),
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
