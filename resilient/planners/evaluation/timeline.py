"""Times tasks that wait for each other on rows that run one task at a time, in a fixed order.

:mod:`resilient.templates.schedules.simulator` times the schedule of one pipeline, with messages that share links. Here
a task may wait for any others, of all pipelines: a language model's microbatch for those of several encoders that its
samples were in, wherever these are, an encoder's backward for the microbatches that its samples went to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.templates.common.arrays import Ints
from resilient.templates.common.compiled import compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class Tasks:
    """Tasks of rows, and which of them wait for which.

    Args:
        row: Of each task, ``[num_tasks]``. A row's tasks run in the order they are in here.
        length_ns: How long each takes.
        sources: Of the tasks that others wait for, ``[num_waits]``.
        targets: The tasks that wait.
        delays_ns: How long after the source's end the target may start: the message between them.
    """

    row: Ints
    length_ns: Ints
    sources: Ints
    targets: Ints
    delays_ns: Ints


def end_times(tasks: Tasks) -> Ints:
    """Return when each task ends, in ns after the first start.

    Args:
        tasks: What to run. Nothing contends for the network.

    Raises:
        ValueError: Tasks wait for each other in a circle.
    """
    num_tasks = len(tasks.row)
    if not num_tasks:
        return np.zeros(0, np.int64)
    by_row = np.argsort(tasks.row, kind="stable")
    by_target = np.argsort(tasks.targets, kind="stable")
    first_wait = np.searchsorted(tasks.targets[by_target], np.arange(num_tasks + 1))
    first_task = np.searchsorted(tasks.row[by_row], np.arange(int(tasks.row.max()) + 2))
    ends = np.full(num_tasks, -1, np.int64)
    compiled(_run)(
        by_row,
        first_task,
        tasks.length_ns,
        first_wait,
        np.ascontiguousarray(tasks.sources[by_target]),
        np.ascontiguousarray(tasks.delays_ns[by_target]),
        ends,
    )
    if ends.min() < 0:
        stuck = np.unique(tasks.row[ends < 0])
        raise ArgumentError(
            "tasks",
            "not wait for each other in a circle",
            f"one over rows {stuck.tolist()}",
            "let rows run what others wait for first",
        )
    return ends


def _run(
    by_row: npt.NDArray[np.intp],
    first_task: Ints,
    length_ns: Ints,
    first_wait: Ints,
    sources: Ints,
    delays_ns: Ints,
    ends: Ints,
) -> None:
    """Let each row in turn go on until it has to wait for a task that was not run yet."""
    num_rows = len(first_task) - 1
    at = first_task[:-1].copy()
    clocks = np.zeros(num_rows, np.int64)
    progress = True
    while progress:
        progress = False
        for row in range(num_rows):
            while at[row] < first_task[row + 1]:
                task = by_row[at[row]]
                start = clocks[row]
                ready = True
                for wait in range(first_wait[task], first_wait[task + 1]):
                    if ends[sources[wait]] < 0:
                        ready = False
                        break
                    start = max(start, ends[sources[wait]] + delays_ns[wait])
                if not ready:
                    break
                clocks[row] = start + length_ns[task]
                ends[task] = clocks[row]
                at[row] += 1
                progress = True
