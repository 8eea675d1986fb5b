"""Layers -> stages -> devices: the best template of every size. One device per stage.

Objective: the slowest stage takes the least time. All partitions have the same sum, so this makes the step
``sum(t) + (N - 1) max(t)`` shortest for every number N of microbatches. Among those, the stage times are as even as can
be (least sum of squares); among those, later stages have more layers. Times are compared in whole nanoseconds, so that
sums are exact and every machine finds the same template. Layers that all take no time count for one each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from resilient.templates.plan import Problem
from resilient.templates.profile import LayerProfile
from resilient.templates.template import PipelineTemplate, StageSpec, nanoseconds


def plan_templates(problem: Problem, sizes: Iterable[int]) -> dict[int, PipelineTemplate]:
    """Return the best template for each number of nodes.

    Args:
        problem: Profile and devices per node.
        sizes: Numbers of nodes.

    Raises:
        ValueError: A size has more devices than the model has layers; leave it out.
    """
    wanted = sorted(set(sizes))
    for size in wanted:
        if not 1 <= size <= problem.max_pipeline_nodes:
            raise ValueError(
                f"template size must be 1 to {problem.max_pipeline_nodes} nodes ({len(problem.profile.layers)} layers, "
                f"{problem.devices_per_node} devices per node, one layer per device at least), got {size}"
            )
    if not wanted:
        return {}
    layers = problem.profile.layers
    times = _range_times(layers)
    slowest = _least_slowest(times, wanted[-1] * problem.devices_per_node)
    templates: dict[int, PipelineTemplate] = {}
    for size in wanted:
        num_stages = size * problem.devices_per_node
        ends = _most_even_ends(times, num_stages, slowest[num_stages])
        templates[size] = PipelineTemplate(num_nodes=size, stages=_stages(layers, ends, problem.devices_per_node))
    return templates


def _range_times(layers: Sequence[LayerProfile]) -> npt.NDArray[np.float64]:
    """Return ``times[i, j]``, the nanoseconds of layers i .. j - 1; infinite where i >= j. [layers + 1, layers + 1]"""
    costs = [nanoseconds(layer.forward_ms + layer.backward_ms) for layer in layers]
    if not any(costs):
        costs = [1] * len(layers)
    starts = np.concatenate(([0], np.cumsum(costs, dtype=np.int64))).astype(np.float64)
    times = starts[None, :] - starts[:, None]
    times[np.tril_indices(len(starts))] = math.inf
    return times


def _least_slowest(times: npt.NDArray[np.float64], max_stages: int) -> list[float]:
    """Return, by number of stages 0 .. max_stages, the least time of the slowest stage over all layers."""
    best = np.full(len(times), math.inf)
    best[0] = 0.0
    slowest = [math.inf]
    for _ in range(max_stages):
        best = np.maximum(best[:, None], times).min(axis=0)
        slowest.append(float(best[-1]))
    return slowest


def _most_even_ends(times: npt.NDArray[np.float64], num_stages: int, bound: float) -> list[int]:
    """Return the stages' end layers with the least sum of squared times, no stage slower than ``bound``."""
    squares = np.where(times <= bound, times * times, math.inf)
    best = np.full(len(times), math.inf)
    best[0] = 0.0
    previous: list[npt.NDArray[np.intp]] = []
    for _ in range(num_stages):
        sums = best[:, None] + squares
        previous.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    ends = [len(times) - 1]
    for starts in reversed(previous[1:]):
        ends.append(int(starts[ends[-1]]))
    return ends[::-1]


def _stages(layers: Sequence[LayerProfile], ends: Sequence[int], devices_per_node: int) -> tuple[StageSpec, ...]:
    return tuple(
        StageSpec(
            first_layer=first,
            end_layer=end,
            node_index=index // devices_per_node,
            device_index=index % devices_per_node,
            stage_ms=math.fsum(layer.forward_ms + layer.backward_ms for layer in layers[first:end]),
        )
        for index, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    )
