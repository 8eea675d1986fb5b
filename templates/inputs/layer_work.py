"""What the layers of known models do with a microbatch, whatever the device: FLOPs, memory traffic, bytes kept.

Owns the counting, layer kind by layer kind; :mod:`resilient.templates.inputs.derive` says by which formulas it becomes
time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from resilient.errors import ArgumentError
from resilient.templates.common.words import look_up
from resilient.templates.inputs.known_models import MODELS, Blocks, KnownModel

PARAMETER_BYTES = 2
"""Of a parameter as it is computed with: fp16 or bf16."""

OPTIMIZER_BYTES = 12
"""Of a parameter's optimizer slots: mixed-precision Adam's master copy and two moments, fp32."""

GRADIENT_BYTES = 4
"""Of a parameter's gradient: fp32, as many microbatches are added up."""


@dataclass(frozen=True, kw_only=True)
class LayerWork:
    """Work of one layer for a microbatch, whatever the device. Bytes and FLOPs are those at degree 1.

    Args:
        name: The layer's.
        parameters: Parameters it owns.
        matrix: Parameters that are multiplied with every token, those of a shared matrix included.
        tokens: Tokens of a microbatch.
        attention_flops: Forward FLOPs of attention.
        traffic_bytes: Memory traffic beside products, the same on all devices.
        sharded_traffic_bytes: The same, divided over the devices.
        lookup_bytes: Memory traffic of a lookup table's gradient.
        kept_bytes: Activations kept for the backward, the same on all devices.
        sharded_kept_bytes: The same, divided over the devices.
        deferred_bytes: Gradients of what matrices and norms give, the same on all devices.
        sharded_deferred_bytes: The same, divided over the devices.
        reduce_bytes: Of one sum over the devices.
        forward_reduces: Sums in the forward.
        backward_reduces: Sums in the backward for inputs.
        input_bytes: Of what enters the layer.
        shares: Layers whose state it uses besides its own.
    """

    name: str
    parameters: int
    matrix: int
    tokens: int
    attention_flops: float = 0.0
    traffic_bytes: int = 0
    sharded_traffic_bytes: int = 0
    lookup_bytes: int = 0
    kept_bytes: int = 0
    sharded_kept_bytes: int = 0
    deferred_bytes: int = 0
    sharded_deferred_bytes: int = 0
    reduce_bytes: int = 0
    forward_reduces: int = 0
    backward_reduces: int = 0
    input_bytes: int = 0
    shares: tuple[str, ...] = ()

    @property
    def forward_flops(self) -> float:
        """Return the FLOPs of its products, attention among them."""
        return 2 * self.matrix * self.tokens + self.attention_flops


def layer_works(model: str, microbatch: int, seq_len: int) -> Iterator[LayerWork]:
    """Yield what each layer of a known model does with a microbatch, in execution order.

    Raises:
        ValueError: The model is not known, or a number does not fit it.
    """
    known = look_up("model", model, MODELS)
    _check(known, model, microbatch, seq_len)
    hidden = known.blocks.hidden
    if known.vision is not None:
        tower, patches = known.vision.blocks, microbatch * known.vision.patches
        patch_bytes = 2 * patches * known.vision.patch_values
        yield LayerWork(
            name="vision.embed",
            parameters=known.vision.patch_values * tower.hidden,
            matrix=known.vision.patch_values * tower.hidden,
            tokens=patches,
            kept_bytes=patch_bytes,
            reduce_bytes=2 * patches * tower.hidden,
            forward_reduces=1,
            backward_reduces=1,
            input_bytes=patch_bytes,
        )
        yield from block_works("vision", tower, microbatch, known.vision.patches)
        merged = known.vision.patches_per_token * tower.hidden
        yield projector_work(
            "vision", (merged, merged, hidden), patches // known.vision.patches_per_token, norm=tower.hidden
        )
    yield embed_work(known, microbatch, seq_len)
    yield from block_works("llm", known.blocks, microbatch, seq_len)
    yield head_work(known, microbatch, seq_len)


def _check(known: KnownModel, model: str, microbatch: int, seq_len: int) -> None:
    if microbatch < 1:
        raise ArgumentError("microbatch", "be >= 1", microbatch, f"{known.microbatch} is usual for {model}")
    shortest = 1 if known.vision is None else known.vision.patches // known.vision.patches_per_token + 1
    if not shortest <= seq_len <= known.positions:
        pictures = "" if known.vision is None else f" ({shortest - 1} of a sample's tokens are its picture's)"
        raise ArgumentError(
            "seq_len",
            f"be {shortest} to {known.positions} for {model}{pictures}",
            seq_len,
            f"{known.seq_len} is usual",
        )


def block_works(unit: str, blocks: Blocks, microbatch: int, seq_len: int) -> Iterator[LayerWork]:
    """Yield what the blocks of a unit do."""
    hidden, ffn, tokens = blocks.hidden, blocks.ffn, microbatch * seq_len
    queries, keys = blocks.num_heads * blocks.head_size, blocks.num_kv_heads * blocks.head_size
    matrix = hidden * (2 * queries + 2 * keys) + (3 if blocks.gated else 2) * hidden * ffn
    vectors = 2 * hidden if blocks.gated else 4 * hidden + hidden + ffn + hidden
    vectors += (queries + 2 * keys) if blocks.qkv_bias else 0
    norms_and_residuals = 2 * (2 * 2 * hidden) + 2 * (3 * 2 * hidden)
    activation = (3 if blocks.gated else 2) * 2 * ffn
    rotation = 2 * 2 * (queries + keys) if blocks.rotary else 0
    inner = (4 if blocks.gated else 2) * 2 * ffn
    for index in range(blocks.num_blocks):
        yield LayerWork(
            name=f"{unit}.block.{index}",
            parameters=matrix + vectors,
            matrix=matrix,
            tokens=tokens,
            attention_flops=4 * microbatch * seq_len**2 * queries / (2 if blocks.causal else 1),
            traffic_bytes=tokens * norms_and_residuals,
            sharded_traffic_bytes=tokens * (activation + rotation),
            kept_bytes=tokens * (8 + 2 * blocks.dropout) * hidden,
            sharded_kept_bytes=tokens * (2 * (2 * queries + 2 * keys) + 4 * blocks.num_heads + inner),
            deferred_bytes=tokens * 8 * hidden,
            sharded_deferred_bytes=tokens * 2 * (queries + 2 * keys + (2 if blocks.gated else 1) * ffn),
            reduce_bytes=2 * tokens * hidden,
            forward_reduces=2,
            backward_reduces=2,
            input_bytes=2 * tokens * hidden,
        )


def projector_work(unit: str, widths: tuple[int, ...], tokens: int, *, norm: int) -> LayerWork:
    """Norm, then a matrix, or two with GELU between them, on what becomes one token of the language model.

    Args:
        unit: The encoder.
        widths: Of what enters, of what is between the two matrices where there are two, and of what leaves.
        tokens: Of the language model.
        norm: Width of the norm before.
    """
    entering, *inner, leaving = widths
    matrix = sum(before * after for before, after in itertools.pairwise(widths))
    return LayerWork(
        name=f"{unit}.projector",
        parameters=matrix + sum(widths[1:]) + 2 * norm,
        matrix=matrix,
        tokens=tokens,
        traffic_bytes=tokens * 4 * entering,
        sharded_traffic_bytes=tokens * 4 * sum(inner),
        kept_bytes=tokens * 4 * entering,
        sharded_kept_bytes=tokens * 4 * sum(inner),
        deferred_bytes=tokens * 2 * (entering + leaving),
        sharded_deferred_bytes=tokens * 2 * sum(inner),
        reduce_bytes=2 * tokens * leaving,
        forward_reduces=1,
        backward_reduces=1,
        input_bytes=2 * tokens * entering,
    )


def embed_work(known: KnownModel, microbatch: int, seq_len: int) -> LayerWork:
    """Rows of the table are read and written; where there is a picture, its tokens are put in between."""
    blocks, tokens = known.blocks, microbatch * seq_len
    hidden, masked = blocks.hidden, not blocks.causal
    vision = known.vision
    features = 0 if vision is None else microbatch * vision.patches // vision.patches_per_token * hidden
    rows = known.vocabulary + (0 if blocks.rotary else known.positions) + 2 * masked
    return LayerWork(
        name="llm.embed",
        parameters=rows * hidden + 2 * hidden * masked,
        matrix=0,
        tokens=tokens,
        traffic_bytes=tokens * (4 if blocks.rotary else 6) * hidden + 4 * tokens * hidden * masked,
        lookup_bytes=tokens * (2 + 2 * GRADIENT_BYTES) * hidden,
        kept_bytes=8 * tokens + tokens * hidden * blocks.dropout + 2 * tokens * hidden * masked,
        deferred_bytes=2 * tokens * hidden,
        reduce_bytes=2 * tokens * hidden,
        forward_reduces=1,
        input_bytes=8 * tokens + 2 * features,
    )


def head_work(known: KnownModel, microbatch: int, seq_len: int) -> LayerWork:
    """Norm, the matrix to the vocabulary and the loss; for masked tokens a transform as well, and a bias."""
    blocks, tokens = known.blocks, microbatch * seq_len
    hidden, vocabulary, masked = blocks.hidden, known.vocabulary, not blocks.causal
    transform = hidden * hidden if masked else 0
    norm = hidden if blocks.gated else 2 * hidden
    own = transform + norm + (hidden + vocabulary if masked else 0) + (0 if known.tied else vocabulary * hidden)
    return LayerWork(
        name="llm.head",
        parameters=own,
        matrix=transform + vocabulary * hidden,
        tokens=tokens,
        traffic_bytes=tokens * (4 + 4 * masked) * hidden,
        sharded_traffic_bytes=tokens * 8 * vocabulary,
        kept_bytes=tokens * (4 + 4 * masked) * hidden,
        sharded_kept_bytes=tokens * 4 * vocabulary,
        deferred_bytes=tokens * (2 + 4 * masked) * hidden,
        sharded_deferred_bytes=tokens * 2 * vocabulary,
        reduce_bytes=2 * tokens * hidden,
        backward_reduces=1,
        input_bytes=2 * tokens * hidden,
        shares=("llm.embed",) if known.tied else (),
    )
