"""Join multimodal samples to a microbatch: texts padded on the right, images on the right and at the bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from resilient.errors import SampleError

IGNORED_LABEL = -100
"""Positions with this label are no targets."""

LARGEST_PIXEL = 30.0
"""Of images that are normalised, and far from 255."""


def images_of(sample: Mapping[str, Any], unit: str) -> list[Tensor]:
    """Return a sample's images for one encoder; a sample without the entry has none."""
    images = sample.get(f"{unit}.pixels", ())
    if isinstance(images, Tensor) and images.ndim == 3:
        return [images]
    return list(images)


def collate_multimodal(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Pad samples of different length and image size to one microbatch; padding never changes the loss.

    Args:
        samples: As :class:`resilient.models.multimodal.module.MultimodalModule` describes them.

    Returns:
        ``input_ids`` and ``labels`` ``[microbatch, seq]``, ``lengths [microbatch]`` and for each encoder with images
        ``{name}.pixels [num_images, channels, height, width]`` and ``{name}.sizes [num_images, 2]``: true height and
        width in pixels. Images follow one another in the order of the samples.

    Raises:
        SampleError: A sample lacks tokens or labels.
    """
    for sample in samples:
        for key in ("input_ids", "labels"):
            if key not in sample:
                raise SampleError(f"all samples must hold {key!r}, got one of {sorted(sample)}; add it")
    pad = torch.nn.utils.rnn.pad_sequence
    input_ids = [sample["input_ids"] for sample in samples]
    batch = {
        "input_ids": pad(input_ids, batch_first=True),
        "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=IGNORED_LABEL),
        "lengths": torch.tensor([len(ids) for ids in input_ids]),
    }
    for key in sorted({key for sample in samples for key in sample if key.endswith(".pixels")}):
        unit = key.removesuffix(".pixels")
        images = [image for sample in samples for image in images_of(sample, unit)]
        if images:
            batch[key] = _pad_images(images)
            batch[f"{unit}.sizes"] = torch.tensor([tuple(image.shape[1:]) for image in images])
    return batch


def _pad_images(images: Sequence[Tensor]) -> Tensor:
    height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
    return torch.stack(
        [torch.nn.functional.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images]
    )
