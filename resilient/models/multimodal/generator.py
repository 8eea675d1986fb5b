"""A generator of pictures after the language model: what people describe it by, its layers, and its loss.

For each patch of a picture that is to be made, a token stands in the text. What the language model's last layer, its
final norm, makes of these tokens is all that the generator gets. It takes each to its own width, adds the position's
vector, and has blocks whose patches see each other, as those of a picture do in an encoder; then each patch becomes its
pixels. All patches are made at once, as by the decoder of a masked autoencoder (He et al., 2022,
https://arxiv.org/abs/2111.06377); the language model and a generator behind it are trained together, as the three
modules of DistTrain (Zhang et al., 2025, https://arxiv.org/abs/2408.04275).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from resilient.common.arguments import check_number
from resilient.models.layer import Activations, Batch, Layer, LayerSpec, TensorParallel
from resilient.models.multimodal.encoder import checked_placeholder, grid, patch_size
from resilient.models.multimodal.vision import block_specs, initial_positions, initialize_norm, part_spec
from resilient.models.multimodal.vision_families import VISION_FAMILIES
from resilient.models.multimodal.vision_sizes import hidden_tokens, num_patches_of, shapes_of, valid_patches
from resilient.models.pretrained import Source, resolve
from resilient.models.tensor_parallel.devices import TensorDevices
from resilient.models.tensor_parallel.exchanges import TOKEN_LOSSES


@dataclass(frozen=True, kw_only=True)
class _Options:
    placeholder_id: int
    loss_weight: float = 1.0
    frozen: bool = False


class GeneratorModule:
    """A generator of pictures, which reads the language model's last hidden states.

    Args:
        decoder: A transformers vision config (vit, siglip_vision_model, clip_vision_model) or a checkpoint folder: its
            blocks, table of positions and final norm are used, and it says how large pictures and patches are.
        placeholder_id: The token that stands for one patch to be made in ``input_ids``.
        loss_weight: What a patch counts in the loss, where a token that is predicted counts 1.
        frozen: Keep the decoder's parameters as they are; the layers that take hidden states to its width, and its
            patches to pixels, are trained in any case.

    Raises:
        ValueError: For a model that is not supported, or a number out of its range.
    """

    def __init__(
        self,
        decoder: PretrainedConfig | str | Path,
        *,
        placeholder_id: int,
        loss_weight: float = 1.0,
        frozen: bool = False,
    ) -> None:
        placeholder_id = checked_placeholder(placeholder_id)
        check_number("loss_weight", loss_weight, "1.0 makes a patch count as much as a token")
        self.source = resolve(decoder, "decoder", VISION_FAMILIES)
        self.options = _Options(placeholder_id=placeholder_id, loss_weight=float(loss_weight), frozen=frozen)


def states_of(name: str) -> str:
    """Return what is called in activations what a generator gets of the language model.

    Packed ``[patches, width]``, one after the other; padded all tokens' ``[microbatch, seq, width]``.
    """
    return f"{name}.states"


def drawn_by(name: str) -> str:
    """Return what is called in activations what a generator makes.

    Packed ``[patches, channels x height x width]``, padded ``[num_images, patches, ...]``.
    """
    return f"{name}.drawn"


class GeneratorEmbed(Layer):
    """Hidden states of the language model to the decoder's width, plus the vector of the patch's position.

    Args:
        source: The decoder.
        name: The generator's name.
        placeholder_id: The token that stands for a patch.
        width: Hidden size of the language model.
    """

    def __init__(self, source: Source, name: str, placeholder_id: int, width: int) -> None:
        super().__init__()
        self.unit = name
        self.placeholder_id = placeholder_id
        self.patch_size = patch_size(source)
        self.grid = grid(source)
        self.projection = nn.Linear(width, source.config.hidden_size)
        self.positions = nn.Parameter(torch.empty(self.grid[0] * self.grid[1], source.config.hidden_size))

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        rest = {key: value for key, value in activations.items() if key != states_of(self.unit)}
        states, positions = activations[states_of(self.unit)], batch.get(f"{self.unit}.positions")
        if positions is not None:
            hidden = (self.projection(states) + nn.functional.embedding(positions, self.positions))[None]
        else:
            hidden = self._padded(self.projection(states[batch["input_ids"] == self.placeholder_id]), batch)
        return {**rest, f"{self.unit}.hidden": hidden}

    def _padded(self, patches: Tensor, batch: Batch) -> Tensor:
        """Return each image's patches, ``[num_images, patches, hidden]``, of all that are real ``[num, hidden]``."""
        valid = valid_patches(batch, self.unit, self.patch_size, patches.device)
        pixels = batch.get(f"{self.unit}.pixels")
        rows, cols = (1, 1) if pixels is None else (pixels.shape[-2 + d] // self.patch_size[d] for d in (0, 1))
        table = self.positions.unflatten(0, self.grid)[:rows, :cols].flatten(0, 1)
        hidden = patches.new_zeros(*valid.shape, patches.shape[-1]).masked_scatter(valid[..., None], patches)
        return hidden + table


class GeneratorHead(Layer):
    """The decoder's final norm, and each patch's pixels.

    Args:
        source: The decoder.
        name: The generator's name.
    """

    def __init__(self, source: Source, name: str) -> None:
        super().__init__()
        config: Any = source.config
        self.unit = name
        post_norm = VISION_FAMILIES[source.family].post_norm
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps) if post_norm else nn.Identity()
        height, width = patch_size(source)
        self.projection = nn.Linear(config.hidden_size, config.num_channels * height * width)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        rest = {key: value for key, value in activations.items() if key != f"{self.unit}.hidden"}
        hidden = activations[f"{self.unit}.hidden"]
        packed = f"{self.unit}.positions" in batch
        return {**rest, drawn_by(self.unit): self.projection(self.norm(hidden[0] if packed else hidden))}


class GeneratorEmbedPart(GeneratorEmbed):
    """What one tensor-parallel device does of the embedding: all of it, and hands on its patches."""

    def __init__(self, source: Source, name: str, placeholder_id: int, width: int, devices: TensorDevices) -> None:
        super().__init__(source, name, placeholder_id, width)
        self._devices = devices

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        made = super().forward(activations, batch)
        hidden = made[f"{self.unit}.hidden"]
        return {**made, f"{self.unit}.hidden": hidden[:, self._devices.own(hidden.shape[1])]}


class GeneratorHeadPart(GeneratorHead):
    """What one tensor-parallel device does of the head: its patches, whose loss it takes itself."""

    def __init__(self, source: Source, name: str, generator: GeneratorModule, devices: TensorDevices) -> None:
        super().__init__(source, name)
        self._generator = generator
        self._devices = devices

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        made = super().forward(activations, batch)
        drawn = made.pop(drawn_by(self.unit))
        own = self._devices.own(num_patches_of(self._generator.source, self.unit, shapes_of(batch)))
        return {**made, TOKEN_LOSSES: patch_losses(self.unit, self._generator, drawn, batch, own)}


def generator_layers(name: str, generator: GeneratorModule, width: int) -> list[LayerSpec]:
    """Cut a generator into ``{name}.embed``, ``{name}.block.{i}`` and ``{name}.head``.

    Args:
        name: Its name.
        generator: It.
        width: Hidden size of the language model.
    """
    source, options = generator.source, generator.options

    def build_embed(devices: TensorDevices | None = None) -> nn.Module:
        arguments = source, name, options.placeholder_id, width
        module = GeneratorEmbed(*arguments) if devices is None else GeneratorEmbedPart(*arguments, devices)
        module.positions.requires_grad_(not options.frozen)
        return module

    def build_head(devices: TensorDevices | None = None) -> nn.Module:
        module = GeneratorHead(source, name) if devices is None else GeneratorHeadPart(source, name, generator, devices)
        module.norm.requires_grad_(not options.frozen)
        return module

    count = partial(num_patches_of, source, name)
    embed = part_spec(name, "embed", build_embed, partial(_initialize_embed, source), "positions", "sizes")
    head = part_spec(name, "head", build_head, partial(_initialize_head, source), "pixels", "patches", "sizes")
    assert embed.reads is not None
    return [
        replace(
            embed,
            reads=embed.reads | {"input_ids"},  # padded, they say which tokens are patches
            tensor_parallel=TensorParallel(build=build_embed, tokens=lambda shapes: {}),
        ),
        *block_specs(source, name, count, frozen=options.frozen),
        replace(head, tensor_parallel=TensorParallel(build=build_head, tokens=partial(hidden_tokens, name, count))),
    ]


def patch_losses(
    name: str, generator: GeneratorModule, drawn: Tensor, batch: Batch, own: slice = slice(None)
) -> Tensor:
    """Return the mean squared error of each patch's pixels, ``[patches]``.

    Args:
        name: The generator's name.
        generator: It.
        drawn: What it has made.
        batch: The samples, packed or padded.
        own: Which patches these are: of a packed cell, or of each image of a padded microbatch.
    """
    target = batch.get(f"{name}.patches")
    if target is not None:
        target = target[own]
    else:
        size = patch_size(generator.source)
        valid, pixels = valid_patches(batch, name, size, drawn.device)[:, own], batch.get(f"{name}.pixels")
        drawn = drawn[valid]
        target = drawn.detach()  # of a microbatch without any
        if pixels is not None:
            target = nn.functional.unfold(pixels, size, stride=size).transpose(1, 2)[:, own][valid]
    drawn = drawn if drawn.dtype is torch.float64 else drawn.float()
    return generator.options.loss_weight * (drawn - target.to(drawn.dtype)).square().mean(-1)


def _initialize_embed(source: Source, module: nn.Module) -> None:
    _draw(source, module.get_submodule("projection"))
    module.get_parameter("positions").copy_(initial_positions(source))


def _initialize_head(source: Source, module: nn.Module) -> None:
    _draw(source, module.get_submodule("projection"))
    initialize_norm(source, module.get_submodule("norm"))


def _draw(source: Source, linear: nn.Module) -> None:
    nn.init.normal_(linear.get_parameter("weight"), std=getattr(source.config, "initializer_range", 0.02))
    nn.init.zeros_(linear.get_parameter("bias"))
