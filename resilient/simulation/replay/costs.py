"""Times of membership changes and checkpoints, besides the time of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resilient.errors import ArgumentError
from resilient.templates.common.checkpoint_interval import checkpoint_steps

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
        load_s: Loading a checkpoint, at least.
        node_load_s: The same if one node did it alone: n nodes take 1/n of that, where that is more than ``load_s``.
        checkpoint_s: How long saving one holds up the steps, at least.
        node_checkpoint_s: The same if one node did it alone.
        checkpoint_steps: Steps between two checkpoints of the policies that live on them.
        insurance_steps: Steps between two checkpoints of the ``resilient`` policy, which needs them only when more
            nodes are lost at once than it can survive; None for none, "auto" by cost and risk.
        risk_s: Expected time between two losses that go back to a checkpoint. With it, policies choose the steps
            between two by :func:`~resilient.templates.common.checkpoint_interval.checkpoint_steps`, whatever
            ``checkpoint_steps`` says.
        step_factor: By which steps take longer than planned.
        bamboo_factor: By which those of the policy ``bamboo`` take longer still than what its nodes compute accounts
            for. The default is what its throughput beside Oobleck's leaves unexplained (SOSP'23, table 2, 6 h: 2.7 for
            BERT-Large, 3.1 for GPT-2); 1 is Bamboo as its idea alone would be.
    """

    regroup_ms: float = 61.0
    restart_s: float = 60.0
    reconfigure_s: float = 20.0
    load_s: float = 0.0
    node_load_s: float = 0.0
    checkpoint_s: float = 0.0
    node_checkpoint_s: float = 0.0
    checkpoint_steps: int = 10
    insurance_steps: int | Literal["auto"] | None = "auto"
    risk_s: float | None = None
    step_factor: float = 1.0
    bamboo_factor: float = 2.9

    def __post_init__(self) -> None:
        seconds = ("restart_s", "reconfigure_s", "load_s", "node_load_s", "checkpoint_s", "node_checkpoint_s")
        for name in ("regroup_ms", *seconds):
            if not 0 <= getattr(self, name) <= _MOST:
                raise ArgumentError(name, f"be 0 to {_MOST:g}", getattr(self, name), "0 means none")
        for name in ("step_factor", "bamboo_factor"):
            if not 1 / _MOST <= getattr(self, name) <= _MOST:
                raise ArgumentError(name, f"be {1 / _MOST:g} to {_MOST:g}", getattr(self, name), "1 means as planned")
        if self.checkpoint_steps < 1:
            raise ArgumentError("checkpoint_steps", "be >= 1", self.checkpoint_steps, "give a number of steps")
        if isinstance(self.insurance_steps, int) and self.insurance_steps < 1:
            raise ArgumentError("insurance_steps", "be >= 1", self.insurance_steps, "None means no checkpoints")
        if self.risk_s is not None and not self.risk_s > 0:
            raise ArgumentError("risk_s", "be > 0", self.risk_s, "give the seconds between such losses")

    @property
    def regroup_ns(self) -> int:
        """``regroup_ms`` in nanoseconds."""
        return round(self.regroup_ms * 1e6)

    def restart_ns(self, num_nodes: int) -> int:
        """Return how long it takes from a change until a job that was restarted on so many nodes goes on."""
        return round(self.restart_s * 1e9) + self.load_ns(num_nodes)

    @property
    def reconfigure_ns(self) -> int:
        """``reconfigure_s`` in nanoseconds."""
        return round(self.reconfigure_s * 1e9)

    def load_ns(self, num_nodes: int) -> int:
        """Return how long so many nodes load a checkpoint."""
        return round(max(self.load_s, self.node_load_s / max(1, num_nodes)) * 1e9)

    def checkpoint_ns(self, num_nodes: int) -> int:
        """Return how long saving a checkpoint holds so many nodes up."""
        return round(max(self.checkpoint_s, self.node_checkpoint_s / max(1, num_nodes)) * 1e9)

    def steps_between(self, step_ns: int, num_nodes: int) -> int | None:
        """Return the steps between two checkpoints of a policy that lives on them; None for no checkpoints."""
        if self.risk_s is None:
            return self.checkpoint_steps
        return checkpoint_steps(self.checkpoint_ns(num_nodes) / 1e9, self.risk_s, step_ns / 1e9)

    def steps_between_insurances(self, step_ns: int, num_nodes: int) -> int | None:
        """Return the steps between two checkpoints of the policy ``resilient``; None for no checkpoints."""
        if self.insurance_steps == "auto":
            return None if self.risk_s is None else self.steps_between(step_ns, num_nodes)
        return self.insurance_steps

    def step_ns(self, planned_ns: int, factor: float = 1.0) -> int:
        """Return how long a step takes that takes longer by one more factor."""
        return max(1, round(planned_ns * self.step_factor * factor))
