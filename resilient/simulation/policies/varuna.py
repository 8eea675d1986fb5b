"""Varuna: a grid of equal pipelines, checkpoints, and a restart whenever the grid changes.

Source: Varuna (EuroSys'22); a checkpoint every 10 steps as in Oobleck's comparison (SOSP'23).
"""

from __future__ import annotations

from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import LiveNodes, When
from resilient.simulation.replay.grids import Grids
from resilient.simulation.replay.job import Response, SteadyWork


class Varuna:
    """A lost node of the grid takes everybody back to the last checkpoint, in the best grid for who is left.

    Nodes that are left over idle until one is lost or the next checkpoint can be continued in a faster grid.

    Args:
        grids: The best grid for each number of nodes.
        costs: ``restart_s``, ``load_s``, ``checkpoint_s``, ``checkpoint_steps``, ``risk_s``.
    """

    name = "varuna"

    def __init__(self, grids: Grids, costs: ChangeCosts) -> None:
        self._grids = grids
        self._costs = costs
        self._working: frozenset[int] = frozenset()
        self._step_ns = 0
        self._started = False

    def when(self, change: LiveNodes) -> When:
        """A loss is answered at once; joiners wait for a checkpoint; other changes do not matter."""
        if self._working.intersection(change.lost):
            return When.NOW
        grid = self._grids.best(len(change.live))
        if grid is not None and self._costs.step_ns(grid.step_ns) < self._step_ns:
            return When.CHECKPOINT
        return When.NEVER

    def respond(self, change: LiveNodes) -> Response:
        """Restart in the best grid; the first start is free."""
        grid = self._grids.best(len(change.live))
        if grid is None:
            self._working = frozenset()
            return Response(work=None, rolls_back=True)
        pause_ns = self._costs.restart_ns(grid.num_nodes) if self._started else 0
        self._started = True
        self._step_ns = self._costs.step_ns(grid.step_ns)
        self._working = frozenset(change.live[: grid.num_nodes])
        work = SteadyWork(
            step_ns=self._step_ns,
            num_nodes=grid.num_nodes,
            checkpoint_steps=self._costs.steps_between(self._step_ns, grid.num_nodes),
            checkpoint_ns=self._costs.checkpoint_ns(grid.num_nodes),
        )
        return Response(work=work, pause_ns=pause_ns, rolls_back=True)
