"""Reading, making and scaling traces."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.simulation.availability.traces import (
    AvailabilityChange,
    AvailabilityTrace,
    periodic_failures,
    read_trace,
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text)
    return path


def test_events_of_one_time_are_one_change(tmp_path: Path) -> None:
    trace = read_trace(
        written(tmp_path, "0,add,a\n0,add,b\n\n60000, remove, a\n60000,add,c\n90000,remove,b\n90000,add,b\n")
    )
    assert trace == AvailabilityTrace(
        name="t",
        changes=(
            AvailabilityChange(time_ms=0, joined=(0, 1)),
            AvailabilityChange(time_ms=60000, joined=(2,), lost=(0,)),
            AvailabilityChange(time_ms=90000, joined=(3,), lost=(1,)),
        ),
        end_ms=90000,
    )
    assert list(trace.counts()) == [(0, 2), (60000, 2), (90000, 2)]
    assert (trace.first_nodes, trace.max_nodes) == (2, 2)


def test_a_node_that_comes_and_goes_at_one_time_is_not_seen(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, "0,add,a\n5,add,b\n5,remove,b\n9,remove,a\n"))
    assert [change.time_ms for change in trace.changes] == [0, 9]


def test_counts_become_joins_and_losses(tmp_path: Path) -> None:
    lines = ["2023-05-01, 23:59:00, 3", "2023-05-01, 23:59:30, 3", "2023-05-02, 00:00:00, 1", "2023-05-02, 00:10:00, 2"]
    path = written(tmp_path, "\n".join(lines) + "\n")
    trace = read_trace(path, seed=1)
    first, second, third = trace.changes
    assert first == AvailabilityChange(time_ms=0, joined=(0, 1, 2))
    assert (second.time_ms, len(second.lost), second.joined) == (60_000, 2, ())
    assert set(second.lost) < {0, 1, 2}
    assert third == AvailabilityChange(time_ms=660_000, joined=(3,))
    assert trace.end_ms == 660_000
    assert read_trace(path, seed=1) == trace
    assert {read_trace(path, seed=seed).changes[1].lost for seed in range(20)} != {second.lost}, "by seed"


@given(st.lists(st.tuples(st.integers(-60, 120), st.integers(1, 9)), min_size=2, max_size=12))
def test_samples_of_late_clocks_lose_no_more_nodes_than_their_order_shows(samples: list[tuple[int, int]]) -> None:
    """Lines are each up to a minute behind the latest before them."""
    latest, lines = 0, ["2023-05-01, 00:00:00, 3\n"]
    expected = {0: 3}
    for after_s, count in samples:
        time_s = max(0, latest + after_s)
        latest = max(latest, time_s)
        expected[latest] = count
        lines.append(f"2023-05-01, {time_s // 3600:02}:{time_s // 60 % 60:02}:{time_s % 60:02}, {count}\n")
    with TemporaryDirectory() as folder:
        trace = read_trace(written(Path(folder), "".join(lines)), hours=1.0)
    live = dict(trace.counts())
    assert all(live[max(when for when in live if when <= 1000 * second)] == n for second, n in expected.items())
    counts = list(expected.values())
    fallen = sum(max(0, before - after) for before, after in pairwise(counts))
    assert sum(len(change.lost) for change in trace.changes) == fallen
    assert not any(change.joined and change.lost for change in trace.changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\n \n",
            "must hold a trace, got no lines; write lines time_ms,add|remove,node or YYYY-MM-DD, HH:MM:SS, count",
        ),
        (
            "time,event,node\n0,add,a\n",
            "line 1 must be time_ms,add|remove,node or YYYY-MM-DD, HH:MM:SS, count, got 'time, event, node'; leave out "
            "what is before the first time",
        ),
        (
            "2023-05-01, 00:00:00, 100001\n",
            "line 1 must have a count of at most 100000, got 100001; take a part of it",
        ),
        ("0,add,a\n²,add,a\n", "line 2 must be time_ms,add|remove,node, got '²,add,a'; mend it, or leave it out"),
        ("0,add,a\n1,sub,a\n", "line 2 must be time_ms,add|remove,node, got '1,sub,a'; mend it, or leave it out"),
        ("0,add,a\n\n-1,add,b\n", "line 3 must be time_ms,add|remove,node, got '-1,add,b'; mend it, or leave it out"),
        ("0,add,a\n7,add\n", "line 2 must be time_ms,add|remove,node, got '7,add'; mend it, or leave it out"),
        ("5,add,a\n4,add,b\n", "line 2 must not be earlier than the line before, at 5 ms, got 4; sort the file"),
        ("0,add,a\n1,add,a\n", "line 2 must add a node that is not there, got a, which is; remove it first"),
        ("0,remove,a\n", "line 1 must remove a node that is there, got a, which is not; add it first"),
        (
            "2023-05-01, 00:00:00, 1\nx\n",
            "line 2 must be YYYY-MM-DD, HH:MM:SS, count, got 'x'; mend it, or leave it out",
        ),
        (
            "2023-05-01, 00:00:00, 1\n2023-05-01, 00:00:60, 1\n",
            "line 2 must be YYYY-MM-DD, HH:MM:SS, count, got '2023-05-01, 00:00:60, 1'; mend it, or leave it out",
        ),
        (
            "2023-05-01, 00:00:00, -1\n",
            "line 1 must be YYYY-MM-DD, HH:MM:SS, count, got '2023-05-01, 00:00:00, -1'; mend it, or leave it out",
        ),
        (
            "2023-05-01, 00:01:01, 1\n2023-05-01, 00:00:00, 1\n",
            "line 2 must not be earlier than the line before, at 0 ms, got -61000; "
            "leave it out, up to a minute less counts as the same time",
        ),
        (
            "2023-05-01, 00:00:00, 0\n",
            "trace 't' must have a node that joins, got none; nothing could be trained",
        ),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    separator = ": " if text.strip() else " "
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}{separator}{message}')}$"):
        read_trace(path)


def test_files_may_begin_with_a_byte_order_mark_and_must_be_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xef\xbb\xbf0,add,a\r\n9,remove,a\r\n")
    assert list(read_trace(path).counts()) == [(0, 1), (9, 0)]
    path.write_bytes(b"\xff\xfe0\x00")
    message = (
        f"{path} must be text with lines time_ms,add|remove,node or YYYY-MM-DD, HH:MM:SS, count, got other bytes "
        f"('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_trace(path)


def test_periodic_failures_go_down_to_half() -> None:
    trace = periodic_failures(5, 600)
    assert trace.name == "every-10min"
    assert [(t, n) for t, n in trace.counts()] == [(0, 5), (600_000, 4), (1_200_000, 3), (1_800_000, 2)]
    assert trace.end_ms == 2_400_000
    assert periodic_failures(5, 600) == trace
    assert periodic_failures(5, 600, seed=1) != trace
    assert periodic_failures(5, 21600, down_to=5).end_ms == 21_600_000
    assert list(periodic_failures(1, 600).counts()) == [(0, 1)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"down_to": 6}, "down_to must be 1 to num_nodes 5, got 6; lose fewer nodes"),
        ({"down_to": 0}, "down_to must be 1 to num_nodes 5, got 0; lose fewer nodes"),
        ({"interval_s": 0.0}, "interval_s must be at least 0.001, got 0.0; give seconds"),
    ],
)
def test_bad_periodic_failures_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        periodic_failures(5, **{"interval_s": 60.0, **arguments})


def test_cutting_and_prolonging() -> None:
    trace = periodic_failures(4, 1800)
    assert trace.lasting(0.5).changes == trace.changes[:2]
    assert trace.lasting(0.4).changes == trace.changes[:1]
    assert trace.lasting(9).changes == trace.changes
    assert trace.lasting(9).end_ms == 32_400_000


def test_an_end_before_the_last_change_is_refused() -> None:
    changes = (AvailabilityChange(time_ms=3, joined=(0,)), AvailabilityChange(time_ms=9, lost=(0,)))
    message = (
        "trace 'x' must end after its first change at 3 ms and not before its last at 9 ms, got an end at 8 ms; "
        "observe for longer (a file ends with its last line, or after the hours that it is given)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        AvailabilityTrace(name="x", changes=changes, end_ms=8)


def test_a_trace_of_a_moment_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "7,add,a\n")
    message = (
        f"{path}: trace 't' must end after its first change at 7 ms and not before its last at 7 ms, got an end at "
        f"7 ms; observe for longer (a file ends with its last line, or after the hours that it is given)"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read_trace(path)


@st.composite
def traces(draw: st.DrawFn) -> AvailabilityTrace:
    live, next_node, time_ms, changes = [], 0, 0, []
    for _ in range(draw(st.integers(1, 12))):
        lost = tuple(draw(st.sets(st.sampled_from(live)))) if live else ()
        joined = tuple(range(next_node, next_node + draw(st.integers(0 if changes else 1, 6))))
        next_node += len(joined)
        live = [node for node in live if node not in lost] + list(joined)
        changes.append(AvailabilityChange(time_ms=time_ms, joined=joined, lost=lost))
        time_ms += draw(st.integers(1, 100))
    return AvailabilityTrace(name="t", changes=tuple(changes), end_ms=time_ms)


@given(traces(), st.integers(1, 40))
def test_scaled_traces_keep_their_shares_and_bulk_losses(trace: AvailabilityTrace, num_nodes: int) -> None:
    scaled = trace.scaled(num_nodes)
    most = trace.max_nodes
    assert scaled.max_nodes <= num_nodes
    live: set[int] = set()
    by_time = {change.time_ms: change for change in scaled.changes}
    whole = 0
    for change in trace.changes:
        now = by_time.pop(change.time_ms, AvailabilityChange(time_ms=0))
        assert live.issuperset(now.lost)
        assert live.isdisjoint(now.joined)
        kept = len(live) - len(now.lost)
        live = live - set(now.lost) | set(now.joined)
        whole += len(change.joined) - len(change.lost)
        share = whole * num_nodes / most
        # Losses may leave too many behind, joins never bring too many.
        assert kept <= len(live) <= max(kept, round(share + 1e-9))
        if num_nodes % most == 0:
            assert len(live) == share
        assert bool(now.lost) <= bool(change.lost)
    assert not by_time


def test_scaling_up_doubles_every_change_and_down_thins_them() -> None:
    trace = AvailabilityTrace(
        name="t",
        changes=(
            AvailabilityChange(time_ms=0, joined=tuple(range(10))),
            AvailabilityChange(time_ms=1, lost=(0, 1, 2, 3)),
            AvailabilityChange(time_ms=2, joined=(10, 11, 12, 13)),
        ),
        end_ms=3,
    )
    assert [count for _, count in trace.scaled(20).counts()] == [20, 12, 20]
    assert [count for _, count in trace.scaled(5).counts()] == [5, 3, 5]
    assert [count for _, count in trace.scaled(1).counts()] in ([1, 0, 1], [1])
    assert trace.scaled(10) is trace
    with pytest.raises(ValueError, match=r"^num_nodes must be >= 1, got 0; leave scaling out to keep the trace's own$"):
        trace.scaled(0)
