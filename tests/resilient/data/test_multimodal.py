"""Padding of texts and images to a microbatch."""

from __future__ import annotations

import pytest
import torch

from resilient.data import collate_multimodal
from resilient.errors import SampleError


def test_texts_and_images_are_padded_right_and_bottom() -> None:
    batch = collate_multimodal(
        [
            {
                "input_ids": torch.tensor([5, 6, 7]),
                "labels": torch.tensor([6, 7, 8]),
                "vision.pixels": [torch.ones(1, 2, 2), torch.full((1, 4, 2), 2.0)],
            },
            {"input_ids": torch.tensor([9]), "labels": torch.tensor([4]), "vision.pixels": torch.full((1, 2, 6), 3.0)},
            {"input_ids": torch.tensor([9, 9]), "labels": torch.tensor([-100, 4])},
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, 0, 0], [9, 9, 0]]
    assert batch["labels"].tolist() == [[6, 7, 8], [4, -100, -100], [-100, 4, -100]]
    assert batch["lengths"].tolist() == [3, 1, 2]
    assert batch["vision.sizes"].tolist() == [[2, 2], [4, 2], [2, 6]]
    assert batch["vision.pixels"].shape == (3, 1, 4, 6)
    assert batch["vision.pixels"].sum(dim=(1, 2, 3)).tolist() == [4.0, 16.0, 36.0]
    assert batch["vision.pixels"][0, 0, :2, :2].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_samples_without_images_give_no_pixels() -> None:
    batch = collate_multimodal([{"input_ids": torch.tensor([5]), "labels": torch.tensor([6])}])
    assert sorted(batch) == ["input_ids", "labels", "lengths"]


def test_sample_without_labels_is_refused() -> None:
    with pytest.raises(SampleError, match=r"^all samples must hold 'labels', got one of \['input_ids'\]; add it$"):
        collate_multimodal([{"input_ids": torch.tensor([5])}])
