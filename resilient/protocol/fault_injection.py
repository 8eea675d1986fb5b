"""Failures caused on purpose: SIGKILL of this worker or its whole node when a chosen moment has come.

Owns what happens in the worker; the agent handles injections that are due at once.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resilient.protocol.messages import Injection


def record_of(injection: Injection, step: int | None, phase: str | None) -> dict[str, Any]:
    """Return what records tell of a failure in a step and phase: with its ``worker``, None where the node is killed."""
    worker = injection.worker if injection.worker_only else None
    return {
        "node": injection.node,
        "phase": phase,
        "step": step,
        "worker_only": injection.worker_only,
        "worker": worker,
    }


@contextmanager
def recorded(injection: Injection, run_directory: str, step: int | None, phase: str | None) -> Iterator[None]:
    """Write down a failure just before it is caused inside: afterwards nobody is there to tell when it was.

    Nobody else writes meanwhile: other workers of a node that come to the moment, too, die before they say so.
    """
    line = {"time": time.time(), **record_of(injection, step, phase)}
    with (Path(run_directory) / "injections.jsonl").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(line) + "\n")
        file.flush()
        yield


def strike(injection: Injection) -> None:
    """Die as told: the whole process group of the node (its agent and all workers), or this process alone."""
    if injection.worker_only:
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class Faults:
    """The injections armed in this worker.

    Args:
        run_directory: Where they are recorded.
        kill: What to do when one is due; replaced in tests.
    """

    def __init__(self, run_directory: str, kill: Callable[[Injection], None] = strike) -> None:
        self._run_directory = run_directory
        self._kill = kill
        self._armed: list[Injection] = []

    def arm(self, injection: Injection) -> None:
        """Wait for the injection's moment; any thread may call this."""
        self._armed.append(injection)

    def reach(self, phase: str, step: int, unit: str = "") -> None:
        """Tell that a phase of a step begins, for a unit or for all; phase "step" stands for the step as a whole."""
        names = (phase, f"{unit}.{phase}")
        for injection in tuple(self._armed):
            due = injection.at_step is None or injection.at_step == step
            if due and (injection.at_phase or "step") in names:
                self._armed.remove(injection)
                with recorded(injection, self._run_directory, step, injection.at_phase):
                    self._kill(injection)
