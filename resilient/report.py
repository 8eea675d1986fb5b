"""From the events of a run to ``report.json``: what each failure and join cost, and whether it changed the result.

Owns the reading of ``events.jsonl`` and every measurement made from it, and the comparison of two runs. Everything
but :func:`read_events`, :func:`compare_runs` and :func:`write_report` is a function of the events alone. Must not
import torch: the coordinator's process writes the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from resilient.errors import CheckpointError

Event = Mapping[str, Any]

PARTS = ("detect", "agree", "regroup", "copy", "redo")
"""The parts of a recovery, in the order in which they happen; each is reported as ``<part>_ms``."""

_NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "BOOL": "?"}


def read_events(path: Path | str) -> list[dict[str, Any]]:
    """Read ``events.jsonl``; a last line that a crash cut short is left out.

    Raises:
        ValueError: If any other line is no JSON object.
    """
    lines = Path(path).read_bytes().splitlines()
    events = []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise ValueError(f"line {number} of {path} must be a JSON object, got {line[:80]!r}") from None
        events.append(event)
    return events


def steps_of(events: Sequence[Event]) -> dict[int, Event]:
    """Return the committed steps by number; of a step reported twice (redone) the last report counts."""
    steps = {event["step"]: event for event in events if event["kind"] == "step"}
    return dict(sorted(steps.items()))


def build_report(events: Sequence[Event]) -> dict[str, Any]:
    """Measure a run.

    A recovery goes from the first ``detected`` to the first step of a generation formed after it, so a second failure
    before that step belongs to the same recovery: ``agree_ms`` then includes the attempts that were given up. The
    parts add up to ``total_ms``.

    Args:
        events: All events of one run, as :func:`read_events` returns them.

    Returns:
        The contents of ``report.json``, ready for ``json.dumps``.
    """
    steps = steps_of(events)
    installed = _installed_by_generation(events)
    return {
        "job": _last(events, "job", ("script", "num_nodes", "workers_per_node", "max_failures", "global_batch")),
        "steps": max(steps, default=0),
        "final_loss": steps[max(steps)]["loss"] if steps else None,
        "throughput_samples_per_s": _throughput(events, steps, installed),
        "recoveries": [_measure_recovery(recovery, events, installed) for recovery in _recoveries(events)],
        "joins": _planned_changes(events, installed, "join"),
        "departures": _planned_changes(events, installed, "leave"),
        "notes": {event["name"]: event["value"] for event in events if event["kind"] == "note"},
        "exit": _exit(events),
        **_NOT_COMPARED,
    }


def write_report(run_dir: Path | str, reference_dir: Path | str | None = None) -> dict[str, Any]:
    """Write ``report.json`` from the ``events.jsonl`` next to it.

    Args:
        run_dir: Folder of the run, ``runs/<id>``.
        reference_dir: Folder of the failure-free run of the same job to compare with; None leaves those keys null.

    Returns:
        What was written.
    """
    report = build_report(read_events(Path(run_dir) / "events.jsonl"))
    if reference_dir is not None:
        report.update(compare_runs(run_dir, reference_dir))
    Path(run_dir, "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


# ---------------------------------------------------------------- recoveries


@dataclass(kw_only=True)
class _Recovery:
    """The events of one recovery. ``before`` is the generation that the failure ended."""

    before: Event | None
    detected: list[Event] = field(default_factory=list)
    lost: list[Event] = field(default_factory=list)
    generations: list[Event] = field(default_factory=list)
    first_step: Event | None = None

    @property
    def nodes(self) -> list[int]:
        named = [node for event in self.detected for node in event["nodes"]]
        return list(dict.fromkeys(named + [event["node"] for event in self.lost]))

    @property
    def cause(self) -> str:
        """What was lost, in the order it became known; a mere suspicion only where nothing better is known."""
        causes = {event["node"]: event["cause"] for event in self.lost}
        for event in self.detected:
            causes.update({node: event["cause"] for node in event["nodes"] if node not in causes})
        if not causes:
            return self.detected[0]["cause"]
        return ", then ".join(f"{causes[node]} (node {node})" for node in self.nodes)


def _recoveries(events: Sequence[Event]) -> Iterator[_Recovery]:
    """Group the events; a recovery that never got a generation (the job stopped) is not one."""
    current: _Recovery | None = None
    generation: Event | None = None
    just_lost: list[Event] = []
    for event in events:
        kind = event["kind"]
        if kind == "detected":
            current = current or _Recovery(before=generation, lost=just_lost)
            current.detected.append(event)
        elif kind == "node_lost":
            (current.lost if current else just_lost).append(event)
        elif kind == "generation":
            generation = event
            if current:
                current.generations.append(event)
        elif kind == "step":
            just_lost = []
            # A step of an older generation may still be under way when the failure is known.
            if current and current.generations and event["generation"] >= current.detected[-1]["generation"]:
                current.first_step = event
                yield current
                current = None
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
    lost_steps = _lost_steps(events, recovery.generations[0], final)
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
        "cause": recovery.cause,
        "nodes": recovery.nodes,
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
    since = recovery.before["time"] if recovery.before else float("-inf")
    until = recovery.detected[0]["time"]
    times = [
        event["time"]
        for event in events
        if event["kind"] == "injected" and event["node"] in recovery.nodes and since <= event["time"] <= until
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
    events: Sequence[Event], installed: Mapping[int, Sequence[Event]], cause: str
) -> list[dict[str, Any]]:
    """Measure the generations that began at a step boundary for ``cause``: how long training stood still."""
    changes = []
    before: Event | None = None
    for event in events:
        if event["kind"] != "generation":
            continue
        if event["cause"] == cause:
            last_step = _last_step_before(events, event["generation"])
            ends = installed.get(event["generation"], [])
            pause_ms = _ms(last_step["time"], max(end["installed_at"] for end in ends)) if ends and last_step else None
            changes.append(
                {
                    "nodes": sorted(_members(event) ^ _members(before)),
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


# ---------------------------------------------------------------- two runs

_NOT_COMPARED: dict[str, Any] = dict.fromkeys(
    ("max_param_abs_diff", "max_param_rel_diff", "max_loss_abs_diff", "same_steps_and_samples")
)


def compare_runs(run_dir: Path | str, reference_dir: Path | str) -> dict[str, Any]:
    """Compare a run with the failure-free run of the same job.

    Returns:
        A dict of four. ``max_param_abs_diff``: largest difference of any parameter in the final checkpoints;
        ``max_param_rel_diff``: the same relative to the largest absolute value of the parameter's tensor in the
        reference, largest over all tensors; ``max_loss_abs_diff``: largest difference of the loss of any step;
        ``same_steps_and_samples``: both runs committed the same steps with as many samples in each.

    Raises:
        CheckpointError: If a run has no final checkpoint, or the two do not hold the same tensors.
    """
    steps = steps_of(read_events(Path(run_dir) / "events.jsonl"))
    reference = steps_of(read_events(Path(reference_dir) / "events.jsonl"))
    losses = [abs(steps[number]["loss"] - reference[number]["loss"]) for number in steps.keys() & reference.keys()]
    absolute, relative = _parameter_differences(final_checkpoint(run_dir), final_checkpoint(reference_dir))
    samples = [{number: step["num_samples"] for number, step in run.items()} for run in (steps, reference)]
    return {
        "max_param_abs_diff": absolute,
        "max_param_rel_diff": relative,
        "max_loss_abs_diff": _worst(losses) if losses else None,
        "same_steps_and_samples": samples[0] == samples[1],
    }


def final_checkpoint(run_dir: Path | str) -> Path:
    """Return the newest complete checkpoint folder of a run."""
    manifests = sorted(Path(run_dir).glob("checkpoints/step-*/manifest.json"))
    if not manifests:
        raise CheckpointError(f"{run_dir} must hold a checkpoint to compare, got none; let the run finish first")
    return manifests[-1].parent


def _parameter_differences(folder: Path, reference_folder: Path) -> tuple[float, float]:
    states = json.loads((folder / "manifest.json").read_text())["states"]
    reference_states = json.loads((reference_folder / "manifest.json").read_text())["states"]
    _must_match(folder, reference_folder, states.keys(), reference_states.keys())
    absolute, relative = [0.0], [0.0]
    for name, state in states.items():
        tensors = _parameters(folder / state["file"])
        reference = _parameters(reference_folder / reference_states[name]["file"])
        _must_match(folder, reference_folder, tensors.keys(), reference.keys())
        for key, expected in reference.items():
            if expected.size:
                difference = float(np.abs(tensors[key] - expected).max())
                scale = float(np.abs(expected).max())
                absolute.append(difference)
                relative.append(difference / scale if scale else (0.0 if difference == 0 else float("inf")))
    return _worst(absolute), _worst(relative)


def _must_match(folder: Path, reference_folder: Path, found: Any, expected: Any) -> None:
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise CheckpointError(
            f"{folder} and {reference_folder} must hold the same states and tensors, got {odd} in one only"
        )


def _parameters(path: Path) -> dict[str, np.ndarray]:
    """Load a state's parameters as float64 (the numpy loader of safetensors has no bfloat16)."""
    from safetensors import deserialize

    tensors = {}
    for key, tensor in deserialize(path.read_bytes()):
        if key.startswith("optimizer/"):
            continue
        if tensor["dtype"] == "BF16":
            bits = np.frombuffer(tensor["data"], dtype="<u2").astype(np.uint32) << 16
            values = bits.view(np.float32)
        else:
            values = np.frombuffer(tensor["data"], dtype=_NUMPY_TYPES[tensor["dtype"]])
        tensors[key] = values.reshape(tensor["shape"]).astype(np.float64)
    return tensors


def _worst(values: Sequence[float]) -> float:
    """The largest value, NaN if there is one: a difference that cannot be told is not a small one."""
    return float(np.max(values))
