"""Bamboo: every node also computes for its successor in the pipeline, and takes its place when it is lost.

Source: Bamboo (NSDI'23). Node i of a pipeline holds, besides its own layers, those of node i + 1 (the last those of the
first), and runs their forward for every microbatch. When node i + 1 is lost, node i does all its work, until the nodes
that are left are arranged anew between two steps. When two neighbours are lost, their layers are nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise

from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import LiveNodes, When
from resilient.simulation.replay.grids import Grid, Grids
from resilient.simulation.replay.job import Response, SteadyWork
from resilient.templates.common.durations import nanoseconds
from resilient.templates.template import PipelineTemplate, StageSpec

_RISK = 0.05
"""When the loss of more than this part of the nodes would be fatal, pipelines are arranged anew (so its simulator)."""


def redundant_ns(
    template: PipelineTemplate,
    num_microbatches: int,
    lost: Collection[int] = (),
    *,
    alone: bool = False,
    redundancy: bool = True,
) -> int:
    """Return the time of a step in which every node computes for its successor, too.

    Args:
        template: Of the pipeline; at least two nodes.
        num_microbatches: Of the pipeline.
        lost: Nodes of the template whose predecessors do their work; no two of them neighbours.
        alone: Whether it is the only pipeline.
        redundancy: Whether forwards for live successors are counted.
    """
    successors = _successors(template)
    times: list[float] = []
    for stage in template.stages:
        if stage.node_index in lost:
            continue
        shadows = successors[stage.node_index, stage.first_device, stage.num_devices]
        if (stage.node_index + 1) % template.num_nodes in lost:
            times.append(stage.stage_ms + max(shadow.stage_ms for shadow in shadows))
        else:
            times.append(stage.stage_ms + redundancy * max(shadow.forward_ms for shadow in shadows))
    step_ms = math.fsum(times) + (num_microbatches - 1) * max(times)
    step_ms += template.lone_sync_ms if alone else template.sync_ms
    return max(1, nanoseconds(step_ms))


def _successors(template: PipelineTemplate) -> dict[tuple[int, int, int], list[StageSpec]]:
    """Return, by node and devices of a stage, the stages on the same devices of the next node."""
    on_node: list[list[StageSpec]] = [[] for _ in range(template.num_nodes)]
    for stage in template.stages:
        on_node[stage.node_index].append(stage)
    return {
        (stage.node_index, stage.first_device, stage.num_devices): [
            other
            for other in on_node[(stage.node_index + 1) % template.num_nodes]
            if other.first_device < stage.first_device + stage.num_devices
            and stage.first_device < other.first_device + other.num_devices
        ]
        for stage in template.stages
    }


class Bamboo:
    """Redundant computation; checkpoints are saved as well, in the background, for what that cannot mend.

    Args:
        grids: The best grid for each number of nodes, timed by :func:`redundant_ns`, of templates that leave half of
            the memory for the successor's layers.
        costs: ``regroup_ms``, ``reconfigure_s``, ``restart_s``, ``load_s``, ``checkpoint_steps``, ``risk_s``,
            ``bamboo_factor``.
    """

    name = "bamboo"

    def __init__(self, grids: Grids, costs: ChangeCosts) -> None:
        self._grids = grids
        self._costs = costs
        self._grid: Grid | None = None
        self._pipelines: list[Sequence[int]] = []
        self._lost: set[int] = set()
        self._started = False

    def when(self, change: LiveNodes) -> When:
        """A loss is answered at once; joiners wait for the end of the step if they make a difference."""
        working = {node for pipeline in self._pipelines for node in pipeline}
        if working.intersection(change.lost):
            return When.NOW
        return When.STEP if self._should_rearrange(len(change.live)) else When.NEVER

    def respond(self, change: LiveNodes) -> Response:
        """Let predecessors take over, arrange all nodes anew, or restart from the last checkpoint."""
        if self._grid is None:
            pause_ns = self._costs.restart_ns(len(change.live)) if self._started else 0
            response = self._rearrange(change, pause_ns)
            self._started = self._started or response.work is not None
            return response
        newly_lost = self._lost_in(change.lost) - self._lost
        self._lost |= newly_lost
        if any(self._is_broken(pipeline) for pipeline in self._pipelines):
            return self._rearrange(change, self._costs.restart_ns(len(change.live)), rolls_back=True)
        if newly_lost and not change.announced:
            return Response(work=self._work(), pause_ns=self._costs.regroup_ns, keeps_step=True, again=True)
        if self._should_rearrange(len(change.live)):
            return self._rearrange(change, self._costs.reconfigure_ns)
        return Response(work=self._work(), keeps_step=True)

    def _lost_in(self, nodes: Collection[int]) -> set[int]:
        return {node for pipeline in self._pipelines for node in pipeline}.intersection(nodes)

    def _is_broken(self, pipeline: Sequence[int]) -> bool:
        lost = [node in self._lost for node in pipeline]
        return any(one and next_one for one, next_one in pairwise([*lost, lost[0]]))

    def _should_rearrange(self, num_live: int) -> bool:
        """Return whether more pipelines could be made, all that are lost replaced, or the next loss is a danger."""
        grid = self._grid
        if grid is None:
            return True
        better = self._grids.best(num_live)
        if better is not None and better.step_ns < grid.step_ns:
            return True
        spare = num_live - (grid.num_nodes - len(self._lost))
        if self._lost and spare >= len(self._lost):
            return True
        return 2 * len(self._lost) > _RISK * (grid.num_nodes - len(self._lost))

    def _rearrange(self, change: LiveNodes, pause_ns: int, *, rolls_back: bool = False) -> Response:
        grid = self._grid = self._grids.best(len(change.live))
        self._lost = set()
        if grid is None:
            self._pipelines = []
            return Response(work=None, rolls_back=rolls_back)
        size = grid.template.num_nodes
        self._pipelines = [change.live[first : first + size] for first in range(0, grid.num_nodes, size)]
        return Response(work=self._work(), pause_ns=pause_ns, rolls_back=rolls_back)

    def _steps_between(self, step_ns: int, num_nodes: int) -> int:
        """Return the steps between two checkpoints: one after the other, where they are tuned, as none holds it up."""
        if self._costs.risk_s is None:
            return self._costs.checkpoint_steps
        return max(1, -(-self._costs.checkpoint_ns(num_nodes) // step_ns))

    def _work(self) -> SteadyWork:
        grid = self._grid
        assert grid is not None
        lost = {frozenset(i for i, node in enumerate(p) if node in self._lost) for p in self._pipelines}
        template, count, alone = grid.template, grid.num_microbatches, grid.num_pipelines == 1
        step_ns = max(redundant_ns(template, count, indices, alone=alone) for indices in lost)
        needed_ns = max(redundant_ns(template, count, indices, alone=alone, redundancy=False) for indices in lost)
        factor = self._costs.bamboo_factor
        step_ns, needed_ns = self._costs.step_ns(step_ns, factor), self._costs.step_ns(needed_ns, factor)
        return SteadyWork(
            step_ns=step_ns,
            num_nodes=grid.num_nodes - len(self._lost),
            redundant_ns=step_ns - needed_ns,
            checkpoint_steps=self._steps_between(step_ns, grid.num_nodes),
        )
