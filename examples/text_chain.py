"""Train a small language model of bytes on text that every machine has: the sources of Python's standard library.

A job without transformers: plain torch modules, one after the other, in a ``Chain``. The last tenth of the text is
never seen in training; how well it is predicted is what the job reports.

    resilient run --nodes 2 examples/text_chain.py                       on two (simulated) nodes
    resilient run --nodes 2 examples/text_chain.py --text my_notes.txt   on a text of yours
    python examples/text_chain.py                                        in one process
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import resilient as rs
from resilient.data import Sample

NUM_BYTES = 256
"""The vocabulary: what a byte can be."""
HELD_OUT = 10
"""One part in so many of the text is held out."""
MODULES = (
    "argparse", "ast", "bdb", "calendar", "cmd", "codecs", "configparser", "contextlib", "copy", "csv", "dataclasses",
    "difflib", "doctest", "enum", "fileinput", "fractions", "ftplib", "functools", "gettext", "heapq", "inspect",
    "locale", "mailbox", "optparse", "pprint", "queue", "random", "sched", "selectors", "shlex", "shutil", "socket",
    "statistics", "string", "tarfile", "tempfile", "textwrap", "threading", "trace", "typing",
)  # fmt: skip
"""Whose sources are read, unless another text is given; the same on every machine with the same Python."""


class TextDataset:
    """Windows of a text; sample i is a function of (split, i) alone.

    Args:
        text: The bytes, ``[length]``.
        split: "train", or "held-out": the end of the text, which no window of "train" touches.
        num_samples: Windows to draw.
        window: Bytes that are predicted in each, every one from those before it.

    Raises:
        ValueError: The text is too short for a window of each split.
    """

    def __init__(self, text: Tensor, split: str, num_samples: int, window: int) -> None:
        border = len(text) - len(text) // HELD_OUT
        self._text = text[border:] if split == "held-out" else text[:border]
        if len(self._text) <= window:
            raise ValueError(
                f"text must be longer than {HELD_OUT} windows, got {len(text)} bytes and windows of {window}; "
                f"give a longer one, or a smaller --window"
            )
        self._num_samples = num_samples
        self._window = window
        self._entropy = 1 if split == "held-out" else 0

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Sample:
        first = int(np.random.default_rng((self._entropy, index)).integers(len(self._text) - self._window))
        seen = self._text[first : first + self._window + 1].long()
        return {"input": seen[:-1], "target": seen[1:]}

    def num_targets(self, index: int) -> int:
        """Return how many bytes a sample predicts: the loss is their mean, and the gradient its gradient."""
        return self._window


class Embedding(nn.Module):
    """Bytes and their positions ``[microbatch, window]`` to vectors ``[microbatch, window, width]``."""

    def __init__(self, window: int, width: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(window, width)

    def forward(self, seen: Tensor) -> Tensor:
        return self.bytes(seen) + self.positions(torch.arange(seen.shape[1], device=seen.device))


class Block(nn.Module):
    """Attention to what came before, and a multilayer perceptron; ``[microbatch, window, width]`` in and out."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.norms[1](hidden))


def byte_loss(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the cross entropy in nats, summed over all bytes of the microbatch."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), batch["target"].flatten(), reduction="sum")


def build_model(window: int, width: int = 96, num_blocks: int = 4, num_heads: int = 4) -> rs.Chain:
    """Return the model as layers: the embedding, the blocks, and the head. Each may be on another node."""
    return rs.Chain(
        [
            lambda: Embedding(window, width),
            *[lambda: Block(width, num_heads)] * num_blocks,
            lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES)),
        ],
        loss=byte_loss,
        names=["embed", *(f"block.{i}" for i in range(num_blocks)), "head"],
    )


def read_text(path: Path | None) -> Tensor:
    """Return a file's bytes, or those of the standard library's sources, ``[length]``."""
    library = Path(sysconfig.get_path("stdlib"))
    paths = [library / f"{name}.py" for name in MODULES] if path is None else [path]
    return torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in paths)), dtype=torch.uint8)


@torch.no_grad()
def held_out_loss(model: nn.Module, dataset: TextDataset) -> float:
    """Return the mean cross entropy of the data set's bytes, in nats."""
    device = next(model.parameters()).device
    samples = [dataset[i] for i in range(len(dataset))]
    batch = {key: torch.stack([sample[key] for sample in samples]).to(device) for key in ("input", "target")}
    return float(byte_loss(model(batch)["hidden"], batch)) / batch["target"].numel()


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small language model of bytes.")
    parser.add_argument("--text", type=Path, help="file to learn from, on every machine; Python's sources by default")
    parser.add_argument("--steps", type=int, default=150, help="optimizer updates")
    parser.add_argument("--batch", type=int, default=32, help="windows of a step, whatever the number of nodes")
    parser.add_argument("--microbatch", type=int, default=8, help="windows that go through a pipeline together")
    parser.add_argument("--window", type=int, default=64, help="bytes of a window")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--max-failures", type=int, default=1, help="node failures survivable at the same time")
    parser.add_argument("--min-pipeline-nodes", type=int, default=1, help="fewest nodes that hold one pipeline")
    parser.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints; 0: at the end")
    return parser.parse_args()


def main() -> None:
    """Train, and let the worker that speaks for the job report how well held-out text is predicted."""
    args = parse_arguments()
    torch.set_num_threads(1)
    text = read_text(args.text)
    trainer = rs.Trainer(
        build_model(args.window),
        TextDataset(text, "train", 50_000, args.window),
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
        loss = held_out_loss(trainer.whole_model(), TextDataset(text, "held-out", 200, args.window))
        trainer.note("held_out_loss", loss)
        trainer.note("held_out_perplexity", math.exp(loss))
        print(f"held-out text: {loss:.3f} nats a byte, a perplexity of {math.exp(loss):.2f}")  # noqa: T201


if __name__ == "__main__":
    main()
