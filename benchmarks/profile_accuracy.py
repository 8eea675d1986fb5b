"""Step times predicted from measured profiles against those of the runtime.

    python benchmarks/profile_accuracy.py [--steps 15] [--repeats 5]

Each job is profiled, then run, in turns and both on this machine. "layers" is the plan's 1F1B, simulated with the
profile's times alone; "predicted" is the same with what else a step costs, each part measured by itself
(:mod:`parts.step_costs`): loading (each stage loads each microbatch), messages, gradient sums, zeroing, norms, the
optimizer and the prepare barrier. Workers must not share cores: no job here has more than two. Cores share caches and
memory, though, so everything is done by two processes at a time: beside a profile, and beside a job of one worker,
another process measures the same profile over and over.

Where other things run on the machine steps take longer than they could. So "processor" is the run's own processor
times, action by action from its trace, put along the schedule: what its steps would have taken on cores of their own,
but for the messages and sums, which are those of the prediction. The profile's times are processor times as well. All
of these are medians, the error that of the repeats. "least" and "median" are of the steps as they went by.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import torch
from parts.step_costs import commit_ms, load_ms, network
from rich.console import Console

from resilient.agent.launch import launch
from resilient.agent.launch_options import LaunchOptions
from resilient.cli.demo import example_script
from resilient.cli.shared.printing import plain_table
from resilient.observability.step_trace import recorded_trace, traced_steps
from resilient.observability.trace_events import ACTION, Trace
from resilient.profiling import profiler
from resilient.profiling.cache import fresh_profile
from resilient.profiling.script import job_of
from resilient.runtime.job import Job
from resilient.templates.common.arrays import Floats
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.schedule import Action, Op
from resilient.templates.schedules.simulator import ActionCosts, simulate

HERE = Path(__file__).parent
WARM_UP_STEPS = 5
BARRIER_BYTES = 24
ENDS = ("begin", "prepare", "commit")
"""What workers do at the ends of a step, as traces call it."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job and a world of ``num_pipelines`` replicas of ``num_stages`` stages each."""

    name: str
    script: str
    options: tuple[str, ...]
    num_pipelines: int
    num_stages: int

    @property
    def arguments(self) -> tuple[str, ...]:
        """The script's arguments."""
        world = ("--max-failures", self.num_pipelines - 1, "--min-pipeline-nodes", self.num_stages)
        return (*self.options, *map(str, world))


MLP = {"name": "MLP", "script": str(HERE / "jobs" / "mlp.py"), "options": ("--batch", "512")}
DIGITS = {"name": "digits", "script": str(example_script()), "options": ("--microbatch", "8")}
WORLDS = ((1, 1), (1, 2), (2, 1))
CASES = tuple(
    Case(**job, num_pipelines=num_pipelines, num_stages=num_stages)
    for job in (MLP, DIGITS)
    for num_pipelines, num_stages in WORLDS
)


@contextmanager
def company(case: Case) -> Iterator[None]:
    """Keep another core as busy as a second worker would."""
    context = multiprocessing.get_context("forkserver")
    begun = context.Event()
    companion = context.Process(target=_measure_for_ever, args=(case, begun), daemon=True)
    companion.start()
    begun.wait()
    try:
        yield
    finally:
        companion.kill()
        companion.join()


def _measure_for_ever(case: Case, begun: Event) -> None:
    torch.set_num_threads(1)
    job = job_of(case.script, case.arguments)
    begun.set()
    while True:
        profiler.measure(job, job.layouts(), profiler.draw_samples(job), on_layer=lambda _: None)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run: its steps' times after the warm-up, its trace, and the event of its only generation."""

    steps_ms: list[float]
    trace: Trace
    generation: dict[str, Any]


def measure(case: Case, num_steps: int) -> Measured:
    """Run the job."""
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = LaunchOptions(
            script=case.script,
            arguments=(*case.arguments, "--steps", str(num_steps)),
            num_nodes=case.num_pipelines * case.num_stages,
            run_directory=folder,
            heartbeat_s=60.0,
            trace_steps=f"{WARM_UP_STEPS + 1}-{num_steps}",
        )
        exit_code = launch(options, events.append)
        if exit_code:
            raise SystemExit(f"the job ended with exit code {exit_code}: {events[-1]}")
        trace = recorded_trace(folder, traced_steps(folder))
    assert trace is not None
    (generation,) = [event for event in events if event["kind"] == "generation"]
    commits = [event["time"] for event in events if event["kind"] == "step"]
    steps_ms = [1000 * (after - before) for before, after in pairwise(commits)]
    return Measured(steps_ms=steps_ms[WARM_UP_STEPS:], trace=trace, generation=generation)


@dataclass(frozen=True, kw_only=True)
class Links:
    """What messages and sums cost, by border and by state; and the prepare barrier."""

    send_ms: list[float]
    latency_ms: list[float]
    sum_ms: dict[int, float]
    barrier_ms: float


def measure_links(profile: ModelProfile, generation: dict[str, Any]) -> list[Links]:
    """Measure the links of each pipeline of a plan."""
    cuts = [cut_of(pipeline) for pipeline in generation["pipelines"]]
    summed = [layer.gradient_bytes for layer in profile.layers] if len(cuts) > 1 else []
    carried = [[profile.layers[first].input_bytes for first, _ in cut[1:]] for cut in cuts]
    if not summed and not any(carried):
        return [Links(send_ms=[], latency_ms=[], sum_ms={}, barrier_ms=0.0) for _ in cuts]
    wired = network([size for sizes in carried for size in sizes], [BARRIER_BYTES, *summed])
    return [
        Links(
            send_ms=[wired.send_ms[size] for size in sizes],
            latency_ms=[wired.message_ms[size] - wired.send_ms[size] for size in sizes],
            sum_ms={state: wired.sum_ms[size] for state, size in enumerate(summed)},
            barrier_ms=wired.sum_ms[BARRIER_BYTES],
        )
        for sizes in carried
    ]


def cut_of(pipeline: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the first and one past the last layer of every stage."""
    return [(stage["first_layer"], stage["end_layer"]) for stage in pipeline["stages"]]


def predict(job: Job, profile: ModelProfile, generation: dict[str, Any], links: Sequence[Links]) -> tuple[float, float]:
    """Predict the step of the slowest pipeline of a plan: by its layers alone, and with all else."""
    loading_ms = load_ms(job)
    found: list[tuple[float, float]] = []
    for pipeline, link in zip(generation["pipelines"], links, strict=True):
        cut = cut_of(pipeline)
        layers = [profile.layers[first:end] for first, end in cut]
        forward_ms = [sum(layer.costs[0].forward_ms for layer in stage) for stage in layers]
        backward_ms = [sum(layer.backward_ms() for layer in stage) for stage in layers]
        alone = simulate(
            generate(ScheduleKind.ONE_F_ONE_B, len(cut), pipeline["num_microbatches"]),
            ActionCosts(forward_ms=forward_ms, backward_input_ms=backward_ms),
        )
        commits_ms = max(commit_ms(job, [layer.name for layer in stage]) for stage in layers)
        step_ms = along_schedule(
            pipeline,
            link,
            np.array([sum(parts) + loading_ms for parts in zip(forward_ms, [*link.send_ms, 0.0], strict=True)]),
            np.array([sum(parts) for parts in zip(backward_ms, [0.0, *link.send_ms], strict=True)]),
            {state: layer.backward_ms() for state, layer in enumerate(profile.layers)},
        )
        found.append((alone.iteration_ms, step_ms + commits_ms))
    return max(layers_ms for layers_ms, _ in found), max(step_ms for _, step_ms in found)


def along_schedule(
    pipeline: dict[str, Any],
    link: Links,
    forward_ms: Floats,
    backward_ms: Floats,
    layer_backward_ms: dict[int, float],
) -> float:
    """Return the time to the end of the prepare barrier, but for what workers do at the ends of the step."""
    states = [list(range(first, end)) if link.sum_ms else [] for first, end in cut_of(pipeline)]
    costs = ActionCosts(
        forward_ms=forward_ms,
        backward_input_ms=backward_ms,
        latency_ms=link.latency_ms,
        reduce_ms=link.sum_ms,
        layer_backward_ms=layer_backward_ms,
    )
    schedule = generate(ScheduleKind.ONE_F_ONE_B, len(states), pipeline["num_microbatches"], states=states)
    return simulate(schedule, costs).iteration_ms + link.barrier_ms


def processor_ms(profile: ModelProfile, measured: Measured, links: Sequence[Links]) -> list[float]:
    """Return what steps take by the run's own processor times, those of its actions put along the schedule."""
    pipelines = measured.generation["pipelines"]
    found: dict[int, list[float]] = {}
    backward_ms = {state: layer.backward_ms() for state, layer in enumerate(profile.layers)}
    for pipeline, link in zip(pipelines, links, strict=True):
        workers = [_busy_ms(measured.trace, stage["node"], stage["local_rank"]) for stage in pipeline["stages"]]
        for step in workers[0]:
            shape = (len(workers), pipeline["num_microbatches"])
            forward, backward, ends = np.zeros(shape), np.zeros(shape), np.zeros(len(workers))
            for row, worker in enumerate(workers):
                for name, busy_ms in worker[step]:
                    action = Action.parse(name) if name not in ENDS else None
                    if action is None or action.op is Op.REDUCE:
                        ends[row] += busy_ms
                    elif action.op in (Op.FORWARD, Op.RECV_F, Op.SEND_F):
                        forward[row, action.index] += busy_ms
                    else:
                        backward[row, action.index] += busy_ms
            whole_ms = along_schedule(pipeline, link, forward, backward, backward_ms) + float(ends.max())
            found.setdefault(step, []).append(whole_ms)
    return [max(of_step) for of_step in found.values()]


def _busy_ms(trace: Trace, process: int, thread: int) -> dict[int, list[tuple[str, float]]]:
    """Return, by step, names and processor times of a worker's actions and of what it does at the step's ends."""
    found: dict[int, list[tuple[str, float]]] = {}
    for each in trace.slices:
        if (each.process, each.thread) == (process, thread) and (each.category == ACTION or each.name in ENDS):
            found.setdefault(each.args["step"], []).append((each.name, each.args["busy_us"] / 1e3))
    return found


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    title = f"step time, ms: {options.repeats} runs of {options.steps} steps"
    columns = ("job", "p x s", "layers", "predicted", "processor", "error", "of runs", "least", "median")
    table = plain_table(*columns, left=("job",), title=title)
    for case in CASES:
        table.add_row(case.name, f"{case.num_pipelines} x {case.num_stages}", *compare(case, options))
        Console().print(table)


def compare(case: Case, options: argparse.Namespace) -> list[str]:
    """Profile and run a job some times; return the cells of the table."""
    job = job_of(case.script, case.arguments)
    found: list[tuple[float, float, float]] = []
    steps_ms: list[float] = []
    for _ in range(options.repeats):
        with company(case):
            profile, _ = fresh_profile(job, lambda _: None)
        with company(case) if case.num_pipelines * case.num_stages == 1 else nullcontext():
            run = measure(case, options.steps)
        links = measure_links(profile, run.generation)
        with company(case):
            layers_ms, predicted_ms = predict(job, profile, run.generation, links)
        found.append((layers_ms, predicted_ms, statistics.median(processor_ms(profile, run, links))))
        steps_ms += run.steps_ms
    errors = sorted(100 * (predicted_ms / busy_ms - 1) for _, predicted_ms, busy_ms in found)
    return [
        *(f"{statistics.median(column):.1f}" for column in zip(*found, strict=True)),
        f"{statistics.median(errors):+.1f} %",
        f"{errors[0]:+.0f} to {errors[-1]:+.0f} %",
        f"{min(steps_ms):.1f}",
        f"{statistics.median(steps_ms):.1f}",
    ]


if __name__ == "__main__":
    main()
