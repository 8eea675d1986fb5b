"""Equal entries have equal checksums, others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from resilient.data import stack
from resilient.data.checksums import entry_checksum, row_checksums


def test_different_entries_have_different_checksums() -> None:
    grid = torch.arange(6.0).reshape(2, 3)
    nan, negative = torch.tensor(float("nan")), torch.tensor(-0.0)
    entries = [
        grid, grid.T, grid.reshape(3, 2), grid.double(), grid.to(torch.bfloat16), grid.numpy(), [grid, grid], [grid],
        {"a": grid}, {"b": grid}, torch.zeros(0), torch.zeros(0, 1), nan, negative, -negative, torch.tensor(True),
        1, 1.5, "text", b"text", None, object(), np.float32(1),
    ]  # fmt: skip
    checksums = [entry_checksum(entry) for entry in entries]
    assert len(set(checksums)) == len(entries)


def test_equal_entries_have_equal_checksums_however_they_lie_in_memory() -> None:
    grid = torch.arange(6.0).reshape(2, 3)
    assert entry_checksum(grid.T) == entry_checksum(grid.T.contiguous().requires_grad_())
    assert entry_checksum((grid, 1)) == entry_checksum([grid.clone(), 1])
    assert entry_checksum(object()) == entry_checksum(object())
    assert entry_checksum(torch.from_numpy(np.zeros(0))) == entry_checksum(torch.zeros(0, dtype=torch.float64))


def test_single_values_count_whatever_stride_they_have() -> None:
    negated = torch.tensor([1 - 2j]).conj().imag  # read as it is, it would be another
    assert entry_checksum(negated) == entry_checksum(torch.tensor([2.0]))
    halves = torch.arange(8).bfloat16()
    assert entry_checksum(halves[::8]) == entry_checksum(halves[:1].clone())


def test_arrays_of_objects_count_by_what_they_hold() -> None:
    def texts(end: str) -> np.ndarray:
        return np.array([f"a {end}", {"number": len(end)}], dtype=object)

    assert entry_checksum(texts("text")) == entry_checksum(texts("te" + "xt".lower()))
    assert entry_checksum(texts("text")) != entry_checksum(texts("word"))


def test_conjugates_count_by_their_values() -> None:
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert entry_checksum(values.conj()) == entry_checksum(torch.tensor([1 - 2j, 3 + 1j]))
    assert entry_checksum(values.conj().imag) == entry_checksum(torch.tensor([-2.0, 1.0]))


@pytest.mark.parametrize(
    "values",
    [
        [torch.arange(6.0), torch.arange(6.0) + 1],
        [torch.tensor(3), torch.tensor(4)],
        [torch.tensor([3], dtype=torch.uint8), torch.tensor([4], dtype=torch.uint8)],
        [torch.eye(3).T[:2], torch.ones(3, 4)[:2, :3]],
        [torch.tensor([1 + 2j]).conj(), torch.tensor([3 - 1j])],
        [torch.tensor([1 - 2j]).conj().imag, torch.tensor([2.0])],
        [torch.arange(3).bfloat16(), torch.ones(3).bfloat16()],
        [torch.tensor([1], dtype=torch.int32), torch.tensor([2])],
        [torch.zeros(0), torch.zeros(0)],
        [torch.zeros(2, requires_grad=True), torch.ones(2)],
        [1, 2],
        [np.ones(2), np.zeros(2)],
    ],
    ids=lambda values: f"{type(values[0]).__name__} {getattr(values[0], 'dtype', '')}",
)
def test_rows_of_what_was_stacked_have_the_checksums_of_what_it_was_made_of(values: list[Any]) -> None:
    stacked = stack([{"entry": value} for value in values])["entry"]
    for rows in (stacked, stacked.to("meta")):
        assert row_checksums(rows, values) == [entry_checksum(value) for value in values]
