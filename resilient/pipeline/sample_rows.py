"""Moves rows of tensors by the samples they are of: what one unit computes at once is not what the next one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor


class SampleRows:
    """Which rows of tensors ``[num_rows, ...]`` are of which samples.

    Args:
        samples: In order, each once.
        counts: Rows of each.
    """

    def __init__(self, samples: Sequence[int], counts: Sequence[int]) -> None:
        self.samples = tuple(samples)
        ends = list(accumulate(counts, initial=0))
        self.num_rows = ends[-1]
        spans = (slice(start, end) for start, end in pairwise(ends))
        self.slices = dict(zip(self.samples, spans, strict=True))


RowsSource = tuple[SampleRows, Mapping[str, Tensor]]
"""Tensors by name, and whose rows they have."""


def rearranged(sources: Sequence[RowsSource], target: SampleRows) -> dict[str, Tensor]:
    """Return tensors with the rows of the target's samples, in its order; of samples that no source has, zeros.

    Args:
        sources: With the same names, and each sample in one of them; one or more.
        target: Says which rows, how many of samples that are in no source.
    """
    first, entries = sources[0]
    if len(sources) == 1 and first.samples == target.samples:
        return dict(entries)
    holder = {sample: (rows, tensors) for rows, tensors in sources for sample in rows.samples}
    found: dict[str, Tensor] = {}
    for name, tensor in entries.items():
        pieces: list[Tensor] = []
        for sample, place in target.slices.items():
            if sample in holder:
                rows, tensors = holder[sample]
                pieces.append(tensors[name][rows.slices[sample]])
            else:
                pieces.append(tensor.new_zeros((place.stop - place.start, *tensor.shape[1:])))
        found[name] = torch.cat(pieces) if pieces else tensor.new_zeros((0, *tensor.shape[1:]))
    return found
