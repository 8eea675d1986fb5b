"""Steps of chains of emulated workers beside what the simulator says of them.

    python benchmarks/parts/emulated.py [--steps 12] [--scale 4] [--mix heavy]

Workers sleep instead of computing, so two cores hold 16 of them. Predicted is the plan's schedule with the layers'
curves for each step's own samples alone; measured is from commit to commit, so it has messages, loading, gradient
norms, the optimizer and the barriers, too. The overhead is what all that adds to the median step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console

from resilient.agent.launch import launch
from resilient.agent.launch_options import LaunchOptions
from resilient.cli.shared.printing import plain_table
from resilient.data.sampler import StepSampler
from resilient.emulation.dataset import EmulatedDataset
from resilient.emulation.unit import EmulatedUnit
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate

JOBS = Path(__file__).parents[1] / "jobs"
sys.path.insert(0, str(JOBS))
from emulated import units  # noqa: E402

WARM_UP_STEPS = 2
CELLS_PER_WORKER = 3


def predicted_ms(
    parts: Sequence[EmulatedUnit], mix: str, pipeline: dict[str, Any], kind: ScheduleKind, step: int
) -> float:
    """Return what a step of one pipeline takes by its layers' curves: a sample is a microbatch."""
    dataset = EmulatedDataset(parts, mix)
    number = pipeline["num_microbatches"]
    order = StepSampler(num_samples=len(dataset), global_batch=number, seed=0).indices(step)
    layers = [part for part in parts for _ in range(part.num_layers)]
    shape = (len(pipeline["stages"]), number)
    forward, inputs, weights = (np.zeros(shape) for _ in range(3))
    for cell, sample in enumerate(order.tolist()):
        lengths = dataset.lengths(sample)
        for row, stage in enumerate(pipeline["stages"]):
            for index in range(stage["first_layer"], stage["end_layer"]):
                cost = layers[index].cost
                time_ms = cost.forward_ms(lengths[layers[index].name])
                forward[row, cell] += time_ms
                inputs[row, cell] += time_ms * cost.backward_input if index else 0.0
                weights[row, cell] += time_ms * cost.backward_weight
    costs = ActionCosts(forward_ms=forward, backward_input_ms=inputs, backward_weight_ms=weights)
    return simulate(generate(kind, len(pipeline["stages"]), number), costs).iteration_ms


def compare(num_workers: int, kind: ScheduleKind, options: argparse.Namespace) -> list[str]:
    """Run one job; return the cells of its row."""
    num_layers = 2 * num_workers
    events: list[dict[str, Any]] = []
    arguments = {
        "steps": options.steps,
        "layers": num_layers,
        "scale": options.scale,
        "mix": options.mix,
        "batch": CELLS_PER_WORKER * num_workers,
        "schedule": kind.value,
        "min-pipeline-nodes": num_workers,
    }
    with tempfile.TemporaryDirectory() as folder:
        launched = LaunchOptions(
            script=str(JOBS / "emulated.py"),
            arguments=tuple(text for name, value in arguments.items() for text in (f"--{name}", str(value))),
            num_nodes=num_workers,
            run_directory=folder,
            heartbeat_s=60.0,
        )
        if exit_code := launch(launched, events.append):
            raise SystemExit(f"the job ended with exit code {exit_code}: {events[-1]}")
    (generation,) = [event for event in events if event["kind"] == "generation"]
    (pipeline,) = generation["pipelines"]
    steps = [event for event in events if event["kind"] == "step"]
    parts = units(num_layers, options.scale)
    measured, predicted = zip(
        *(
            (1e3 * (after["time"] - before["time"]), predicted_ms(parts, options.mix, pipeline, kind, after["step"]))
            for before, after in pairwise(steps[WARM_UP_STEPS:])
        ),
        strict=True,
    )
    ratio = median(after / before for before, after in zip(predicted, measured, strict=True))
    return [f"{median(predicted):.1f}", f"{median(measured):.1f}", f"{100 * (ratio - 1):+.1f} %"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--mix", default="heavy")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    options = parser.parse_args()
    title = f"step time, ms: medians of {options.steps - WARM_UP_STEPS - 1} steps"
    table = plain_table("workers", "schedule", "predicted", "measured", "overhead", left=("schedule",), title=title)
    for num_workers in options.workers:
        for kind in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1):
            table.add_row(str(num_workers), kind.value, *compare(num_workers, kind, options))
    Console().print(table)


if __name__ == "__main__":
    main()
