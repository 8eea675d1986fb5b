"""Records of samples as data sets describe them, and the sample table that a model makes of them.

Owns the joining of pictures, clips and text to samples and the judgement of bad ones. Rules of encoders are
:mod:`resilient.planners.workloads.tokens`, reading files is :mod:`resilient.planners.workloads.formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.encoder_models import units_of
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.workloads.tokens import RULES, Encoded, PictureRule, SoundRule
from resilient.templates.common.arrays import Floats, Ints

MIN_SIDE = 14
"""Pixels of a side: a picture smaller than a patch shows nothing. Data sets hold such where the real ones are gone."""

MAX_RATIO = 200.0
"""Between the sides of a picture; Qwen2-VL's limit, kept for all."""

MAX_PIXELS = 178_956_970
"""Of a picture: Pillow refuses to open larger ones."""

BadSamplePolicy = Literal["error", "drop", "resize"]

_MOST_HALVINGS, _BISECTIONS = 16.0, 14
"""Of a sample, to make it fit, and steps to find how many do."""

_NAMED = 5
"""Bad samples that an error names."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Records:
    """Samples as a data set describes them.

    Args:
        names: Of the samples.
        text: Tokens of each sample's text, without those that stand for pictures or sound. [num_samples]
        picture_of: Sample of each picture, ascending. [num_pictures], as the next two.
        widths: Pixels.
        heights: Pixels.
        sound_of: Sample of each clip, ascending. [num_clips], as the next.
        seconds: Duration.
        flaws: What could not be read of each sample, empty where all could; left out where no sample has one.
    """

    names: tuple[str, ...]
    text: Ints
    picture_of: Ints
    widths: Ints
    heights: Ints
    sound_of: Ints
    seconds: Floats
    flaws: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, chosen: Ints) -> Records:
        """Return those samples, in that order and as often as they are named."""
        pictures, picture_of = _owned(self.picture_of, chosen, len(self))
        clips, sound_of = _owned(self.sound_of, chosen, len(self))
        return Records(
            names=tuple(self.names[index] for index in chosen),
            text=self.text[chosen],
            picture_of=picture_of,
            widths=self.widths[pictures],
            heights=self.heights[pictures],
            sound_of=sound_of,
            seconds=self.seconds[clips],
            flaws=tuple(self.flaws[index] for index in chosen) if self.flaws else (),
        )


@dataclass(frozen=True, kw_only=True)
class Bad:
    """A sample that does not fit.

    Args:
        name: The sample's.
        reason: What is wrong with it.
        dropped: Whether it was left out; otherwise it was made to fit.
    """

    name: str
    reason: str
    dropped: bool


def sample_table(
    records: Records,
    model: str,
    *,
    bad: BadSamplePolicy = "error",
    limits: Mapping[str, int] | None = None,
) -> tuple[SampleTable, tuple[Bad, ...]]:
    """Return what a model's units process of each sample.

    Bad are samples with flaws, pictures smaller than :data:`MIN_SIDE`, larger than :data:`MAX_PIXELS` or more than
    :data:`MAX_RATIO` times as long as broad, clips without duration, samples of more tokens than a unit's limit, and
    samples without text.

    Args:
        records: The samples. Pictures and sound that the model has no encoder for are left out.
        model: As for :func:`~resilient.planners.costs.derived_costs.derive_costs`.
        bad: What to do with bad samples: ``error`` names them; ``drop`` leaves them out; ``resize`` enlarges, crops or
            shrinks pictures, cuts clips and text until they fit, and leaves out what cannot be made to.
        limits: Tokens that a sample may have, by unit (``vision``, ``audio``, ``llm``), for instance those of
            :func:`~resilient.planners.workloads.sample_limits.most_tokens`. The language model's positions are one
            always.

    Returns:
        The table, and the bad samples in order.

    Raises:
        ValueError: A name is not known, there are bad samples and ``bad`` is ``error``, or no sample is left.
    """
    encoders, language = units_of(model)
    limits = dict(limits or {})
    by_unit = {encoder.unit: RULES[name] for name, encoder in encoders.items()}
    unknown = limits.keys() - by_unit.keys() - {LLM}
    if unknown:
        raise ArgumentError("limits", f"be of units of {model!r}", ", ".join(sorted(unknown)), "leave it out")
    limits[LLM] = min(limits.get(LLM, language.positions), language.positions)
    return _Judge(records, bad, limits, by_unit).table()


class _Judge:
    """Collects what is wrong with samples, the first thing of each, and makes it right where that is asked for."""

    def __init__(
        self,
        records: Records,
        bad: BadSamplePolicy,
        limits: Mapping[str, int],
        rules: Mapping[str, PictureRule | SoundRule],
    ) -> None:
        self.records, self.bad, self.limits, self.rules = records, bad, limits, rules
        self.found: dict[int, Bad] = {}

    def table(self) -> tuple[SampleTable, tuple[Bad, ...]]:
        records, count = self.records, len(self.records)
        for sample, flaw in enumerate(records.flaws):
            if flaw:
                self._note(sample, flaw, dropped=True)
        units: dict[str, Lengths] = {}
        outputs = np.zeros(count, dtype=np.int64)
        for unit in self.rules:
            encoded = self._pictures() if unit == "vision" else self._sound()
            units[unit] = encoded.lengths
            outputs += encoded.outputs
        for sample in np.flatnonzero(records.text < 1).tolist():
            self._note(sample, "no text", dropped=True)
        text, limit = records.text, self.limits[LLM]
        for sample in np.flatnonzero(text + outputs > limit).tolist():
            reason = f"{text[sample] + outputs[sample]} tokens of llm, more than {limit}"
            self._note(sample, reason, dropped=int(outputs[sample]) >= limit)
        text = np.maximum(np.minimum(text, limit - outputs), 0)
        units[LLM] = Lengths.of(text + outputs)
        found = tuple(self.found[sample] for sample in sorted(self.found))
        if found and self.bad == "error":
            raise ArgumentError(
                "samples",
                "fit the model",
                f"{len(found)} of {count} that do not ({_named(found)})",
                "leave them out ({bad=drop}), or make them fit ({bad=resize})",
            )
        kept = np.array([sample for sample in range(count) if not self._dropped(sample)], dtype=np.int64)
        if not kept.size:
            raise ValueError(
                f"one sample or more must fit the model, got {count} and none does ({_named(found)}); see their data"
            )
        return SampleTable(units=units, names=records.names)[kept], found

    def _note(self, sample: int, reason: str, *, dropped: bool) -> None:
        """Note what is wrong; a sample that was made to fit and still does not is dropped."""
        before = self.found.get(sample)
        if before is None or (dropped and not before.dropped):
            dropped = dropped or self.bad == "drop"
            self.found[sample] = Bad(name=self.records.names[sample], reason=reason, dropped=dropped)

    def _dropped(self, sample: int) -> bool:
        return sample in self.found and self.found[sample].dropped

    def _pictures(self) -> Encoded:
        records = self.records
        widths, heights, owner = records.widths, records.heights, records.picture_of
        small = np.minimum(widths, heights) < MIN_SIDE
        large = widths * heights > MAX_PIXELS
        long = np.maximum(widths, heights) > MAX_RATIO * np.minimum(widths, heights)
        for index in np.flatnonzero(small | large | long):
            why = f"longer than {MAX_RATIO:g} times its breadth"
            if small[index] or large[index]:
                why = f"smaller than {MIN_SIDE}" if small[index] else f"more than {MAX_PIXELS} in all"
            reason = f"a picture of {widths[index]} x {heights[index]} pixels, {why}"
            self._note(int(owner[index]), reason, dropped=False)
        widths, heights = np.maximum(widths, MIN_SIDE), np.maximum(heights, MIN_SIDE)
        longest = (np.minimum(widths, heights) * MAX_RATIO).astype(np.int64)
        widths, heights = np.minimum(widths, longest), np.minimum(heights, longest)
        side = np.sqrt(np.minimum(MAX_PIXELS / (widths * heights), 1.0))
        widths, heights = (widths * side).astype(np.int64), (heights * side).astype(np.int64)
        rule = cast(PictureRule, self.rules["vision"])

        def scaled(factor: Floats) -> Encoded:
            side = np.sqrt(factor)[owner]
            new = [np.maximum(np.floor(sides * side), MIN_SIDE).astype(np.int64) for sides in (widths, heights)]
            changed = side < 1
            return self._join(rule(np.where(changed, new[0], widths), np.where(changed, new[1], heights)), owner)

        return self._within("vision", scaled)

    def _sound(self) -> Encoded:
        seconds, owner = self.records.seconds, self.records.sound_of
        for index in np.flatnonzero(~(seconds > 0)):
            self._note(int(owner[index]), f"a clip of {seconds[index]:g} s", dropped=True)
        seconds = np.where(seconds > 0, seconds, 0.0)
        rule = cast(SoundRule, self.rules["audio"])
        return self._within("audio", lambda factor: self._join(rule(seconds * factor[owner]), owner))

    def _join(self, encoded: Encoded, owner: Ints) -> Encoded:
        """Put the items of each sample together."""
        count = len(self.records)
        longest = np.zeros(count, dtype=np.int64)
        np.maximum.at(longest, owner, encoded.lengths.longest)
        tokens, squares, outputs = (
            np.bincount(owner, weights=each, minlength=count).astype(np.int64)
            for each in (encoded.lengths.tokens, encoded.lengths.squares, encoded.outputs)
        )
        return Encoded(lengths=Lengths(tokens=tokens, squares=squares, longest=longest), outputs=outputs)

    def _within(self, unit: str, encode: Callable[[Floats], Encoded]) -> Encoded:
        """Return what ``encode`` makes of samples reduced to some parts of their size, such that limits are held."""
        encoded = encode(np.ones(len(self.records)))
        limit = self.limits.get(unit)
        if limit is None:
            return encoded
        over = encoded.lengths.tokens > limit
        for sample in np.flatnonzero(over).tolist():
            reason = f"{encoded.lengths.tokens[sample]} tokens of {unit}, more than {limit}"
            self._note(sample, reason, dropped=False)
        if self.bad == "resize" and over.any():
            # What halvings do is bisected: tokens come in steps, and rules reduce large pictures themselves.
            few, many = np.zeros(len(over)), np.where(over, _MOST_HALVINGS, 0.0)
            for _ in range(_BISECTIONS):
                middle = (few + many) / 2
                fits = encode(2**-middle).lengths.tokens <= limit
                few, many = np.where(fits, few, middle), np.where(fits, middle, many)
            encoded = encode(2**-many)
            over = encoded.lengths.tokens > limit
        for sample in np.flatnonzero(over).tolist():
            self._note(sample, f"{encoded.lengths.tokens[sample]} tokens of {unit}, more than {limit}", dropped=True)
        return encoded


def _named(found: Sequence[Bad]) -> str:
    named = "; ".join(f"{each.name!r}: {each.reason}" for each in found[:_NAMED])
    return f"{named}; and {len(found) - _NAMED} more" if len(found) > _NAMED else named


def _owned(owner: Ints, chosen: Ints, count: int) -> tuple[Ints, Ints]:
    """Return the items of the chosen samples, and which of these each belongs to."""
    starts = np.searchsorted(owner, np.arange(count + 1))
    counts = (starts[1:] - starts[:-1])[chosen]
    first = np.repeat(starts[chosen] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts)
    return first + np.arange(counts.sum()), np.repeat(np.arange(len(chosen)), counts)
