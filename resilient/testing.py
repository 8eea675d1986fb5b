"""What users need to test jobs of their own: train in this process, or on simulated nodes of which some fail.

On emulated devices (:func:`emulated`) many of them fit on few cores, for tests of planners and schedules.

    def test_my_job_survives_the_loss_of_a_node(tmp_path):
        run = run_job("train.py", "--steps", "20", directory=tmp_path, nodes=4,
                      failures=[fail_at(step=5, phase="backward", node=1)])
        assert run.exit_code == 0, run.reason
        assert [fired["node"] for fired in run.failures] == [1]

Must not import torch: that is the jobs' own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.agent.launch import Launcher
from resilient.agent.launch_options import LaunchOptions
from resilient.emulation.unit import CostCurve, EmulatedUnit
from resilient.errors import ArgumentError
from resilient.observability.event_log import loss_of, read_events, steps_of
from resilient.observability.run_report import build_run_report
from resilient.protocol.messages import Injection
from resilient.protocol.phases import check_phase

__all__ = ["CostCurve", "EmulatedUnit", "JobRun", "emulated", "fail_at", "run_job", "train_here"]

if TYPE_CHECKING:
    from resilient.emulation.dataset import EmulatedDataset
    from resilient.emulation.model import EmulatedModel
    from resilient.trainer import FitResult, Trainer


@dataclass(frozen=True)
class JobRun:
    """A run that has ended, read from its folder.

    Args:
        directory: Folder of the run.
        exit_code: That of ``resilient run``: 0 done, 1 failed, 3 stopped with a checkpoint, 4 state lost, 130
            interrupted.
    """

    directory: Path
    exit_code: int

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """All of ``events.jsonl``, in order."""
        return read_events(self.directory / "events.jsonl")

    @cached_property
    def report(self) -> dict[str, Any]:
        """What ``report.json`` says."""
        return build_run_report(self.events)

    @cached_property
    def losses(self) -> dict[int, float]:
        """Step -> loss, of all committed steps; NaN where it is not finite."""
        return {number: loss_of(step) for number, step in steps_of(self.events).items()}

    @property
    def reason(self) -> str:
        """Why the job ended, in words."""
        return self.report["exit"]["reason"]

    @property
    def failures(self) -> list[dict[str, Any]]:
        """The failures that were caused, as the dying processes wrote them down: node, step, phase."""
        path = self.directory / "injections.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fail_at(
    *, step: int, phase: str | None = None, node: int = 0, worker_only: bool = False, worker: int = 0
) -> Injection:
    """Describe a failure for :func:`run_job` to cause, with SIGKILL.

    Args:
        step: In which step, 1 for the first.
        phase: As the node enters this phase of the step: forward, send, backward, part (of a cell's backward, after the
            first), weight (its backward for the weights, apart), return, gather (of a layer of a sharded stage),
            scatter (of its gradient), exchange (of tensor-parallel devices' tokens), reduce, prepare or commit; all up
            to return also of one unit, as in ``vision.forward``. Save, of the checkpoint of this step. Or, of a
            recovery in it, regroup, connect, copy, verify or assign. None for as the step begins.
        node: Which node: they are numbered from 0.
        worker_only: Kill only one worker of the node, as it gets there; its agent survives.
        worker: Which one that is: they are numbered from 0.

    Raises:
        ArgumentError: An argument cannot be.
    """
    _check_count("step", step, 1, "steps are numbered from 1")
    _check_count("node", node, 0, "nodes are numbered from 0")
    _check_count("worker", worker, 0, "workers are numbered from 0")
    if type(worker_only) is not bool:
        raise ArgumentError("worker_only", "be True or False", repr(worker_only), "leave it out to kill the whole node")
    if phase is not None:
        check_phase(phase)
    return Injection(node=node, at_step=step, at_phase=phase, worker_only=worker_only, worker=worker)


def run_job(
    script: Path | str,
    *arguments: str,
    directory: Path | str,
    nodes: int,
    workers_per_node: int = 1,
    shard: str = "off",
    tp: str = "1",
    network_gbit_s: float | None = None,
    failures: Sequence[Injection] = (),
    resume: Path | str | None = None,
    heartbeat_s: float = 5.0,
    wait_for_nodes_s: float = 10.0,
    act: Callable[[Launcher, dict[str, Any]], None] | None = None,
) -> JobRun:
    """Run a job to its end as ``resilient run`` does: real processes, one for each worker of each simulated node.

    Call this from the main thread. The membership checks itself after everything that happens.

    Args:
        script: The job's script.
        arguments: The script's own.
        directory: Folder of the run; must not hold another.
        nodes: Simulated nodes to start.
        workers_per_node: Workers of each.
        shard: Whether they divide the states of their stage: ``off``, ``auto`` or ``on``.
        tp: How many of them share each microbatch: a number or ``auto``.
        network_gbit_s: Between two nodes, for each worker, as plans count it; None where it is too fast to matter.
        failures: What to kill, and when (:func:`fail_at`).
        resume: A checkpoint folder to begin from.
        heartbeat_s: Seconds of silence after which a node counts as lost.
        wait_for_nodes_s: Seconds in which others may join when nodes went away and too few are left; 0 for stopping at
            once, as a job does in any case that begins with too few.
        act: Called with every event while the job runs, to add nodes, remove or interrupt; it must not block.

    Raises:
        ValueError: The job cannot be run so.
        CheckpointError: ``resume`` cannot be read.
    """
    _check_count("nodes", nodes, 1, "a job has one at least")
    _check_count("workers_per_node", workers_per_node, 1, "a node has one at least")
    _check_all("arguments", arguments, str, "of text", "write numbers as str(20)")
    _check_all("failures", failures, Injection, "of fail_at", "write [fail_at(step=5)]")
    options = LaunchOptions(
        script=str(script),
        arguments=arguments,
        num_nodes=nodes,
        workers_per_node=workers_per_node,
        shard=shard,
        tp=tp,
        network_gbit_s=network_gbit_s,
        run_directory=str(directory),
        resume=None if resume is None else str(resume),
        heartbeat_s=heartbeat_s,
        wait_for_nodes_s=wait_for_nodes_s,
        injections=tuple(failures),
        validate=True,
    )
    launcher = Launcher(options)
    if act is not None:
        launcher.subscribe(lambda event: act(launcher, event))
    return JobRun(Path(directory), launcher.run())


def _check_count(name: str, value: object, least: int, fix: str) -> None:
    if type(value) is not int or value < least:
        raise ArgumentError(name, f"be a whole number >= {least}", repr(value), fix)


def _check_all(name: str, values: object, kind: type, what: str, fix: str) -> None:
    if not isinstance(values, list | tuple) or not all(isinstance(each, kind) for each in values):
        raise ArgumentError(name, f"be a sequence {what}", repr(values), fix)


def train_here(trainer: Trainer, num_steps: int, *, directory: Path | str) -> tuple[FitResult, dict[int, float]]:
    """Train a job in this process, as its script run by itself does.

    Args:
        trainer: The job; not trained yet.
        num_steps: Steps to train.
        directory: Folder for its checkpoints.

    Returns:
        What ``fit`` does, and the loss of every step.

    Raises:
        Exception: What ``fit`` does.
    """
    with _environment(RESILIENT_RUN_DIR=str(directory), RESILIENT_AGENT=None, RESILIENT_TRACE=None):
        result = trainer.fit(num_steps)
    return result, trainer.losses


def emulated(units: Sequence[EmulatedUnit], mix: str = "mixed") -> tuple[EmulatedModel, EmulatedDataset]:
    """Return a model whose layers wait instead of computing, and samples for it: a trainer takes both.

    Processes, messages, schedules, failures and results are real.

    Args:
        units: In execution order: encoders, then the language model, which reads them all. Each layer waits as long as
            its unit's :class:`CostCurve` says.
        mix: How long samples are: ``short`` (all alike), ``mixed``, or ``heavy`` (few hold most of the tokens).

    Raises:
        ArgumentError: There are no units, two of one name, or no such mix.
    """
    from resilient.emulation.dataset import EmulatedDataset
    from resilient.emulation.model import EmulatedModel

    return EmulatedModel(units), EmulatedDataset(units, mix)


@contextmanager
def _environment(**wanted: str | None) -> Iterator[None]:
    """Have these environment variables inside; None for not at all."""
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
