"""A fixed number of nodes, as under ``torchrun --nnodes N``: restart from the last checkpoint when there are enough."""

from __future__ import annotations

from resilient.errors import ArgumentError
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import LiveNodes, When
from resilient.simulation.replay.grids import Grids
from resilient.simulation.replay.job import Response, SteadyWork


class Restart:
    """Trains on exactly N nodes. Others stand by to replace them; while there are too few, the job waits.

    Args:
        grids: The best grid for N nodes decides what a step takes.
        costs: ``restart_s``, ``load_s``, ``checkpoint_s``, ``checkpoint_steps``, ``risk_s``.
        num_nodes: N.

    Raises:
        ValueError: No pipeline is made of so few nodes.
    """

    name = "restart"

    def __init__(self, grids: Grids, costs: ChangeCosts, num_nodes: int) -> None:
        grid = grids.best(num_nodes)
        if grid is None:
            raise ArgumentError("num_nodes", "hold a pipeline", num_nodes, "restart with more nodes")
        self._costs = costs
        self._num_nodes = num_nodes
        self._work = SteadyWork(
            step_ns=costs.step_ns(grid.step_ns),
            num_nodes=grid.num_nodes,
            checkpoint_steps=costs.steps_between(costs.step_ns(grid.step_ns), grid.num_nodes),
            checkpoint_ns=costs.checkpoint_ns(grid.num_nodes),
        )
        self._members: frozenset[int] = frozenset()
        self._started = False

    def when(self, change: LiveNodes) -> When:
        """The loss of a member, even of one that the grid leaves idle, breaks the job; nothing else does."""
        return When.NOW if self._members.intersection(change.lost) else When.NEVER

    def respond(self, change: LiveNodes) -> Response:
        """Restart on N nodes, those first that were there first, or wait for them; the first start is free."""
        if len(change.live) < self._num_nodes:
            self._members = frozenset()
            return Response(work=None, rolls_back=True)
        self._members = frozenset(change.live[: self._num_nodes])
        pause_ns = self._costs.restart_ns(self._work.num_nodes) if self._started else 0
        self._started = True
        return Response(work=self._work, pause_ns=pause_ns, rolls_back=True)
