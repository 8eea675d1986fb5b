"""Steps of planned multimodal jobs: every planner, three mixes of lengths, measured beside what was predicted.

    python benchmarks/multimodal.py [--quick] [--workers 8 16] [--mixes short heavy] [--planners resilient dflop ...]
                                    [--real] [--scale 0.25] [--json FILE]

Workers are emulated, a node of one device each: layers sleep by cost curves, so two cores hold 16 of them. ``--real``
adds a small real model on two workers. Jobs come one after the other. "chain" has no planner: padded microbatches of
equally many samples go through all layers in a row; "packed" is the same without padding: what packing alone brings.
Pipelines have four nodes or more, as if the model had no room on fewer; planners that have no stages have it whole on
each node, and so has "resilient" a second time.

Measured is the median of the steps after the first ones, from commit to commit, so it has messages, reading, gradient
norms, the optimizer and the barriers, too. Predicted is the schedule that the workers ran, simulated with the layers'
measured curves and the messages; "above" is the median of the steps' ratios. "of bound" is the time that all work would
take spread evenly over all workers, with nothing else, as a part of what was measured. "waited" is the part of all
steps in which rank 0 did nothing but wait for an assignment. A busy machine wakes sleepers late, and each worker needs
some 50 ms of a core in a step (to read samples, for what emulated layers really compute, for messages, and to write
down the step), of which 8 workers have two: layers are as slow as makes that little, of each mix, and ``--scale`` makes
them slower or faster.

What is above the prediction has three parts, as shares of it: "cells", what was computed took longer than by the
measured curves; "messages", what they, the sums of gradients and reading samples cost from the first action, or from
reading for it, to the last; and "rest", what is before and after: the schedule, the barrier, the optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from parts.predicted_steps import StepBounds, kept_costs, step_times
from rich.console import Console

from resilient.agent.launch import launch
from resilient.agent.launch_options import LaunchOptions
from resilient.cli.shared.printing import plain_table
from resilient.planners.registry import PLANNERS
from resilient.profiling.script import job_of

SCRIPT = str(Path(__file__).parent / "jobs" / "multimodal.py")
CHAIN, PACKED = "chain", "packed"
"""Without a planner: microbatches that are padded, and such as take no longer than their samples."""
MIXES = {"short": "even", "mixed": "moderate", "heavy": "heavy-tailed"}
SCALES = {"short": 12.0, "mixed": 4.5, "heavy": 1.5}
"""By mix: how much slower its layers are, with 8 workers; with more, in proportion: they share the two cores."""
WARM_UP_STEPS = 3
PIPELINE_NODES = {8: 4, 16: 4, 2: 2}
"""By number of workers: nodes of the smallest pipelines, as of a model that has no room on fewer."""
ALONE = ("fsdp", "static-cp", "dhp", "dhp-across-nodes", "resilient")
"""Planners that are measured with pipelines of one node, too, or only so: all but the last put no layers on stages."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job.

    Args:
        workers: How many.
        mix: Of lengths.
        planner: Its name, :data:`CHAIN` or :data:`PACKED`.
        pipeline_nodes: Nodes of the smallest pipelines.
        real: Whether layers compute.
        scale: How slow they are if they do not.
    """

    workers: int
    mix: str
    planner: str
    pipeline_nodes: int
    real: bool
    scale: float

    def arguments(self, steps: int) -> tuple[str, ...]:
        """Return the script's."""
        given: dict[str, Any] = {
            "steps": steps,
            "mix": self.mix,
            "layers": 0 if self.real else 16,
            "scale": self.scale,
            "batch": 4 * self.workers,
            "min-pipeline-nodes": self.pipeline_nodes,
        }
        if self.is_planned:
            given["planner"] = self.planner
        named = tuple(text for name, value in given.items() for text in (f"--{name}", str(value)))
        return (*named, "--packed") if self.planner == PACKED else named

    @property
    def is_planned(self) -> bool:
        """Whether a planner places samples."""
        return self.planner not in (CHAIN, PACKED)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a job did.

    Args:
        pipelines: Nodes of each.
        step_ms: Median.
        predicted_ms: Median; None for a chain.
        above: Median of measured over predicted steps, less one; None for a chain.
        cells: Median of the part of that, of the prediction, by which computing took longer.
        messages: Likewise, messages, sums of gradients and reading.
        rest: Likewise, what comes before the first action and after the last.
        bound: Part of the median step that the work takes if it is spread evenly; None for a chain.
        waited: Part of the steps in which rank 0 waited for an assignment.
    """

    pipelines: tuple[int, ...]
    step_ms: float
    predicted_ms: float | None = None
    above: float | None = None
    cells: float | None = None
    messages: float | None = None
    rest: float | None = None
    bound: float | None = None
    waited: float


def measure(case: Case, steps: int, cache: Path) -> Measured:
    """Run a job, and predict its steps.

    Args:
        case: The job.
        steps: How many.
        cache: Where what is measured is kept, of jobs that differ in the planner alone.
    """
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        launched = LaunchOptions(
            script=SCRIPT,
            arguments=case.arguments(steps),
            num_nodes=case.workers,
            run_directory=folder,
            heartbeat_s=60.0,
            environment={"XDG_CACHE_HOME": str(cache)},
            trace_steps=f"{WARM_UP_STEPS + 1}-{steps}",
        )
        if exit_code := launch(launched, events.append):
            said = [event.get("text") or event.get("reason") for event in events]
            raise SystemExit(f"{case} ended with exit code {exit_code}: {[each for each in said if each]}")
        known = step_times(Path(folder))
    (generation,) = [event for event in events if event["kind"] == "generation"]
    done = [event for event in events if event["kind"] == "step"]
    times = {after["step"]: 1e3 * (after["time"] - before["time"]) for before, after in pairwise(done)}
    times = {step: time_ms for step, time_ms in times.items() if step > WARM_UP_STEPS}
    step_ms = median(times.values())
    pipelines = tuple(len(pipeline["nodes"]) for pipeline in generation["pipelines"])
    waited = sum(event["waited_ms"] for event in done) / sum(event["step_ms"] for event in done)
    if not case.is_planned:
        return Measured(pipelines=pipelines, step_ms=step_ms, waited=waited)
    bounds = StepBounds(job_of(SCRIPT, case.arguments(steps)), kept_costs(cache), case.workers)
    return Measured(
        pipelines=pipelines,
        step_ms=step_ms,
        predicted_ms=median(each.predicted_ms for each in known.values()),
        above=median(time_ms / known[step].predicted_ms for step, time_ms in times.items()) - 1,
        cells=median(each.computed_ms / each.predicted_ms - 1 for each in known.values()),
        messages=median((each.run_ms - each.computed_ms) / each.predicted_ms for each in known.values()),
        rest=median((time_ms - known[step].run_ms) / known[step].predicted_ms for step, time_ms in times.items()),
        bound=median(bounds.of(step) / time_ms for step, time_ms in times.items()),
        waited=waited,
    )


def cells(case: Case, measured: Measured, step_ms: dict[str, float]) -> Iterator[str]:
    """Yield the texts of a row.

    Args:
        case: The job.
        measured: What it did.
        step_ms: Measured before, by planner, of the same workers and mix.
    """
    yield f"{case.workers}{' real' if case.real else ''}"
    yield MIXES[case.mix]
    yield case.planner
    yield "+".join(map(str, measured.pipelines))
    yield "" if measured.predicted_ms is None else f"{measured.predicted_ms:.0f}"
    yield f"{measured.step_ms:.0f}"
    for part in (measured.above, measured.cells, measured.messages, measured.rest):
        yield "" if part is None else f"{100 * part:+.0f} %"
    for other in (CHAIN, "uniform", "uniform-sorted"):
        yield f"{step_ms[other] / measured.step_ms:.2f}" if other in step_ms else ""
    yield "" if measured.bound is None else f"{100 * measured.bound:.0f} %"
    yield f"{100 * measured.waited:.2f} %"


def cases(options: argparse.Namespace) -> Iterator[list[Case]]:
    """Yield the jobs that are compared with each other."""
    names = list(dict.fromkeys((CHAIN, PACKED, "uniform", "uniform-sorted", *options.planners)))
    for workers in options.workers:
        for mix in options.mixes:
            scale = options.scale * SCALES[mix] * workers / 8
            yield [
                Case(workers=workers, mix=mix, planner=name, pipeline_nodes=nodes, real=False, scale=scale)
                for name in names
                for nodes in smallest_pipelines(name, workers)
            ]
    if options.real:
        for mix in options.mixes:
            yield [
                Case(workers=2, mix=mix, planner=name, pipeline_nodes=nodes, real=True, scale=1.0)
                for name in names
                if name != PACKED
                for nodes in smallest_pipelines(name, 2)
            ]


def smallest_pipelines(planner: str, workers: int) -> tuple[int, ...]:
    """Return how many nodes a planner's smallest pipelines have, in each of its jobs."""
    with_stages = () if planner in ALONE[:-1] else (PIPELINE_NODES[workers],)
    return (*with_stages, 1) if planner in ALONE else with_stages


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 workers, heavy-tailed lengths, ours alone, few steps")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, nargs="*", choices=(8, 16), default=[8, 16])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--real", action="store_true", help="a small real model on two workers, too")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.steps, options.workers, options.mixes = 6, [8], ["heavy"]
        options.planners = ["resilient"]
    return options


def main() -> None:
    """Run the jobs and print the table."""
    options = parsed()
    title = f"step time, ms: medians of {options.steps - WARM_UP_STEPS} steps"
    words = ("lengths", "planner", "pipelines")
    table = plain_table(
        *(
            "workers",
            *words,
            "predicted",
            "measured",
            "above",
            "cells",
            "messages",
            "rest",
            "x chain",
            "x uniform",
            "x sorted",
            "of bound",
            "waited",
        ),
        left=words,
        title=title,
    )
    rows: list[dict[str, Any]] = []
    for group in cases(options):
        step_ms: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as cache:
            for case in group:
                measured = measure(case, options.steps, Path(cache))
                step_ms[case.planner] = measured.step_ms
                table.add_row(*cells(case, measured, step_ms))
                rows.append({**asdict(case), **asdict(measured), "load": os.getloadavg()[0]})
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=2))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
