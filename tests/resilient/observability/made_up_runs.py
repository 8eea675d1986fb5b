"""Hand-made event streams with round numbers, for the tests of what the person sees."""

from __future__ import annotations

import math
from typing import Any

START = 1_700_000_000.0
LAYERS = ["vision.embed", "vision.block.0", "projector", "llm.embed", "llm.block.0", "llm.block.1", "llm.head"]


class Run:
    """Builds events.jsonl line by line; times are given in ms after the start."""

    def __init__(self, num_steps: int = 4, num_nodes: int = 3) -> None:
        self.events: list[dict[str, Any]] = []
        self.current = 0
        self.add(0, "job", script="digits_vlm.py", arguments=["--seed", "0"], num_nodes=num_nodes, workers_per_node=1,
                 max_failures=1, min_pipeline_nodes=1, global_batch=64, microbatch=4, num_steps=num_steps,
                 num_layers=len(LAYERS), layers=LAYERS)  # fmt: skip
        for node in range(num_nodes):
            self.add(0, "node_connected", node=node, host=f"host-{node}", pid=100 + node)
            self.add(0, "node_ready", node=node, pids=[200 + node], device="cpu")

    def add(self, at_ms: float, kind: str, **fields: Any) -> None:
        self.events.append({"time": START + at_ms / 1e3, "kind": kind, "generation": self.current, **fields})

    def generation(self, at_ms: float, number: int, cause: str, version: int, nodes: list[int], **fields: Any) -> None:
        self.current = number
        size = min(5, (len(nodes) + 1) // 2)
        groups = [nodes[first : first + size] for first in range(0, len(nodes), size)]
        self.add(at_ms, "generation", **{
            "cause": cause, "version": version, "roll_forward": False, "interrupted_step": version + 1, "lost_steps": 0,
            "nodes": nodes, "pipelines": [_pipeline(group, 16 // len(groups)) for group in groups], "transfers": 2,
            "standby": [], "pids": {f"{node}/0": 200 + node for node in nodes}, **fields,
        })  # fmt: skip

    def installed(self, regrouped_ms: float, installed_ms: float, node: int = 0, bytes_copied: int = 0) -> None:
        self.add(installed_ms, "installed", node=node, local_rank=0, started_at=START + regrouped_ms / 1e3,
                 regrouped_at=START + regrouped_ms / 1e3, installed_at=START + installed_ms / 1e3,
                 bytes_copied=bytes_copied)  # fmt: skip

    def step(self, at_ms: float, step: int, loss: float | None = None, generation: int | None = None) -> None:
        fields = {} if generation is None else {"generation": generation}
        if loss is not None and not math.isfinite(loss):
            self.add(at_ms, "step", step=step, loss=None, grad_norm=None, skipped=True, num_samples=64, step_ms=100.0,
                     learning_rate=3e-4, **fields)  # fmt: skip
            return
        self.add(at_ms, "step", step=step, loss=4.0 / step if loss is None else loss, grad_norm=1.0, num_samples=64,
                 step_ms=100.0, learning_rate=3e-4, **fields)  # fmt: skip

    def injected(self, at_ms: float, node: int) -> None:
        self.add(at_ms, "injected", node=node, phase="backward", step=None, worker_only=False, worker=None)

    def not_injected(
        self, at_ms: float, node: int, *, step: int | None = None, phase: str | None = None, worker: int | None = None
    ) -> None:
        self.add(
            at_ms, "not_injected", node=node, phase=phase, step=step, worker_only=worker is not None, worker=worker
        )

    def detected(self, at_ms: float, nodes: list[int], generation: int, cause: str = "node lost") -> None:
        self.add(at_ms, "detected", nodes=nodes, cause=cause, step=0, generation=generation)


def _pipeline(nodes: list[int], num_microbatches: int) -> dict[str, Any]:
    cuts = [round(index * len(LAYERS) / len(nodes)) for index in range(len(nodes) + 1)]
    stages = [
        {"node": node, "local_rank": 0, "first_layer": cuts[index], "end_layer": cuts[index + 1]}
        for index, node in enumerate(nodes)
    ]
    return {"nodes": nodes, "num_microbatches": num_microbatches, "stages": stages}


def failure_and_join(num_steps: int = 40) -> Run:
    """A run of 5 nodes: node 2 is killed in step 15, node 5 joins before step 23, and the job ends."""
    run = Run(num_steps=num_steps, num_nodes=5)
    run.generation(0, 1, "start", 0, [0, 1, 2, 3, 4])
    run.installed(20, 50)
    run.add(60, "output", text="held-out accuracy 0.10")
    for step in range(1, 15):
        run.step(100 * step, step)
    run.injected(1440, 2)
    run.detected(1442, [2], 2)
    run.add(1442, "node_lost", node=2, cause="node lost")
    run.generation(1460, 2, "failure", 14, [0, 1, 3, 4], lost_steps=1)
    run.installed(1500, 1570, bytes_copied=5_000_000)
    for step in range(15, 23):
        run.step(1570 + 120 * (step - 14), step)
    run.add(2500, "node_connected", node=5, host="host-5", pid=105)
    run.add(2520, "node_ready", node=5, pids=[205], device="cpu")
    run.add(2520, "boundary", joining=[5], leaving=[])
    run.generation(2540, 3, "join", 22, [0, 1, 3, 4, 5])
    run.installed(2560, 2590, node=5, bytes_copied=3_000_000)
    for step in range(23, num_steps + 1):
        run.step(2590 + 100 * (step - 22), step)
    run.add(2600 + 100 * (num_steps - 22), "note", name="accuracy", value=0.93)
    run.add(2600 + 100 * (num_steps - 22), "checkpoint", step=num_steps, path="checkpoints/step-00000040")
    run.add(2600 + 100 * (num_steps - 22), "finished", step=num_steps, path="checkpoints/step-00000040")
    return run


def fail_twice_with_late_steps(run: Run, *, suspected: bool) -> None:
    """Lose node 1, commit steps 3 and 4, lose node 2, of which is heard before the steps: their reporter was slow."""
    run.injected(240, 1)
    run.detected(250, [1], 2)
    run.add(250, "node_lost", node=1, cause="node lost")
    run.generation(260, 2, "failure", 2, [0, 2], lost_steps=1)
    run.installed(265, 270, node=0)
    run.injected(475, 2)
    run.detected(480, [] if suspected else [2], 3, cause="communication failed: peer closed")
    run.add(480, "node_lost", node=2, cause="heartbeat missed")
    run.step(370, 3)
    run.step(470, 4)
    run.generation(500, 3, "failure", 4, [0], lost_steps=1)
    run.installed(510, 530, node=0)
    run.step(630, 5)
