"""Jobs on a GPU that lose a node: the demo, and a kill in each phase of a step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.parts.gpu.part import Row, Setting
from benchmarks.parts.steps import JOBS
from resilient.cli.demo import KILL_PHASES, PARAM_TOLERANCE, judge
from resilient.observability.event_log import read_events
from resilient.observability.run_comparison import compare_runs
from resilient.testing import JobRun, fail_at, run_job

_DEMO_STEPS, _DEMO_STEPS_REHEARSED = 120, 60
"""The node that joins has to be ready before the last one, and begins with some seconds of starting CUDA."""
_MARGIN_S = 5.0
_STEPS, _KILL_STEP = 6, 4
_JOB = ("--steps", str(_STEPS), "--precision", "fp64")


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


def kills(setting: Setting) -> list[Row]:
    """Kill a node of five whose workers share one GPU, in each phase of a step."""
    # torch reads it when it first looks for devices, which no process of this part has done yet
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    phases = KILL_PHASES[1:2] if setting.is_rehearsal else KILL_PHASES
    return kill_in(setting, phases, num_nodes=5, pipeline_nodes=2)


def kill_in(
    setting: Setting, phases: Sequence[str], *, num_nodes: int, pipeline_nodes: int, max_failures: int = 1
) -> list[Row]:
    """Run a job without failures, and once for each phase with the last node killed in it; all must train the same.

    Args:
        setting: Where.
        phases: Of :mod:`resilient.protocol.phases`.
        num_nodes: Of each job; enough for it to go on without one.
        pipeline_nodes: Fewest that a pipeline has.
        max_failures: That the job must be able to survive, also after the first one.
    """
    arguments = (*_JOB, "--device", setting.device, "--min-pipeline-nodes", str(pipeline_nodes))
    arguments += ("--max-failures", str(max_failures))
    reference = _run(setting, "reference", arguments, num_nodes)
    return [
        _row(
            setting,
            _run(setting, phase, arguments, num_nodes, fail_at(step=_KILL_STEP, phase=phase, node=num_nodes - 1)),
            reference,
            phase,
        )
        for phase in phases
    ]


def _run(setting: Setting, name: str, arguments: tuple[str, ...], num_nodes: int, *failures: Any) -> JobRun:
    directory = setting.folder / name
    run = run_job(JOBS / "small.py", *arguments, directory=directory, nodes=num_nodes, failures=failures)
    if run.exit_code:
        raise RuntimeError(f"the job {name} ended with exit code {run.exit_code}: {run.reason}")
    return run


def _row(setting: Setting, run: JobRun, reference: JobRun, phase: str) -> Row:
    compared = compare_runs(run.directory, reference.directory)
    difference, recoveries = compared["max_param_rel_diff"], run.report["recoveries"]
    reasons = [
        (len(run.failures) == 1, "no node was killed"),
        (len(recoveries) == 1, f"it recovered {len(recoveries)} times"),
        (compared["same_steps_and_samples"], "other steps or samples"),
        (difference <= PARAM_TOLERANCE, f"parameters differ by {difference:.1e}"),
        (not any(each["restarted_workers"] for each in recoveries), "a surviving worker was restarted"),
    ]
    wrong = [reason for holds, reason in reasons if not holds] + wrong_devices(setting, run.events)
    took_ms = recoveries[0]["total_ms"] if recoveries else "none"
    beside = f"parameters differ by {difference:.1e}"
    return Row(what=f"recovery, killed in {phase}", value=took_ms, unit="ms", beside=beside, wrong="; ".join(wrong))


def wrong_devices(setting: Setting, events: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with where a job's workers computed: nothing, if that is where it should be."""
    if setting.device != "cuda":
        return []
    known = {torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}
    found = {event["device"] for event in events if event["kind"] == "node_ready"}
    return [] if found and found <= known else [f"workers computed on {sorted(found)}, not on {sorted(known)}"]
