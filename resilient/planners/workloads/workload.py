"""Workloads for trying planners: files of real data sets, and seeded generators with their quantiles.

Owns the quantiles; the samples they make are as heterogeneous as the data sets, but are none of theirs. No public set
pairs heavy-tailed pictures with text: such workloads are composed of two, and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.encoder_models import units_of
from resilient.planners.costs.samples import SampleTable
from resilient.planners.workloads.formats import read_records
from resilient.planners.workloads.records import Bad, BadSamplePolicy, Records, sample_table
from resilient.planners.workloads.tokens import tokens_of_words
from resilient.templates.common.arrays import Floats, Ints

PER_CENT = (
    *(0, 0.1, 0.5, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50),
    *(55, 60, 65, 70, 75, 80, 85, 90, 95, 97, 98, 99, 99.5, 99.9, 100),
)
"""Of samples at most as large as the entries of the tables."""

LAION_SIDE = (
    *(66.8, 80, 80, 80, 150, 196, 224.3, 243.9, 267, 289, 303, 338, 367.4, 387.3, 415.7),
    *(450.3, 491.9, 528.2, 571.8, 636.2, 700, 804.7, 900, 1162.5, 1439.9, 1569.5, 2029.1, 2637.1, 4232.7, 5898.9),
)
"""Root of a picture's pixels in LAION-Aesthetics (8313 pictures; those of 10 x 10 pixels and less are left out)."""
LAION_RATIO = (
    *(0.288, 0.436, 0.543, 0.585, 0.643, 0.667, 0.686, 0.75, 0.793, 0.952, 1, 1, 1, 1.113, 1.259),
    *(1.333, 1.333, 1.41, 1.498, 1.5, 1.501, 1.508, 1.667, 1.779, 1.872, 1.993, 2.183, 2.423, 2.897, 3.472),
)
"""Width by height of the same; it does not depend on the size (rank correlation 0.05)."""

COCO_SIDE = (200, 288, 385, 500, 500, 500, 500, 500, *([640] * 22))
"""Longer side in pixels in COCO val2017 (5000 pictures)."""
COCO_RATIO = (
    *(0.384, 0.478, 0.562, 0.617, 0.662, 0.666, 0.67, 0.75, 0.75, 1, 1.248, 1.333, 1.333, 1.333, 1.333),
    *(1.333, 1.339, 1.478, 1.499, 1.499, 1.499, 1.502, 1.506, 1.616, 1.778, 1.783, 2, 2.184, 3.386, 4.025),
)
"""Width by height of the same."""
COCO_WORDS = (7, 7, 7, 8, 8, 8, 8, 8, 9, 9, 9, 9, *([10] * 5), 11, 11, 11, 12, 12, 13, 14, 15, 16, 18, 20, 23, 28)
"""Of a picture's first caption in the same; it does not depend on the size."""

LIBRISPEECH_SECONDS = (
    *(1.06, 1.4, 1.79, 1.92, 2.04, 2.29, 2.63, 2.93, 3.24, 3.54, 3.89, 4.26, 4.64, 5.03, 5.48),
    *(6.01, 6.55, 7.15, 7.88, 8.69, 9.73, 11.06, 13.12, 16.27, 18.33, 20.23, 23.48, 28.01, 32.75, 35.16),
)
"""Of an utterance in LibriSpeech (11126, all of the development and test sets)."""
LIBRISPEECH_WORDS = (
    *(1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15),
    *(17, 19, 20, 22, 25, 27, 31, 36, 45, 50, 55, 62, 71, 85, 119),
)
"""Of the same."""
LIBRISPEECH_RANKS = 0.949
"""Correlation of the two, of normal numbers in the place of their ranks (rank correlation 0.945)."""

VIDEO_HEIGHTS = (240, 360, 480, 720)
"""Pixels of videos, each as often, 16:9."""
FRAME_PIXELS, VIDEO_PIXELS = 768 * 28 * 28, 16384 * 28 * 28
"""What Qwen2-VL's preparation leaves of a frame, and of all frames of a video together, two counted as one."""

_BLOCK = 512
"""Samples that a generator makes with one seed."""


def workload(
    name: str | Path,
    num_samples: int,
    seed: int,
    model: str,
    *,
    bad: BadSamplePolicy = "error",
    known: int = 0,
) -> SampleTable:
    """Return that many samples of a workload, as :func:`judged_workload` does, without what is bad in it."""
    return judged_workload(name, num_samples, seed, model, bad=bad, known=known)[0]


def judged_workload(
    name: str | Path,
    num_samples: int,
    seed: int,
    model: str,
    *,
    bad: BadSamplePolicy = "error",
    limits: Mapping[str, int] | None = None,
    tokenizer: Callable[[str], Sequence[int]] | None = None,
    pictures: str | Path | None = None,
    known: int = 0,
) -> tuple[SampleTable, tuple[Bad, ...]]:
    """Return that many samples of a workload, as a model sees them, and what is bad in it. Deterministic.

    Asked for more, with as many known, it returns the same ones first.

    Args:
        name: A name in :data:`GENERATORS`, a file that :func:`~resilient.planners.workloads.formats.read_records`
            reads, or
            several joined by ``+``: names of the first, pictures of the first that has any, sound likewise, text of the
            last that has any (``laion+librispeech``, ``sizes.csv+coco``). A file is joined row by row.
        num_samples: How many. Samples of a file repeat only when there are too few of them.
        seed: Of the choice.
        model: As for :func:`~resilient.planners.costs.derived_costs.derive_costs`.
        bad: What to do with bad samples, as for :func:`~resilient.planners.workloads.records.sample_table`. All of a
            file are
            judged, drawn or not, and others are drawn in the place of those that are dropped.
        limits: As there.
        tokenizer: As for :func:`~resilient.planners.workloads.formats.read_records`.
        pictures: As there.
        known: Of the samples, the first ones, none of which are among the others: so many, and of a file half of its
            samples at most, which repeat.

    Raises:
        ValueError: A name is not known, a file is not what it must be, samples are bad and ``bad`` is ``error``, or
            there is nothing in the workload that the model's encoders read.
    """
    if num_samples < 1:
        raise ArgumentError("num_samples", "be >= 1", num_samples, "ask for one or more")
    names = [str(name)] if Path(name).is_file() else str(name).split("+")
    sources = [_source(each, tokenizer, pictures) for each in names]
    files = [len(source) for source in sources if isinstance(source, Records)]
    count = max(files, default=num_samples)
    while True:
        records = _composed([_rows(source, count, (seed, number)) for number, source in enumerate(sources)])
        _check(records, str(name), model)
        table, found = sample_table(records, model, bad=bad, limits=limits)
        missing = num_samples - len(table)
        if files or missing <= 0:
            break
        if len(found) > 20 * num_samples + 1000:
            raise ValueError(f"samples of {name} must fit {model!r}, got {len(found)} bad of {count}; see its data")
        count += 2 * missing
    if not files:
        return table[:num_samples], found
    random = np.random.default_rng((seed, len(sources)))
    shuffled = random.permutation(len(table))
    known = min(known, num_samples)
    apart = min(known, len(table) // 2)
    first = _repeated(shuffled[:apart] if apart else shuffled, known, random)
    return table[np.concatenate([first, _repeated(shuffled[apart:], num_samples - known, random)])], found


def _repeated(some: Ints, count: int, random: np.random.Generator) -> Ints:
    """Return so many of some, each once before any comes again, and in another order each time."""
    again = [random.permutation(some) for _ in range((count - 1) // len(some))]
    return np.concatenate([some, *again])[:count]


Draw = Callable[[np.random.Generator, int], Records]


def _source(name: str, tokenizer: Callable[[str], Sequence[int]] | None, pictures: str | Path | None) -> Records | Draw:
    if name in GENERATORS:
        return GENERATORS[name]
    if not Path(name).is_file():
        raise ArgumentError("workload", f"be a file or one of {', '.join(GENERATORS)}", repr(name), "see its spelling")
    return read_records(name, tokenizer=tokenizer, pictures=pictures)


def _rows(source: Records | Draw, count: int, seed: tuple[int, int]) -> Records:
    """Return so many samples. Generators make them by the block, each with a seed of its own."""
    if isinstance(source, Records):
        return source[np.arange(count) % len(source)]
    starts = range(0, count, _BLOCK)
    drawn = _stacked([source(np.random.default_rng((*seed, start)), _BLOCK) for start in starts])
    names = [name.partition(":")[0] for name in drawn.names]
    return replace(drawn, names=tuple(f"{name}:{number}" for number, name in enumerate(names)))[np.arange(count)]


def _check(records: Records, name: str, model: str) -> None:
    if any(records.flaws) and all(records.flaws):
        return  # there is better to say of it
    if not records.text.any():
        raise ValueError(f"samples of {name} must have text, got none; compose it with another: {name}+coco")
    units = {encoder.unit for encoder in units_of(model)[0].values()}
    there = {unit for unit, items in (("vision", records.widths), ("audio", records.seconds)) if items.size}
    if units and not units & there:
        raise ValueError(
            f"samples of {name} must have something for the encoders of {model!r} ({', '.join(sorted(units))}), got "
            f"{', '.join(sorted(there)) or 'text alone'}; choose another model, or compose it with another workload"
        )


def _composed(rows: list[Records]) -> Records:
    pictures = next((part for part in rows if part.widths.size), rows[0])
    sound = next((part for part in rows if part.seconds.size), rows[0])
    return Records(
        names=rows[0].names,
        text=next((part.text for part in reversed(rows) if part.text.any()), rows[0].text),
        picture_of=pictures.picture_of,
        widths=pictures.widths,
        heights=pictures.heights,
        sound_of=sound.sound_of,
        seconds=sound.seconds,
        flaws=_flaws(rows),
    )


def _flaws(rows: Sequence[Records]) -> tuple[str, ...]:
    """Return the first flaw of each sample; what is flawed in a part is not asked whether that part is used."""
    flawed = [part.flaws for part in rows if any(part.flaws)]
    return tuple(next(filter(None, flaws), "") for flaws in zip(*flawed, strict=True))


def _records(
    name: str,
    text: Ints,
    *,
    picture_of: Ints | None = None,
    sizes: tuple[Ints, Ints] | None = None,
    seconds: Floats | None = None,
) -> Records:
    """Make records of generated samples; without owners each has one item."""
    each, none = np.arange(len(text)), np.empty(0, dtype=np.int64)
    widths, heights = sizes or (none, none)
    return Records(
        names=tuple(f"{name}:{index}" for index in each),
        text=text,
        picture_of=none if sizes is None else each if picture_of is None else picture_of,
        widths=widths,
        heights=heights,
        sound_of=none if seconds is None else each,
        seconds=np.empty(0) if seconds is None else seconds,
    )


def _quantile(table: tuple[float, ...], rank: Floats) -> Floats:
    return np.interp(rank * 100, PER_CENT, table)


def _laion_sizes(random: np.random.Generator, count: int) -> tuple[Ints, Ints]:
    side, ratio = _quantile(LAION_SIDE, random.random(count)), _quantile(LAION_RATIO, random.random(count))
    return np.rint(side * np.sqrt(ratio)).astype(np.int64), np.rint(side / np.sqrt(ratio)).astype(np.int64)


def _coco_words(random: np.random.Generator, count: int) -> Ints:
    return np.rint(_quantile(COCO_WORDS, random.random(count))).astype(np.int64)


def _laion(random: np.random.Generator, count: int) -> Records:
    sizes = _laion_sizes(random, count)
    return _records("laion", tokens_of_words(_coco_words(random, count)), sizes=sizes)


def _coco(random: np.random.Generator, count: int) -> Records:
    side, ratio = _quantile(COCO_SIDE, random.random(count)), _quantile(COCO_RATIO, random.random(count))
    widths = np.rint(side * np.minimum(ratio, 1)).astype(np.int64)
    heights = np.rint(side / np.maximum(ratio, 1)).astype(np.int64)
    return _records("coco", tokens_of_words(_coco_words(random, count)), sizes=(widths, heights))


def _librispeech(random: np.random.Generator, count: int) -> Records:
    from scipy.special import ndtr  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    normal = random.standard_normal((2, count))
    normal[1] = LIBRISPEECH_RANKS * normal[0] + np.sqrt(1 - LIBRISPEECH_RANKS**2) * normal[1]
    duration, length = np.asarray(ndtr(normal))
    words = np.rint(_quantile(LIBRISPEECH_WORDS, length))
    seconds = np.round(_quantile(LIBRISPEECH_SECONDS, duration), 3)
    return _records("librispeech", tokens_of_words(words), seconds=seconds)


def _interleaved(random: np.random.Generator, count: int) -> Records:
    pictures = np.minimum(random.geometric(0.25, count), 16)
    sizes = _laion_sizes(random, int(pictures.sum()))
    words = np.rint(np.clip(random.lognormal(np.log(300), 1.0, count), 10, 6000))
    owner = np.repeat(np.arange(count), pictures)
    return _records("interleaved", tokens_of_words(words), picture_of=owner, sizes=sizes)


def _video(random: np.random.Generator, count: int) -> Records:
    """Two frames are taken a second, and two are one picture to the encoder, which attends within it alone."""
    seconds = np.rint(np.clip(random.lognormal(np.log(25), 0.9, count), 4, 120)).astype(np.int64)
    full = random.choice(VIDEO_HEIGHTS, count) ** 2 * (16 / 9)
    side = np.sqrt(np.minimum(np.minimum(full, FRAME_PIXELS), VIDEO_PIXELS / seconds))
    owner = np.repeat(np.arange(count), seconds)
    widths, heights = ((side * part).astype(np.int64)[owner] for part in (4 / 3, 3 / 4))
    words = np.rint(np.clip(random.lognormal(np.log(100), 0.8, count), 10, 1000))
    return _records("video", tokens_of_words(words), picture_of=owner, sizes=(widths, heights))


def _mixed(random: np.random.Generator, count: int) -> Records:
    kinds = [_laion(random, count), _coco(random, count), _librispeech(random, count)]
    chosen = random.integers(len(kinds), size=count)
    rows = [part[np.flatnonzero(chosen == kind)] for kind, part in enumerate(kinds)]
    place = np.argsort(np.argsort(chosen, kind="stable"), kind="stable")
    return _stacked(rows)[place]


def _stacked(units_of: list[Records]) -> Records:
    """Return the samples of all parts, one part after the other."""
    first = np.cumsum([0, *(len(part) for part in units_of)])
    return Records(
        names=tuple(name for part in units_of for name in part.names),
        text=np.concatenate([part.text for part in units_of]),
        picture_of=np.concatenate([part.picture_of + start for part, start in zip(units_of, first, strict=False)]),
        widths=np.concatenate([part.widths for part in units_of]),
        heights=np.concatenate([part.heights for part in units_of]),
        sound_of=np.concatenate([part.sound_of + start for part, start in zip(units_of, first, strict=False)]),
        seconds=np.concatenate([part.seconds for part in units_of]),
    )


GENERATORS: dict[str, Draw] = {
    "laion": _laion,
    "coco": _coco,
    "librispeech": _librispeech,
    "mixed": _mixed,
    "interleaved": _interleaved,
    "video": _video,
}
"""By name.

- ``coco``: a picture and its caption; nearly all of one size.
- ``laion``: composed, a picture of LAION-Aesthetics and a caption of COCO; heavy-tailed.
- ``librispeech``: an utterance and its words.
- ``mixed``: composed, each sample one of these three.
- ``interleaved``: made up, 1 to 16 pictures of LAION-Aesthetics (4 on average) in a text of about 300 words
  (log-normal, 10 to 6000): long sequences.
- ``video``: made up, a clip of about 25 s (log-normal, 4 to 120) as Qwen2-VL prepares it, a picture a second, and about
  100 words (log-normal, 10 to 1000): most sequences are far longer than of pictures. Other encoders tile such pictures,
  and have positions for the shortest clips only.
"""
