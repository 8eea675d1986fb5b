"""Moments of a step, and of the beginning of a generation, in which a failure can be caused."""

from __future__ import annotations

from resilient.errors import ArgumentError

UNIT_PHASES = ("forward", "send", "backward", "part", "weight", "return")
"""What a worker does for a unit in a step: computes a cell, sends on what it made, differentiates it, or one more part
of it, or, apart from that, its weights, and returns gradients to who made what came in. Of chains only without unit."""

PHASES = (*UNIT_PHASES, "gather", "reduce", "prepare", "commit", "regroup", "copy", "assign")
"""The others: a layer of a sharded stage is gathered, gradients are summed, the barrier is entered, the step is
applied; and in a generation that begins, groups are made, states are copied, the first steps' assignments are
shared."""


def check_phase(phase: str) -> None:
    """Check the phase of a failure to cause.

    Raises:
        ArgumentError: There is none of this name.
    """
    unit, dot, rest = str(phase).rpartition(".")
    if bool(unit) != bool(dot) or rest not in (UNIT_PHASES if unit else PHASES):
        fix = f"choose one; of one unit, as in vision.forward: {', '.join(UNIT_PHASES)}"
        raise ArgumentError("phase", f"be one of {', '.join(PHASES)}", repr(phase), fix)
