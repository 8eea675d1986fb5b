"""Events are written in lines that do not grow with the number of nodes, and read as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from resilient.observability.event_log import lines_of, read_events

_JSON = st.recursive(
    st.none() | st.integers(-9, 9**12) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=9,
)
_LARGE = st.lists(_JSON, max_size=3000) | st.dictionaries(st.text(max_size=9), _JSON, max_size=600)


def generation(num_nodes: int) -> dict[str, Any]:
    """Return what the log says of a generation in which pipelines have eight nodes."""
    pipelines = [
        {
            "nodes": list(range(first, first + 8)),
            "stages": [{"node": node, "local_rank": 0, "first_layer": 1, "end_layer": 2} for node in range(8)],
        }
        for first in range(0, num_nodes, 8)
    ]
    pids = {f"{node}/0": 10**6 + node for node in range(num_nodes)}
    return {"kind": "generation", "nodes": list(range(num_nodes)), "pipelines": pipelines, "standby": [], "pids": pids}


def written(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_event_of_many_nodes_has_lines_that_stay_short(tmp_path: Path) -> None:
    few, many = generation(8), generation(4096)
    assert lines_of(few) == [json.dumps(few, separators=(",", ":")).encode()]
    lines = lines_of(many)
    assert max(map(len, lines)) < 2 * 4096
    assert read_events(written(tmp_path / "events.jsonl", *lines, *lines_of(few))) == [many, few]


@given(large=_LARGE, other=_JSON)
def test_events_are_read_as_they_were(large: Any, other: Any, tmp_path_factory: Any) -> None:
    event = {"kind": "made up", "large": large, "other": other}
    path = tmp_path_factory.mktemp("run") / "events.jsonl"
    assert read_events(written(path, *lines_of(event), b'{"kind":"next"}')) == [event, {"kind": "next"}]


def test_event_of_which_a_crash_has_left_some_lines_is_left_out(tmp_path: Path) -> None:
    event = generation(1024)
    lines = lines_of(event)
    path = written(tmp_path / "events.jsonl", *lines[:-1])
    assert read_events(path) == []
    assert read_events(written(path, *lines[:-1], *lines, b'{"kind":"next"}')) == [event, {"kind": "next"}]
    assert read_events(written(path, *lines[1:], b'{"kind":"next"}')) == [{"kind": "next"}]
