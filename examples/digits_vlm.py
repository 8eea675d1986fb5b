"""Train a small vision-language model to read rows of handwritten digits.

The images are real: scikit-learn's 1,797 scanned digits of 8 x 8 pixels, 1 to 8 of them side by side, so that image
size and answer length differ from sample to sample. The digits of the held-out set are never seen in training.

    resilient run --nodes 5 examples/digits_vlm.py      on five (simulated) nodes
    python examples/digits_vlm.py                       in one process
"""

from __future__ import annotations

import argparse
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, ViTConfig

import resilient as rs
from resilient.common.extras import require
from resilient.data import IGNORED_LABEL, Sample, collate_multimodal

require("sklearn", "this example")
from sklearn.datasets import load_digits  # noqa: E402

PAD, BOS, IMAGE, EOS, ZERO = 0, 1, 2, 3, 4
"""Tokens; digit d is ``ZERO + d``."""
PIXELS = 8
MAX_DIGITS = 8


class DigitsDataset:
    """Rows of 1 to 8 digits with their reading; sample i is a function of (split, seed, i).

    Args:
        split: "train", or "held-out": a fifth of the scanned digits that no training image holds.
        num_samples: Rows to compose.
        features_per_digit: Placeholder tokens the encoder gives for each digit.
        seed: Of the compositions.
    """

    def __init__(self, split: str, num_samples: int, features_per_digit: int, seed: int = 0) -> None:
        self.pixels, self.digits = _scans(split)
        self.features_per_digit = features_per_digit
        self._num_samples = num_samples
        self._entropy = (seed, 0 if split == "train" else 1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        chosen = self._chosen(index)
        image = torch.cat(list(self.pixels[chosen]), dim=1)[None]
        num_features = len(chosen) * self.features_per_digit
        tokens = torch.tensor([BOS] + [IMAGE] * num_features + [ZERO + int(d) for d in self.digits[chosen]] + [EOS])
        labels = tokens[1:].clone()
        labels[:num_features] = IGNORED_LABEL
        return {"input_ids": tokens[:-1], "labels": labels, "vision.pixels": image}

    def num_targets(self, index: int) -> int:
        """Return the answer's length: the digits and the end."""
        return len(self._chosen(index)) + 1

    def _chosen(self, index: int) -> np.ndarray:
        generator = np.random.default_rng((*self._entropy, index))
        return generator.integers(len(self.digits), size=generator.integers(1, MAX_DIGITS + 1))


@cache
def _scans(split: str) -> tuple[Tensor, np.ndarray]:
    """Return the scanned digits of a split: pixels in -1 .. 1 ``[n, 8, 8]`` and what they show ``[n]``."""
    pixels, digits = load_digits(return_X_y=True)
    held_out = np.random.default_rng(0).permutation(len(digits)) < len(digits) // 5
    mine = held_out if split == "held-out" else ~held_out
    return torch.tensor(pixels[mine] / 8 - 1, dtype=torch.float32).unflatten(1, (PIXELS, PIXELS)), digits[mine]


def build_model(patch: int) -> rs.MultimodalModule:
    """Return a ViT of 2 blocks, an MLP projector and a Llama of 4 blocks: about 0.7 M parameters."""
    vision = ViTConfig(
        image_size=(PIXELS, PIXELS * MAX_DIGITS),
        patch_size=patch,
        num_channels=1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        qkv_bias=False,  # a key bias changes no attention weight: its gradient is rounding noise, which Adam amplifies
        initializer_range=0.1,
    )
    llm = LlamaConfig(
        vocab_size=ZERO + 10,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return rs.MultimodalModule(
        encoders={"vision": rs.EncoderModule(vision, projector="mlp", placeholder_id=IMAGE)}, language_model=llm
    )


@torch.no_grad()
def read_digits(model: torch.nn.Module, dataset: DigitsDataset) -> float:
    """Return the share of the data set's digits that greedy decoding reads right, given the images alone."""
    device = next(model.parameters()).device
    by_width: dict[int, list[Sample]] = {}
    for i in range(len(dataset)):
        sample = dataset[i]
        by_width.setdefault(sample["vision.pixels"].shape[2], []).append(sample)
    right = total = 0
    for width, group in by_width.items():
        num_digits = width // PIXELS
        batch = {key: value.to(device) for key, value in collate_multimodal(group).items()}
        truth = batch["input_ids"][:, -num_digits:]
        read = batch["input_ids"][:, :-num_digits]
        for _ in range(num_digits):
            next_token = model({**batch, "input_ids": read})["logits"][:, -1].argmax(-1, keepdim=True)
            read = torch.cat((read, next_token), dim=1)
        right += int((read[:, -num_digits:] == truth).sum())
        total += truth.numel()
    return right / total


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small vision-language model to read rows of digits.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates")
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, whatever the number of nodes")
    parser.add_argument("--microbatch", type=int, default=8, help="samples that go through a pipeline together")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--max-failures", type=int, default=1, help="node failures survivable at the same time")
    parser.add_argument("--min-pipeline-nodes", type=int, default=2, help="fewest nodes that hold one pipeline")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: at the end")
    parser.add_argument("--patch", type=int, choices=(4, 8), default=8, help="pixels; 4 gives 4 features per digit")
    return parser.parse_args()


def main() -> None:
    """Train, and let the worker that speaks for the job report how well held-out digits are read."""
    args = parse_arguments()
    torch.set_num_threads(1)
    features_per_digit = (PIXELS // args.patch) ** 2
    trainer = rs.Trainer(
        build_model(args.patch),
        DigitsDataset("train", 50_000, features_per_digit),
        optimizer=rs.AdamW(lr=args.lr, lr_schedule=rs.WarmupCosine(args.steps // 10, args.steps, floor=0.01)),
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        seed=args.seed,
        precision=args.precision,
        clip_grad_norm=1.0,
        checkpoint_every=args.checkpoint_every,
    )
    result = trainer.fit(num_steps=args.steps)
    if result.is_main:
        accuracy = read_digits(trainer.whole_model(), DigitsDataset("held-out", 200, features_per_digit))
        trainer.note("held_out_accuracy", accuracy)
        print(f"{accuracy:.1%} of held-out digits read right")  # noqa: T201


if __name__ == "__main__":
    main()
