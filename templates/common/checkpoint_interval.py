"""How often a checkpoint pays: what one costs against the work that a loss undoes since the last one."""

from __future__ import annotations

import math


def checkpoint_interval_s(cost_s: float, risk_s: float) -> float:
    """Return the time of training between two checkpoints with which least time is lost.

    Args:
        cost_s: How long saving one holds up the training.
        risk_s: Expected time between two losses that go back to a checkpoint.

    Source: Young, A first order approximation to the optimum checkpoint interval (CACM 17(9), 1974): sqrt(2 C M);
        Daly, A higher order estimate of the optimum checkpoint interval (FGCS 22, 2006), equation 37: its next terms,
        and M from C = 2 M on.
    """
    if math.isinf(risk_s):
        return math.inf
    part = cost_s / (2 * risk_s)
    if part >= 1:
        return risk_s
    return math.sqrt(2 * cost_s * risk_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def checkpoint_steps(cost_s: float, risk_s: float, step_s: float) -> int | None:
    """Return the steps between two checkpoints with which least time is lost; None for no checkpoints at all.

    Args:
        cost_s: As for :func:`checkpoint_interval_s`.
        risk_s: Likewise.
        step_s: Time of a step.
    """
    interval_s = checkpoint_interval_s(cost_s, risk_s)
    return None if math.isinf(interval_s) else max(1, round(interval_s / step_s))
