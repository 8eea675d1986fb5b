"""Finds out why a step's loss or gradient is not finite: all ranks repeat the step, and watch.

The step is a function of the states and of its number, so it comes out as before. Nothing is raised before all ranks
know who has found the first value that is not finite: that one alone speaks, and no connection breaks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from resilient.comm import Communicator
from resilient.errors import NonFiniteError
from resilient.pipeline.finite_watch import FiniteWatch
from resilient.pipeline.step_work import StepWork
from resilient.protocol.messages import StepOutcome
from resilient.runtime.batches import Batches
from resilient.runtime.install import Session
from resilient.runtime.job import Job
from resilient.state.skipped import MOST_IN_A_ROW


def find_nonfinite(
    session: Session,
    work: StepWork,
    outcome: StepOutcome,
    job: Job,
    batches: Batches,
) -> NonFiniteError | None:
    """Repeat a step that is not to be committed; all ranks call this.

    Args:
        session: The generation.
        work: The step's.
        outcome: Of the step.
        job: What is trained, on how many samples.
        batches: Name its samples.

    Returns:
        The error, on the one rank that is to raise it; None on all others.

    Raises:
        CommunicationError: A peer is gone; the step is to be redone.
    """
    model = job.model
    watch = FiniteWatch(model)
    session.executor.run(replace(work, watch=watch))
    end = len(model.layers)
    # first come the layers, microbatch by microbatch, then the gradients, from the last layer to the first
    after_forward = end * job.global_batch
    if watch.found is not None:
        key = watch.found.layer_index * job.global_batch + watch.found.position
        unit = model.layers[watch.found.layer_index].unit
        cell = session.steps.cell_at(outcome.step, unit, watch.found.position)
        what = f"{watch.found.what}, for {batches.told(outcome.step, cell)}"
    elif (layer_index := session.gradient_sync.last_nonfinite()) is not None:
        key = after_forward + end - 1 - layer_index
        what = f"the gradient of layer {model.layers[layer_index].name!r} is not finite, though the loss is"
    else:
        key = after_forward + end
        what = "repeated, it had, so the device computes wrongly, or the data change"
    if _smallest(session.comm, key) != session.comm.rank:
        return None
    is_last_straw = outcome.skipped.in_a_row >= MOST_IN_A_ROW
    whose = f"one of {MOST_IN_A_ROW} steps in a row" if is_last_straw else "a step"
    fix = "mend that" if is_last_straw else "mend that, or leave such steps out with Trainer(on_nonfinite='skip')"
    got = f"loss {outcome.loss:g} and gradient norm {outcome.grad_norm:g}"
    return NonFiniteError(f"{whose} must have a finite loss and gradient, got {got}: {what}; {fix}", step=outcome.step)


def _smallest(comm: Communicator, key: int) -> int:
    """Return the first of the ranks whose key is the smallest."""
    keys = torch.zeros(comm.size, dtype=torch.float64)
    keys[comm.rank] = key
    comm.all_reduce(keys, tuple(range(comm.size))).wait()
    return int(keys.argmin())
