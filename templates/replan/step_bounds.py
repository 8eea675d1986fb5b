"""How long a step takes at least where some nodes are slow, before they are in their places."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.composition.batch_split import Line, least_finish_ns, split_rows
from resilient.templates.plan import Plan
from resilient.templates.replan.layout_choices import LayoutChoices
from resilient.templates.replan.placement import Targets


class StepBounds:
    """Bounds of the step of pipelines whose nodes are not in their places.

    Pipelines that stay as they are keep their slow nodes. Of the others one has a node that is as slow as the slowest
    that must be in use; beside that, slow nodes of which it is not known where they are make no pipeline slower.

    Args:
        layouts: The choices among layouts, and the plan's.
        plan: The plan before.
        live: The live nodes.
        slowdowns: Nodes that are slow, and by what factor.
        num_microbatches: Of a step.
        slowed: Returns the line of a layout on nodes of some factors, of a plan's only pipeline or not.
    """

    def __init__(
        self,
        layouts: LayoutChoices,
        plan: Plan,
        live: Sequence[int],
        slowdowns: Mapping[int, float],
        num_microbatches: int,
        slowed: Callable[[int, tuple[float, ...], bool], Line],
    ) -> None:
        self._layouts, self._num_microbatches, self._slowed = layouts, num_microbatches, slowed
        self._slowdowns = slowdowns
        self._num_live, there = len(live), frozenset(live)
        slow = {node for node in slowdowns if node in there and slowdowns[node] > 1}
        self._slowest_first = sorted(slow, key=lambda node: -slowdowns[node])
        self._slow_pipelines = {
            index: pipeline.nodes
            for index, pipeline in enumerate(plan.pipelines)
            if not slow.isdisjoint(pipeline.nodes) and there.issuperset(pipeline.nodes)
        }
        self._least_finish_ns = cache(
            lambda layout, factor, alone: least_finish_ns(layouts.layouts[layout], factor, alone=alone)
        )

    def least_ms(self, targets: Targets, stays: Ints, without: Collection[int]) -> float:
        """Return how long a step takes at least.

        Args:
            targets: The pipelines to be made.
            stays: Of each pipeline of the plan before the target that it is, with the same nodes in the same places,
                negative where it is not known to be one.
            without: Nodes that take no place.
        """
        alone, numbers = len(targets.numbers) == 1, targets.numbers
        table, first_least = self._layouts.lines_and_least(alone=alone)
        rows = first_least + numbers
        known = stays[stays >= 0]
        rows[known] = self._layouts.single(numbers[known])
        settled, lines = set[int](), list[Line]()
        for index, nodes in self._slow_pipelines.items():
            if (target := int(stays[index])) >= 0:
                settled.update(nodes)
                factors = tuple(self._slowdowns.get(node, 1.0) for node in nodes)
                lines.append(self._slowed(int(numbers[target]), factors, alone))
                rows[target] = len(table.fill) + len(lines) - 1
        if lines:
            table = table.with_lines(lines)
        counts = split_rows(table, rows, self._num_microbatches)
        least_ns = table.rows(rows).latest_ns(counts)
        return max(least_ns, self._least_of_others_ns(targets, known, settled, without)) / 1e6

    def _least_of_others_ns(
        self, targets: Targets, known: Ints, settled: Collection[int], without: Collection[int]
    ) -> int:
        """Return how long the pipelines take at least that are not known to stay: for the slowest node that they need.

        Args:
            targets: All pipelines.
            known: Those that are.
            settled: Their nodes, the slow ones at least.
            without: Nodes that take no place.
        """
        left_out = self._num_live - len(without) - int(self._layouts.num_nodes[targets.numbers].sum())
        slow = [node for node in self._slowest_first if node not in without and node not in settled]
        others = np.delete(targets.numbers, known)
        if left_out >= len(slow) or not len(others):
            return 0
        factor, alone = self._slowdowns[slow[left_out]], len(targets.numbers) == 1
        return min(self._least_finish_ns(layout, factor, alone) for layout in set(others.tolist()))
