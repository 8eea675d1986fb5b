"""A Llama-shaped model of any size as a chain of transformers' own blocks, and the work that it is: here and in plain
PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from resilient.templates.inputs.known_models import MODELS, Blocks
from resilient.templates.inputs.layer_work import block_works

SMALL = "small"
_INITIAL_DEVIATION = 0.02
_PASSES = 3
"""Forward, and backward for inputs and for weights, which take as many products each."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model of Llama's kind with a head of its own.

    Args:
        blocks: Its blocks.
        vocabulary: Tokens there are.
    """

    blocks: Blocks
    vocabulary: int

    def model_flops(self, num_samples: int, seq_len: int) -> float:
        """Return the FLOPs of the products of forward and backward, attention among them, without recomputation."""
        head = 2 * self.blocks.hidden * self.vocabulary * num_samples * seq_len
        blocks = sum(work.forward_flops for work in block_works("llm", self.blocks, num_samples, seq_len))
        return _PASSES * (blocks + head)


def shape_of(name: str, num_blocks: int = 0, vocabulary: int = 0) -> Shape:
    """Return a shape.

    Args:
        name: Of a known model of Llama's kind, or :data:`SMALL`: 4.5 M parameters, for cores.
        num_blocks: Other than its own; 0 for those.
        vocabulary: Likewise.
    """
    if name == SMALL:
        small = {"num_blocks": 4, "hidden": 256, "num_heads": 8, "num_kv_heads": 4, "head_size": 32, "ffn": 704}
        known = Shape(blocks=replace(MODELS["llama3.2-1b"].blocks, **small), vocabulary=2048)
    else:
        known = Shape(blocks=MODELS[name].blocks, vocabulary=MODELS[name].vocabulary)
    return Shape(
        blocks=replace(known.blocks, num_blocks=num_blocks or known.blocks.num_blocks),
        vocabulary=vocabulary or known.vocabulary,
    )


class Block(nn.Module):
    """A decoder block that knows the places of its tokens: ``[microbatch, tokens, hidden]`` in and out."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.block = LlamaDecoderLayer(config, index)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        return self.block(hidden, position_embeddings=self.rotary(hidden, positions))


def config_of(shape: Shape) -> LlamaConfig:
    """Return transformers' configuration of a shape."""
    blocks = shape.blocks
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=blocks.hidden,
        intermediate_size=blocks.ffn,
        num_hidden_layers=blocks.num_blocks,
        num_attention_heads=blocks.num_heads,
        num_key_value_heads=blocks.num_kv_heads,
        head_dim=blocks.head_size,
    )
    config._attn_implementation = "sdpa"
    return config


def factories(shape: Shape | None = None, *, compiled: bool = False) -> list[Callable[[], nn.Module]]:
    """Return one factory per layer: the embedding, the blocks, and the head with its norm.

    Args:
        shape: Of the model; the small one by default.
        compiled: Have ``torch.compile`` make each block's code.
    """
    shape = shape or shape_of(SMALL)
    config = config_of(shape)

    def embedding() -> nn.Module:
        return _drawn(nn.Embedding(shape.vocabulary, shape.blocks.hidden))

    def block(index: int) -> nn.Module:
        made = _drawn(Block(config, index))
        if compiled:
            made.compile()
        return made

    def head() -> nn.Module:
        norm = LlamaRMSNorm(shape.blocks.hidden, eps=config.rms_norm_eps)
        return _drawn(nn.Sequential(norm, nn.Linear(shape.blocks.hidden, shape.vocabulary, bias=False)))

    return [embedding, *(lambda index=index: block(index) for index in range(shape.blocks.num_blocks)), head]


def _drawn(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=_INITIAL_DEVIATION)
    return module


def layer_names(shape: Shape) -> list[str]:
    """Return the names that derived profiles have for the layers."""
    return ["llm.embed", *(f"llm.block.{index}" for index in range(shape.blocks.num_blocks)), "llm.head"]


def summed_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of all tokens, summed."""
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="sum")


class Tokens:
    """Random sequences, all in memory; what is predicted of each token is the next one."""

    def __init__(self, vocabulary: int, seq_len: int, num_samples: int = 4096) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (num_samples, seq_len + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": self._tokens[index, :-1], "target": self._tokens[index, 1:]}

    def num_targets(self, index: int) -> int:
        """Return how many tokens a sample predicts."""
        return self._tokens.shape[1] - 1


SEQ_LEN = TARGETS_PER_SAMPLE = 64
"""Of the small model's samples."""


def dataset() -> Tokens:
    """Return the small model's samples."""
    return Tokens(shape_of(SMALL).vocabulary, SEQ_LEN)
