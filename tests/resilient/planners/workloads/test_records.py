"""Sample tables of records, and bad samples by name."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.planners.workloads.records import Bad, BadSamplePolicy, Records, sample_table
from resilient.planners.workloads.tokens import SmartResize

QWEN, WHISPER, OMNI = "qwen2-vl-7b", "whisper-large-v3+llama3.2-3b", "siglip-so400m+whisper-large-v3+llama3.2-3b"

Sample = tuple[int, list[tuple[int, int]], list[float]]
"""Text tokens, sizes of pictures, seconds of clips."""


def records(*samples: Sample) -> Records:
    return Records(
        names=tuple(f"s{index}" for index in range(len(samples))),
        text=np.array([text for text, _, _ in samples], dtype=np.int64),
        picture_of=np.array([i for i, (_, sizes, _) in enumerate(samples) for _ in sizes], dtype=np.int64),
        widths=np.array([width for _, sizes, _ in samples for width, _ in sizes], dtype=np.int64),
        heights=np.array([height for _, sizes, _ in samples for _, height in sizes], dtype=np.int64),
        sound_of=np.array([i for i, (_, _, clips) in enumerate(samples) for _ in clips], dtype=np.int64),
        seconds=np.array([clip for _, _, clips in samples for clip in clips]),
    )


def test_items_of_a_sample_are_sequences_of_their_own() -> None:
    table, bad = sample_table(records((10, [(280, 280), (560, 280)], []), (7, [], [])), QWEN)
    vision, llm = table.units["vision"], table.units["llm"]
    assert list(table.units) == ["vision", "llm"]
    assert vision.tokens.tolist() == [400 + 800, 0]
    assert vision.squares.tolist() == [400**2 + 800**2, 0]
    assert vision.longest.tolist() == [800, 0]
    assert llm.tokens.tolist() == [10 + 100 + 200, 7]
    assert llm.squares.tolist() == [310**2, 49]
    assert (table.names, bad) == (("s0", "s1"), ())


def test_what_the_model_does_not_read_is_left_out() -> None:
    everything = records((10, [(384, 384)], [10.0]))
    assert {unit: lengths.tokens.tolist() for unit, lengths in sample_table(everything, WHISPER)[0].units.items()} == {
        "audio": [500],
        "llm": [260],
    }
    alone = sample_table(everything, "llama3.2-3b")[0]
    assert {unit: lengths.tokens.tolist() for unit, lengths in alone.units.items()} == {"llm": [10]}
    both = sample_table(everything, OMNI)[0]
    assert {unit: lengths.tokens.tolist() for unit, lengths in both.units.items()} == {
        "vision": [2 * 729],
        "audio": [500],
        "llm": [10 + 2 * 729 + 27 + 250],
    }


BAD = records(
    (10, [(640, 480)], []),
    (10, [(1, 1)], []),
    (10, [(20, 9000)], []),
    (0, [(640, 480)], []),
    (10, [(5800, 6000)], []),
    (400, [(640, 480)], []),
    (10, [(60000, 30000)], []),
)
LIMITS = {"vision": 4000, "llm": 500}
REASONS = {
    "s1": "a picture of 1 x 1 pixels, smaller than 14",
    "s2": "a picture of 20 x 9000 pixels, longer than 200 times its breadth",
    "s3": "no text",
    "s4": "5040 tokens of vision, more than 4000",
    "s5": "791 tokens of llm, more than 500",
    "s6": "a picture of 60000 x 30000 pixels, more than 178956970 in all",
}


def test_bad_samples_are_an_error_that_names_them() -> None:
    reasons = "; ".join(f"{name!r}: {reason}" for name, reason in list(REASONS.items())[:5])
    message = (
        f"samples must fit the model, got 6 of 7 that do not ({reasons}; and 1 more); leave them out (bad=drop), "
        f"or make them fit (bad=resize)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sample_table(BAD, QWEN, limits=LIMITS)


def test_an_error_names_a_few() -> None:
    with pytest.raises(ValueError, match=re.escape("'s4': no text; and 3 more); leave them out (bad=drop)")):
        sample_table(records(*[(0, [], [])] * 8), QWEN)


def test_bad_samples_are_dropped() -> None:
    table, bad = sample_table(BAD, QWEN, bad="drop", limits=LIMITS)
    assert table.names == ("s0",)
    assert bad == tuple(Bad(name=name, reason=reason, dropped=True) for name, reason in REASONS.items())


def test_bad_samples_are_made_to_fit() -> None:
    table, bad = sample_table(BAD, QWEN, bad="resize", limits=LIMITS | {"llm": 1100})
    made = [("s1", False), ("s2", False), ("s3", True), ("s4", False), ("s6", False)]
    assert [(each.name, each.dropped) for each in bad] == made
    assert table.names == ("s0", "s1", "s2", "s4", "s5", "s6")
    vision, llm = table.units["vision"].tokens, table.units["llm"].tokens
    # 14 x 14 pixels are enlarged; 20 x 9000 become 20 x 4000; 34.8 million are scaled until they are 4000 patches.
    assert vision[:3].tolist() == [
        1564,
        *SmartResize()(np.array([14, 20]), np.array([14, 4000])).lengths.tokens,
    ]
    assert 3600 < vision[3] <= 4000
    assert llm[3] == 10 + vision[3] // 4
    assert 3600 < vision[5] <= 4000
    text_cut, found = sample_table(BAD, QWEN, bad="resize", limits={"llm": 500})
    assert text_cut.units["llm"].tokens[text_cut.names.index("s5")] == 500
    assert Bad(name="s4", reason="1270 tokens of llm, more than 500", dropped=True) in found


def test_flawed_samples_are_left_out_and_only_those() -> None:
    flawed = replace(records((0, [], []), (5, [(300, 200)], []), (5, [(1, 1)], [])), flaws=("no picture a.png", "", ""))
    some = flawed[np.array([1, 0, 0, 2])]
    table, bad = sample_table(some, QWEN, bad="resize")
    assert table.names == ("s1", "s2")
    reasons = [("s0", "no picture a.png", True)] * 2 + [("s2", "a picture of 1 x 1 pixels, smaller than 14", False)]
    assert [(each.name, each.reason, each.dropped) for each in bad] == reasons


def test_clips_are_cut_to_the_limit() -> None:
    long = records((5, [], [40.0, 20.0]), (5, [], [-1.0]), (5, [], [10.0]))
    table, bad = sample_table(long, WHISPER, bad="resize", limits={"audio": 2000})
    assert bad == (
        Bad(name="s0", reason="3000 tokens of audio, more than 2000", dropped=False),
        Bad(name="s1", reason="a clip of -1 s", dropped=True),
    )
    assert 1950 <= table.units["audio"].tokens[0] <= 2000
    assert table.units["audio"].tokens[1] == 500


def test_what_cannot_be_made_to_fit_is_dropped() -> None:
    # The smallest picture of LLaVA-OneVision is two sequences of 729.
    table, bad = sample_table(records((5, [(600, 600)], []), (5, [], [])), OMNI, bad="resize", limits={"vision": 1000})
    assert table.names == ("s1",)
    assert [(each.name, each.dropped) for each in bad] == [("s0", True)]


def test_the_positions_of_the_language_model_are_a_limit() -> None:
    with pytest.raises(ValueError, match=re.escape("('s0': 8193 tokens of llm, more than 8192)")):
        sample_table(records((8193, [], [])), "llama3-8b", limits={"llm": 10**6})


def test_nothing_left_is_an_error() -> None:
    message = "one sample or more must fit the model, got 1 and none does ('s0': no text); see their data"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sample_table(records((0, [], [])), QWEN, bad="drop")
    message = "limits must be of units of 'qwen2-vl-7b', got audio; leave it out"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        sample_table(records((1, [], [])), QWEN, limits={"audio": 3})


SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), max_size=3),
        st.lists(st.floats(-1, 100), max_size=3),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(samples=SAMPLES, bad=st.sampled_from(["drop", "resize"]), model=st.sampled_from([QWEN, WHISPER, OMNI]))
def test_limits_are_held_and_each_sample_is_kept_or_reported(
    samples: list[Sample], bad: BadSamplePolicy, model: str
) -> None:
    limits = {unit: 3000 for unit in ("vision", "audio", "llm") if model == OMNI or unit == "llm"}
    given_records = records(*samples, (1, [], []))  # one that is always good
    table, found = sample_table(given_records, model, bad=bad, limits=limits)
    dropped = {each.name for each in found if each.dropped}
    assert table.names == tuple(name for name in given_records.names if name not in dropped)
    if bad == "drop":
        assert all(each.dropped for each in found)
    for unit, limit in limits.items():
        assert table.units[unit].tokens.max() <= limit
    for lengths in table.units.values():
        assert (lengths.longest <= lengths.tokens).all()
        assert (lengths.squares <= lengths.tokens * lengths.longest).all()
    good = [index for index, name in enumerate(given_records.names) if name not in {each.name for each in found}]
    alone, _ = sample_table(given_records[np.array(good)], model, limits=limits)
    kept = np.array([table.names.index(given_records.names[index]) for index in good])
    for unit, lengths in alone.units.items():
        np.testing.assert_array_equal(lengths.tokens, table.units[unit].tokens[kept])


def test_chosen_records_keep_their_items() -> None:
    some = records((1, [(100, 100)], []), (2, [(200, 300), (300, 200)], [4.0]), (3, [], [5.0, 6.0]))
    chosen = some[np.array([2, 1, 1])]
    assert chosen.names == ("s2", "s1", "s1")
    assert chosen.text.tolist() == [3, 2, 2]
    assert list(zip(chosen.picture_of.tolist(), chosen.widths.tolist(), chosen.heights.tolist(), strict=True)) == [
        (1, 200, 300),
        (1, 300, 200),
        (2, 200, 300),
        (2, 300, 200),
    ]
    assert list(zip(chosen.sound_of.tolist(), chosen.seconds.tolist(), strict=True)) == [
        (0, 5.0),
        (0, 6.0),
        (1, 4.0),
        (2, 4.0),
    ]
