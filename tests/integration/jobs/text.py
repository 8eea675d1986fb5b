"""A language model of transformers' that learns a rule of tokens, in milliseconds a step; options for the tests."""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import chain
import torch
from believed_times import divide_times
from torch import Tensor
from transformers import LlamaConfig

import resilient as rs
from resilient import trainer as trainers
from resilient.data.sampler import StepSampler
from resilient.runtime import worker
from resilient.templates.inputs.profile import LayerCost, ModelProfile

job_profile = trainers.job_profile
VOCABULARY = 29
"""No degree divides it."""
NUM_SAMPLES, BATCH = 4096, 14


class Sequences:
    """Texts of different lengths, each token of which follows from the two before; sample i is a function of i.

    Args:
        held: Samples that cannot be read before the worker knows that its generation ends.
        slowly_while: While this file is there, samples take long to read.
    """

    def __init__(self, held: frozenset[int], slowly_while: Path | None) -> None:
        self._held = held
        self._slowly_while = slowly_while

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        while index in self._held and not chain.KnownGuard.last.ends():
            time.sleep(0.005)
        if self._slowly_while is not None and self._slowly_while.exists():
            time.sleep(0.03)
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


def with_known_costs(*given: Any) -> ModelProfile:
    """Return the job's profile with times of which it is known what plans are made for them.

    Two tensor-parallel devices take 1.1 times as long for each microbatch as two that take one each. So pipelines of
    several devices a node are sharded where these have a microbatch each, and tensor parallel where one would be idle.
    """
    profile = job_profile(*given)

    def cost(measured: LayerCost, degree: int) -> LayerCost:
        ms = 10 if degree == 1 else 11 / degree
        return replace(measured, forward_ms=ms, backward_input_ms=ms, backward_weight_ms=ms)

    layers = [replace(layer, costs=tuple(map(cost, layer.costs, profile.tp_degrees))) for layer in profile.layers]
    return replace(profile, layers=tuple(layers))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--tp-chunks", type=int, default=1)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--checkpoint-every", type=int, default=0)
    parser.add_argument("--slowly-while", type=Path, metavar="FILE")
    parser.add_argument("--tied", action="store_true", help="head and embedding have one matrix")
    parser.add_argument("--change-after", type=int, help="this step waits until its worker was told of the change")
    parser.add_argument("--known-costs", action="store_true", help="plan with times that are not measured")
    parser.add_argument("--divided", action="store_true", help="a device of several is to take its part of the time")
    args = parser.parse_args()
    if args.divided:
        divide_times()
    torch.set_num_threads(1)
    worker.GenerationGuard = chain.KnownGuard
    sampler = StepSampler(num_samples=NUM_SAMPLES, global_batch=args.batch, seed=0)
    held = () if args.change_after is None else map(int, sampler.indices(args.change_after))
    trainer = rs.Trainer(
        build_model(args.blocks, tied=args.tied),
        Sequences(frozenset(held), args.slowly_while),
        optimizer=rs.AdamW(lr=3e-3) if args.optimizer == "adamw" else rs.SGD(lr=1e-2, momentum=0.9),
        global_batch=args.batch,
        checkpoint_every=args.checkpoint_every,
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
    with mock.patch.object(trainers, "job_profile", with_known_costs) if args.known_costs else nullcontext():
        trainer.fit(num_steps=args.steps)


if __name__ == "__main__":
    main()
