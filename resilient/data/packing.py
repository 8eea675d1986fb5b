"""Pack sequences without padding: all tokens in one row, and how many belong to each sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resilient.data.multimodal import IGNORED_LABEL, images_of
from resilient.data.seeding import GOLDEN, mixed


def pack_texts(samples: Sequence[Mapping[str, Any]], labels: Sequence[Tensor]) -> dict[str, Tensor]:
    """Pack the tokens of samples.

    Args:
        samples: With ``input_ids [seq]``; there may be none.
        labels: Of each, what is predicted after its first token, its second, ...: up to ``[seq]``.

    Returns:
        ``input_ids``, ``labels`` and ``llm.positions`` (in their own text) ``[1, tokens]``, and ``llm.segments
        [samples]``, the tokens of each.
    """
    nothing = torch.empty(0, dtype=torch.int64)
    lengths = [len(sample["input_ids"]) for sample in samples]
    return {
        "input_ids": torch.cat([nothing, *(sample["input_ids"] for sample in samples)])[None],
        "labels": torch.cat([nothing, *(_filled(*each) for each in zip(labels, lengths, strict=True))])[None],
        "llm.positions": torch.cat([nothing, *map(torch.arange, lengths)])[None],
        "llm.segments": torch.tensor(lengths, dtype=torch.int64),
    }


def pack_images(
    samples: Sequence[Mapping[str, Any]],
    keys: Sequence[int],
    unit: str,
    *,
    num_channels: int,
    patch_size: tuple[int, int],
    num_columns: int,
    num_class_tokens: int,
) -> dict[str, Tensor]:
    """Pack the patches of all images of samples, in their order.

    Args:
        samples: As :class:`resilient.models.multimodal.module.MultimodalModule` describes them; there may be no image.
        keys: Of each sample, what its random numbers are drawn from.
        unit: The encoder's name.
        num_channels: Of an image.
        patch_size: Height and width in pixels.
        num_columns: Of the encoder's table of positions.
        num_class_tokens: Tokens before the patches of each image, and positions before theirs.

    Returns:
        ``{unit}.patches [patches, channels x height x width]``; ``{unit}.positions [tokens]``, rows of the table of
        positions; ``{unit}.keys [tokens]``, what each token's random numbers are drawn from; and ``{unit}.segments
        [images]``, the tokens of each.
    """
    height, width = patch_size
    nothing = torch.empty(0, dtype=torch.int64)
    patches: list[Tensor] = []
    positions: list[Tensor] = []
    token_keys: list[Tensor] = []
    for sample, key in zip(samples, keys, strict=True):
        for number, image in enumerate(images_of(sample, unit)):
            grid = image.unflatten(2, (-1, width)).unflatten(1, (-1, height)).permute(1, 3, 0, 2, 4)
            patches.append(grid.flatten(2).flatten(0, 1))
            rows, columns = (torch.arange(size) for size in grid.shape[:2])
            table = (rows[:, None] * num_columns + columns).flatten() + num_class_tokens
            positions.append(torch.cat((torch.arange(num_class_tokens), table)))
            places = torch.arange(len(positions[-1])) * GOLDEN
            token_keys.append(mixed(mixed(mixed(torch.tensor([key])) + number) + places))
    return {
        f"{unit}.patches": torch.cat(patches) if patches else torch.empty(0, num_channels * height * width),
        f"{unit}.positions": torch.cat([nothing, *positions]),
        f"{unit}.keys": torch.cat([nothing, *token_keys]),
        f"{unit}.segments": torch.tensor([len(each) for each in positions], dtype=torch.int64),
    }


def _filled(labels: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(labels, (0, length - len(labels)), value=IGNORED_LABEL)
