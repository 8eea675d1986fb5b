"""What an encoder of a multimodal model is, as people describe it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig

from resilient.common.arguments import whole_number
from resilient.errors import SampleError
from resilient.models.multimodal.vision_families import VISION_FAMILIES
from resilient.models.multimodal.vision_sizes import pair
from resilient.models.pretrained import Source, resolve


@dataclass(frozen=True, kw_only=True)
class _Options:
    placeholder_id: int
    projector: str = "mlp"
    frozen: bool = False
    frozen_projector: bool = False


class EncoderModule:
    """An encoder and the projector that takes its features to the language model.

    Args:
        encoder: A transformers vision config (vit, siglip_vision_model, clip_vision_model) or a checkpoint folder.
        placeholder_id: The token that stands for one feature (patch) of this encoder in ``input_ids``.
        projector: "linear", or "mlp" for two matrices with a GELU between them.
        frozen: Keep the encoder's parameters as they are.
        frozen_projector: Keep the projector's parameters as they are.

    Raises:
        ValueError: For a model that is not supported, or an unknown projector.
    """

    def __init__(
        self,
        encoder: PretrainedConfig | str | Path,
        *,
        placeholder_id: int,
        projector: str = "mlp",
        frozen: bool = False,
        frozen_projector: bool = False,
    ) -> None:
        if projector not in ("mlp", "linear"):
            raise ValueError(f"projector must be 'mlp' or 'linear', got {projector!r}; pass one of them")
        placeholder_id = checked_placeholder(placeholder_id)
        self.source = resolve(encoder, "encoder", VISION_FAMILIES)
        self.options = _Options(
            placeholder_id=placeholder_id,
            projector=projector,
            frozen=frozen,
            frozen_projector=frozen_projector,
        )


def checked_placeholder(placeholder_id: int) -> int:
    """Return a token that stands for a patch.

    Raises:
        ArgumentError: It is none.
    """
    fix = "look it up: tokenizer.convert_tokens_to_ids('<image>')"
    return whole_number("placeholder_id", placeholder_id, 0, fix)


def patch_size(source: Source) -> tuple[int, int]:
    """Return height and width of a patch in pixels."""
    return pair(source.config.patch_size)


def grid(source: Source) -> tuple[int, int]:
    """Return rows and columns of the table of positions: the largest image in patches."""
    (height, width), (patch_height, patch_width) = pair(source.config.image_size), patch_size(source)
    return height // patch_height, width // patch_width


def num_patches(image: Tensor, source: Source, name: str) -> int:
    """Return how many patches an image has.

    Args:
        image: ``[channels, height, width]``.
        source: The model that reads or makes it.
        name: What to call it in messages.

    Raises:
        SampleError: It has another shape or type than that of the model's images.
    """
    channels = source.config.num_channels
    if not image.is_floating_point():
        raise SampleError(
            f"{name} image must be of floating-point values, got {image.dtype}; convert it to float and normalise it"
        )
    if image.ndim != 3 or image.shape[0] != channels:
        raise SampleError(
            f"{name} image must have shape [{channels}, height, width], got {tuple(image.shape)}; reshape it"
        )
    height, width = image.shape[1:]
    patch_height, patch_width = patch_size(source)
    if height % patch_height or width % patch_width or not height or not width:
        raise SampleError(
            f"{name} image must be a multiple of {patch_height} x {patch_width} pixels, got {height} x {width}; pad it"
        )
    rows, cols = height // patch_height, width // patch_width
    most_rows, most_cols = grid(source)
    if rows > most_rows or cols > most_cols:
        raise SampleError(
            f"{name} image must be at most {most_rows * patch_height} x {most_cols * patch_width} pixels, "
            f"got {height} x {width}; shrink it or raise image_size in the config of its model"
        )
    return rows * cols
