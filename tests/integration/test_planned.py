"""Planned jobs train what one process trains: every planner, nodes killed in every phase, joins and departures."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from resilient.data.sampler import StepSampler
from resilient.observability.step_trace import traced_steps
from resilient.observability.trace_events import ACTION
from resilient.planners.registry import AUTO
from resilient.protocol.phases import PHASES
from resilient.templates.schedules.schedule import Action, Op
from resilient.testing import fail_at
from tests.integration.drills import FEWEST, JOINER, SCRIPT, Drill, run_drills
from tests.integration.harness import (
    Event,
    Run,
    check_equals_one_process,
    check_survivors,
    run_alone,
    run_job,
    started,
)
from tests.integration.jobs.planned import Mixed

JOB = ("--steps", "4", "--batch", "16")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job in one process, a chain of padded microbatches: its folder and its log."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, run_alone(folder, *JOB, script=SCRIPT)


def check(run: Run, alone: tuple[Path, str]) -> None:
    """Check that a job equals one process, no survivor was restarted, and each failure cost a step at most."""
    check_equals_one_process(run, *alone)
    check_survivors(run)
    assert run.report["recoveries"], "somebody was killed"
    assert all(recovery["lost_steps"] <= 1 for recovery in run.report["recoveries"]), run.report["recoveries"]


KILLED = ("dip", "cornstarch", "dflop", "dhp", "orchmllm", AUTO)
"""Planners that decide in different ways. Others have other orders of samples in the same pipelines: the stress has all
(:mod:`tests.integration.planned_stress`)."""


@pytest.mark.parametrize("planner", KILLED)
def test_planner_through_a_kill(planner: str, alone: tuple[Path, str], tmp_path: Path) -> None:
    fewest = FEWEST.get(planner, 2)
    options = ("--planner", planner, "--min-pipeline-nodes", str(fewest))
    inject = [fail_at(node=1, step=2, phase="backward")]
    run = run_job(tmp_path, *JOB, *options, script=SCRIPT, nodes=2 * fewest + 1, inject=inject)
    check(run, alone)


ALWAYS = {"interleaved": ("disttrain", 4), "everywhere": ("cornstarch", 2), "sharded": ("resilient", 1)}
"""What is always answered of what planners may answer: whose answer it is, and the fewest nodes that it is for."""


def several_stages(pipeline: Event) -> set[str]:
    """Return the lanes of which a node has several stages, and units of which it shares its node with others'."""
    lanes: dict[int, list[str]] = {}
    for stage in pipeline["stages"]:
        lanes.setdefault(stage["node"], []).append(stage["lane"])
    found = {lane for of_node in lanes.values() for lane, count in Counter(of_node).items() if count > 1}
    return found | {" ".join(of_node) for of_node in lanes.values() if len(set(of_node)) > 1}


@pytest.mark.parametrize(
    ("always", "shared"),
    [("interleaved", {"llm.0"}), ("everywhere", {f"vision.{row} audio.{row} llm.0" for row in range(2)})],
)
def test_rows_with_several_stages_through_a_kill(
    always: str, shared: set[str], alone: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # others ask the same planner
    planner, fewest = ALWAYS[always]
    options = ("--planner", planner, "--always", always, "--min-pipeline-nodes", str(fewest))
    inject = [fail_at(node=1, step=2, phase="backward")]
    run = run_job(tmp_path / "run", *JOB, *options, script=SCRIPT, nodes=2 * fewest + 1, inject=inject)
    check(run, alone)
    for generation in run.generations:
        smallest = [each for each in generation["pipelines"] if len(each["nodes"]) == fewest]
        assert smallest
        assert all(several_stages(each) == shared for each in smallest)


def crossing(folder: Path) -> Counter[int]:
    """Return, by generation, how many messages of the traced steps went from one pipeline to another."""
    steps, found = traced_steps(folder), Counter[int]()
    actions = {id(step): [Action.parse(span.name) for span in step.spans if span.category == ACTION] for step in steps}
    pipeline_of = {
        (step.generation, step.step, action.lane): step.pipeline
        for step in steps
        for action in actions[id(step)]
        if action.op is Op.FORWARD
    }
    for step in steps:
        for action in actions[id(step)]:
            if action.op in (Op.SEND_F, Op.SEND_B) and action.peer is not None:
                there = pipeline_of.get((step.generation, step.step, action.peer.lane), step.pipeline)
                found[step.generation] += there != step.pipeline
    return found


def test_features_cross_pipelines_through_kills(alone: tuple[Path, str], tmp_path: Path) -> None:
    arguments = (*JOB, "--planner", "orchmllm", "--even", "--min-pipeline-nodes", 1)
    options = "--trace-steps 1-4 --inject node=1,step=2,phase=vision.send --inject node=2,step=4,phase=backward"
    with started(tmp_path, *arguments, nodes=4, options=options, script=SCRIPT) as job:
        run = job.wait()
    check(run, alone)
    recoveries = run.report["recoveries"]
    assert [recovery["lost_steps"] for recovery in recoveries] == [1, 1]
    assert [len(generation["pipelines"]) for generation in run.generations] == [4, 3, 2]
    found = crossing(tmp_path)
    assert all(found[generation] > 0 for generation in (1, 2, 3)), found
    assert "from the first action to the last: planned" in job.output


def test_features_cross_pipelines_that_are_unlike(
    alone: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = (*JOB, "--planner", "orchmllm", "--even", "--always", "together", "--min-pipeline-nodes", 2)
    options = "--trace-steps 1-4 --inject node=2,step=3,phase=llm.backward"
    with started(tmp_path / "run", *arguments, nodes=5, options=options, script=SCRIPT) as job:
        run = job.wait()
    check(run, alone)
    sizes = [sorted(len(pipeline["nodes"]) for pipeline in each["pipelines"]) for each in run.generations]
    assert sizes == [[2, 3], [2, 2]]
    assert all(crossing(run.directory)[generation] for generation in (1, 2))


DRILLS = {
    "disttrain": (  # an encoder's samples come back as it dealt them, each unit has nodes of its own
        Drill(kind="encoder", phase="vision.forward"),
        Drill(kind="encoder", phase="send"),
        Drill(kind="language", phase="llm.return"),
        Drill(kind="rank 0", phase="assign", during="join"),
        Drill(kind="encoder", phase="copy", during="loss"),
        Drill(kind="language", phase="regroup", during="leave"),
    ),
    "entrain": (  # encoder cells are differentiated in parts
        Drill(kind="encoder", phase="part"),
        Drill(kind="encoder", phase="reduce", also="language"),
        Drill(kind="encoder", phase="prepare"),
        Drill(kind="rank 0", phase="save"),
        Drill(kind="language", phase="copy", during="leave"),
        Drill(kind="encoder", phase="regroup", during="join"),
    ),
    "resilient": (  # encoders and language model on the same nodes, backwards for the weights apart
        Drill(kind="rank 0", phase="vision.backward"),
        Drill(kind="any", phase="llm.weight"),
        Drill(kind="rank 0", phase="llm.backward", also="any"),
        Drill(kind="rank 0", phase="prepare"),
        Drill(kind="language", phase="commit"),
        Drill(kind="rank 0", phase="assign", during="loss"),
    ),
    "interleaved": (  # several stages of the language model on each of its nodes
        Drill(kind="language", phase="llm.send"),
        Drill(kind="any", phase="copy", during="loss"),
        Drill(kind="language", phase="llm.weight", also="encoder"),
    ),
    "everywhere": (  # encoders on every node of the language model, which share its samples
        Drill(kind="any", phase="vision.send"),
        Drill(kind="rank 0", phase="copy", during="join"),
        Drill(kind="language", phase="prepare", also="any"),
    ),
    "orchmllm": (  # all units on every node, whose two workers share each cell; features cross pipelines
        Drill(kind="any", phase="exchange"),
        Drill(kind="rank 0", phase="llm.backward", also="any"),
        Drill(kind=JOINER, phase="verify", during="join"),
        Drill(kind="rank 0", phase="regroup", during="loss"),
    ),
    "sharded": (  # all units on every node, whose two workers divide them
        Drill(kind="any", phase="gather"),
        Drill(kind="rank 0", phase="scatter"),
        Drill(kind="any", phase="copy", during="join"),
        Drill(kind="rank 0", phase="connect", during="loss"),
    ),
}
"""Every phase, of nodes of every kind, one after the other in a job of each planner."""

SHARED = {"orchmllm": 2}
"""How many workers of a node share each microbatch, where they do."""


def workers_of_stages(run: Run) -> set[int]:
    """Return how many workers the stages of pipelines of one node have; those of longer ones stand apart."""
    pipelines = [pipeline for generation in run.generations for pipeline in generation["pipelines"]]
    return {stage.get("num_workers", 1) for each in pipelines if len(each["nodes"]) == 1 for stage in each["stages"]}


@pytest.mark.timeout(600)  # a job with six failures, one after the other
@pytest.mark.parametrize("planner", DRILLS)
def test_planned_job_through_failures_of_every_kind(
    planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, fewest = ALWAYS.get(planner, (planner, 1 if planner in SHARED else FEWEST.get(planner, 2)))
    schedule = ("--schedule", "zb-h1") if planner in ("resilient", "interleaved") else ()
    always = ("--always", planner) if planner in ALWAYS else ()
    ahead = ("--read-ahead", "3", "--checkpoint-every", "5") if planner == "entrain" else ()
    if always:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments, degree = (*schedule, *always, *ahead), SHARED.get(planner, 1)
    workers = 2 if planner == "sharded" else degree
    drilled = run_drills(
        tmp_path, DRILLS[planner], asked, *arguments, fewest=fewest, workers_per_node=workers, tp=str(degree)
    )
    assert (drilled.missed, drilled.wrong) == ([], [])
    if workers > 1:
        assert workers_of_stages(drilled.run) == {2}


def test_drills_come_to_every_phase() -> None:
    drilled = [drill for drills in DRILLS.values() for drill in drills]
    phases = {drill.phase.rpartition(".")[2] for drill in drilled}
    assert phases == set(PHASES)
    assert {drill.during for drill in drilled} == {"", "loss", "join", "leave"}
    assert {drill.kind for drill in drilled} == {"encoder", "language", "rank 0", "any", JOINER}


@pytest.fixture(scope="module")
def drawing_alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The job with a generator in one process."""
    folder = tmp_path_factory.mktemp("drawing")
    return folder, run_alone(folder, *JOB, "--draws", script=SCRIPT)


@pytest.mark.parametrize(("planner", "fewest", "workers"), [("disttrain", 4, 1), ("uniform", 2, 2)])
def test_generator_through_a_kill(
    planner: str, fewest: int, workers: int, drawing_alone: tuple[Path, str], tmp_path: Path
) -> None:
    """Of lanes on workers of their own, and on such as share each stage."""
    options = (*JOB, "--draws", "--planner", planner, "--min-pipeline-nodes", str(fewest))
    inject = [fail_at(node=1, step=2, phase="backward")]
    nodes, tp = 2 * fewest + 1, str(workers)
    run = run_job(tmp_path, *options, script=SCRIPT, nodes=nodes, workers_per_node=workers, tp=tp, inject=inject)
    check(run, drawing_alone)
    stages = [stage for pipeline in run.generations[0]["pipelines"] for stage in pipeline["stages"]]
    assert {"llm.0", "image.0"} <= {stage["lane"] for stage in stages}
    assert {stage.get("num_workers", 1) for stage in stages} == {workers}


def test_picture_that_is_not_finite_is_named_before_what_the_language_model_makes_of_it(tmp_path: Path) -> None:
    data, batch = Mixed(), 8
    indices = StepSampler(num_samples=len(data), global_batch=batch, seed=0).indices(2).tolist()
    first, *_, broken = indices
    assert not data.lengths(first)["vision"], "the language model's cell begins before that of the images"
    assert data.lengths(broken)["vision"]
    options = ("--planner", "resilient", "--max-failures", "0", "--batch", "8", "--microbatch", "8")
    options += ("--broken", str(broken))
    run = run_job(tmp_path, *options, script=SCRIPT, nodes=2)
    assert re.fullmatch(
        r"node \d: NonFiniteError: a step must have a finite loss and gradient, got loss nan and gradient norm nan: "
        r"entry 'vision\.patches', which layer 'vision\.embed' may read, is not finite \(nan\), for samples "
        rf"\[(\d+, )*{broken}(, \d+)*\] of Mixed; mend that, or leave such steps out with "
        r"Trainer\(on_nonfinite='skip'\) \(generation 1, step 2\); resume with: resilient run .*",
        run.reason,
    ), run.reason
