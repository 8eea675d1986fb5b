"""How many tokens samples become: what encoders do with pictures and sound, and how long text is.

Owns the rules of published architectures, as arithmetic on sizes: no picture is opened here. A rule answers for many
items at once; which items belong to which sample is :mod:`resilient.planners.workloads.records`' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from resilient.planners.costs.samples import Lengths
from resilient.templates.common.arrays import Floats, Ints

TOKENS_PER_WORD = 4 / 3
"""Of English text, where there is no tokenizer: "100 tokens are about 75 words" is what OpenAI says of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """Patches or frames that an encoder processes for items, and the tokens it gives out.

    Args:
        lengths: Of the sequences that each item becomes, in the encoder's tokens.
        outputs: Tokens of the language model that stand for each item. [num_items]
    """

    lengths: Lengths
    outputs: Ints


class PictureRule(Protocol):
    """What a vision encoder does with pictures of some widths and heights in pixels; both ``[num_items]``."""

    def __call__(self, widths: Ints, heights: Ints) -> Encoded: ...


class SoundRule(Protocol):
    """What an audio encoder does with clips of some seconds. [num_items]"""

    def __call__(self, seconds: Floats) -> Encoded: ...


def _equal(sequences: Ints, length: Ints, outputs: Ints) -> Encoded:
    """Items that become sequences of one length each."""
    lengths = Lengths(tokens=sequences * length, squares=sequences * length**2, longest=length)
    return Encoded(lengths=lengths, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class SmartResize:
    """Qwen2-VL's rule: the picture's own resolution, in multiples of a merged patch, within bounds of pixels.

    Args:
        patch: Pixels of a patch's side.
        merge: Patches of a token's side.
        min_pixels: Smaller pictures are enlarged.
        max_pixels: Larger ones are made smaller. The released Qwen2-VL allows 16384 tokens of 28 x 28 pixels; its
            code, and this, 1280 where nobody says otherwise.
        max_ratio: Between the sides.

    Source: Wang et al. 2024 (Qwen2-VL), section 2.1; ``smart_resize`` of its image processor.
    """

    patch: int = 14
    merge: int = 2
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 1280 * 28 * 28
    max_ratio: float = 200.0

    def __call__(self, widths: Ints, heights: Ints) -> Encoded:
        sides = np.stack([widths, heights]).astype(np.float64)
        if (sides.max(axis=0) > self.max_ratio * sides.min(axis=0)).any():
            worst = int((sides.max(axis=0) / sides.min(axis=0)).argmax())
            raise ValueError(
                f"the sides of a picture must differ at most {self.max_ratio:g}-fold, got {widths[worst]} x "
                f"{heights[worst]} pixels; crop it, or leave it out"
            )
        factor, pixels = self.patch * self.merge, sides.prod(axis=0)
        rounded = np.rint(sides / factor)
        shrunk = np.maximum(np.floor(sides / np.sqrt(pixels / self.max_pixels) / factor), 1)
        grown = np.ceil(sides * np.sqrt(self.min_pixels / pixels) / factor)
        area = rounded.prod(axis=0) * factor**2
        grid = np.where(area > self.max_pixels, shrunk, np.where(area < self.min_pixels, grown, rounded))
        outputs = grid.prod(axis=0).astype(np.int64)
        return _equal(np.ones_like(outputs), outputs * self.merge**2, outputs)


@dataclass(frozen=True, kw_only=True)
class AnyRes:
    """The whole picture and, on the best of some canvases, its tiles; padding is taken off, rows end in a token.

    Args:
        side: Pixels of a tile's side.
        patch: Pixels of a patch's side; of a side that is no multiple of it the rest is cut off.
        canvases: Tiles of each allowed canvas, (down, across), in order of preference.
        extra: Tokens of the encoder that are none of the picture (a class token) and not handed on.
        max_tiles: The tiles' tokens are interpolated down to about so many tiles' worth; None keeps them all.

    Source: Liu et al. 2024 (LLaVA-NeXT); Li et al. 2024 (LLaVA-OneVision), section 3.2; their processors.
    """

    side: int
    canvases: tuple[tuple[int, int], ...]
    patch: int = 14
    extra: int = 0
    max_tiles: int | None = None

    def __call__(self, widths: Ints, heights: Ints) -> Encoded:
        down, across = np.array(self.canvases, dtype=np.int64)[self._best(widths, heights)].T
        patches = self.side // self.patch
        rows, columns = self._unpadded(widths, heights, patches * down, patches * across)
        if self.max_tiles is not None:
            ratio = np.sqrt(rows * columns / (self.max_tiles * patches**2))
            smaller = ratio > 1.1
            ratio = np.where(smaller, ratio, 1.0)
            rows, columns = (rows // ratio).astype(np.int64), (columns // ratio).astype(np.int64)
        length = np.full_like(rows, patches**2 + self.extra)
        return _equal(down * across + 1, length, patches**2 + rows * columns + rows)

    def _best(self, widths: Ints, heights: Ints) -> npt.NDArray[np.intp]:
        """Choose the canvas that shows most of the picture's pixels and, of those, wastes least."""
        canvas = np.array(self.canvases, dtype=np.int64) * self.side  # [canvas, (height, width)]
        scale = np.minimum(canvas[:, 1] / widths[:, None], canvas[:, 0] / heights[:, None])
        shown = (widths[:, None] * scale).astype(np.int64) * (heights[:, None] * scale).astype(np.int64)
        shown = np.minimum(shown, (widths * heights)[:, None])
        wasted = canvas.prod(axis=1) - shown
        return (shown * 2**32 - wasted).argmax(axis=1)

    @staticmethod
    def _unpadded(widths: Ints, heights: Ints, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        wide = widths / heights > columns / rows
        high = np.round(heights * (columns / widths), 7).astype(np.int64)
        broad = np.round(widths * (rows / heights), 7).astype(np.int64)
        return (
            np.where(wide, rows - (rows - high) // 2 * 2, rows),
            np.where(wide, columns, columns - (columns - broad) // 2 * 2),
        )


@dataclass(frozen=True, kw_only=True)
class DynamicTiles:
    """InternVL's rule: the grid of tiles nearest to the picture's aspect ratio, and the whole picture beside them.

    Args:
        side: Pixels of a tile's side.
        max_tiles: Of a grid.
        patch: Pixels of a patch's side.
        merge: Patches of a token's side.
        extra: As in :class:`AnyRes`.

    Source: Chen et al. 2024 (InternVL 1.5), section 3.3; ``GotOcr2ImageProcessor``, which InternVL uses.
    """

    side: int = 448
    max_tiles: int = 12
    patch: int = 14
    merge: int = 2
    extra: int = 1

    def __call__(self, widths: Ints, heights: Ints) -> Encoded:
        sides = range(1, self.max_tiles + 1)
        grids = sorted(
            ((across, down) for across in sides for down in sides if across * down <= self.max_tiles),
            key=lambda grid: grid[0] * grid[1],
        )
        ratio, pixels = widths / heights, widths * heights
        least, tiles = np.full(len(widths), np.inf), np.ones(len(widths), dtype=np.int64)
        for across, down in grids:
            off = np.abs(ratio - across / down)
            # Of equally near grids the one with more tiles, unless they are more than twice the picture.
            larger = (off == least) & (pixels > 0.5 * self.side**2 * across * down)
            tiles[(off < least) | larger] = across * down
            least = np.minimum(least, off)
        sequences = np.where(tiles > 1, tiles + 1, tiles)
        patches = (self.side // self.patch) ** 2
        return _equal(sequences, np.full_like(tiles, patches + self.extra), sequences * (patches // self.merge**2))


@dataclass(frozen=True)
class Frames:
    """Whisper's rule, with Qwen2-Audio's pooling: windows of 30 s, 50 frames a second, two of them to a token.

    Windows do not attend to each other. The last one is computed as long as it is; the released encoders fill it up.

    Source: Radford et al. 2022 (Whisper), section 2.2; Chu et al. 2024 (Qwen2-Audio), section 2.
    """

    def __call__(self, seconds: Floats) -> Encoded:
        spectra = np.ceil(np.round(seconds * 100, 6)).astype(np.int64)
        full, rest = spectra // _WINDOW, spectra % _WINDOW
        window_frames, rest_frames = _half(_WINDOW), _half(rest)
        lengths = Lengths(
            tokens=full * window_frames + rest_frames,
            squares=full * window_frames**2 + rest_frames**2,
            longest=np.where(full > 0, window_frames, rest_frames),
        )
        return Encoded(lengths=lengths, outputs=full * (window_frames // 2) + rest_frames // 2)


_WINDOW = 3000
"""Spectra, of 10 ms."""


def _half(spectra: Ints | int) -> Ints:
    """A convolution of stride 2, padded on both sides."""
    return (np.asarray(spectra, dtype=np.int64) + 1) // 2


LLAVA_NEXT = AnyRes(side=336, canvases=((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)), extra=1)
LLAVA_ONEVISION = AnyRes(
    side=384,
    canvases=tuple((down, across) for down in range(1, 7) for across in range(1, 7)),
    max_tiles=9,
)

RULES: dict[str, PictureRule | SoundRule] = {
    "clip-l-336": LLAVA_NEXT,
    "siglip-so400m": LLAVA_ONEVISION,
    "internvit-300m": DynamicTiles(),
    "internvit-6b": DynamicTiles(),
    "qwen2-vl": SmartResize(),
    "whisper-large-v3": Frames(),
}
"""What is done, by the encoder's name in :data:`~resilient.planners.costs.encoder_models.ENCODERS`."""


def count_text(texts: Sequence[str], tokenizer: Callable[[str], Sequence[int]] | None = None) -> Ints:
    """Return the tokens of each text.

    Args:
        texts: One for each sample.
        tokenizer: Returns a text's token ids; without it words are counted.
    """
    if tokenizer is None:
        return tokens_of_words([len(text.split()) for text in texts])
    return np.array([len(tokenizer(text)) for text in texts], dtype=np.int64)


def tokens_of_words(words: npt.ArrayLike) -> Ints:
    """Return about how many tokens texts of so many words are, see :data:`TOKENS_PER_WORD`."""
    return np.ceil(np.asarray(words, dtype=np.float64) * TOKENS_PER_WORD).astype(np.int64)
