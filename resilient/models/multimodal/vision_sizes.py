"""How many patches and tokens the layers of vision encoders, and of generators made of them, read of a microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from resilient.models.layer import Batch, Shapes
from resilient.models.multimodal.vision_families import VISION_FAMILIES
from resilient.models.pretrained import Source

TokensOf = Callable[[Shapes], int]
"""Given the shapes of a microbatch, returns how many tokens a unit's layers read of it."""


def pair(value: Any) -> tuple[int, int]:
    """Return (height, width) from one number for both or from two."""
    height, width = (value, value) if isinstance(value, int) else value
    return int(height), int(width)


def valid_patches(batch: Batch, name: str, patch_size: tuple[int, int], device: torch.device) -> Tensor:
    """Return which patches of the padded images are real, ``[num_images, rows x cols]``.

    A microbatch without any image counts as one image of one padding patch, so that every parameter gets a
    gradient (of zero) and every stage sends something.
    """
    pixels = batch.get(f"{name}.pixels")
    if pixels is None:
        return torch.zeros(1, 1, dtype=torch.bool, device=device)
    sizes = batch[f"{name}.sizes"].to(device)
    rows = torch.arange(0, pixels.shape[-2], patch_size[0], device=device) < sizes[:, 0, None]
    cols = torch.arange(0, pixels.shape[-1], patch_size[1], device=device) < sizes[:, 1, None]
    return (rows[:, :, None] & cols[:, None, :]).flatten(1)


def num_patches_of(source: Source, name: str, shapes: Shapes) -> int:
    """Return how many patches there are of all images of a packed cell, or of each image of a padded microbatch.

    Those of a packed cell are one row, of an encoder class tokens included.
    """
    if f"{name}.positions" in shapes:
        return shapes[f"{name}.positions"][0]
    pixels = shapes.get(f"{name}.pixels")
    (height, width), patch = pixels[-2:] if pixels is not None else (0, 0), pair(source.config.patch_size)
    return 1 if pixels is None else height // patch[0] * (width // patch[1])


def num_tokens(source: Source, name: str, shapes: Shapes) -> int:
    """Return how many tokens an encoder makes, class tokens included: of all images of a packed cell, which are one
    row, or of each image of a padded microbatch."""
    is_packed = f"{name}.positions" in shapes
    has_class_token = VISION_FAMILIES[source.family].class_token is not None
    return num_patches_of(source, name, shapes) + (has_class_token and not is_packed)


def shapes_of(batch: Batch) -> Shapes:
    """Return the shapes of a microbatch's entries."""
    return {name: tuple(tensor.shape) for name, tensor in batch.items()}


def hidden_tokens(name: str, count: TokensOf, shapes: Shapes) -> dict[str, int]:
    """Return how many tokens there are of what enters a block or the unit's last layer."""
    return {f"{name}.hidden": count(shapes)}
