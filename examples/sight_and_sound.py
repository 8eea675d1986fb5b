"""Train a small model that sees and hears: digits in pictures, moved by tones.

Pictures show digits, scanned ones as in ``digits_vlm.py``; a sound has a tone for each of them. After a rising tone the
model says the digit that follows (0 after 9), after a falling one that before, after a steady one the digit itself:
neither picture nor sound alone tells it. Some samples have no sound, and digits are said as they are; some have no
picture, and it is said how the tones go. Most samples have few digits or tones, few have up to 40.

The sounds are made here, not recorded: of any pitch and loudness, in noise. They are encoded as spectrograms, as in the
Audio Spectrogram Transformer (Gong et al., 2021, https://arxiv.org/abs/2104.01778).

    resilient run --nodes 5 examples/sight_and_sound.py                          on five (simulated) nodes
    resilient run --nodes 3 examples/sight_and_sound.py --min-pipeline-nodes 1   on fewer than four
    python examples/sight_and_sound.py                                           in one process
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, ViTConfig
from transformers.audio_utils import mel_filter_bank

import resilient as rs
from resilient.data import IGNORED_LABEL, Sample
from resilient.examples.digits_vlm import PIXELS, scans, share_right

PAD, BOS, EOS, IMAGE, SOUND, FALLING, STEADY, RISING, ZERO = range(9)
"""Tokens; digit d is ``ZERO + d``."""
MOST = 40
MEDIAN = 3
DIGITS_A_PICTURE = 8
KINDS = {"both": 0.7, "sight": 0.15, "sound": 0.15}
"""What samples have, and the share of each."""

HERTZ = 8000
FRAME = 125
"""Samples of the sound that a spectrogram moves on by."""
FRAMES_A_TONE = 8
WINDOW = 256
BANDS = 16


@dataclass(frozen=True)
class Scene:
    """What a sample is made of: which scans it shows, where its tones go (-1 falls, 0, 1 rises), and which it has."""

    scans: np.ndarray
    tones: np.ndarray
    kind: str


class ScenesDataset:
    """Digits seen and tones heard, with what is to be said; sample i is a function of (split, seed, i).

    Args:
        split: "train", or "held-out": of a fifth of the scanned digits that no training picture holds, and other tones.
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
        generator = np.random.default_rng((*self._entropy, index))
        scene = self._scene(generator)
        sample: dict[str, object] = {}
        if scene.kind != "sound":
            digits = self.pixels[scene.scans].split(DIGITS_A_PICTURE)
            sample["vision.pixels"] = [torch.cat(list(row), dim=1)[None] for row in digits]
        if scene.kind != "sight":
            sample["sound.pixels"] = spectrogram(play(scene.tones, generator))
        placeholders = _placeholders(scene.kind)
        tokens, labels = [BOS], [IGNORED_LABEL]
        for answer in self._answers(scene):
            tokens += [*placeholders, answer]
            labels += [*[IGNORED_LABEL] * len(placeholders), answer]
        return {"input_ids": torch.tensor(tokens[:-1]), "labels": torch.tensor(labels[1:]), **sample}

    def num_targets(self, index: int) -> int:
        """Return how many tokens are said."""
        return len(self._scene(np.random.default_rng((*self._entropy, index))).tones)

    def lengths(self, index: int) -> dict[str, list[int]]:
        """Return the tokens of each picture, one for a digit, of the sound, one for a tone, and of the text."""
        scene = self._scene(np.random.default_rng((*self._entropy, index)))
        count, full = len(scene.tones), DIGITS_A_PICTURE
        pictures = [min(full, count - first) for first in range(0, count, full)]
        return {
            "vision": [] if scene.kind == "sound" else pictures,
            "sound": [] if scene.kind == "sight" else [count],
            "llm": [count * (len(_placeholders(scene.kind)) + 1)],
        }

    def _scene(self, generator: np.random.Generator) -> Scene:
        count = int(np.clip(np.rint(generator.lognormal(np.log(MEDIAN), 1.0)), 1, MOST))
        return Scene(
            scans=generator.integers(len(self.digits), size=count),
            tones=generator.integers(-1, 2, size=count),
            kind=str(generator.choice(list(KINDS), p=list(KINDS.values()))),
        )

    def _answers(self, scene: Scene) -> list[int]:
        if scene.kind == "sound":
            return (STEADY + scene.tones).tolist()
        moves = scene.tones if scene.kind == "both" else 0
        return (ZERO + (self.digits[scene.scans] + moves) % 10).tolist()


def _placeholders(kind: str) -> list[int]:
    return [*([IMAGE] if kind != "sound" else []), *([SOUND] if kind != "sight" else [])]


def play(tones: np.ndarray, generator: np.random.Generator) -> Tensor:
    """Return the sound of tones, ``[samples]``; those that rise or fall do so by most of an octave."""
    count, length = len(tones), FRAMES_A_TONE * FRAME
    first, octaves, loudness = (generator.uniform(*ends, (count, 1)) for ends in ((400, 900), (0.7, 1), (0.3, 1)))
    hertz = first * 2 ** (tones[:, None] * octaves * np.linspace(0, 1, length))
    tone = loudness * np.sin(2 * np.pi * np.cumsum(hertz, axis=1) / HERTZ)
    return torch.from_numpy(tone + generator.normal(scale=0.05, size=tone.shape)).flatten()


def spectrogram(sound: Tensor) -> Tensor:
    """Return how loud each band of the mel scale is in each frame, about -1 .. 1, ``[1, BANDS, samples / FRAME]``."""
    window = torch.hann_window(WINDOW, dtype=sound.dtype)
    spectrum = torch.stft(sound, WINDOW, FRAME, window=window, pad_mode="constant", return_complex=True)
    loudness = _bands() @ spectrum[:, :-1].abs().square()
    return ((loudness + 1e-2).log() / 5).float()[None]


@cache
def _bands() -> Tensor:
    """Return how much of each frequency is in each band, ``[BANDS, WINDOW / 2 + 1]``."""
    return torch.from_numpy(mel_filter_bank(WINDOW // 2 + 1, BANDS, 100.0, HERTZ / 2, HERTZ)).T


def build_model() -> rs.MultimodalModule:
    """Return two ViTs of 2 blocks, for pictures and spectrograms, and a Llama of 3 blocks: about 0.7 M parameters."""
    llm = LlamaConfig(
        vocab_size=ZERO + 10,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=3 * MOST,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    encoders = {
        "vision": rs.EncoderModule(
            _encoder(rows=PIXELS, columns=PIXELS, longest=DIGITS_A_PICTURE), projector="mlp", placeholder_id=IMAGE
        ),
        "sound": rs.EncoderModule(
            _encoder(rows=BANDS, columns=FRAMES_A_TONE, longest=MOST), projector="mlp", placeholder_id=SOUND
        ),
    }
    return rs.MultimodalModule(encoders=encoders, language_model=llm)


def _encoder(*, rows: int, columns: int, longest: int) -> ViTConfig:
    return ViTConfig(
        image_size=(rows, columns * longest),
        patch_size=(rows, columns),
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


def say_digits(model: torch.nn.Module, dataset: ScenesDataset) -> float:
    """Return the share of the digits that are said right, in samples with pictures and sound."""
    samples = [dataset[i] for i in range(len(dataset))]
    return share_right(model, [each for each in samples if {"vision.pixels", "sound.pixels"} <= each.keys()], ZERO)


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description="Train a small model that sees and hears.")
    parser.add_argument("--steps", type=int, default=100, help="optimizer updates")
    parser.add_argument("--batch", type=int, default=32, help="samples of a step, whatever the number of nodes")
    parser.add_argument("--microbatch", type=int, default=4, help="samples that go through a pipeline together")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of initial values and sample order")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp64"), default="fp32")
    parser.add_argument("--max-failures", type=int, default=1, help="node failures survivable at the same time")
    parser.add_argument("--min-pipeline-nodes", type=int, default=2, help="fewest nodes that hold one pipeline")
    return parser.parse_args()


def main() -> None:
    """Train, and let the worker that speaks for the job report how well it does on what it never saw or heard."""
    args = parse_arguments()
    torch.set_num_threads(1)
    trainer = rs.Trainer(
        build_model(),
        ScenesDataset("train", 50_000),
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
        accuracy = say_digits(trainer.whole_model(), ScenesDataset("held-out", 200))
        trainer.note("held_out_accuracy", accuracy)
        print(f"{accuracy:.1%} of digits said right, of held-out scans and tones")  # noqa: T201


if __name__ == "__main__":
    main()
