"""Jobs on a GPU that lose a node: the demo, and kills in each phase of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.gpu.part import Row, Setting
from benchmarks.parts.steps import JOBS
from resilient.cli.demo import KILL_PHASES, PARAM_TOLERANCE, judge
from resilient.observability.event_log import read_events
from resilient.observability.run_comparison import compare_runs
from resilient.testing import JobRun, fail_at, run_job

_DEMO_STEPS, _DEMO_STEPS_REHEARSED = 120, 60
"""The node that joins has to be ready before the last one, and begins with some seconds of starting CUDA."""
_MARGIN_S = 5.0
_KILL_STEP, _STEPS_APART = 4, 2
_LEFT_NODES = 4
"""Two pipelines of two."""


def demo(setting: Setting) -> list[Row]:
    """Run ``resilient demo``, whose workers train on a GPU where there is one."""
    directory, told = setting.folder / "run", setting.folder / "report.json"
    steps = _DEMO_STEPS_REHEARSED if setting.is_rehearsal else _DEMO_STEPS
    command = [str(Path(sys.executable).with_name("resilient")), "demo", "--plain", "--steps", str(steps)]
    command += ["--run-dir", str(directory), "--json", str(told)]
    subprocess.run(command, timeout=setting.limit_s - _MARGIN_S, check=False)
    if not told.exists():
        raise RuntimeError("the demo has written no report")
    wrong = wrong_devices(setting, read_events(directory / "events.jsonl"))
    return demo_rows(json.loads(told.read_text()), wrong)


def demo_rows(report: dict[str, Any], wrong: list[str]) -> list[Row]:
    """Return the demo's verdict.

    Args:
        report: The demo's.
        wrong: What is wrong besides.
    """
    wrong = [*judge(report), *wrong]
    recovery_ms = [recovery["total_ms"] for recovery in report["recoveries"]]
    return [
        Row(what="demo", value="failed" if wrong else "passed", wrong="; ".join(wrong)),
        *(Row(what="recovery", value=each, unit="ms") for each in recovery_ms),
        Row(what="parameters differ by", value=report["max_param_rel_diff"] or 0.0, beside="from the failure-free run"),
    ]


def kills(setting: Setting) -> Iterator[Row]:
    """Kill nodes whose workers share one GPU, one in each phase of a step."""
    # torch reads it when it first looks for devices, which no process of this part has done yet
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    phases = KILL_PHASES[1:2] if setting.is_rehearsal else KILL_PHASES
    return kill_in(setting, [phases], num_nodes=_LEFT_NODES + len(phases), pipeline_nodes=2)


def kill_in(
    setting: Setting, jobs: Sequence[Sequence[str]], *, num_nodes: int, pipeline_nodes: int, max_failures: int = 1
) -> Iterator[Row]:
    """Run a job without failures, and others in which nodes are killed; all must train the same.

    Args:
        setting: Where.
        jobs: For each job the phases, of :mod:`resilient.protocol.phases`, in which a node is killed, one after the
            other, each in a step of its own.
        num_nodes: Of each job; enough for it to go on without those.
        pipeline_nodes: Fewest that a pipeline has.
        max_failures: That the job must be able to survive, also after the first one.
    """
    num_steps = _KILL_STEP + _STEPS_APART * max(map(len, jobs))
    arguments = ("--steps", str(num_steps), "--precision", "fp64", "--device", setting.device)
    arguments += ("--min-pipeline-nodes", str(pipeline_nodes), "--max-failures", str(max_failures))
    reference = _run(setting, "reference", arguments, num_nodes)
    for phases in jobs:
        failures = [
            fail_at(step=_KILL_STEP + _STEPS_APART * number, phase=phase, node=num_nodes - 1 - number)
            for number, phase in enumerate(phases)
        ]
        run = _run(setting, "-".join(phases), arguments, num_nodes, *failures)
        yield from _rows(setting, run, reference, phases)


def _run(setting: Setting, name: str, arguments: tuple[str, ...], num_nodes: int, *failures: Any) -> JobRun:
    directory = setting.folder / name
    run = run_job(JOBS / "small.py", *arguments, directory=directory, nodes=num_nodes, failures=failures)
    if run.exit_code:
        raise RuntimeError(f"the job {name} ended with exit code {run.exit_code}: {run.reason}")
    return run


def _rows(setting: Setting, run: JobRun, reference: JobRun, phases: Sequence[str]) -> list[Row]:
    compared = compare_runs(run.directory, reference.directory)
    difference, recoveries = compared["max_param_rel_diff"], run.report["recoveries"]
    reasons = [
        (len(run.failures) == len(phases), f"{len(run.failures)} nodes were killed"),
        (len(recoveries) == len(phases), f"it recovered {len(recoveries)} times"),
        (compared["same_steps_and_samples"], "other steps or samples"),
        (difference <= PARAM_TOLERANCE, f"parameters differ by {difference:.1e}"),
        (not any(each["restarted_workers"] for each in recoveries), "a surviving worker was restarted"),
    ]
    wrong = "; ".join([reason for holds, reason in reasons if not holds] + wrong_devices(setting, run.events))
    beside = f"parameters differ by {difference:.1e}"
    took_ms = [each["total_ms"] for each in recoveries] or ["none"]
    return [
        Row(what=f"recovery, killed in {phase}", value=each, unit="ms", beside=beside, wrong=wrong)
        for phase, each in zip(phases, took_ms, strict=False)
    ]


def wrong_devices(setting: Setting, events: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with where a job's workers computed: nothing, if that is where it should be."""
    if setting.device != "cuda":
        return []
    found = sorted({event["device"] for event in events if event["kind"] == "node_ready"})
    is_right = found and all(device.startswith(setting.device) for device in found)
    return [] if is_right else [f"workers computed on {', '.join(found) or 'nothing'}"]
