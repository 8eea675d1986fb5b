"""Times of membership changes and checkpoints, besides the time of steps."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.errors import ArgumentError

_MOST = 1e9
"""Of every cost: 30 years in seconds."""


@dataclass(frozen=True, kw_only=True)
class ChangeCosts:
    """Measured or assumed times; the same for all policies that have the kind of cost.

    Args:
        regroup_ms: From a node's loss until the others have noticed, agreed, and formed new groups; copies not counted.
            The default is what ``benchmarks/recovery.py`` measures.
        restart_s: From a change until restarted processes can load a checkpoint. The default is an estimate for large
            models: starting the processes, their imports and the device, and forming all groups anew.
        reconfigure_s: The same where processes go on but meet anew before they do, as Bamboo's. The default is what
            its authors simulate with.
        load_s: Loading a checkpoint.
        checkpoint_s: How long saving one holds up the steps.
        checkpoint_steps: Steps between two checkpoints of the policies that live on them.
        insurance_steps: Steps between two checkpoints of the ``resilient`` policy, which needs them only when more
            nodes are lost at once than it can survive; None for none. The default is near the best for the markets in
            :mod:`resilient.simulation.availability.spot_market` where a step takes about a minute.
        step_factor: By which steps take longer than planned.
        bamboo_factor: By which those of the policy ``bamboo`` take longer still than what its nodes compute accounts
            for. The default is what its throughput beside Oobleck's leaves unexplained (SOSP'23, table 2, 6 h: 2.7 for
            BERT-Large, 3.1 for GPT-2); 1 is Bamboo as its idea alone would be.
    """

    regroup_ms: float = 61.0
    restart_s: float = 60.0
    reconfigure_s: float = 20.0
    load_s: float = 0.0
    checkpoint_s: float = 0.0
    checkpoint_steps: int = 10
    insurance_steps: int | None = 30
    step_factor: float = 1.0
    bamboo_factor: float = 2.9

    def __post_init__(self) -> None:
        for name in ("regroup_ms", "restart_s", "reconfigure_s", "load_s", "checkpoint_s"):
            if not 0 <= getattr(self, name) <= _MOST:
                raise ArgumentError(name, f"be 0 to {_MOST:g}", getattr(self, name), "0 means none")
        for name in ("step_factor", "bamboo_factor"):
            if not 1 / _MOST <= getattr(self, name) <= _MOST:
                raise ArgumentError(name, f"be {1 / _MOST:g} to {_MOST:g}", getattr(self, name), "1 means as planned")
        if self.checkpoint_steps < 1:
            raise ArgumentError("checkpoint_steps", "be >= 1", self.checkpoint_steps, "give a number of steps")
        if self.insurance_steps is not None and self.insurance_steps < 1:
            raise ArgumentError("insurance_steps", "be >= 1", self.insurance_steps, "None means no checkpoints")

    @property
    def regroup_ns(self) -> int:
        """``regroup_ms`` in nanoseconds."""
        return round(self.regroup_ms * 1e6)

    @property
    def restart_ns(self) -> int:
        """From a change until the restarted job goes on."""
        return round((self.restart_s + self.load_s) * 1e9)

    @property
    def reconfigure_ns(self) -> int:
        """``reconfigure_s`` in nanoseconds."""
        return round(self.reconfigure_s * 1e9)

    @property
    def load_ns(self) -> int:
        """``load_s`` in nanoseconds."""
        return round(self.load_s * 1e9)

    @property
    def checkpoint_ns(self) -> int:
        """``checkpoint_s`` in nanoseconds."""
        return round(self.checkpoint_s * 1e9)

    def step_ns(self, planned_ns: int, factor: float = 1.0) -> int:
        """Return how long a step takes that takes longer by one more factor."""
        return max(1, round(planned_ns * self.step_factor * factor))
