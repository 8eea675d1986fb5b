"""Language models as layers: token embeddings, decoder blocks, and the head.

The families share one structure in transformers and differ in their classes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from resilient.data.multimodal import IGNORED_LABEL
from resilient.models.layer import Activations, Batch, Layer, LayerSpec, Shapes, TensorParallel
from resilient.models.multimodal.generator import states_of
from resilient.models.multimodal.vision_sizes import valid_patches
from resilient.models.pretrained import Source, first, initializer, load_pretrained, modeling
from resilient.models.segments import Segments, through_block, window_mask
from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.models.tensor_parallel.exchanges import TOKEN_LOSSES, gather_tokens, token_losses
from resilient.models.tensor_parallel.linears import (
    COLUMNS,
    ROWS,
    ColumnLinear,
    TokenCount,
    VocabularyEmbedding,
    divide_linears,
    entering,
)

LANGUAGE_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""model_type -> what its classes' names begin with."""


class Rotary:
    """Rotary position embeddings; shared by the blocks of a process, part of no state.

    Keeps the last microbatch's, which all blocks of a forward pass ask for.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: tuple[tuple[int, torch.dtype, torch.device], Tensor | None, tuple[Tensor, Tensor]] | None = None

    def __call__(self, hidden: Tensor, seq: int, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cosines and sines ``[1, seq, head_dim]``.

        Args:
            hidden: Its type and device count.
            seq: How many tokens.
            positions: Of the tokens ``[1, seq]``; None for 0, 1, ...
        """
        key = (seq, hidden.dtype, hidden.device)
        last = self._last
        if last is not None and last[0] == key and last[1] is positions:
            return last[2]
        family = self._source.family
        (embedding,) = modeling(family, LANGUAGE_FAMILIES[family] + "RotaryEmbedding")
        # tensors made in inference mode could not be used in training later
        with torch.inference_mode(False), hidden.device:
            places = torch.arange(seq)[None] if positions is None else positions
            tables = embedding(self._source.config)(torch.empty(0, dtype=hidden.dtype), places)
        self._last = (key, positions, tables)
        return tables


class LanguageEmbed(Layer):
    """Embed tokens; placeholder tokens become the encoders' features, in the order of the images.

    Args:
        source: The language model.
        placeholders: Encoder name -> the token id that stands for one of its features.
        patch_sizes: Encoder name -> (height, width) of a patch in pixels.
    """

    def __init__(
        self, source: Source, placeholders: Mapping[str, int], patch_sizes: Mapping[str, tuple[int, int]]
    ) -> None:
        super().__init__()
        config: Any = source.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.placeholders = dict(placeholders)
        self.patch_sizes = dict(patch_sizes)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        hidden = self.embed_tokens(batch["input_ids"])
        for name, token in self.placeholders.items():
            features = activations.get(f"{name}.features")
            if features is None:  # a packed cell without images
                continue
            if features.ndim == 3:  # padded, not packed
                features = features[valid_patches(batch, name, self.patch_sizes[name], features.device)]
            hidden = hidden.masked_scatter((batch["input_ids"] == token)[..., None], features.to(hidden.dtype))
        return {"hidden": hidden}


class LanguageBlock(Layer):
    """One decoder block. Sequences are packed, or padded on the right: causal attention never reads the padding."""

    def __init__(self, source: Source, index: int, rotary: Rotary) -> None:
        super().__init__()
        (block,) = modeling(source.family, LANGUAGE_FAMILIES[source.family] + "DecoderLayer")
        self.block = block(source.config, index)
        self.window = _window(source.config, index)
        self.rotary = rotary

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        return {"hidden": through_block(partial(self._run, batch), activations["hidden"])}

    def _run(self, batch: Batch, hidden: Tensor) -> Tensor:
        seq, device = self._num_tokens(batch, hidden), hidden.device
        lengths, positions = batch.get("llm.segments"), batch.get("llm.positions")
        if positions is not None and not positions.numel():
            positions = None
        output = self.block(
            hidden,
            attention_mask=window_mask(seq, self.window, device)
            if lengths is None
            else Segments.of(lengths, self.window),
            position_ids=torch.arange(seq, device=device)[None] if positions is None else positions,
            position_embeddings=self.rotary(hidden, seq, positions),
        )
        return first(output)

    def _num_tokens(self, batch: Batch, hidden: Tensor) -> int:
        """Return how many tokens attend to each other."""
        return hidden.shape[1]

    def extra_repr(self) -> str:
        """Return what tells this layer's kind from others': the profiler measures equal ones together."""
        return f"window={self.window}"


class LanguageHead(Layer):
    """Final norm and the projection to the vocabulary; generators get what the norm makes of their tokens.

    Args:
        source: The language model.
        drawn: Generator name -> the token id that stands for one of its patches.
    """

    def __init__(self, source: Source, drawn: Mapping[str, int]) -> None:
        super().__init__()
        self.drawn = dict(drawn)
        config: Any = source.config
        (norm,) = modeling(source.family, LANGUAGE_FAMILIES[source.family] + "RMSNorm")
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        hidden = self.norm(activations["hidden"])
        return {"logits": self.lm_head(hidden), **_states_of(self.drawn, hidden, batch)}


class LanguageEmbedPart(Layer):
    """One tensor-parallel device's part of the embedding; makes its tokens of the sequence.

    Args:
        source: The language model.
        placeholders: As for :class:`LanguageEmbed`.
        patch_sizes: As there.
        devices: They.
    """

    def __init__(
        self,
        source: Source,
        placeholders: Mapping[str, int],
        patch_sizes: Mapping[str, tuple[int, int]],
        devices: TensorDevices,
    ) -> None:
        super().__init__()
        config: Any = source.config
        self.embed_tokens = VocabularyEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id, devices)
        self.placeholders = dict(placeholders)
        self.patch_sizes = dict(patch_sizes)
        self._devices = devices

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        ids = batch["input_ids"]
        own = self._devices.own(ids.shape[1])
        hidden = self.embed_tokens(ids)
        for name, token in self.placeholders.items():
            features = activations.get(f"{name}.features")
            if features is None:  # a packed cell without images
                continue
            if features.ndim == 3:  # padded, not packed
                features = features[valid_patches(batch, name, self.patch_sizes[name], features.device)]
            stands_for_one = ids == token
            places = stands_for_one.flatten().cumsum(0).view_as(ids) - 1
            wanted = stands_for_one[:, own]
            found = features[places[:, own][wanted]].to(hidden.dtype)
            hidden = hidden.masked_scatter(wanted[..., None], found)
        return {"hidden": hidden}


class LanguageBlockPart(LanguageBlock):
    """One tensor-parallel device's heads of a block and part of its multilayer perceptron, for all tokens.

    What comes in and goes out are its tokens of the sequence, and so is what the norms see.
    """

    def __init__(self, source: Source, index: int, rotary: Rotary, devices: TensorDevices) -> None:
        super().__init__(source, index, rotary)
        self._all_tokens = TokenCount()
        divide_linears(self.block, _block_rules(source), devices, self._all_tokens)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        return {"hidden": self._run(batch, activations["hidden"])}

    def _num_tokens(self, batch: Batch, hidden: Tensor) -> int:
        self._all_tokens.value = batch["input_ids"].shape[1]
        return self._all_tokens.value


class LanguageHeadPart(Layer):
    """One tensor-parallel device's part of the head, for all tokens; takes the loss of its tokens itself.

    Args:
        source: The language model.
        drawn: As for :class:`LanguageHead`; what generators get all devices have.
        unshifted: Whether the labels are the tokens that are read, and not those that follow.
        devices: They.
    """

    def __init__(self, source: Source, drawn: Mapping[str, int], unshifted: bool, devices: TensorDevices) -> None:
        super().__init__()
        self.drawn = dict(drawn)
        config: Any = source.config
        (norm,) = modeling(source.family, LANGUAGE_FAMILIES[source.family] + "RMSNorm")
        self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = ColumnLinear(config.hidden_size, devices.own_size(config.vocab_size), bias=False)
        self.num_classes = config.vocab_size
        self.unshifted = unshifted
        self._devices = devices

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        labels = batch["labels"]
        own = self.norm(activations["hidden"])
        states = self._states(own, batch) if self.drawn else {}
        logits = self.lm_head(entering(own, [self.lm_head], self._devices, labels.shape[1]))
        if self.unshifted and "llm.segments" not in batch:  # nothing is to be read after the last one
            labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return {TOKEN_LOSSES: token_losses(logits, labels, self._devices, self.num_classes, IGNORED_LABEL), **states}

    def _states(self, own: Tensor, batch: Batch) -> Activations:
        """Return what generators get of all tokens, given this device's."""
        hidden = gather_tokens(own, self._devices, batch["input_ids"].shape[1])
        return _states_of(self.drawn, hidden, batch)


def _states_of(drawn: Mapping[str, int], hidden: Tensor, batch: Batch) -> Activations:
    """Return what each generator gets of the head's hidden states ``[microbatch, seq, width]``."""
    packed = "llm.segments" in batch
    return {states_of(name): hidden[batch["input_ids"] == token] if packed else hidden for name, token in drawn.items()}


def language_layers(
    source: Source,
    *,
    frozen: bool,
    unshifted: bool,
    placeholders: Mapping[str, int],
    patch_sizes: Mapping[str, tuple[int, int]],
    drawn: Mapping[str, int],
) -> list[LayerSpec]:
    """Cut a language model into ``llm.embed``, ``llm.block.{i}`` and ``llm.head``.

    Args:
        source: It.
        frozen: Keep its parameters as they are.
        unshifted: As for :class:`LanguageHeadPart`.
        placeholders: As for :class:`LanguageEmbed`.
        patch_sizes: As there.
        drawn: As for :class:`LanguageHead`.
    """
    config: Any = source.config
    rotary = Rotary(source)
    tied = {"lm_head.weight": ("llm.embed", "embed_tokens.weight")} if config.tie_word_embeddings else {}
    head_names = {"norm.": "model.norm.", "lm_head.": "model.embed_tokens." if tied else "lm_head."}

    def spec(
        name: str, whole: Any, part: Any, names: Mapping[str, str], conditions: Mapping[str, Any] = {}, **rest: Any
    ) -> LayerSpec:
        def build_part(devices: TensorDevices) -> nn.Module:
            return _build(partial(part, devices=devices), frozen)

        return LayerSpec(
            name=f"llm.{name}",
            unit="llm",
            build=partial(_build, whole, frozen),
            initialize=partial(_initialize, source, names),
            tensor_parallel=TensorParallel(build=build_part, **{"tokens": _hidden_tokens, **conditions}),
            **rest,
        )

    embed = spec(
        "embed",
        partial(LanguageEmbed, source, placeholders, patch_sizes),
        partial(LanguageEmbedPart, source, placeholders, patch_sizes),
        {"embed_tokens.": "model.embed_tokens."},
        {"tokens": lambda shapes: {}},
        reads=frozenset(("input_ids", *(f"{name}.sizes" for name in placeholders))),
        cut={"embed_tokens": 0},
    )
    rules = _block_rules(source)
    heads = {"attention heads": config.num_attention_heads, "key-value heads": config.num_key_value_heads}
    blocks = [
        spec(
            f"block.{i}",
            partial(LanguageBlock, source, i, rotary),
            partial(LanguageBlockPart, source, i, rotary),
            {"block.": f"model.layers.{i}."},
            {"divisible": heads, "why_not": _why_not(config, rules)},
            reads=frozenset(("llm.segments", "llm.positions")),
            cut={f"block.{path}": int(rule == ROWS) for path, rule in rules.items()},
        )
        for i in range(config.num_hidden_layers)
    ]
    head = spec(
        "head",
        partial(LanguageHead, source, drawn),
        partial(LanguageHeadPart, source, drawn, unshifted),
        head_names,
        reads=frozenset(("labels", *(("input_ids",) if drawn else ()))),
        for_loss=frozenset({"logits", TOKEN_LOSSES} if drawn else ()),
        tied=tied,
        cut={} if tied else {"lm_head": 0},
    )
    return [embed, *blocks, head]


def _hidden_tokens(shapes: Shapes) -> dict[str, int]:
    """Return how many tokens there are of what enters a block or the head."""
    return {"hidden": shapes["input_ids"][1]}


def _block_rules(source: Source) -> dict[str, str]:
    """Return how devices divide the linear layers of a block, by their paths in it, as transformers knows it."""
    plan: Mapping[str, str] = getattr(source.config, "base_model_tp_plan", None) or {}
    return {
        path.removeprefix("layers.*."): rule
        for path, rule in plan.items()
        if path.startswith("layers.*.") and rule in (COLUMNS, ROWS)
    }


def _why_not(config: Any, rules: Mapping[str, str]) -> str:
    """Return why devices cannot divide a block; "" if they can."""
    if not rules:
        return "for which transformers has no base_model_tp_plan"
    if config.attention_dropout:
        return "whose attention has dropout (attention_dropout is not 0)"
    return ""


class WideRMSNorm(nn.Module):
    """transformers' RMSNorm, computed in float32 or wider: theirs narrows float64, and rounding grows to 1e-9.

    Args:
        weight: Scale ``[hidden]``.
        eps: Added to the mean square.
    """

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


def _build(make: Any, frozen: bool) -> nn.Module:
    layer: nn.Module = make()
    norms = [(name, part) for name, part in layer.named_modules() if type(part).__name__.endswith("RMSNorm")]
    for name, norm in norms:
        layer.set_submodule(name, WideRMSNorm(norm.get_parameter("weight"), cast(Any, norm).variance_epsilon))
    return layer.requires_grad_(not frozen)


def _initialize(source: Source, names: Mapping[str, str], module: nn.Module) -> None:
    if source.weights is not None:
        load_pretrained(module, source.weights, names)
        return
    (pretrained,) = modeling(source.family, LANGUAGE_FAMILIES[source.family] + "PreTrainedModel")
    module.apply(initializer(pretrained, source.config))


def _window(config: Any, index: int) -> int | None:
    """Return how many positions block ``index`` looks back, its own included; None for all."""
    types = getattr(config, "layer_types", None)
    if types is not None and types[index] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None)
