"""Moments of a step, and of the beginning of a generation, in which a failure can be caused."""

from __future__ import annotations

from resilient.errors import ArgumentError

UNIT_PHASES = ("forward", "send", "backward", "part", "weight", "return")
"""What a worker does for a unit in a step: computes a cell, sends on what it made, differentiates it, or one more part
of it, or, apart from that, its weights, and returns gradients to who made what came in. Of chains only without unit."""

IN_STEP = (*UNIT_PHASES, "gather", "scatter", "exchange", "reduce", "prepare", "commit", "save")
"""All of a step. The others: a layer of a sharded stage is gathered, what its devices have of a gradient is summed into
their parts, tensor-parallel devices exchange tokens, gradients are summed over pipelines, the barrier is entered, the
step is applied, a part of a checkpoint is written."""

AT_BEGINNING = ("regroup", "connect", "copy", "verify", "assign")
"""Those of a generation that begins: it is entered, groups are made, states are copied, a copy that has come is
verified, the first steps' assignments are shared."""

PHASES = (*IN_STEP, *AT_BEGINNING)


def check_phase(phase: str) -> None:
    """Check the phase of a failure to cause.

    Raises:
        ArgumentError: There is none of this name.
    """
    unit, dot, rest = str(phase).rpartition(".")
    if bool(unit) != bool(dot) or rest not in (UNIT_PHASES if unit else PHASES):
        fix = f"choose one; of one unit, as in vision.forward: {', '.join(UNIT_PHASES)}"
        raise ArgumentError("phase", f"be one of {', '.join(PHASES)}", repr(phase), fix)
