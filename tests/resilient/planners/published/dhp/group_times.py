"""What groups take, however they were chosen."""

from __future__ import annotations

import numpy as np

from resilient.planners.published.dhp.group_kernels import times_of
from resilient.planners.published.dhp.groups import Ranks, Sequences
from resilient.templates.common.arrays import Floats, Ints


def group_ms(sequences: Sequences, bins: Ints, num_bins: int, ranks: Ranks) -> Floats:
    """Return the time of each group at each degree. [num_bins, num_ranks]"""
    work = np.stack((sequences.attention_ms, sequences.other_ms, sequences.tokens))
    return times_of(work, bins, num_bins, ranks.ring_ms, ranks.fixed_ms + ranks.start_ms)
