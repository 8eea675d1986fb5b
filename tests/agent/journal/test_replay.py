"""A run's decisions, taken again from its log of stimuli, are those of its event log; what is not, is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.agent.journal.replay import difference, replay_run
from resilient.agent.membership.parts.events import Tick
from resilient.agent.membership.regrouping import Regrouping
from tests.agent.logged_job import LoggedJob, eventful, write_events


def test_replay_of_an_eventful_job_decides_the_same(tmp_path: Path) -> None:
    job = eventful(tmp_path)
    written = job.leave()
    replayed = replay_run(tmp_path)
    assert [decision.event["kind"] for decision in replayed.decisions] == [event["kind"] for event in written]
    assert {"detected", "node_lost", "boundary", "finished"} <= {event["kind"] for event in written}
    assert (replayed.stopped, replayed.broken) == (True, "")
    assert difference(tmp_path, replayed) == ""


def test_what_the_coordinator_writes_by_itself_is_not_compared(tmp_path: Path) -> None:
    written = eventful(tmp_path).leave()
    own = [{"time": 1.0, "kind": kind, "generation": 0} for kind in ("listening", "injected")]
    write_events(tmp_path, [own[0], *written[:4], own[1], *written[4:]])
    assert difference(tmp_path, replay_run(tmp_path)) == ""


def test_tampered_event_is_named(tmp_path: Path) -> None:
    written = eventful(tmp_path).leave()
    (place,) = (place for place, event in enumerate(written) if event["kind"] == "detected")
    written[place]["step"] = 7
    write_events(tmp_path, written)
    assert difference(tmp_path, replay_run(tmp_path)) == (
        f"decision {place + 1} is detected with step 1 in the replay; events.jsonl says 7"
    )


def test_tampered_stimulus_is_named_by_what_it_leads_to(tmp_path: Path) -> None:
    written = eventful(tmp_path).leave()
    log = tmp_path / "stimuli.jsonl"
    assert log.read_text().count('"cause":"node lost"') == 1
    log.write_text(log.read_text().replace('"cause":"node lost"', '"cause":"unplugged"'))
    place = next(place for place, event in enumerate(written) if event["kind"] == "node_lost")
    assert difference(tmp_path, replay_run(tmp_path)) == (
        f'decision {place + 1} is node_lost with cause "unplugged" in the replay; events.jsonl says "node lost"'
    )


def test_missing_stimulus_is_named_by_what_follows_it(tmp_path: Path) -> None:
    written = eventful(tmp_path).leave()
    log = tmp_path / "stimuli.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]))
    assert difference(tmp_path, replay_run(tmp_path)) == (
        f"decision 2 is missing in the replay; events.jsonl says {json.dumps(written[1])}"
    )


def test_missing_event_is_named(tmp_path: Path) -> None:
    written = eventful(tmp_path).leave()
    write_events(tmp_path, written[:-1])
    last = {key: value for key, value in written[-1].items() if key != "time"}
    assert difference(tmp_path, replay_run(tmp_path)) == (
        f"decision {len(written)} is missing in events.jsonl; the replay says {json.dumps(last)}"
    )


def test_events_of_the_last_stimulus_may_be_missing_where_the_coordinator_was_killed(tmp_path: Path) -> None:
    job = LoggedJob(tmp_path)
    job.start()
    job.step(1)
    job.lose(2)
    written = job.leave()
    assert [event["kind"] for event in written[-2:]] == ["node_lost", "detected"]
    for kept in (1, 2):
        write_events(tmp_path, written[:-kept])
        assert difference(tmp_path, replay_run(tmp_path)) == ""
    write_events(tmp_path, written[:-3])
    assert difference(tmp_path, replay_run(tmp_path)).startswith(
        f"decision {len(written) - 2} is missing in events.jsonl"
    )


def test_fault_of_the_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eventful(tmp_path).leave()

    def let_nobody_know(self: Regrouping, nodes: list[int], cause: str) -> None:
        pass

    monkeypatch.setattr(Regrouping, "begin_failure", let_nobody_know)
    broken = replay_run(tmp_path).broken
    assert broken.startswith(
        "the membership is inconsistent: nodes [2] take part in generation 1 and are gone\n"
        "the last stimuli, the newest at the end:\n"
    )
    assert broken.endswith("  5.000 s  generation 1, running: NodeLost(node=2, cause='node lost')")


def test_quiet_ticks_change_no_decision(tmp_path: Path) -> None:
    """The coordinator leaves them out of the log."""
    job = eventful(tmp_path)
    job.leave()
    kinds = [decision.event["kind"] for decision in replay_run(tmp_path).decisions]
    again = tmp_path / "again"
    again.mkdir()
    ticking = LoggedJob(again)
    ticking.start()
    for second in range(1, 4):
        ticking.now = float(second)
        assert ticking.machine.handle(Tick(), ticking.now) == []
    ticking.step(1)
    ticking.now = 5.0
    ticking.lose(2)
    ticking.leave()
    replayed = replay_run(again)
    assert difference(again, replayed) == ""
    assert [decision.event["kind"] for decision in replayed.decisions] == kinds[: len(replayed.decisions)]
