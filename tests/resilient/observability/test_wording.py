"""Times and recoveries read the same wherever they are printed."""

from __future__ import annotations

from typing import Any

import pytest

from resilient.observability.wording import duration, lost_work, recovery_parts, standby_in_words, three_digits

RECOVERY = {"detect_ms": 3.14, "agree_ms": None, "regroup_ms": 61.2, "copy_ms": 0.0, "redo_ms": 1320.0, "lost_steps": 1}


@pytest.mark.parametrize(
    ("value_ms", "text"),
    [
        (0.0, "0 ms"),
        (0.1254, "0.125 ms"),
        (2.444, "2.44 ms"),
        (87.44, "87.4 ms"),
        (999.4, "999 ms"),
        (999.6, "1 s"),
        (1324.0, "1.32 s"),
        (39640.4, "39.6 s"),
        (1_234_567.0, "1235 s"),
    ],
)
def test_durations_have_three_digits(value_ms: float, text: str) -> None:
    assert duration(value_ms) == text


@pytest.mark.parametrize(("value", "text"), [(0.1254, "0.125"), (28.53, "28.5"), (999.7, "1000"), (39640.4, "39640")])
def test_numbers_in_columns_have_as_many(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_parts_that_are_not_known_are_left_out() -> None:
    assert recovery_parts(RECOVERY) == "detect 3.14 ms, regroup 61.2 ms, copy 0 ms, redo 1.32 s"


@pytest.mark.parametrize(
    ("reasons", "slowdowns", "sentences"),
    [
        ({}, {"3": 2.0}, []),
        ({"4": "no_place"}, {}, ["node 4 stands by: no pipeline has a place for it"]),
        (
            {"3": "faster"},
            {"3": 2.0},
            ["node 3 stands by: it is 2 times slower than others, a step takes 88 s without it, 105 s with every node"],
        ),
        (
            {"3": "faster", "5": "most_nodes", "7": "faster"},
            {"3": 2.0, "5": 9.0},
            [
                "nodes 3, 7 stand by: node 3 is 2 times slower than others, a step takes 88 s without them, "
                "105 s with every node",
                "node 5 stands by: as many nodes train as may",
            ],
        ),
    ],
)
def test_why_nodes_stand_by_is_said_in_a_sentence_for_each_reason(
    reasons: dict[str, str], slowdowns: dict[str, float], sentences: list[str]
) -> None:
    generation: dict[str, Any] = {"slowdowns": slowdowns, "step_ms": 88_000.0, "with_standby_ms": 105_000.0}
    assert standby_in_words({**generation, "standby_reasons": reasons}) == sentences


def test_steps_that_were_redone_are_counted() -> None:
    assert lost_work(RECOVERY) == "1 step redone"
    assert lost_work({"lost_steps": 0}) == "no work lost"
