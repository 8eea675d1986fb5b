"""Train a small vision-language model to read pages of handwritten digits.

The pictures are real: scikit-learn's 1,797 scanned digits of 8 x 8 pixels, 1 to 8 of them side by side in a row. A page
has rows of 1 to 40 digits in all, each followed by its reading; most pages are short, few hold most of the digits. On
one page in eight the rows are typed: it has no picture. The digits of the held-out set are never seen in training.

    resilient run --nodes 5 examples/digits_vlm.py                          on five (simulated) nodes
    resilient run --nodes 3 examples/digits_vlm.py --min-pipeline-nodes 1   on fewer than four
    python examples/digits_vlm.py                                           in one process
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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

PAD, BOS, IMAGE, READ, END, ZERO = range(6)
"""Tokens: ``READ`` and ``END`` stand before and after a row's reading; digit d is ``ZERO + d``."""
PIXELS = 8
LONGEST_ROW = 8
MOST_DIGITS = 40
MEDIAN_DIGITS = 3
TYPED = 1 / 8


@dataclass(frozen=True)
class Page:
    """What a sample shows: of each row which scans, and whether they are typed instead of pictured."""

    rows: list[np.ndarray]
    typed: bool


class DigitsDataset:
    """Pages of digits with their readings; sample i is a function of (split, seed, i).

    Args:
        split: "train", or "held-out": a fifth of the scanned digits that no training picture holds.
        num_samples: Pages to compose.
        seed: Of the compositions.
    """

    def __init__(self, split: str, num_samples: int, seed: int = 0) -> None:
        self.pixels, self.digits = scans(split)
        self._num_samples = num_samples
        self._entropy = (seed, 0 if split == "train" else 1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        page = self._page(index)
        tokens, labels = [BOS], [IGNORED_LABEL]
        for row in page.rows:
            digits = [ZERO + int(digit) for digit in self.digits[row]]
            shown = [*(digits if page.typed else [IMAGE] * len(row)), READ]
            tokens += [*shown, *digits, END]
            labels += [*[IGNORED_LABEL] * len(shown), *digits, END]
        sample: dict[str, object] = {"input_ids": torch.tensor(tokens[:-1]), "labels": torch.tensor(labels[1:])}
        if not page.typed:
            sample["vision.pixels"] = [torch.cat(list(self.pixels[row]), dim=1)[None] for row in page.rows]
        return sample

    def num_targets(self, index: int) -> int:
        """Return the length of all readings: their digits, and the end of each."""
        return sum(len(row) + 1 for row in self._page(index).rows)

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of each picture, one for a digit, and of the text."""
        page = self._page(index)
        digits = [len(row) for row in page.rows]
        return {"vision": [] if page.typed else digits, "llm": [2 * sum(digits) + 2 * len(digits)]}

    def _page(self, index: int) -> Page:
        generator = np.random.default_rng((*self._entropy, index))
        left = int(np.clip(np.rint(generator.lognormal(np.log(MEDIAN_DIGITS), 1.0)), 1, MOST_DIGITS))
        rows: list[np.ndarray] = []
        while left:
            rows.append(generator.integers(len(self.digits), size=min(left, generator.integers(1, LONGEST_ROW + 1))))
            left -= len(rows[-1])
        return Page(rows, typed=bool(generator.random() < TYPED))


@cache
def scans(split: str) -> tuple[Tensor, np.ndarray]:
    """Return the scanned digits of a split: pixels in -1 .. 1 ``[n, 8, 8]`` and what they show ``[n]``."""
    pixels, digits = load_digits(return_X_y=True)
    held_out = np.random.default_rng(0).permutation(len(digits)) < len(digits) // 5
    mine = held_out if split == "held-out" else ~held_out
    return torch.tensor(pixels[mine] / 8 - 1, dtype=torch.float32).unflatten(1, (PIXELS, PIXELS)), digits[mine]


def build_model() -> rs.MultimodalModule:
    """Return a ViT of 2 blocks, an MLP projector and a Llama of 4 blocks: about 0.7 M parameters."""
    vision = ViTConfig(
        image_size=(PIXELS, PIXELS * LONGEST_ROW),
        patch_size=PIXELS,
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
        max_position_embeddings=4 * MOST_DIGITS,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
    )
    return rs.MultimodalModule(
        encoders={"vision": rs.EncoderModule(vision, projector="mlp", placeholder_id=IMAGE)}, language_model=llm
    )


def read_digits(model: torch.nn.Module, dataset: DigitsDataset) -> float:
    """Return the share of the data set's pictured digits that are read right."""
    pages = [dataset[i] for i in range(len(dataset))]
    return share_right(model, [page for page in pages if "vision.pixels" in page], ZERO)


@torch.no_grad()
def share_right(model: torch.nn.Module, samples: list[Sample], zero: int) -> float:
    """Return the share of digits, tokens from ``zero`` on, that are predicted right from all that is before them."""
    device = next(model.parameters()).device
    right = total = 0
    for first in range(0, len(samples), 16):
        batch = {key: value.to(device) for key, value in collate_multimodal(samples[first : first + 16]).items()}
        is_digit = batch["labels"] >= zero
        right += int((model(batch)["logits"].argmax(-1) == batch["labels"])[is_digit].sum())
        total += int(is_digit.sum())
    return right / total


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small vision-language model to read pages of digits.")
    parser.add_argument("--steps", type=int, default=200, help="optimizer updates")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, whatever the number of nodes")
    parser.add_argument("--microbatch", type=int, default=4, help="samples that go through a pipeline together")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--max-failures", type=int, default=1, help="node failures survivable at the same time")
    parser.add_argument("--min-pipeline-nodes", type=int, default=2, help="fewest nodes that hold one pipeline")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: at the end")
    return parser.parse_args()


def main() -> None:
    """Train, and let the worker that speaks for the job report how well held-out digits are read."""
    args = parse_arguments()
    torch.set_num_threads(1)
    trainer = rs.Trainer(
        build_model(),
        DigitsDataset("train", 50_000),
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
        accuracy = read_digits(trainer.whole_model(), DigitsDataset("held-out", 200))
        trainer.note("held_out_accuracy", accuracy)
        print(f"{accuracy:.1%} of held-out digits read right")  # noqa: T201


if __name__ == "__main__":
    main()
