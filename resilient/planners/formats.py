"""Reading what data sets say about their samples: LLaVA's JSON, manifests of recordings, tables of lengths.

Owns the names under which data sets keep sizes, durations and text. What is read is records of samples, however odd:
which are bad depends on the model and is judged with it, in :mod:`resilient.planners.records`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from resilient.planners.records import Records
from resilient.planners.tokens import count_text, tokens_of_words

NAMES = ("name", "id", "image_id", "image_name", "utt_id", "image", "audio_filepath", "audio")
WIDTHS, HEIGHTS = ("width", "widths"), ("height", "heights")
SIZES = ("image_sizes", "image_size", "size")
"""Of (width, height), or of one for each picture."""
SECONDS = ("duration_s", "duration", "durations", "seconds")
TOKENS = ("text_tokens", "tokens", "length")
WORDS = ("words", "caption_words_first", "num_words")
TEXTS = ("text", "caption", "transcript", "sentence")

_MARKS = ("<image>", "<audio>", "<video>")
"""In LLaVA's conversations, where pictures and sound stand."""

Row = Mapping[str, Any]


def read_records(
    path: str | Path, *, tokenizer: Callable[[str], Sequence[int]] | None = None, pictures: str | Path | None = None
) -> Records:
    """Read samples from a file.

    A sample is a row of a ``.csv`` file, a line of a ``.jsonl`` or an entry of a ``.json`` list. It may have pictures
    (columns of :data:`WIDTHS` and :data:`HEIGHTS` or of :data:`SIZES`; one or a list), clips (:data:`SECONDS`; one or a
    list) and text (the first there is of LLaVA's ``conversations``, :data:`TOKENS`, :data:`TEXTS`, :data:`WORDS`).

    Args:
        path: The file.
        tokenizer: Returns a text's token ids; without it words are counted.
        pictures: Folder of the pictures that the column ``image`` names, to read the sizes of where the file does not
            have them. A picture that cannot be read has the size 0 x 0, and so is bad.

    Raises:
        ValueError: The file is of no such kind, or a value in it is not what it must be; the message names the sample.
    """
    path = Path(path)
    samples = [_Sample(row, path, index, pictures) for index, row in enumerate(_rows(path))]
    sizes = [sample.sizes() for sample in samples]
    seconds = [sample.seconds() for sample in samples]
    return Records(
        names=tuple(sample.name for sample in samples),
        text=np.array([sample.text(tokenizer) for sample in samples], dtype=np.int64),
        picture_of=_owner(sizes),
        widths=np.array([width for each in sizes for width, _ in each], dtype=np.int64),
        heights=np.array([height for each in sizes for _, height in each], dtype=np.int64),
        sound_of=_owner(seconds),
        seconds=np.array([clip for each in seconds for clip in each], dtype=np.float64),
    )


def _rows(path: Path) -> Sequence[Row]:
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as file:
                return list(csv.DictReader(file))
        if path.suffix == ".jsonl":
            return msgspec.json.Decoder(dict[str, Any]).decode_lines(path.read_bytes())
        if path.suffix == ".json":
            return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path.name} must be a {path.suffix[1:]} file of samples, got {error}; correct it") from error
    raise ValueError(f"a file of samples must end in .csv, .json or .jsonl, got {path.name!r}; rename or convert it")


def _owner(items: Sequence[Sequence[Any]]) -> np.typing.NDArray[np.int64]:
    return np.repeat(np.arange(len(items)), [len(each) for each in items])


class _Sample:
    """One row, asked for what it has; what a data set leaves out is empty or missing."""

    def __init__(self, row: Row, path: Path, index: int, pictures: str | Path | None) -> None:
        self.row, self.path, self.pictures = row, path, pictures
        given = self._first(NAMES)
        self.name = f"{path.name}:{index}" if given is None or isinstance(given, list) else str(given)

    def sizes(self) -> list[tuple[int, int]]:
        both = self._first(SIZES)
        if both is not None:
            pairs = both if both and isinstance(both[0], list) else [both]
            if any(len(pair) != 2 for pair in pairs):
                raise ValueError(f"sizes of {self.name!r} must be of width and height, got {both}; correct the file")
            widths, heights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        else:
            widths, heights = _listed(self._first(WIDTHS)), _listed(self._first(HEIGHTS))
        if not widths and not heights:
            return self._opened()
        if len(widths) != len(heights):
            raise ValueError(
                f"pictures of {self.name!r} must have a width and a height each, got {len(widths)} widths and "
                f"{len(heights)} heights; correct the file"
            )
        return [
            (round(self._number("width", width)), round(self._number("height", height)))
            for width, height in zip(widths, heights, strict=True)
        ]

    def _opened(self) -> list[tuple[int, int]]:
        names = _listed(self.row.get("image"))
        if not names:
            return []
        if self.pictures is None:
            raise ValueError(
                f"pictures of {self.name!r} must have sizes, got {', '.join(map(str, names))} alone; "
                f"say in which folder they are"
            )
        from PIL import Image, UnidentifiedImageError

        sizes = list[tuple[int, int]]()
        for name in names:
            try:
                with Image.open(Path(self.pictures) / str(name)) as picture:
                    sizes.append(picture.size)
            except (OSError, UnidentifiedImageError):
                sizes.append((0, 0))
        return sizes

    def seconds(self) -> list[float]:
        return [self._number("duration", clip) for clip in _listed(self._first(SECONDS))]

    def text(self, tokenizer: Callable[[str], Sequence[int]] | None) -> int:
        turns = self.row.get("conversations")
        if turns is not None:
            text = "\n".join(str(turn["value"]) for turn in turns)
            for mark in _MARKS:
                text = text.replace(mark, "")
            return int(count_text([text.strip()], tokenizer)[0])
        if (tokens := self._first(TOKENS)) is not None:
            return round(self._number("tokens", tokens))
        if (text := self._first(TEXTS)) is not None:
            return int(count_text([str(text)], tokenizer)[0])
        if (words := self._first(WORDS)) is not None:
            return int(tokens_of_words(self._number("words", words)))
        return 0

    def _first(self, columns: Sequence[str]) -> Any:
        return next((self.row[column] for column in columns if self.row.get(column) not in (None, "")), None)

    def _number(self, what: str, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 <= number < 2**31:
            raise ValueError(
                f"{what} of {self.name!r} in {self.path.name} must be a number from 0 on, got {value!r}; "
                f"correct the file"
            )
        return number


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
