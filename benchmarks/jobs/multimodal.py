"""An encoder and a language model, emulated or real, on samples of one of three mixes of lengths."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from transformers import LlamaConfig, ViTConfig

import resilient as rs
from resilient.data.dataset import Sample
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.model import EmulatedModel
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.models.layer import Model

PATCH, WORD, PICTURE = 4, 3, 9
LONGEST = 512


def units(num_layers: int, scale: float) -> list[EmulatedUnit]:
    """Return an encoder with a quarter of the layers, and a language model; ``scale`` makes all of them slower."""
    vision = CostCurve(fixed_ms=0.2 * scale, token_ms=0.02 * scale, square_ms=4e-6 * scale)
    language = CostCurve(fixed_ms=0.2 * scale, token_ms=0.02 * scale, square_ms=4e-6 * scale)
    num_vision = num_layers // 4
    return [
        EmulatedUnit(name="vision", num_layers=num_vision, cost=vision),
        EmulatedUnit(name="llm", num_layers=num_layers - num_vision, cost=language),
    ]


class Pictures:
    """Pictures and words of the lengths of an emulated data set; nothing is learnt of them.

    Args:
        mix: As there.
    """

    def __init__(self, mix: str) -> None:
        self._lengths = EmulatedDataset(units(4, 1.0), mix)

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the patches of each picture, and the tokens of the text with a place for each patch."""
        drawn = self._lengths.lengths(index)
        pictures = [max(1, min(length, LONGEST) // 4) for length in drawn["vision"]]
        return {"vision": pictures, "llm": [sum(pictures) + min(self.num_targets(index), LONGEST)]}

    def num_targets(self, index: int) -> int:
        """Return the words."""
        return min(self._lengths.lengths(index)["llm"][0], LONGEST)

    def __getitem__(self, index: int) -> Sample:
        lengths, words = self.lengths(index), self.num_targets(index)
        places = sum(lengths["vision"])
        drawn = torch.Generator().manual_seed(index)
        text = torch.randint(WORD, PICTURE, (words,), generator=drawn)
        sample: dict[str, Tensor | list[Tensor]] = {
            "input_ids": torch.cat((torch.full((places,), PICTURE), text)),
            "labels": torch.cat((torch.full((places,), -100), text.roll(-1))),
            "vision.pixels": [torch.randn(3, PATCH, PATCH * each, generator=drawn) for each in lengths["vision"]],
        }
        return sample


def real_model() -> Model:
    """Return a ViT of 2 blocks and a Llama of 4."""
    vision = ViTConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=LONGEST // 4 * PATCH,
        patch_size=PATCH,
        qkv_bias=False,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    llm = LlamaConfig(
        vocab_size=10,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2 * LONGEST,
    )
    return rs.MultimodalModule(
        encoders={"vision": rs.EncoderModule(vision, placeholder_id=PICTURE)}, language_model=llm, labels="shifted"
    )


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=0, help="of an emulated model; 0 for a real one")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--mix", default="heavy")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--min-pipeline-nodes", type=int, default=1)
    parser.add_argument("--planner")
    parser.add_argument("--packed", action="store_true", help="a chain's microbatches take no longer than its samples")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, dataset = real_model(), Pictures(args.mix)
    if args.layers:
        parts = units(args.layers, args.scale)
        model, dataset = EmulatedModel(parts, padded=not args.packed), EmulatedDataset(parts, args.mix)
    trainer = rs.Trainer(
        model,
        dataset,
        optimizer=rs.AdamW(lr=1e-3),
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=0,
        min_pipeline_nodes=args.min_pipeline_nodes,
        planner=args.planner,
        device="cpu",
    )
    trainer.fit(args.steps)


if __name__ == "__main__":
    main()
