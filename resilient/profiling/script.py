"""Describes the job of a script without training it: runs the script up to ``Trainer.fit``.

Whoever wants a description puts a place for it (:func:`job_of`); ``fit`` looks whether there is one, leaves the job
there, and ends the script as ``sys.exit(0)`` would, for a script cannot go on without what ``fit`` returns.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from contextvars import ContextVar

from resilient.common.sources import count_as_main
from resilient.protocol.forkserver import seed_script
from resilient.runtime.job import Job

_described: ContextVar[list[Job] | None] = ContextVar("described_jobs", default=None)
"""Where jobs are to be left instead of trained; None, as usual, where they are to be trained."""


def job_of(script: str, arguments: Sequence[str]) -> Job:
    """Run a script as a worker of ``resilient run`` would, and return the job it wants to train.

    From then on this process's sources are those of a worker: what is kept by them is what workers find.

    Args:
        script: Path of the script.
        arguments: Its own.

    Raises:
        ValueError: It ended without training, by itself or by ``sys.exit(0)``.
        SystemExit: It ended with an exit code of its own that says that something is wrong, before training.
        Exception: What the script raised.
    """
    before = sys.argv, sys.path
    jobs: list[Job] = []
    seed_script()  # as workers do
    token = _described.set(jobs)
    sys.argv, sys.path = [script, *arguments], [os.path.dirname(os.path.abspath(script)), *sys.path[1:]]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if not jobs and end.code:  # it has said what is wrong, of its arguments, say
            raise
    finally:
        sys.argv, sys.path = before
        _described.reset(token)
    if not jobs:
        raise ValueError(f"script must call Trainer.fit, got {script}, which ended without it; check its arguments")
    count_as_main(script)
    return jobs[0]


def leave_description(job: Job) -> bool:
    """Leave a job for whoever wants it described and not trained; return whether anybody does.

    Called by ``Trainer.fit`` before anything is connected or written.
    """
    jobs = _described.get()
    if jobs is None:
        return False
    jobs.append(job)
    return True
