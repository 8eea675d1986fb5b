"""Traces of real runs: what was run is the schedule, worker by worker."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product
from pathlib import Path

import pytest

from resilient.observability.planned_steps import PLANNED_THREAD
from resilient.observability.trace_events import ACTION, PART, PLANNED, RECOVERY, STEP, Slice, Trace
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Action, Op
from tests.integration.harness import Run, check_recovered, started

STEPS = (3, 4, 5)


def traced_run(folder: Path, *arguments: str, nodes: int, options: str = "") -> tuple[Run, Trace]:
    options = f"--trace-steps {STEPS[0]}-{STEPS[-1]} {options}"
    with started(folder, "--steps", 7, *arguments, nodes=nodes, options=options) as job:
        run = job.wait()
    assert run.exit_code == 0, run.reason
    assert f"trace in {folder}/trace.json: open it in https://ui.perfetto.dev" in job.output
    return run, Trace.from_json((folder / "trace.json").read_bytes())


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Trace]:
    """Two pipelines of two stages, without failure."""
    return traced_run(tmp_path_factory.mktemp("reference") / "run", nodes=4)


def check_no_overlap(slices: list[Slice]) -> None:
    for before, after in pairwise(slices):
        assert before.end_ns <= after.start_ns, (before, after)


def check_is_the_schedule(trace: Trace, run: Run, generation: int, steps: tuple[int, ...]) -> None:
    """Check that in these steps every worker of a generation did what its row of the schedule says, and committed."""
    formed = run.generations[generation - 1]
    for pipeline in formed["pipelines"]:
        states = [list(range(stage["first_layer"], stage["end_layer"])) for stage in pipeline["stages"]]
        workers = list(dict.fromkeys((stage["node"], stage["local_rank"]) for stage in pipeline["stages"]))
        num_chunks = len(states) // len(workers)
        kind = ScheduleKind.INTERLEAVED if num_chunks > 1 else ScheduleKind.ONE_F_ONE_B
        schedule = generate(kind, len(workers), pipeline["num_microbatches"], num_chunks=num_chunks, states=states)
        for row, worker in enumerate(workers):
            of_worker = [s for s in trace.slices if (s.process, s.thread) == worker]
            for step in steps:
                of_step = [s for s in of_worker if (s.args["generation"], s.args.get("step")) == (generation, step)]
                of_step.sort(key=lambda s: s.start_ns)
                (whole,) = [s for s in of_step if s.category == STEP]
                actions = [s for s in of_step if s.category == ACTION]
                assert [s.name for s in actions] == [str(action) for action in schedule.row(row)]
                ends = [s for s in of_step if s.category == PART and s.name in ("begin", "prepare", "commit")]
                assert [s.name for s in ends] == ["begin", "prepare", "commit"]
                in_order = [ends[0], *actions, *ends[1:]]
                check_no_overlap(in_order)
                assert whole.start_ns <= in_order[0].start_ns
                assert in_order[-1].end_ns <= whole.end_ns
                assert 0 < sum(s.args["busy_us"] for s in in_order) <= whole.args["busy_us"]
                loads = [s for s in of_step if s.name.startswith("load")]
                assert len(loads) == pipeline["num_microbatches"]
                forwards = [s for s in actions if Action.parse(s.name).op is Op.FORWARD]
                for load, forward in product(loads, forwards):
                    apart = load.end_ns <= forward.start_ns or forward.end_ns <= load.start_ns
                    assert apart, "reading is not part of what is computed"


def test_what_was_run_is_the_schedule(reference: tuple[Run, Trace]) -> None:
    run, trace = reference
    (generation,) = run.generations
    assert [len(pipeline["stages"]) for pipeline in generation["pipelines"]] == [2, 2]
    assert sorted(trace.processes.values()) == ["node 0", "node 1", "node 2", "node 3"]
    check_is_the_schedule(trace, run, 1, STEPS)
    own = [(process, thread) for process, thread in trace.threads if thread < PLANNED_THREAD]
    assert sorted(trace.threads) == sorted([*own, *((process, PLANNED_THREAD + thread) for process, thread in own)])
    for process, thread in own:
        steps = trace.of(process, thread, STEP)
        assert [each.name for each in steps] == [f"step {number}" for number in STEPS]
        check_no_overlap(steps)
        assert trace.of(process, thread, RECOVERY) == []
        planned = [(s.args["step"], s.name) for s in trace.of(process, PLANNED_THREAD + thread, PLANNED)]
        computed = [(s.args["step"], s.name) for s in trace.of(process, thread, ACTION) if "_" not in s.name]
        assert planned == [(step, name) for step, name in computed if Action.parse(name).op.computes]
    assert (run.directory / "trace.png").stat().st_size > 10_000


def test_report_tells_how_steps_differ_from_their_plans(reference: tuple[Run, Trace]) -> None:
    traced = json.loads((reference[0].directory / "report.json").read_text())["traced"]
    assert traced["steps"] == 2 * len(STEPS)
    assert traced["planned_ms"] > 0
    assert traced["run_ms"] > traced["reading_ms"] > 0
    assert len(traced["largest"]) == 5
    for each in traced["largest"]:
        assert each["node"] in range(4)
        assert each["action"] in ("0F", "0B", "1F", "1B")
        assert each["planned_ms"] != each["run_ms"]


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_step_that_was_given_up_and_the_recovery_are_in_the_trace(
    schedule: str, num_chunks: int, reference: tuple[Run, Trace], tmp_path: Path
) -> None:
    """Whatever the schedule, a node killed in the middle of a step changes no parameter."""
    inject = "--inject node=1,step=5,phase=backward"
    run, trace = traced_run(tmp_path / "run", "--schedule", schedule, nodes=5, options=inject)
    check_recovered(run, reference[0])
    (recovery,) = run.report["recoveries"]
    assert (recovery["step"], recovery["nodes"]) == (5, [1])
    for generation, num_rows in zip(run.generations, ([3, 2], [2, 2]), strict=True):
        assert [len(pipeline["stages"]) for pipeline in generation["pipelines"]] == [
            num_chunks * number for number in num_rows
        ]
    check_is_the_schedule(trace, run, 1, STEPS[:1])  # who was slow to leave the barrier of step 4 was rolled forward
    check_is_the_schedule(trace, run, 2, STEPS[-1:])
    given_up = [s for s in trace.slices if s.category == STEP and (s.args["step"], s.args["generation"]) == (5, 1)]
    assert 1 not in {s.process for s in given_up}, "who is killed writes nothing down"
    assert given_up
    for step in given_up:
        (regroup,) = [s for s in trace.of(step.process, step.thread, RECOVERY) if s.name == "regroup"]
        assert step.end_ns <= regroup.start_ns
    survivors = {name: sorted(s.process for s in trace.slices if s.name == name) for name in ("regroup", "copy")}
    assert survivors == {"regroup": [0, 2, 3, 4], "copy": [0, 2, 3, 4]}
    (coordinator,) = [process for process, name in trace.processes.items() if name == "coordinator"]
    assert [s.name for s in trace.of(coordinator, 0, RECOVERY)] == ["detect", "agree"]


def test_steps_of_a_planned_job_lie_beside_their_plans(tmp_path: Path) -> None:
    script = Path(__file__).parent / "jobs" / "planned.py"
    options = "--planner resilient --trace-steps 2-3"
    arguments = ("--steps", 3, "--max-failures", 0)
    with started(tmp_path, *arguments, nodes=2, options=options, script=script) as job:
        run = job.wait()
    assert run.exit_code == 0, run.reason
    trace = Trace.from_json((tmp_path / "trace.json").read_bytes())
    (pipeline,) = run.generations[0]["pipelines"]
    lanes: dict[tuple[int, int], list[str]] = {}
    for stage in pipeline["stages"]:
        lanes.setdefault((stage["node"], stage["local_rank"]), []).append(stage["lane"])
    assert len(lanes) == 2
    for (process, thread), of_worker in lanes.items():
        name = trace.threads[process, thread]
        assert re.findall(r"([a-z]+\.\d+):\d+", name) == of_worker
        assert trace.threads[process, PLANNED_THREAD + thread] == f"{name} (planned)"
        planned = [(s.args["step"], s.name) for s in trace.of(process, PLANNED_THREAD + thread, PLANNED)]
        run_actions = [(s.args["step"], s.name) for s in trace.of(process, thread, ACTION)]
        assert planned == [(step, name) for step, name in run_actions if Action.parse(name).op.computes]
        computed = {str(Action.parse(name).lane) for _, name in planned}
        assert computed == set(of_worker)
    traced = json.loads((tmp_path / "report.json").read_text())["traced"]
    assert traced["steps"] == 2
    for each in traced["largest"]:
        assert each["action"].partition(":")[0] in lanes[each["node"], each["local_rank"]]
    assert (tmp_path / "trace.png").stat().st_size > 10_000
