"""All microbatches of all replicas as one list: what planners spread samples over that balance both at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from resilient.planners.planner import Replica
from resilient.templates.common.arrays import Floats, Ints


def slots(replicas: Sequence[Replica]) -> tuple[Ints, Ints, Floats]:
    """Return the replica, the microbatch and the speed of each slot; all ``[num_slots]``.

    A replica's microbatches share its speed: with work in proportion to these, replicas are done at the same time, and
    so is each microbatch of a replica.
    """
    counts = np.array([each.num_microbatches for each in replicas], dtype=np.int64)
    replica = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    speeds = np.array([each.speed for each in replicas], dtype=np.float64) / counts
    return replica, np.arange(len(replica), dtype=np.int64) - first, speeds[replica]
