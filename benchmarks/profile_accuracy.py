"""Step times predicted from measured profiles against those of the runtime.

    python benchmarks/profile_accuracy.py [--steps 25]

Each job is profiled, then run; both on this machine, one after the other. Predicted is 1F1B of the plan the run got,
simulated with the profile's times; the planner's objective, an upper bound of that, stands beside it. Neither knows of
gradient sums, optimizer and loading. Workers must not share cores: no job here has more than two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from resilient.agent.launch import LaunchOptions, launch
from resilient.demo import example_script
from resilient.profile_cache import fresh_profile
from resilient.script import job_of
from resilient.templates.profile import ModelProfile
from resilient.templates.simulate import simulate_template
from resilient.templates.template import PipelineTemplate, StageSpec

HERE = Path(__file__).parent
WARM_UP_STEPS = 5


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


MLP = {"name": "MLP, 9.7 M", "script": str(HERE / "jobs" / "mlp.py"), "options": ("--batch", "512")}
DIGITS = {"name": "ViT + Llama, 0.7 M", "script": str(example_script()), "options": ("--microbatch", "8")}
WORLDS = ((1, 1), (1, 2), (2, 1))
CASES = tuple(
    Case(**job, num_pipelines=num_pipelines, num_stages=num_stages)
    for job in (MLP, DIGITS)
    for num_pipelines, num_stages in WORLDS
)


def measured_ms(case: Case, num_steps: int) -> tuple[float, dict[str, Any]]:
    """Run the job; return the median step in ms and the event of its only generation."""
    events: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        options = LaunchOptions(
            script=case.script,
            arguments=(*case.arguments, "--steps", str(num_steps)),
            num_nodes=case.num_pipelines * case.num_stages,
            run_directory=folder,
        )
        exit_code = launch(options, events.append)
    if exit_code:
        raise SystemExit(f"the job ended with exit code {exit_code}: {events[-1]}")
    (generation,) = [event for event in events if event["kind"] == "generation"]
    commits = [event["time"] for event in events if event["kind"] == "step"]
    steps = [1000 * (after - before) for before, after in pairwise(commits)]
    return statistics.median(steps[WARM_UP_STEPS:]), generation


def predicted_ms(profile: ModelProfile, generation: dict[str, Any]) -> tuple[float, float]:
    """Return the step's time as simulated, and by the planner's objective: those of the slowest pipeline."""
    simulated: list[float] = []
    objective: list[float] = []
    for pipeline in generation["pipelines"]:
        stages = [
            _stage(profile, index, stage["first_layer"], stage["end_layer"])
            for index, stage in enumerate(pipeline["stages"])
        ]
        template = PipelineTemplate(num_nodes=len(stages), stages=tuple(stages))
        simulated.append(simulate_template(template, pipeline["num_microbatches"]).iteration_ms)
        objective.append(template.iteration_ms(pipeline["num_microbatches"]))
    return max(simulated), max(objective)


def _stage(profile: ModelProfile, index: int, first_layer: int, end_layer: int) -> StageSpec:
    layers = profile.layers[first_layer:end_layer]
    return StageSpec(
        first_layer=first_layer,
        end_layer=end_layer,
        node_index=index,
        forward_ms=sum(layer.costs[0].forward_ms for layer in layers),
        backward_ms=sum(layer.backward_ms() for layer in layers),
    )


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title=f"step time, median of {options.steps} steps")
    for column in (
        "job",
        "pipelines x stages",
        "objective, ms",
        "simulated, ms",
        "measured, ms",
        "simulated / measured",
    ):
        table.add_column(column, justify="right" if column != "job" else "left")
    for case in CASES:
        profile, _ = fresh_profile(job_of(case.script, case.arguments), lambda _: None)
        actual_ms, generation = measured_ms(case, options.steps)
        simulated_ms, objective_ms = predicted_ms(profile, generation)
        table.add_row(
            case.name,
            f"{case.num_pipelines} x {case.num_stages}",
            f"{objective_ms:.1f}",
            f"{simulated_ms:.1f}",
            f"{actual_ms:.1f}",
            f"{simulated_ms / actual_ms:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
