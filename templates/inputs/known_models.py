"""Published shapes of models that can be planned for without having them; costs come of them in :mod:`derive`.

Owns shapes and the batches they were trained with, no formulas. All of a model's names begin with its unit, as in the
runtime: ``vision.embed``, ``vision.block.3``, ``vision.projector``, ``llm.embed``, ``llm.block.3``, ``llm.head``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Equal transformer blocks.

    Args:
        num_blocks: How many.
        hidden: Width of what flows from block to block.
        num_heads: Query heads.
        num_kv_heads: Key and value heads; fewer than ``num_heads`` in grouped-query attention.
        head_size: Width of a head.
        ffn: Width of the feed-forward part.
        gated: Llama's kind: SwiGLU (three matrices), RMSNorm, no biases. Otherwise GPT's: GELU, LayerNorm, biases.
        qkv_bias: Whether the projections to queries, keys and values have biases; those of GPT's kind do.
        causal: Whether a token attends to those before it only.
        rotary: Whether queries and keys are rotated; otherwise the embedding has learnt positions.
        dropout: Whether there is dropout after attention and feed-forward.
    """

    num_blocks: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    gated: bool = False
    qkv_bias: bool = True
    causal: bool = True
    rotary: bool = False
    dropout: bool = True


@dataclass(frozen=True, kw_only=True)
class Vision:
    """A vision tower, and the projector that merges its patches into tokens of the language model.

    Args:
        blocks: Its blocks.
        patch_values: Numbers in a patch: channels x frames x height x width.
        patches_per_token: Patches that the projector merges into one token.
        patches: Patches of a sample.
    """

    blocks: Blocks
    patch_values: int
    patches_per_token: int
    patches: int


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model by its published shape.

    Args:
        source: Where the shape was published.
        blocks: Blocks of the language model. Where they are not causal the model is BERT's kind, trained on masked
            tokens: segments and a norm in the embedding, and a transform before the head.
        vocabulary: Tokens there are.
        positions: The longest sequence.
        tied: Whether the head uses the embedding's matrix.
        seq_len: Tokens of a sample, where nobody says otherwise.
        microbatch: Samples of a microbatch, likewise.
        global_batch: Samples of a step, likewise.
        vision: What reads the images; None for text alone.
    """

    source: str
    blocks: Blocks
    vocabulary: int
    positions: int
    tied: bool
    seq_len: int
    microbatch: int
    global_batch: int
    vision: Vision | None = None


def _gpt_blocks(num_blocks: int, hidden: int, num_heads: int, *, causal: bool = True) -> Blocks:
    return Blocks(
        num_blocks=num_blocks,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden // num_heads,
        ffn=4 * hidden,
        causal=causal,
    )


def _gpt2(num_blocks: int, hidden: int, num_heads: int, *, microbatch: int, global_batch: int) -> KnownModel:
    return KnownModel(
        source="Radford et al. 2019, table 2",
        blocks=_gpt_blocks(num_blocks, hidden, num_heads),
        vocabulary=50257,
        positions=1024,
        tied=True,
        seq_len=1024,
        microbatch=microbatch,
        global_batch=global_batch,
    )


def _gpt3(num_blocks: int, hidden: int, num_heads: int, *, microbatch: int, global_batch: int) -> KnownModel:
    return KnownModel(
        source="Brown et al. 2020, table 2.1",
        blocks=_gpt_blocks(num_blocks, hidden, num_heads),
        vocabulary=50257,
        positions=2048,
        tied=True,
        seq_len=2048,
        microbatch=microbatch,
        global_batch=global_batch,
    )


def _llama_blocks(num_blocks: int, hidden: int, num_heads: int, num_kv_heads: int, ffn: int) -> Blocks:
    return Blocks(
        num_blocks=num_blocks,
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=hidden // num_heads,
        ffn=ffn,
        gated=True,
        qkv_bias=False,
        rotary=True,
        dropout=False,
    )


def _llama3(source: str, blocks: Blocks, *, positions: int = 8192, tied: bool = False) -> KnownModel:
    """4 million tokens a step, in sequences of 8192: what Llama 3's pre-training began with."""
    return KnownModel(
        source=source,
        blocks=blocks,
        vocabulary=128256,
        positions=positions,
        tied=tied,
        seq_len=8192,
        microbatch=1,
        global_batch=512,
    )


def _qwen2(blocks: Blocks, *, vocabulary: int, tied: bool) -> KnownModel:
    """How they were batched is not published; as Llama 3 is our choice, in sequences half as long."""
    return KnownModel(
        source="Qwen et al. 2024 (Qwen2.5), table 1, and config.json",
        blocks=replace(blocks, qkv_bias=True),
        vocabulary=vocabulary,
        positions=32768,
        tied=tied,
        seq_len=4096,
        microbatch=1,
        global_batch=1024,
    )


def _qwen2_vl(source: str, blocks: Blocks) -> KnownModel:
    """How they were batched is not published: a picture of 896 x 896 pixels (1024 tokens) a sample is our choice."""
    return replace(
        _qwen2(blocks, vocabulary=152064, tied=False),
        source=source,
        seq_len=2048,
        global_batch=512,
        vision=Vision(
            blocks=Blocks(
                num_blocks=32,
                hidden=1280,
                num_heads=16,
                num_kv_heads=16,
                head_size=80,
                ffn=5120,
                causal=False,
                rotary=True,
                dropout=False,
            ),
            patch_values=3 * 2 * 14 * 14,
            patches_per_token=4,
            patches=64 * 64,
        ),
    )


_QWEN2_7B = _llama_blocks(28, 3584, 28, 4, 18944)
_QWEN2_72B = _llama_blocks(80, 8192, 64, 8, 29568)

MODELS = {
    # Devlin et al.'s batches were smaller; these, and those of GPT-2 and GPT-3 below, are what Oobleck (SOSP'23) and
    # the systems it is compared with were measured with.
    "bert-large": KnownModel(
        source="Devlin et al. 2019, section 3, uncased",
        blocks=_gpt_blocks(24, 1024, 16, causal=False),
        vocabulary=30522,
        positions=512,
        tied=True,
        seq_len=512,
        microbatch=32,
        global_batch=8192,
    ),
    "gpt2-medium": _gpt2(24, 1024, 16, microbatch=32, global_batch=8192),
    "gpt2-xl": _gpt2(48, 1600, 25, microbatch=4, global_batch=512),
    "gpt3-medium": _gpt3(24, 1024, 16, microbatch=16, global_batch=8192),
    "gpt3-2.7b": _gpt3(32, 2560, 32, microbatch=2, global_batch=1024),
    "gpt3-6.7b": _gpt3(32, 4096, 32, microbatch=2, global_batch=1024),
    "llama3.2-1b": _llama3(
        "meta-llama/Llama-3.2-1B, config.json", _llama_blocks(16, 2048, 32, 8, 8192), positions=131072, tied=True
    ),
    "llama3.2-3b": _llama3(
        "meta-llama/Llama-3.2-3B, config.json", _llama_blocks(28, 3072, 24, 8, 8192), positions=131072, tied=True
    ),
    "llama3-8b": _llama3("Grattafiori et al. 2024, table 3", _llama_blocks(32, 4096, 32, 8, 14336)),
    "llama3-70b": _llama3("Grattafiori et al. 2024, table 3", _llama_blocks(80, 8192, 64, 8, 28672)),
    "qwen2.5-0.5b": _qwen2(_llama_blocks(24, 896, 14, 2, 4864), vocabulary=151936, tied=True),
    "qwen2.5-1.5b": _qwen2(_llama_blocks(28, 1536, 12, 2, 8960), vocabulary=151936, tied=True),
    "qwen2.5-7b": _qwen2(_QWEN2_7B, vocabulary=152064, tied=False),
    "qwen2.5-32b": _qwen2(_llama_blocks(64, 5120, 40, 8, 27648), vocabulary=152064, tied=False),
    "qwen2.5-72b": _qwen2(_QWEN2_72B, vocabulary=152064, tied=False),
    "qwen2-vl-7b": _qwen2_vl("Qwen/Qwen2-VL-7B-Instruct, config.json", _QWEN2_7B),
    "qwen2-vl-72b": _qwen2_vl("Qwen/Qwen2-VL-72B-Instruct, config.json", _QWEN2_72B),
}
"""By name; the number in ``gpt2-medium`` (355 M parameters) and the like is the exact model that is meant."""
