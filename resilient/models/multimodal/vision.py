"""Vision encoders as layers: patch embedding, transformer blocks, and the projector into the language model.

Images of a microbatch differ in size. They are packed patch by patch into one row, or zero-padded on the right and at
the bottom; padding patches are masked out of attention, so that no real patch's value depends on them. An image smaller
than the encoder's own takes the top left part of its table of positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from resilient.models.layer import Activations, Batch, Layer, LayerSpec, TensorParallel
from resilient.models.multimodal.vision_families import VISION_FAMILIES
from resilient.models.multimodal.vision_sizes import (
    TokensOf,
    hidden_tokens,
    num_tokens,
    pair,
    shapes_of,
    valid_patches,
)
from resilient.models.pretrained import Source, first, initializer, load_pretrained, modeling
from resilient.models.sample_dropout import seed_by_sample
from resilient.models.segments import Segments, through_block
from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.models.tensor_parallel.exchanges import gather_tokens
from resilient.models.tensor_parallel.linears import ROWS, TokenCount, divide_linears

_FIRST_VERSION = 5
"""Of transformers whose blocks consist of the linear layers that families name."""


class VisionEmbed(Layer):
    """Patches to vectors, plus the position's vector, after the class token if the family has one."""

    def __init__(self, source: Source, name: str) -> None:
        super().__init__()
        config: Any = source.config
        family = VISION_FAMILIES[source.family]
        (embeddings,) = modeling(family.module, family.embeddings)
        theirs = embeddings(config)
        self.unit = name
        self.patch_size = pair(config.patch_size)
        self.grid = tuple(size // patch for size, patch in zip(pair(config.image_size), self.patch_size, strict=True))
        self.patch: nn.Conv2d = attrgetter(family.patch)(theirs)
        self.positions = nn.Parameter(attrgetter(family.positions)(theirs).detach().reshape(-1, config.hidden_size))
        if family.class_token:
            self.class_token = nn.Parameter(getattr(theirs, family.class_token).detach().reshape(1, 1, -1))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if family.pre_norm else nn.Identity()

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        packed = f"{self.unit}.patches" in batch
        hidden = self._packed(batch) if packed else self._padded(batch.get(f"{self.unit}.pixels"))
        return {**activations, f"{self.unit}.hidden": self.norm(hidden)}

    def _packed(self, batch: Batch) -> Tensor:
        """Return all images' tokens in one row, ``[1, tokens, hidden]``."""
        weight, positions = self.patch.weight, batch[f"{self.unit}.positions"]
        patches = batch[f"{self.unit}.patches"].to(weight.dtype)
        hidden = nn.functional.linear(patches, weight.flatten(1), self.patch.bias).to(self.positions.dtype)
        num_class_tokens = len(self.positions) - self.grid[0] * self.grid[1]
        if num_class_tokens:
            is_patch = positions >= num_class_tokens
            hidden = torch.cat((self.class_token[0], hidden))[is_patch.cumsum(0) * is_patch]
        return (hidden + nn.functional.embedding(positions, self.positions))[None]

    def _padded(self, pixels: Tensor | None) -> Tensor:
        """Return each image's tokens, ``[num_images, tokens, hidden]``."""
        weight = self.patch.weight
        if pixels is None:
            pixels = weight.new_zeros(1, weight.shape[1], *self.patch_size)
        patches: Tensor = self.patch(pixels.to(weight.dtype))
        class_position, table = self.positions.tensor_split([len(self.positions) - self.grid[0] * self.grid[1]])
        table = table.unflatten(0, self.grid)[: patches.shape[2], : patches.shape[3]].flatten(0, 1)
        hidden = patches.flatten(2).transpose(1, 2) + table
        if len(class_position):
            token = (self.class_token + class_position).expand(len(hidden), -1, -1)
            hidden = torch.cat((token.to(hidden.dtype), hidden), dim=1)
        return hidden


class VisionBlock(Layer):
    """One transformer block; attention reads real patches (and the class token) of the same image only."""

    def __init__(self, source: Source, name: str, index: int) -> None:
        super().__init__()
        family = VISION_FAMILIES[source.family]
        (block,) = modeling(family.module, family.block)
        self.block = block(source.config)
        self.dropouts = seed_by_sample(self.block, f"{name}.block.{index}")
        self.arguments = family.arguments
        self.unit = name
        self.patch_size = pair(source.config.patch_size)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        name = f"{self.unit}.hidden"
        return {**activations, name: through_block(partial(self._run, batch), activations[name])}

    def _run(self, batch: Batch, hidden: Tensor) -> Tensor:
        keys, lengths = batch.get(f"{self.unit}.keys"), batch.get(f"{self.unit}.segments")
        for dropout in self.dropouts:
            dropout.begin(keys if keys is not None and len(keys) else None)
        seq, device = self._num_tokens(batch, hidden), hidden.device
        mask = self._valid(seq, batch, device) if lengths is None else Segments.of(lengths)
        return first(self.block(hidden, mask, **self.arguments))

    def _num_tokens(self, batch: Batch, hidden: Tensor) -> int:
        """Return how many tokens attend to each other."""
        return hidden.shape[1]

    def _valid(self, num_tokens: int, batch: Batch, device: torch.device) -> Tensor:
        valid = valid_patches(batch, self.unit, self.patch_size, device)
        keys = nn.functional.pad(valid, (num_tokens - valid.shape[1], 0), value=True)
        keys = keys | (torch.arange(keys.shape[1], device=keys.device) == 0)  # an empty row would give nan
        return keys[:, None, None, :].expand(-1, -1, keys.shape[1], -1)


class Projector(Layer):
    """The encoder's final norm, then from its width to the language model's; drops the class token.

    Args:
        source: The encoder.
        name: The encoder's name.
        kind: "linear", or "mlp" for two matrices with a GELU between them.
        width: Hidden size of the language model.
    """

    def __init__(self, source: Source, name: str, kind: str, width: int) -> None:
        super().__init__()
        config: Any = source.config
        family = VISION_FAMILIES[source.family]
        self.unit = name
        self.num_class_tokens = 1 if family.class_token else 0
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if family.post_norm else nn.Identity()
        self.projection: nn.Module = nn.Linear(config.hidden_size, width)
        if kind == "mlp":
            self.projection = nn.Sequential(self.projection, nn.GELU(), nn.Linear(width, width))

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        rest = {key: value for key, value in activations.items() if key != f"{self.unit}.hidden"}
        hidden, positions = activations[f"{self.unit}.hidden"], batch.get(f"{self.unit}.positions")
        if positions is None:
            patches = hidden[:, self.num_class_tokens :]
        else:
            patches = hidden[0, positions >= self.num_class_tokens]
        return {**rest, f"{self.unit}.features": self.projection(self.norm(patches))}


class VisionEmbedPart(VisionEmbed):
    """What one tensor-parallel device does of the embedding: all of it, and hands on its tokens."""

    def __init__(self, source: Source, name: str, devices: TensorDevices) -> None:
        super().__init__(source, name)
        self._devices = devices

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        made = super().forward(activations, batch)
        hidden = made[f"{self.unit}.hidden"]
        return {**made, f"{self.unit}.hidden": hidden[:, self._devices.own(hidden.shape[1])]}


class VisionBlockPart(VisionBlock):
    """One tensor-parallel device's heads of a block and part of its multilayer perceptron, for all tokens."""

    def __init__(self, source: Source, name: str, index: int, count: TokensOf, devices: TensorDevices) -> None:
        super().__init__(source, name, index)
        self._count = count
        self._devices = devices
        self._all_tokens = TokenCount()
        divide_linears(self.block, VISION_FAMILIES[source.family].rules(), devices, self._all_tokens)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        name = f"{self.unit}.hidden"
        own = activations[name]
        self._all_tokens.value = self._count(shapes_of(batch))
        if self._all_tokens.value:
            return {**activations, name: self._run(batch, own)}
        self._all_tokens.value = 1  # as :func:`through_block` does, on the device whose that one is
        one = nn.functional.pad(own, (0, 0, 0, self._devices.own_size(1)))
        return {**activations, name: self._run(batch, one)[:, :0]}

    def _num_tokens(self, batch: Batch, hidden: Tensor) -> int:
        return self._all_tokens.value


class ProjectorPart(Projector):
    """What one tensor-parallel device does of a projector: its tokens; all have what is made of all."""

    def __init__(self, source: Source, name: str, kind: str, width: int, devices: TensorDevices) -> None:
        super().__init__(source, name, kind, width)
        self._source = source
        self._devices = devices

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        rest = {key: value for key, value in activations.items() if key != f"{self.unit}.hidden"}
        made, positions = (
            self.projection(self.norm(activations[f"{self.unit}.hidden"])),
            batch.get(f"{self.unit}.positions"),
        )
        features = gather_tokens(made, self._devices, num_tokens(self._source, self.unit, shapes_of(batch)))
        if positions is None:
            features = features[:, self.num_class_tokens :]
        else:
            features = features[0, positions >= self.num_class_tokens]
        return {**rest, f"{self.unit}.features": features}


def vision_layers(
    source: Source,
    name: str,
    *,
    projector: str,
    width: int,
    frozen: bool,
    frozen_projector: bool,
) -> list[LayerSpec]:
    """Cut an encoder into ``{name}.embed``, ``{name}.block.{i}`` and ``{name}.projector``."""

    def build_projector(devices: TensorDevices | None = None) -> nn.Module:
        arguments = source, name, projector, width
        module = Projector(*arguments) if devices is None else ProjectorPart(*arguments, devices)
        module.norm.requires_grad_(not frozen)
        module.projection.requires_grad_(not frozen_projector)
        return module

    build = partial(_build, frozen, VisionEmbed, source, name)
    initialize, projected = partial(_initialize_embed, source), partial(_initialize_projector, source)
    embed = TensorParallel(build=partial(_build, frozen, VisionEmbedPart, source, name), tokens=lambda shapes: {})
    count = partial(num_tokens, source, name)
    project = TensorParallel(build=build_projector, tokens=partial(hidden_tokens, name, count))
    return [
        replace(part_spec(name, "embed", build, initialize, "pixels", "patches", "positions"), tensor_parallel=embed),
        *block_specs(source, name, count, frozen=frozen),
        replace(part_spec(name, "projector", build_projector, projected, "positions"), tensor_parallel=project),
    ]


def block_specs(source: Source, name: str, count: TokensOf, *, frozen: bool) -> list[LayerSpec]:
    """Return the blocks of an encoder, or of a generator that is made of them, ``{name}.block.{i}``.

    Args:
        source: It.
        name: Its name.
        count: Returns how many tokens a block reads.
        frozen: Keep its parameters as they are.
    """
    config: Any = source.config
    family, why_not = VISION_FAMILIES[source.family], _why_not(source)
    specs = [
        part_spec(
            name,
            f"block.{i}",
            partial(_build, frozen, VisionBlock, source, name, i),
            partial(_initialize_block, source, f"{family.blocks}.{i}."),
            "sizes",
            "segments",
            "keys",
        )
        for i in range(config.num_hidden_layers)
    ]
    return [
        replace(
            spec,
            cut={} if why_not else {f"block.{path}": int(rule == ROWS) for path, rule in family.rules().items()},
            tensor_parallel=TensorParallel(
                build=partial(_build, frozen, VisionBlockPart, source, name, i, count),
                tokens=partial(hidden_tokens, name, count),
                divisible={"attention heads": config.num_attention_heads},
                why_not=why_not,
            ),
        )
        for i, spec in enumerate(specs)
    ]


def _why_not(source: Source) -> str:
    """Return why devices cannot divide a block; "" if they can."""
    if int(transformers.__version__.partition(".")[0]) < _FIRST_VERSION:
        return f"but those of transformers {_FIRST_VERSION} and later"
    for name in (VISION_FAMILIES[source.family].attention_dropout, "hidden_dropout_prob"):
        if getattr(source.config, name, 0):
            return f"which has dropout ({name} is not 0)"
    return ""


def part_spec(
    name: str,
    part: str,
    build: Callable[[], nn.Module],
    initialize: Callable[[nn.Module], None],
    *reads: str,
) -> LayerSpec:
    """Return a layer of a unit, which reads these entries of the unit."""
    entries = frozenset(f"{name}.{entry}" for entry in reads)
    return LayerSpec(name=f"{name}.{part}", unit=name, build=build, initialize=initialize, reads=entries)


def _build(frozen: bool, layer: Any, *arguments: Any) -> nn.Module:
    return layer(*arguments).requires_grad_(not frozen)


def _rule(source: Source) -> Any:
    family = VISION_FAMILIES[source.family]
    (pretrained,) = modeling(family.module, family.pretrained)
    return initializer(pretrained, source.config)


def _initialize_embed(source: Source, module: nn.Module) -> None:
    family = VISION_FAMILIES[source.family]
    ours = {"patch.": f"{family.patch}.", "positions": family.positions}
    if family.class_token:
        ours["class_token"] = family.class_token
    if source.weights is not None:
        names = {mine: f"embeddings.{theirs}" for mine, theirs in ours.items()}
        load_pretrained(module, source.weights, {**names, "norm.": f"{family.pre_norm}."})
        return
    (embeddings,) = modeling(family.module, family.embeddings)
    theirs = embeddings(source.config).apply(_rule(source))
    module.apply(_rule(source))
    for mine, name in ours.items():
        if mine == "patch.":
            module.get_submodule("patch").load_state_dict(attrgetter(family.patch)(theirs).state_dict())
        else:
            own = module.get_parameter(mine)
            own.copy_(attrgetter(name)(theirs).reshape(own.shape))


def initial_positions(source: Source) -> Tensor:
    """Return the table of positions of an encoder's patches, ``[rows x cols, hidden]``, drawn or of its checkpoint."""
    embed = VisionEmbed(source, "positions")
    _initialize_embed(source, embed)
    return embed.positions[len(embed.positions) - embed.grid[0] * embed.grid[1] :]


def _initialize_block(source: Source, prefix: str, module: nn.Module) -> None:
    if source.weights is not None:
        load_pretrained(module, source.weights, {"block.": prefix}, VISION_FAMILIES[source.family].renames)
    else:
        module.apply(_rule(source))


def _initialize_projector(source: Source, module: nn.Module) -> None:
    for part in module.get_submodule("projection").modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=getattr(source.config, "initializer_range", 0.02))
            nn.init.zeros_(part.bias)
    initialize_norm(source, module.get_submodule("norm"))


def initialize_norm(source: Source, norm: nn.Module) -> None:
    """Fill the norm behind an encoder's blocks."""
    if source.weights is not None:
        load_pretrained(norm, source.weights, {"": f"{VISION_FAMILIES[source.family].post_norm}."})
    else:
        norm.apply(_rule(source))
