"""Measures a run from its events, for ``report.json``: what failures and joins cost, and whether they changed results.

Owns every measurement made from the events; all but :func:`write_report` is a function of them alone. Must not
import torch: the coordinator's process writes the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resilient.common.files import write_whole
from resilient.observability.event_log import Event, killed_worker, read_events, steps_of, was_skipped
from resilient.observability.planned_steps import differences, planned_steps
from resilient.observability.run_comparison import NOT_COMPARED, compare_runs
from resilient.observability.step_trace import traced_steps
from resilient.templates.common.checkpoint_interval import checkpoint_interval_s


def build_run_report(events: Sequence[Event]) -> dict[str, Any]:
    """Measure a run.

    A recovery goes from the first ``detected`` to the first step of a generation formed after it, so a second failure
    before that step belongs to the same recovery: ``agree_ms`` then includes the attempts that were given up. Which
    was first is told by the step's generation: it may be heard of late. The parts add up to ``total_ms``.

    Args:
        events: All events of one run, as :func:`read_events` returns them.

    Returns:
        The contents of ``report.json``, ready for ``json.dumps``.
    """
    steps = steps_of(events)
    installed = _installed_by_generation(events)
    return {
        "job": _last(events, "job", ("script", "num_nodes", "workers_per_node", "max_failures", "global_batch")),
        "schedule": _last(events, "schedule", ("num_nodes", "chosen", "others")) or None,
        "steps": max(steps, default=0),
        "final_loss": steps[max(steps)]["loss"] if steps else None,
        "skipped_steps": sum(map(was_skipped, steps.values())),
        "throughput_samples_per_s": _throughput(events, steps, installed),
        "recoveries": [_measure_recovery(recovery, events, installed) for recovery in _recoveries(events)],
        "joins": _planned_changes(events, installed, "join"),
        "departures": _planned_changes(events, installed, "leave"),
        "checkpoints": _checkpoints(events),
        "standbys": [
            {
                "generation": event["generation"],
                "reasons": event["standby_reasons"],
                "slowdowns": {node: event["slowdowns"].get(node, 1.0) for node in event["standby_reasons"]},
                "step_ms": event["step_ms"],
                "with_standby_ms": event["with_standby_ms"],
            }
            for event in events
            if event["kind"] == "generation" and event.get("standby_reasons")
        ],
        "dropped_replicas": [
            {key: event[key] for key in ("step", "node", "states")}
            for event in events
            if event["kind"] == "replica_dropped"
        ],
        "notes": {event["name"]: event["value"] for event in events if event["kind"] == "note"},
        "not_injected": [_injection(event) for event in events if event["kind"] == "not_injected"],
        "exit": _exit(events),
        "traced": None,
        **NOT_COMPARED,
    }


def write_report(run_dir: Path | str, reference_dir: Path | str | None = None) -> dict[str, Any]:
    """Write ``report.json`` from the ``events.jsonl`` next to it.

    Args:
        run_dir: Folder of the run, ``runs/<id>``.
        reference_dir: Folder of the failure-free run of the same job to compare with; None leaves those keys null.

    Returns:
        What was written.
    """
    report = build_run_report(read_events(Path(run_dir) / "events.jsonl"))
    report["traced"] = differences(planned_steps(traced_steps(run_dir)))
    if reference_dir is not None:
        report.update(compare_runs(run_dir, reference_dir))
    write_whole(Path(run_dir, "report.json"), f"{json.dumps(report, indent=2)}\n".encode())
    return report


# ---------------------------------------------------------------- recoveries


@dataclass(kw_only=True)
class _Recovery:
    """The events of one recovery; ``heard`` are those of kind ``detected`` and ``node_lost``, in their order.

    ``before`` is the generation that the failure ended; ``previous_at``, when the failure before was known, tells
    the two apart where they hit the same node.
    """

    before: Event | None
    previous_at: float
    heard: list[Event]
    generations: list[Event] = field(default_factory=list)
    first_step: Event | None = None

    @property
    def detected(self) -> list[Event]:
        return [event for event in self.heard if event["kind"] == "detected"]

    @property
    def lost(self) -> list[Event]:
        return [event for event in self.heard if event["kind"] == "node_lost"]

    @property
    def nodes(self) -> list[int]:
        """Those lost, in the order it became known."""
        return list(dict.fromkeys(node for event in self.heard for node in event.get("nodes", [event.get("node")])))

    @property
    def units(self) -> list[str]:
        """What the nodes that were lost had of a model of units."""
        pipelines = self.before["pipelines"] if self.before else []
        stages = [stage for pipeline in pipelines for stage in pipeline["stages"] if stage["node"] in self.nodes]
        lanes = [stage.get("lane", "") for stage in stages]  # a chain has none
        return list(dict.fromkeys(lane.rpartition(".")[0] for lane in lanes if lane))

    @property
    def cause(self) -> str:
        """What was lost, in the order it became known; a mere suspicion only where nothing better is known."""
        causes = {event["node"]: event["cause"] for event in self.lost}
        for event in self.detected:
            causes.update({node: event["cause"] for node in event["nodes"] if node not in causes})
        if not causes:
            return self.detected[0]["cause"]
        return ", then ".join(f"{causes[node]} (node {node})" for node in self.nodes)

    def is_over_with(self, step: Event) -> bool:
        """Whether a step was committed after this recovery; those of an older generation may still have been."""
        return bool(self.generations) and step["generation"] >= self.generations[0]["generation"]

    def end_with(self, step: Event) -> _Recovery | None:
        """End with the first step; return the next recovery where its failure was heard of before the step was."""
        generation = step["generation"]
        ended = [event for event in self.generations if event["generation"] <= generation]
        # ``detected`` has the generation that is to be formed, ``node_lost`` the one that it ends
        own = [event for event in self.heard if event["generation"] < generation + (event["kind"] == "detected")]
        following = _Recovery(
            before=ended[-1],
            previous_at=max(event["time"] for event in own),
            heard=[event for event in self.heard if event not in own],
            generations=self.generations[len(ended) :],
        )
        self.heard, self.generations, self.first_step = own, ended, step
        return following if following.detected else None


def _recoveries(events: Sequence[Event]) -> Iterator[_Recovery]:
    """Group the events; a recovery that never got a generation (the job stopped) is not one."""
    current: _Recovery | None = None
    generation: Event | None = None
    just_lost: list[Event] = []
    previous_at = float("-inf")
    for event in events:
        kind = event["kind"]
        if kind == "detected":
            current = current or _Recovery(before=generation, previous_at=previous_at, heard=just_lost)
            current.heard.append(event)
        elif kind == "node_lost":
            (current.heard if current else just_lost).append(event)
        elif kind == "generation":
            generation = event
            if current:
                current.generations.append(event)
        elif kind == "step":
            just_lost = []
            if current and current.is_over_with(event):
                following = current.end_with(event)
                yield current
                previous_at, current = current.detected[-1]["time"], following
    if current and current.generations:
        yield current


def _measure_recovery(
    recovery: _Recovery, events: Sequence[Event], installed: Mapping[int, Sequence[Event]]
) -> dict[str, Any]:
    final = recovery.generations[-1]
    detected_at = recovery.detected[0]["time"]
    ends = installed.get(final["generation"], [])
    regrouped_at = max((end["regrouped_at"] for end in ends), default=final["time"])
    installed_at = max((end["installed_at"] for end in ends), default=regrouped_at)
    # A further failure before the first step ends in a generation that loses nothing more itself.
    lost_steps = max(
        _lost_steps(events, recovery.generations[0], final),
        *(generation["lost_steps"] for generation in recovery.generations),
    )
    redone = lost_steps > 0 and recovery.first_step is not None
    injected_at = _injected_at(events, recovery)
    parts = {
        "detect_ms": None if injected_at is None else _ms(injected_at, detected_at),
        "agree_ms": _ms(detected_at, final["time"]),
        "regroup_ms": _ms(final["time"], regrouped_at),
        "copy_ms": _ms(regrouped_at, installed_at),
        "redo_ms": _ms(installed_at, recovery.first_step["time"]) if redone and recovery.first_step else 0.0,
    }
    return {
        "generation": final["generation"],
        "cause": recovery.cause,
        "nodes": recovery.nodes,
        "units": recovery.units,
        "step": final["interrupted_step"],
        "lost_steps": lost_steps,
        "roll_forward": any(generation["roll_forward"] for generation in recovery.generations),
        **parts,
        "total_ms": round(sum(part for part in parts.values() if part is not None), 3),
        "bytes_copied": sum(
            end["bytes_copied"] for g in recovery.generations for end in installed.get(g["generation"], [])
        ),
        "restarted_workers": _restarted_workers(recovery.before, final),
    }


def _injected_at(events: Sequence[Event], recovery: _Recovery) -> float | None:
    """When the failure was caused, or None when nothing caused on purpose preceded its detection."""
    until = recovery.detected[0]["time"]
    times = [
        event["time"]
        for event in events
        if event["kind"] == "injected"
        and event["node"] in recovery.nodes
        and recovery.previous_at < event["time"] <= until
    ]
    return min(times, default=None)


def _lost_steps(events: Sequence[Event], first: Event, final: Event) -> int:
    """Steps whose work is done again: the interrupted one, and any committed step that was fallen back behind."""
    committed = _last_step_before(events, first["generation"])
    behind = committed["step"] - final["version"] if committed else 0
    return max(final["lost_steps"], behind)


def _restarted_workers(before: Event | None, after: Event) -> int:
    """How many workers of both generations are not the same process any more."""
    old = before["pids"] if before else {}
    return sum(old[worker] != pid for worker, pid in after["pids"].items() if worker in old)


# ---------------------------------------------------------------- joins and the whole run


def _planned_changes(
    events: Sequence[Event], installed: Mapping[int, Sequence[Event]], kind: str
) -> list[dict[str, Any]]:
    """Measure the generations that began at a step boundary because nodes joined or left (``kind``).

    One in which some joined and others left counts as both.
    """
    changes = []
    before: Event | None = None
    for event in events:
        if event["kind"] != "generation":
            continue
        joined, left = _members(event) - _members(before), _members(before) - _members(event)
        nodes = joined if kind == "join" else left
        if event["cause"] in ("join", "leave") and nodes:
            last_step = _last_step_before(events, event["generation"])
            ends = installed.get(event["generation"], [])
            pause_ms = _ms(last_step["time"], max(end["installed_at"] for end in ends)) if ends and last_step else None
            changes.append(
                {
                    "generation": event["generation"],
                    "nodes": sorted(nodes),
                    "step": event["interrupted_step"],
                    "lost_steps": _lost_steps(events, event, event),
                    "pause_ms": pause_ms,
                    "bytes_copied": sum(end["bytes_copied"] for end in ends),
                    "restarted_workers": _restarted_workers(before, event),
                }
            )
        before = event
    return changes


def _members(generation: Event | None) -> set[int]:
    return {*generation["nodes"], *generation["standby"]} if generation else set()


def _throughput(
    events: Sequence[Event], steps: Mapping[int, Event], installed: Mapping[int, Sequence[Event]]
) -> float | None:
    """Committed samples per second from the end of the first installation to the last step, recoveries included."""
    first = next((event["generation"] for event in events if event["kind"] == "generation"), 0)
    if not steps or first not in installed:
        return None
    seconds = max(step["time"] for step in steps.values()) - max(end["installed_at"] for end in installed[first])
    samples = sum(step["num_samples"] for step in steps.values())
    return round(samples / seconds, 3) if seconds > 0 else None


def _checkpoints(events: Sequence[Event]) -> dict[str, Any]:
    """Return how many were written, and by what they were chosen where they were."""
    written = sum(event["kind"] == "checkpoint" for event in events)
    paces = [event["checkpoint_pace"] for event in events if event.get("checkpoint_pace")]
    if not paces:
        return {"written": written}
    costs = [event["checkpoint_s"] for event in events if event["kind"] == "step" and event.get("checkpoint_s")]
    cost_s, risk_s = costs[-1] if costs else paces[-1]["cost_s"], paces[-1]["risk_s"]
    interval_s = None if cost_s is None else checkpoint_interval_s(cost_s, risk_s)
    return {"written": written, "cost_s": cost_s, "risk_s": risk_s, "interval_s": interval_s}


def _injection(event: Event) -> dict[str, Any]:
    told = {name: event[name] for name in ("node", "phase", "step", "worker_only")}
    return {**told, "worker": killed_worker(event)}


def _exit(events: Sequence[Event]) -> dict[str, Any]:
    for event in reversed(events):
        if event["kind"] == "finished":
            return {"code": 0, "reason": "finished", "checkpoint": event["path"]}
        if event["kind"] == "stopped":
            return {"code": event["exit_code"], "reason": event["reason"], "checkpoint": event["path"]}
        if event["kind"] == "failed":
            return {"code": 1, "reason": event["error"], "checkpoint": None}
    return {"code": None, "reason": "the run was cut off", "checkpoint": None}


def _installed_by_generation(events: Sequence[Event]) -> dict[int, list[Event]]:
    installed: dict[int, list[Event]] = {}
    for event in events:
        if event["kind"] == "installed":
            installed.setdefault(event["generation"], []).append(event)
    return installed


def _last_step_before(events: Sequence[Event], generation: int) -> Event | None:
    """The newest step committed in an earlier generation; told by its generation, as messages may cross."""
    steps = [event for event in events if event["kind"] == "step" and event["generation"] < generation]
    return max(steps, key=lambda step: step["step"], default=None)


def _last(events: Sequence[Event], kind: str, keys: Sequence[str]) -> dict[str, Any]:
    found = next((event for event in reversed(events) if event["kind"] == kind), {})
    return {key: found[key] for key in keys if key in found}


def _ms(start: float, end: float) -> float:
    """Milliseconds between two Unix times; never negative, as they may be from clocks of different machines."""
    return max(0.0, round((end - start) * 1e3, 3))
