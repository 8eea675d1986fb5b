"""What is checked once, at the start of ``fit``, before anything is connected or written: what would train wrongly."""

from __future__ import annotations

from resilient.data.reader import Cell
from resilient.errors import ArgumentError
from resilient.runtime.batches import Batches, Read
from resilient.runtime.job import Job

_NUM_MICROBATCHES = 4


def check_trainable(job: Job) -> None:
    """Refuse a model of which nothing is trained.

    Raises:
        ArgumentError: All parameters are frozen, or there are none.
    """
    layouts = job.layouts().values()
    if any(layout.num_trainable for layout in layouts):
        return
    num_frozen = sum(entry.numel for layout in layouts for entry in layout.entries)
    got = f"{num_frozen} frozen ones" if num_frozen else "none at all"
    fix = "unfreeze a layer" if num_frozen else "give it layers that learn"
    raise ArgumentError("model", "have parameters that are trained", f"{got} in {len(layouts)} layers", fix)


def first_samples(job: Job) -> list[list[Read]]:
    """Read and check the samples of the first microbatches of the job's first step, a list for each.

    Raises:
        SampleError: One cannot be trained on, or all of them together show that they are not what the model wants.
    """
    batches = Batches(job)
    num_microbatches = min(_NUM_MICROBATCHES, job.global_batch // job.microbatch)
    read = [batches.samples(1, Cell.of_chain(position, job.microbatch)) for position in range(num_microbatches)]
    check = getattr(job.model, "check_first", None)
    if check is not None:
        check({batches.name(each.index): each.sample for microbatch in read for each in microbatch})
    return read
