"""Train a small model to draw handwritten digits.

It is told a digit and draws it: the language model reads the digit, and a generator behind it makes a picture of 8 x 8
pixels of its last hidden states. The pictures it learns from are real, those of ``digits_vlm.py``. After each picture
it names the digit that follows (0 after 9), so that words and pictures are learnt together. A sample has 1 to 3
digits; in one of eight they are named alone, and nothing is drawn.

Of a digit alone nobody can tell which of its scans is meant, so the best picture is the mean of all of them. The
held-out scans, never seen in training, are compared with what is drawn, and with the mean of all training scans.

    resilient run --nodes 5 examples/draw_digits.py                          on five (simulated) nodes
    resilient run --nodes 3 examples/draw_digits.py --min-pipeline-nodes 1   on fewer than four
    python examples/draw_digits.py                                           in one process
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, ViTConfig

import resilient as rs
from resilient.data import IGNORED_LABEL, Sample, collate_multimodal
from resilient.examples.digits_vlm import PIXELS, scans

PAD, BOS, PATCH, NEXT, END, ZERO = range(6)
"""Tokens: ``PATCH`` stands for a patch to be drawn, behind ``NEXT`` the digit that follows; digit d is ``ZERO + d``."""
MOST_DIGITS = 3
PATCH_SIZE = 4
PATCHES = (PIXELS // PATCH_SIZE) ** 2
NAMED_ALONE = 1 / 8


class DrawingsDataset:
    """Digits that are told, and their pictures; sample i is a function of (split, seed, i).

    Args:
        split: "train", or "held-out": a fifth of the scanned digits that no training picture holds.
        num_samples: Samples to compose.
        seed: Of the compositions.
    """

    def __init__(self, split: str, num_samples: int, seed: int = 0) -> None:
        self.pixels, self.digits = scans(split)
        self._num_samples = num_samples
        self._entropy = (seed, 0 if split == "train" else 1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        chosen, drawn = self._composed(index)
        tokens, labels = [BOS], [IGNORED_LABEL]
        for digit in self.digits[chosen].tolist():
            told = [ZERO + digit, *[PATCH] * (PATCHES if drawn else 0), NEXT]
            tokens += told
            labels += [*[IGNORED_LABEL] * (len(told) - 1), ZERO + (digit + 1) % 10]
        sample: dict[str, object] = {"input_ids": torch.tensor(tokens), "labels": torch.tensor(labels)}
        if drawn:
            sample["image.pixels"] = [picture[None] for picture in self.pixels[chosen]]
        return sample

    def num_targets(self, index: int) -> int:
        """Return the digits that are named, and the patches that are drawn."""
        chosen, drawn = self._composed(index)
        return len(chosen) * (1 + (PATCHES if drawn else 0))

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of the text, and the patches of each picture."""
        chosen, drawn = self._composed(index)
        pictures = [PATCHES] * len(chosen) if drawn else []
        return {"llm": [1 + 2 * len(chosen) + sum(pictures)], "image": pictures}

    def _composed(self, index: int) -> tuple[np.ndarray, bool]:
        """Return a sample's scans, and whether they are drawn."""
        generator = np.random.default_rng((*self._entropy, index))
        chosen = generator.integers(len(self.digits), size=generator.integers(1, MOST_DIGITS + 1))
        return chosen, bool(generator.random() >= NAMED_ALONE)


def build_model() -> rs.MultimodalModule:
    """Return a Llama of 3 blocks, and a generator of 2 blocks behind it: about 0.4 M parameters."""
    decoder = ViTConfig(
        image_size=PIXELS,
        patch_size=PATCH_SIZE,
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
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1 + (2 + PATCHES) * MOST_DIGITS,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=END,
    )
    generator = rs.GeneratorModule(decoder, placeholder_id=PATCH, loss_weight=10.0)  # pixels err by less than words
    return rs.MultimodalModule(encoders={}, language_model=llm, generators={"image": generator})


@torch.no_grad()
def drawing_error(model: torch.nn.Module, dataset: DrawingsDataset) -> float:
    """Return the mean squared error of the pixels of all pictures of a data set."""
    samples = [sample for i in range(len(dataset)) if "image.pixels" in (sample := dataset[i])]
    total, count = 0.0, 0
    for start in range(0, len(samples), 50):
        batch = collate_multimodal(samples[start : start + 50])
        drawn: Tensor = model(batch)["image.drawn"]  # [num_images, patches, pixels of a patch]
        scanned = torch.nn.functional.unfold(batch["image.pixels"], PATCH_SIZE, stride=PATCH_SIZE).transpose(1, 2)
        total += float((drawn.float() - scanned).square().sum())
        count += scanned.numel()
    return total / count


def error_of_mean(dataset: DrawingsDataset) -> float:
    """Return the mean squared error if the mean of all training scans were drawn, whatever the digit."""
    pictures = [image for i in range(len(dataset)) for image in dataset[i].get("image.pixels", ())]
    mean = scans("train")[0].mean(dim=0)
    return float((torch.cat(pictures) - mean).square().mean())


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small model to draw handwritten digits.")
    parser.add_argument("--steps", type=int, default=150, help="optimizer updates")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, whatever the number of nodes")
    parser.add_argument("--microbatch", type=int, default=4, help="samples that go through a pipeline together")
    parser.add_argument("--lr", type=float, default=5e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--max-failures", type=int, default=1, help="node failures survivable at the same time")
    parser.add_argument("--min-pipeline-nodes", type=int, default=2, help="fewest nodes that hold one pipeline")
    return parser.parse_args()


def main() -> None:
    """Train, and let the worker that speaks for the job report how well scans are drawn that it never saw."""
    args = parse_arguments()
    torch.set_num_threads(1)
    trainer = rs.Trainer(
        build_model(),
        DrawingsDataset("train", 50_000),
        optimizer=rs.AdamW(lr=args.lr, lr_schedule=rs.WarmupCosine(args.steps // 10, args.steps, floor=0.01)),
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        seed=args.seed,
        precision=args.precision,
        clip_grad_norm=1.0,
    )
    result = trainer.fit(num_steps=args.steps)
    if result.is_main:
        held_out = DrawingsDataset("held-out", 200)
        error, of_mean = drawing_error(trainer.whole_model(), held_out), error_of_mean(held_out)
        trainer.note("held_out_error", error)
        print(f"held-out pictures: squared error {error:.3f} a pixel, of the mean picture {of_mean:.3f}")  # noqa: T201


if __name__ == "__main__":
    main()
