"""Reading what data sets say about their samples: LLaVA's JSON, manifests of recordings, tables of lengths.

Owns the names under which data sets keep sizes, durations and text. What is read is records of samples, however odd:
what cannot be read of one is noted with it, and which are bad depends on the model and is judged with it, in
:mod:`resilient.planners.workloads.records`.
"""

from __future__ import annotations

import csv
import io
import warnings
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.workloads.records import Records
from resilient.planners.workloads.tokens import count_text, tokens_of_words
from resilient.templates.common.arrays import Ints

NAMES = ("name", "id", "image_id", "image_name", "utt_id", "image", "audio_filepath", "audio")
WIDTHS, HEIGHTS = ("width", "widths"), ("height", "heights")
SIZES = ("image_sizes", "image_size", "size")
"""Of (width, height), or of one for each picture."""
SECONDS = ("duration_s", "duration", "durations", "seconds")
TOKENS = ("text_tokens", "tokens", "length")
WORDS = ("words", "caption_words_first", "num_words")
TEXTS = ("text", "caption", "transcript", "sentence")

CONVERSATIONS, IMAGE = "conversations", "image"
SOUND = ("audio_filepath", "audio")

_MARKS = ("<image>", "<audio>", "<video>")
"""In LLaVA's conversations, where pictures and sound stand."""

_CONTENT = frozenset((*WIDTHS, *HEIGHTS, *SIZES, *SECONDS, *SOUND, *TOKENS, *WORDS, *TEXTS, CONVERSATIONS, IMAGE))

_SHOWN = 60
"""Characters of a wrong value."""

RecordFields = Mapping[Any, Any]


def read_records(
    path: str | Path, *, tokenizer: Callable[[str], Sequence[int]] | None = None, pictures: str | Path | None = None
) -> Records:
    """Read samples from a file.

    A sample is a row of a ``.csv`` file, a line of a ``.jsonl`` or an entry of a ``.json`` list. It may have pictures
    (columns of :data:`WIDTHS` and :data:`HEIGHTS` or of :data:`SIZES`; one or a list), clips (:data:`SECONDS`; one or a
    list) and text (the first there is of LLaVA's ``conversations``, :data:`TOKENS`, :data:`TEXTS`, :data:`WORDS`). A
    sample with a value that is not what it must be, or a picture that cannot be opened, is read as one with a flaw.

    Args:
        path: The file.
        tokenizer: Returns a text's token ids; without it words are counted.
        pictures: Folder of the pictures that the column ``image`` names, to read the sizes of where the file does not
            have them.

    Raises:
        ValueError: The file is of no such kind, is damaged, or has no samples or none of these columns.
    """
    path = Path(path)
    samples = [_Sample(row, path, index, pictures) for index, row in enumerate(_rows(path))]
    text = np.array([sample.tokens for sample in samples], dtype=np.int64)
    text += count_text([sample.text for sample in samples], tokenizer)
    return Records(
        names=tuple(sample.name for sample in samples),
        text=text,
        picture_of=_owner([sample.sizes for sample in samples]),
        widths=np.array([width for sample in samples for width, _ in sample.sizes], dtype=np.int64),
        heights=np.array([height for sample in samples for _, height in sample.sizes], dtype=np.int64),
        sound_of=_owner([sample.seconds for sample in samples]),
        seconds=np.array([clip for sample in samples for clip in sample.seconds], dtype=np.float64),
        flaws=tuple(sample.flaw for sample in samples),
    )


def _rows(path: Path) -> Sequence[RecordFields]:
    kind = path.suffix.lower()
    if kind not in _READERS:
        raise ArgumentError("workload", f"end in {', '.join(_READERS)}", repr(str(path)), "rename or convert it")
    try:
        rows = _READERS[kind](path.read_bytes().removeprefix(BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path.name} must be a {kind[1:]} file of samples, got {error}; correct it") from error
    if not rows:
        raise ValueError(f"{path.name} must have samples, got none; see whether it is the right file")
    columns = {column: None for row in rows for column in row if column}
    if not _CONTENT & columns.keys():
        raise ValueError(
            f"{path.name} must have columns of pictures, sound or text ({', '.join(sorted(_CONTENT))}), got "
            f"{', '.join(columns)}; rename them"
        )
    return rows


def _read_csv(data: bytes) -> Sequence[RecordFields]:
    """Rows with more or fewer values than the header has are noted under ``None``."""
    reader = csv.DictReader(io.StringIO(data.decode(), newline=""), skipinitialspace=True)
    reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or ()]
    rows: list[dict[Any, Any]] = []
    for row in reader:
        count = len(reader.fieldnames) + len(row.get(None, ())) - sum(value is None for value in row.values())
        rows.append(row if count == len(reader.fieldnames) else {**row, None: (count, len(reader.fieldnames))})
    return rows


def _read_json(data: bytes) -> Sequence[RecordFields]:
    return msgspec.json.decode(data, type=list[dict[str, Any]]) if data.strip() else []


def _read_lines(data: bytes) -> Sequence[RecordFields]:
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows = list[RecordFields]()
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                rows.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise msgspec.DecodeError(f"{error} in line {number}") from error
    return rows


_READERS: Mapping[str, Callable[[bytes], Sequence[RecordFields]]] = {
    ".csv": _read_csv,
    ".json": _read_json,
    ".jsonl": _read_lines,
}


def _owner(items: Sequence[Sequence[Any]]) -> Ints:
    return np.repeat(np.arange(len(items)), [len(each) for each in items])


class _FlawError(Exception):
    """Says what cannot be read of a sample."""


class _Sample:
    """One row; what a data set leaves out is empty or missing.

    Attributes:
        name: Of the sample.
        sizes: Of its pictures.
        seconds: Of its clips.
        text: Its text, or, where the file says how long it is,
        tokens: Its length.
        flaw: What cannot be read; it has nothing else then.
    """

    def __init__(
        self,
        row: RecordFields,
        path: Path,
        index: int,
        pictures: str | Path | None,
    ) -> None:
        self._row = row
        given = self._first(NAMES)
        self.name = f"{path.name}:{index}" if given is None or isinstance(given, (list, dict)) else str(given)
        self.sizes: list[tuple[int, int]] = []
        self.seconds: list[float] = []
        self.text, self.tokens, self.flaw = "", 0, ""
        try:
            if None in row:
                raise _FlawError("{} columns, where the file has {}".format(*row[None]))
            sizes = self._sizes() or self._opened(pictures)
            seconds = self._seconds()
            self.tokens = self._tokens()
            self.text = self._text({"<image>": len(sizes), "<audio>": len(seconds)})
            self.sizes, self.seconds = sizes, seconds
        except _FlawError as flaw:
            self.flaw = str(flaw)

    def _sizes(self) -> list[tuple[int, int]]:
        both = self._first(SIZES)
        if both is not None:
            pairs = both if isinstance(both, list) and all(isinstance(pair, list) for pair in both) else [both]
            if any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
                raise _FlawError(f"sizes {_short(both)}, which are not of width and height")
            widths, heights = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        else:
            widths, heights = _listed(self._first(WIDTHS)), _listed(self._first(HEIGHTS))
        if len(widths) != len(heights):
            raise _FlawError(f"{len(widths)} widths and {len(heights)} heights of pictures")
        return [
            (round(_number("width", width)), round(_number("height", height)))
            for width, height in zip(widths, heights, strict=True)
        ]

    def _opened(self, folder: str | Path | None) -> list[tuple[int, int]]:
        names = [str(name) for name in _listed(self._first((IMAGE,)))]
        if not names:
            return []
        if folder is None:
            raise _FlawError(f"no size of {', '.join(names)}, nor the folder of pictures to find it in")
        from PIL import Image

        sizes = list[tuple[int, int]]()
        for name in names:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # nothing is decompressed
                    with Image.open(Path(folder) / name) as picture:
                        sizes.append(picture.size)
            except FileNotFoundError:
                raise _FlawError(f"no picture {name}") from None
            except (OSError, ValueError, Image.DecompressionBombError) as error:
                raise _FlawError(f"a picture that cannot be opened: {error}") from None
        return sizes

    def _seconds(self) -> list[float]:
        clips = _listed(self._first(SECONDS))
        names = _listed(self._first(SOUND))
        if names and not clips:
            raise _FlawError(f"no duration of {', '.join(map(str, names))}")
        return [_number("duration", clip) for clip in clips]

    def _text(self, items: Mapping[str, int]) -> str:
        turns = self._row.get(CONVERSATIONS)
        if turns is None:
            return "" if self._first(TOKENS) is not None else str(self._first(TEXTS) or "")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) and "value" in turn for turn in turns):
            raise _FlawError(f"conversations that are not a list of turns with a value each: {_short(turns)}")
        text = "\n".join(str(turn["value"] or "") for turn in turns)
        for mark in _MARKS:
            if text.count(mark) > items.get(mark, len(text)):
                raise _FlawError(f"{text.count(mark)} marks {mark} for {items[mark]} items")
            text = text.replace(mark, "")
        return text.strip()

    def _tokens(self) -> int:
        if self._row.get(CONVERSATIONS) is not None:
            return 0
        if (tokens := self._first(TOKENS)) is not None:
            return round(_number("tokens", tokens))
        if self._first(TEXTS) is None and (words := self._first(WORDS)) is not None:
            return int(tokens_of_words(_number("words", words)))
        return 0

    def _first(self, columns: Sequence[str]) -> Any:
        for column in columns:
            value = self._row.get(column)
            if value is not None and value != "" and value != []:
                return value
        return None


def _number(what: str, value: Any) -> float:
    try:
        number = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < 2**31:
        raise _FlawError(f"{what} {_short(value)}, which is no number from 0 on")
    return number


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
