"""A step whose loss or gradient is not finite ends the job, or is skipped, by all workers alike, whoever fails."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from resilient.data.sampler import StepSampler
from resilient.observability.event_log import was_skipped
from resilient.observability.run_comparison import compare_parameters
from resilient.state.manifest import read_manifest
from resilient.state.skipped import SkippedSteps
from resilient.testing import fail_at
from tests.integration.harness import (
    TOLERANCE,
    Event,
    Run,
    check_equal,
    check_recovered,
    command,
    run_alone,
    run_job,
    started,
)
from tests.integration.jobs.chain import BREAKING_LAYER, BREAKING_POSITION, NUM_LAYERS, NUM_SAMPLES

NODES = 5
STEP = 5
STEPS = 9
BATCH, MICROBATCH = 28, 4
BREAKS = ("--steps", STEPS, "--break-in", STEP, "--breaks")


def arguments(*more: object) -> list[str]:
    return [str(argument) for argument in (*BREAKS, *more)]


def samples() -> list[int]:
    """Return the samples of the microbatch that breaks."""
    indices = StepSampler(num_samples=NUM_SAMPLES, global_batch=BATCH, seed=0).indices(STEP)
    first = BREAKING_POSITION // MICROBATCH * MICROBATCH
    return [int(index) for index in indices[first : first + MICROBATCH]]


def holders(run: Run, layer: int) -> set[int]:
    stages = [stage for pipeline in run.generations[0]["pipelines"] for stage in pipeline["stages"]]
    return {stage["node"] for stage in stages if stage["first_layer"] <= layer < stage["end_layer"]}


FOUND = {
    "output": (
        BREAKING_LAYER,
        "inf",
        f"the output of layer 'layer.{BREAKING_LAYER}' is not finite ('hidden' is inf), though its input is, "
        "for samples {samples} of Waves",
    ),
    "gradient": (
        BREAKING_LAYER,
        "number",
        f"the gradient of layer 'layer.{BREAKING_LAYER}' is not finite, though the loss is",
    ),
    "loss": (
        NUM_LAYERS - 1,
        "inf",
        "the loss is not finite (inf), though the output of layer 'layer.9' is, for samples {samples} of Waves",
    ),
}


@pytest.mark.parametrize("breaks", FOUND)
def test_job_stops_with_the_origin_and_the_last_good_step(breaks: str, tmp_path: Path) -> None:
    run = run_job(tmp_path, *arguments(breaks), nodes=NODES)
    layer, loss, what = FOUND[breaks]
    found = re.fullmatch(
        r"node (\d+): NonFiniteError: a step must have a finite loss and gradient, got loss (\S+) and gradient norm "
        rf"(\S+): {re.escape(what.format(samples=samples()))}; mend that, or leave such steps out with "
        rf"Trainer\(on_nonfinite='skip'\) \(generation 1, step {STEP}\); "
        rf"resume with: resilient run .*--resume {tmp_path}/checkpoints/step-0000000{STEP - 1} .*",
        run.reason,
    )
    assert run.exit_code == 1
    assert found is not None, run.reason
    assert int(found[1]) in holders(run, layer)
    assert ("number" if re.fullmatch(r"[\d.]+", found[2]) else "inf") == loss
    assert max(run.losses) == STEP - 1, "nothing was committed"
    assert [failed["traceback"] for failed in run.of_kind("failed")] == [""]
    assert run.of_kind("detected") == [], "no connection broke"


@pytest.mark.parametrize("phase", ["reduce", "prepare"])
def test_survivors_of_a_node_killed_in_the_step_stop_as_well(phase: str, tmp_path: Path) -> None:
    inject = [fail_at(node=2, step=STEP, phase=phase)]
    run = run_job(tmp_path, *arguments("output"), nodes=NODES, inject=inject)
    assert run.exit_code == 1
    assert [fired["node"] for fired in run.failures] == [2]
    assert f"the output of layer 'layer.{BREAKING_LAYER}' is not finite" in run.reason
    assert f"--resume {tmp_path}/checkpoints/step-0000000{STEP - 1} " in run.reason
    assert max(run.losses) == STEP - 1


# ---------------------------------------------------------------- skipped


SKIPPING = ("loss", "--break-in", STEP + 1, "--on-nonfinite", "skip")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run without failures, which skips two steps."""
    run = run_job(tmp_path_factory.mktemp("reference"), *arguments(*SKIPPING, "--checkpoint-every", 1), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


def skipped_steps(run: Run) -> list[int]:
    return [event["step"] for event in run.of_kind("step") if was_skipped(event)]


def test_skipped_step_updates_nothing_and_is_counted(reference: Run) -> None:
    assert (skipped_steps(reference), reference.report["skipped_steps"]) == ([STEP, STEP + 1], 2)
    before, skipped, after = (
        read_manifest(reference.directory / "checkpoints" / f"step-{step:08d}") for step in (STEP - 1, STEP, STEP + 2)
    )
    assert len(before.states) == NUM_LAYERS
    assert skipped.states == before.states, "the files are the same to the byte"
    assert after.states != before.states
    assert [manifest.skipped for manifest in (before, skipped, after)] == [
        SkippedSteps(), SkippedSteps(total=1, in_a_row=1), SkippedSteps(total=2)
    ]  # fmt: skip


def test_logs_of_a_skipped_step_are_json(reference: Run) -> None:
    def refuse(number: str) -> None:
        raise ValueError(number)

    for file in ("events.jsonl", "stimuli.jsonl"):
        for line in (reference.directory / file).read_text().splitlines():
            json.loads(line, parse_constant=refuse)
    (event,) = (event for event in reference.of_kind("step") if event["step"] == STEP)
    assert (event["loss"], event["grad_norm"]) == (None, None)


@pytest.mark.parametrize("phase", ["reduce", "prepare", "commit"])
def test_node_killed_in_a_skipped_step(phase: str, reference: Run, tmp_path: Path) -> None:
    run = run_job(tmp_path, *arguments(*SKIPPING), nodes=NODES, inject=[fail_at(node=2, step=STEP, phase=phase)])
    check_recovered(run, reference)
    assert skipped_steps(run) == [STEP, STEP + 1]


def test_node_joins_between_skipped_steps(reference: Run, tmp_path: Path) -> None:
    """The joiner's optimizer has done as many updates as the others'."""

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == STEP - 1:
            launcher.add_node()

    run = run_job(tmp_path / "run", *arguments(*SKIPPING, "--change-after", STEP), nodes=NODES, act=act)
    check_equal(run, reference)
    assert [(join["nodes"], join["step"]) for join in run.report["joins"]] == [([NODES], STEP + 1)]


def test_job_resumed_after_a_skipped_step_remembers_it(reference: Run, tmp_path: Path) -> None:
    checkpoint = reference.directory / "checkpoints" / f"step-{STEP:08d}"
    run = run_job(tmp_path, *arguments(*SKIPPING), nodes=NODES, resume=str(checkpoint))
    assert run.exit_code == 0, run.reason
    assert compare_parameters(run.directory, reference.directory)[1] <= TOLERANCE
    final = run.directory / "checkpoints" / f"step-{STEPS:08d}"
    assert read_manifest(final).skipped == SkippedSteps(total=2)


def test_one_process_skips_what_many_skip(reference: Run, tmp_path: Path) -> None:
    log = run_alone(tmp_path, *arguments(*SKIPPING))
    assert log.count("was skipped") == 2
    assert compare_parameters(tmp_path, reference.directory)[1] <= TOLERANCE


def test_skipped_step_is_shown_and_replayed(tmp_path: Path) -> None:
    with started(tmp_path / "run", *arguments(*SKIPPING), nodes=NODES) as job:
        run = job.wait()
    assert run.exit_code == 0, run.reason
    assert f"step {STEP} was skipped, as its loss or gradient is not finite: 1 so far" in job.output
    assert f"step {STEP}/{STEPS}  loss nan" in job.output
    ended = subprocess.run(command("replay", run.directory), capture_output=True, text=True, timeout=100, check=False)
    assert ended.stdout.splitlines()[-1] == "equal to events.jsonl"
