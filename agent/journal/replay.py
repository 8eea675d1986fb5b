"""Takes the decisions of a run once more, from the log of what its coordinator was told, and compares them.

What is compared: every line that the membership machine had written to ``events.jsonl``, in order, with all its fields
but the time of writing (a time that a worker reported is one of its fields). What the coordinator writes by itself is
left out: where it listens, the injections that dying processes left behind, and those that were not carried out. Must
not import torch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from resilient.agent.journal.stimulus_log import read_stimuli
from resilient.agent.membership.machine import Membership, MembershipError
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Instruction, Record
from resilient.observability.event_log import read_events

NOT_DECIDED = ("listening", "took_over", "node_refused", "injected", "not_injected")
"""Kinds of events that the coordinator writes by itself."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A line for the event log.

    Args:
        at_s: Seconds since the first stimulus.
        stimulus_index: The stimulus it follows from, 0 for the first.
        event: The line as it is read from the event log, but for the time of writing.
    """

    at_s: float
    stimulus_index: int
    event: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay.

    Args:
        decisions: In order.
        num_stimuli: That they follow from.
        stopped: The job ended.
        broken: What the machine itself found to be wrong, with the stimuli before it; "" if nothing.
    """

    decisions: tuple[Decision, ...]
    num_stimuli: int
    stopped: bool
    broken: str = ""


def replay_run(run_directory: Path) -> Replayed:
    """Feed the stimuli of a run to a fresh machine; its invariants are checked after each.

    Args:
        run_directory: Folder of the run, with ``stimuli.jsonl``.

    Raises:
        OSError: The log cannot be read.
        ValueError: It is none, or there is nothing in it.
    """
    path = run_directory / "stimuli.jsonl"
    settings, lines = read_stimuli(path)
    told = list(lines)
    if not told:
        raise ValueError(f"{path} must hold what a coordinator was told, got nothing recorded; choose another run")
    machine, decisions, broken = Membership(settings), list[Decision](), ""
    for index, (at, stimulus) in enumerate(told):
        instructions: list[Instruction] = []
        try:
            instructions = machine.handle(stimulus, at)
            machine.validate()
        except MembershipError as error:
            broken = broken or str(error)
            if settings.validate:
                instructions = []  # the run did none of this
        decisions += (
            Decision(at_s=at - told[0][0], stimulus_index=index, event=_as_read(instruction))
            for instruction in instructions
            if isinstance(instruction, Record)
        )
    stopped = machine.phase is Phase.STOPPED
    return Replayed(decisions=tuple(decisions), num_stimuli=len(told), stopped=stopped, broken=broken)


def difference(run_directory: Path, replayed: Replayed) -> str:
    """Return the first difference between a replay and the event log of its run; "" if there is none.

    A coordinator that was killed may have had no time for what followed from the last stimulus: that may be missing.

    Raises:
        OSError: The event log cannot be read.
        ValueError: It is none.
    """
    events = [event for event in read_events(run_directory / "events.jsonl") if event.get("kind") not in NOT_DECIDED]
    for number, (decision, event) in enumerate(zip(replayed.decisions, events, strict=False), start=1):
        compared = event if "time" in decision.event else {key: event[key] for key in event if key != "time"}
        if decision.event != compared:
            return f"decision {number} is {_first_unlike(decision.event, compared)}"
    if len(events) > len(replayed.decisions):
        index = len(replayed.decisions)
        return f"decision {index + 1} is missing in the replay; events.jsonl says {_short(events[index])}"
    missing = replayed.decisions[len(events) :]
    if missing and (replayed.stopped or missing[0].stimulus_index < replayed.num_stimuli - 1):
        return f"decision {len(events) + 1} is missing in events.jsonl; the replay says {_short(missing[0].event)}"
    return ""


def _as_read(record: Record) -> dict[str, Any]:
    event = {"kind": record.kind, "generation": record.generation, **record.fields}
    return json.loads(msgspec.json.encode(event))


def _first_unlike(decided: dict[str, Any], written: dict[str, Any]) -> str:
    """Return how two events differ: in their kind, or in the first field that is not the same."""
    if decided.get("kind") != written.get("kind"):
        return f"{_short(decided)} in the replay; events.jsonl says {_short(written)}"
    said = ({key: _short(event[key]) for key in event} for event in (decided, written))
    replayed, read = (defaultdict(lambda: "nothing", texts) for texts in said)
    field = next(key for key in (*decided, *written) if replayed[key] != read[key])
    return f"{decided['kind']} with {field} {replayed[field]} in the replay; events.jsonl says {read[field]}"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:199]}…"
