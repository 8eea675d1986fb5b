"""A small model with two encoders, whose samples a planner may place: images, sounds and texts of all lengths."""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, ViTConfig

import resilient as rs

PATCH, VOCABULARY, PICTURE, SOUND = 4, 40, 38, 39


class Mixed:
    """Samples of up to four images and three sounds; some are text alone. Nothing is learnt of them.

    Args:
        broken: The sample whose images are not finite.
        slowly_while: While this file is there, samples take long to read: so that a job does few steps meanwhile.
    """

    def __init__(self, broken: int | None = None, slowly_while: Path | None = None) -> None:
        self.broken = broken
        self._slowly_while = slowly_while

    def __len__(self) -> int:
        return 200

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of each sequence."""
        chosen = random.Random(index)
        images = [chosen.choice([1, 2, 2, 6]) for _ in range(chosen.choice([0, 1, 1, 2, 4]))]
        sounds = [chosen.choice([1, 3]) for _ in range(chosen.choice([0, 0, 1, 3]))]
        return {"vision": images, "audio": sounds, "llm": [sum(images) + sum(sounds) + chosen.randint(2, 20)]}

    def num_targets(self, index: int) -> int:
        """Return the tokens that are predicted."""
        lengths = self.lengths(index)
        return lengths["llm"][0] - sum(lengths["vision"]) - sum(lengths["audio"])

    def __getitem__(self, index: int) -> dict[str, Tensor | list[Tensor]]:
        if self._slowly_while is not None and self._slowly_while.exists():
            time.sleep(0.1)
        lengths = self.lengths(index)
        drawn = torch.Generator().manual_seed(index)

        def pictures(unit: str, channels: int) -> list[Tensor]:
            factor = math.nan if (unit, index) == ("vision", self.broken) else 1.0
            return [factor * torch.randn(channels, PATCH, PATCH * n, generator=drawn) for n in lengths[unit]]

        num_pictures, num_sounds = sum(lengths["vision"]), sum(lengths["audio"])
        words = torch.randint(3, 30, (self.num_targets(index),), generator=drawn)
        ids = torch.cat((torch.full((num_pictures,), PICTURE), torch.full((num_sounds,), SOUND), words))
        labels = torch.cat((torch.full((num_pictures + num_sounds,), -100), words.roll(-1)))
        return {
            "input_ids": ids,
            "labels": labels,
            "vision.pixels": pictures("vision", 3),
            "audio.pixels": pictures("audio", 1),
        }


def encoder(channels: int, layers: int, placeholder: int, *, frozen: bool) -> rs.EncoderModule:
    """Return a small encoder of patches in a row."""
    config = ViTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        image_size=6 * PATCH,
        patch_size=PATCH,
        num_channels=channels,
        qkv_bias=False,  # a key's bias has no gradient but rounding errors
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return rs.EncoderModule(config, placeholder_id=placeholder, frozen=frozen)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--planner")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--min-pipeline-nodes", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--broken", type=int)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--slowly-while", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    llm = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = rs.MultimodalModule(
        encoders={
            "vision": encoder(3, 3, PICTURE, frozen=arguments.frozen),
            "audio": encoder(1, 2, SOUND, frozen=False),
        },
        language_model=llm,
        labels="shifted",
    )
    optimizers = {"adamw": rs.AdamW(lr=1e-2), "sgd": rs.SGD(lr=1e-2, momentum=0.9)}
    rs.Trainer(
        model,
        Mixed(arguments.broken, arguments.slowly_while),
        optimizer=optimizers[arguments.optimizer],
        global_batch=arguments.batch,
        microbatch=arguments.microbatch,
        max_failures=arguments.max_failures,
        min_pipeline_nodes=arguments.min_pipeline_nodes,
        precision="fp64",
        clip_grad_norm=1.0,
        schedule=arguments.schedule,
        planner=arguments.planner,
    ).fit(arguments.steps)


if __name__ == "__main__":
    main()
