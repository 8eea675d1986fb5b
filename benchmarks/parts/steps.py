"""Steps of a job without failures, timed by its events."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from resilient.agent.launch import launch
from resilient.agent.launch_options import LaunchOptions

JOBS = Path(__file__).parents[1] / "jobs"
WARM_UP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Steps:
    """A run.

    Args:
        step_ms: Of each step after the warm-up.
        generation: The event of the only generation.
        devices: What its workers computed on.
    """

    step_ms: list[float]
    generation: dict[str, Any]
    devices: list[str]


def run_steps(
    script: str,
    arguments: Mapping[str, object],
    *,
    num_nodes: int,
    workers_per_node: int = 1,
    shard: str = "off",
    tp: str = "1",
    tp_chunks: int | None = None,
) -> Steps:
    """Run a job of ``jobs/`` under the launcher.

    Args:
        script: Its file.
        arguments: Its options and their values; one without a value has None.
        num_nodes: Simulated nodes.
        workers_per_node: Workers of each.
        shard: Whether they divide the states of their stage.
        tp: How many of them compute each layer together.
        tp_chunks: In how many chunks these exchange tokens; None for what the script says.

    Raises:
        RuntimeError: The job did not end well.
    """
    events: list[dict[str, Any]] = []
    words = [str(part) for pair in arguments.items() for part in pair if part is not None]
    with tempfile.TemporaryDirectory() as folder:
        options = LaunchOptions(
            script=str(JOBS / script),
            arguments=tuple(words),
            num_nodes=num_nodes,
            workers_per_node=workers_per_node,
            shard=shard,
            tp=tp,
            tp_chunks=tp_chunks,
            run_directory=folder,
        )
        exit_code = launch(options, events.append)
    if exit_code:
        raise RuntimeError(f"the job ended with exit code {exit_code}: {events[-1]}")
    (generation,) = [event for event in events if event["kind"] == "generation"]
    commits = [event["time"] for event in events if event["kind"] == "step"]
    return Steps(
        step_ms=[1000 * (after - before) for before, after in pairwise(commits)][WARM_UP_STEPS:],
        generation=generation,
        devices=[event["device"] for event in events if event["kind"] == "node_ready"],
    )
