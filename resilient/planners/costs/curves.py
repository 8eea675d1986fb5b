"""What layers take as functions of the lengths of the sequences that are packed in a microbatch.

A layer's time for one microbatch is ``attention * sum(x^2) + linear * sum(x) + fixed`` over the sequences x packed in
it: attention stays within a sequence, everything else sees tokens. A curve is no table: it holds for lengths beyond
those it was fitted to, too, where attention takes over, which no time or time per token kept from the border would
show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import Lengths
from resilient.templates.common.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Time in ms, or bytes, of one call on packed sequences.

    Args:
        attention: Per squared token.
        linear: Per token.
        fixed: Per call.
    """

    attention: float = 0.0
    linear: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        if not all(0 <= each < float("inf") for each in (self.attention, self.linear, self.fixed)):
            raise ArgumentError("coefficients", "be >= 0 and finite", self, "fit the curve again")

    def __add__(self, other: Curve) -> Curve:
        linear, fixed = self.linear + other.linear, self.fixed + other.fixed
        return Curve(attention=self.attention + other.attention, linear=linear, fixed=fixed)

    def __mul__(self, factor: float) -> Curve:
        return Curve(attention=self.attention * factor, linear=self.linear * factor, fixed=self.fixed * factor)

    def of(self, lengths: Lengths) -> Floats:
        """Return each sample's share, without the call's fixed time. [num_samples]"""
        return self.attention * lengths.squares + self.linear * lengths.tokens

    def call_ms(self, tokens: float, squares: float) -> float:
        """Return the time of one call on sequences of these sums; nothing to do takes no time."""
        return self.attention * squares + self.linear * tokens + self.fixed if tokens else 0.0

    @classmethod
    def fit(
        cls,
        tokens: npt.ArrayLike,
        times_ms: npt.ArrayLike,
        *,
        squares: npt.ArrayLike | None = None,
        relative_to: npt.ArrayLike | None = None,
        attention: bool = True,
    ) -> Curve:
        """Return the non-negative coefficients with the least relative error on measured calls.

        Args:
            tokens: Sums of the lengths, ``[num_points]``.
            times_ms: Measured times.
            squares: Sums of the squared lengths; left out where each call was on one sequence.
            relative_to: Times that errors are measured by; the measured ones where left out. What is the difference of
                two of them may be next to nothing, and is no measure.
            attention: Whether anything grows with the square. Gradients of parameters do not: what noise makes of it
                is small between the lengths and large beyond them.

        Raises:
            ValueError: Fewer than three lengths, or a length or time that is not positive and finite.
        """
        from scipy.optimize import nnls  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

        x, y = np.asarray(tokens, dtype=np.float64), np.asarray(times_ms, dtype=np.float64)
        scale = y if relative_to is None else np.asarray(relative_to, dtype=np.float64)
        right = x.shape == y.shape and all(((each > 0) & (each < np.inf)).all() for each in (x, scale))
        if not right or not np.isfinite(y).all() or np.unique(x).size < 3:
            raise ValueError(
                f"a curve must be fitted to three lengths or more with times > 0, got {x.tolist()} and {y.tolist()}; "
                f"measure them again"
            )
        squared = x * x if squares is None else np.asarray(squares, dtype=np.float64)
        powers = np.stack([squared * attention, x, np.ones_like(x)], axis=1)
        found = cast("tuple[Floats, float]", nnls(powers / scale[:, None], y / scale))[0]
        return cls(attention=float(found[0]), linear=float(found[1]), fixed=float(found[2]))


@dataclass(frozen=True, kw_only=True)
class LayerCurves:
    """One layer at one degree of parallelism, on each of its devices.

    Args:
        forward: With the communication of tensor and context parallelism.
        backward_input: For the gradient of its input.
        backward_weight: For the gradient of its parameters.
        activation_bytes: Kept from forward to backward, per token.
        entered_bytes: As of :class:`~resilient.templates.inputs.profile.LayerCost`; likewise ``given_bytes``.
        loaded_bytes: Per token, loaded of a cell for the layer; what is not known is 0.
        deferred_bytes: Kept besides, per token, between the two parts of a backward.
        workspace_bytes: The most that a call uses at a time beside that, in bytes; what is not known is 0.
        ending_workspace_bytes: As of :class:`~resilient.templates.inputs.profile.LayerCost`; likewise
            ``split_workspace_bytes``, ``again_bytes`` and ``ending_again_bytes``.
    """

    forward: Curve
    backward_input: Curve
    backward_weight: Curve
    activation_bytes: float = 0.0
    entered_bytes: float = 0.0
    given_bytes: float = 0.0
    deferred_bytes: float = 0.0
    loaded_bytes: float = 0.0
    workspace_bytes: Curve = Curve()
    ending_workspace_bytes: Curve = Curve()
    split_workspace_bytes: Curve = Curve()
    again_bytes: Curve = Curve()
    ending_again_bytes: Curve = Curve()
