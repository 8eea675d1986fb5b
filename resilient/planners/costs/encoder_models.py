"""Published shapes of encoders, and the multimodal models that are put together of them.

Owns shapes, no formulas; costs come of them in :mod:`resilient.planners.costs.derived_costs`, sample lengths in
:mod:`resilient.planners.workloads.tokens`. An encoder's tokens are what its blocks attend over: patches, audio frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resilient.errors import ArgumentError
from resilient.templates.common.words import look_up
from resilient.templates.inputs.known_models import MODELS, Blocks, KnownModel


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder, and the projector that turns its tokens into tokens of the language model.

    Args:
        source: Where the shape was published.
        unit: Its name as a unit: ``vision`` or ``audio``.
        blocks: Its blocks.
        embed_matrix: Parameters that are multiplied for every token before the first block.
        embed_parameters: Trained parameters there, biases and positions included.
        input_values: Numbers that enter for a token.
        tokens_per_output: Tokens that become one token of the language model.
        projector: ``merge``: two matrices, the first as wide as the tokens put together (Qwen2-VL); ``mlp``: two, both
            as wide as the language model (LLaVA); ``linear``: one.
        pooled: Whether tokens are averaged, not put together, to become one.
        padded: Whether all of a batch are computed as long as the longest: convolutions along a clip are not packed.
    """

    source: str
    unit: Literal["vision", "audio"]
    blocks: Blocks
    embed_matrix: int
    embed_parameters: int
    input_values: int
    tokens_per_output: int = 1
    projector: Literal["merge", "mlp", "linear"] = "mlp"
    pooled: bool = False
    padded: bool = False

    def widths(self, hidden: int) -> tuple[int, ...]:
        """Return the widths in the projector to a language model that is ``hidden`` wide."""
        merged = self.blocks.hidden * (1 if self.pooled else self.tokens_per_output)
        inner = {"merge": (merged,), "mlp": (hidden,), "linear": ()}[self.projector]
        return (merged, *inner, hidden)


def _vit_blocks(num_blocks: int, hidden: int, num_heads: int, ffn: int, *, rotary: bool = False) -> Blocks:
    return Blocks(
        num_blocks=num_blocks,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        ffn=ffn,
        causal=False,
        rotary=rotary,
        dropout=False,
    )


def _vit(source: str, blocks: Blocks, *, positions: int, extra: int, tokens_per_output: int = 1) -> Encoder:
    """A tower on patches of 14 x 14 pixels with learnt positions; ``extra`` vectors: bias, class token, norm."""
    patch = 3 * 14 * 14
    return Encoder(
        source=source,
        unit="vision",
        blocks=blocks,
        embed_matrix=patch * blocks.hidden,
        embed_parameters=(patch + positions + extra) * blocks.hidden,
        input_values=patch,
        tokens_per_output=tokens_per_output,
    )


_QWEN2_PATCH = 3 * 2 * 14 * 14

ENCODERS = {
    "clip-l-336": _vit(
        "openai/clip-vit-large-patch14-336, config.json", _vit_blocks(24, 1024, 16, 4096), positions=577, extra=3
    ),
    "siglip-so400m": _vit(
        "google/siglip-so400m-patch14-384, config.json", _vit_blocks(27, 1152, 16, 4304), positions=729, extra=1
    ),
    "internvit-300m": _vit(
        "OpenGVLab/InternViT-300M-448px, config.json",
        _vit_blocks(24, 1024, 16, 4096),
        positions=1025,
        extra=2,
        tokens_per_output=4,
    ),
    "internvit-6b": _vit(
        "OpenGVLab/InternViT-6B-448px-V2_5, config.json",
        _vit_blocks(45, 3200, 25, 12800),
        positions=1025,
        extra=2,
        tokens_per_output=4,
    ),
    "qwen2-vl": Encoder(
        source="Qwen/Qwen2-VL-7B-Instruct, config.json, the same in all sizes",
        unit="vision",
        blocks=_vit_blocks(32, 1280, 16, 5120, rotary=True),
        embed_matrix=_QWEN2_PATCH * 1280,
        embed_parameters=_QWEN2_PATCH * 1280,
        input_values=_QWEN2_PATCH,
        tokens_per_output=4,
        projector="merge",
    ),
    # A token is two frames of the spectrogram: the second convolution has stride 2. Pooling and projector are those of
    # Qwen2-Audio. Positions are sines, not trained.
    "whisper-large-v3": Encoder(
        source="openai/whisper-large-v3 and Qwen/Qwen2-Audio-7B, config.json",
        unit="audio",
        blocks=_vit_blocks(32, 1280, 20, 5120),
        embed_matrix=2 * 3 * 128 * 1280 + 3 * 1280 * 1280,
        embed_parameters=3 * 128 * 1280 + 1280 + 3 * 1280 * 1280 + 1280,
        input_values=2 * 128,
        tokens_per_output=2,
        projector="linear",
        pooled=True,
        padded=True,
    ),
}
"""By name; what is on top of the last block for other uses (pooling heads) is left out."""

SHORT = {
    "qwen2-vl-7b": "qwen2-vl+qwen2.5-7b",
    "qwen2-vl-72b": "qwen2-vl+qwen2.5-72b",
    "internvl2.5-38b": "internvit-6b+qwen2.5-32b",
    "internvl2.5-78b": "internvit-6b+qwen2.5-72b",
}
"""Names of whole models, and what they are put together of."""


def units_of(model: str) -> tuple[dict[str, Encoder], KnownModel]:
    """Return the encoders, by name, and the language model of a multimodal model.

    Args:
        model: Encoders and a language model, ``siglip-so400m+whisper-large-v3+llama3-8b``; a name in :data:`SHORT`; or
            a language model alone. No two encoders of one unit.

    Raises:
        ValueError: A name is not known (the message lists those that are), or two encoders are of one unit.
    """
    known = {name: each for name, each in MODELS.items() if each.vision is None}
    if "+" not in model:
        look_up("model", model, {**SHORT, **known})
    *names, language = SHORT.get(model, model).split("+")
    encoders = {name: look_up("encoder", name, ENCODERS) for name in names}
    units = [ENCODERS[name].unit for name in names]
    if len(set(units)) != len(units):
        got = f"{model!r} with {', '.join(units)}"
        raise ArgumentError("model", "have encoders of different units", got, "leave one out")
    return encoders, look_up("language model", language, known)
