"""Runs a job's script up to ``Trainer.fit``, for whoever wants the job and no training."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from contextvars import ContextVar

from resilient.runtime.job import Job

_wanted: ContextVar[bool] = ContextVar("job_wanted", default=False)


class _Reached(BaseException):
    """Ends the script; no ``Exception``, which the script might catch."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job = job


def job_of(script: str, arguments: Sequence[str]) -> Job:
    """Run a script as ``python SCRIPT ARGUMENTS`` would, and return the job it wants to train.

    Args:
        script: Path of the script.
        arguments: Its own.

    Raises:
        ValueError: It ended without training.
        Exception: What the script raised.
    """
    before = sys.argv, sys.path
    token = _wanted.set(True)
    sys.argv, sys.path = [script, *arguments], [os.path.dirname(os.path.abspath(script)), *sys.path[1:]]
    try:
        runpy.run_path(script, run_name="__main__")
    except _Reached as reached:
        return reached.job
    finally:
        sys.argv, sys.path = before
        _wanted.reset(token)
    raise ValueError(f"script must call Trainer.fit, got {script}, which ended without it; check its arguments")


def hand_over(job: Job) -> None:
    """Give the job to :func:`job_of`, if that is what runs the script; called by ``Trainer.fit`` first of all."""
    if _wanted.get():
        raise _Reached(job)
