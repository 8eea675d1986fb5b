"""A language model of transformers' that learns a rule of tokens, in milliseconds a step; options for the tests."""

from __future__ import annotations

import argparse
import time

import chain
import torch
from torch import Tensor
from transformers import LlamaConfig

import resilient as rs
from resilient.data.sampler import StepSampler
from resilient.runtime import worker

VOCABULARY = 29
"""No degree divides it."""
NUM_SAMPLES, BATCH = 4096, 14


class Sequences:
    """Texts of different lengths, each token of which follows from the two before; sample i is a function of i.

    Args:
        held: Samples that cannot be read before the worker knows that its generation ends.
    """

    def __init__(self, held: frozenset[int]) -> None:
        self._held = held

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        while index in self._held and not chain.KnownGuard.last.ends():
            time.sleep(0.005)
        tokens = [index % (VOCABULARY - 1) + 1, index // 7 % (VOCABULARY - 1) + 1]
        for _ in range(5 + index % 4):
            tokens.append((3 * tokens[-1] + tokens[-2]) % (VOCABULARY - 1) + 1)
        return {"input_ids": torch.tensor(tokens[:-1]), "labels": torch.tensor(tokens[1:])}

    def num_targets(self, index: int) -> int:
        return 6 + index % 4


def build_model(num_blocks: int, *, tied: bool) -> rs.MultimodalModule:
    """Return a Llama of four heads and two key-value heads."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=26,  # no degree beyond 2 divides it
        num_hidden_layers=num_blocks,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=tied,
    )
    return rs.MultimodalModule(encoders={}, language_model=config)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--tp-chunks", type=int, default=1)
    parser.add_argument("--tied", action="store_true", help="head and embedding have one matrix")
    parser.add_argument("--change-after", type=int, help="this step waits until its worker was told of the change")
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker.GenerationGuard = chain.KnownGuard
    sampler = StepSampler(num_samples=NUM_SAMPLES, global_batch=BATCH, seed=0)
    held = () if args.change_after is None else map(int, sampler.indices(args.change_after))
    trainer = rs.Trainer(
        build_model(args.blocks, tied=args.tied),
        Sequences(frozenset(held)),
        optimizer=rs.AdamW(lr=3e-3),
        global_batch=BATCH,
        microbatch=2,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        precision="fp64",
        schedule=args.schedule,
        tp_chunks=args.tp_chunks,
        clip_grad_norm=1.0,
        comm_timeout_s=60.0,
        num_workers=0,
    )
    trainer.fit(num_steps=args.steps)


if __name__ == "__main__":
    main()
