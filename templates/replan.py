"""The next plan, after nodes were lost or joined.

Two candidates, both made of precomputed templates:

- *local*: only the pipelines concerned change. Joiners first replace lost nodes, then extend the smallest pipelines. A
  pipeline below n0 nodes borrows from those that have more, or merges with another (Oobleck, SOSP'23, section 5).
- *composed*: the best composition for the number of nodes, whatever the pipelines were before.

The composed one is taken where the local one does not exist or its step takes clearly longer. Then live nodes are
placed into the slots so that the fewest bytes of layer states have to be copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt

from resilient.templates.batch import split_microbatches, step_ns
from resilient.templates.compose import compose
from resilient.templates.nodespec import template_sizes, usable_nodes
from resilient.templates.partition import plan_templates
from resilient.templates.plan import Pipeline, Plan, Problem
from resilient.templates.template import PipelineTemplate, StageSpec

# A composition must bring the step below this part of the local candidate's to be worth the additional copying.
_WORTH_COPYING = 0.9

_Templates = Mapping[int, PipelineTemplate]
_Sizes = tuple[int, ...]
_Table = npt.NDArray[np.float64]


def prepare(problem: Problem, num_nodes: int) -> None:
    """Do ahead of time what a later :func:`replan` for up to ``num_nodes`` nodes would otherwise do during recovery.

    Computes the templates, the compositions for up to f nodes less, and imports the assignment solver (0.4 s). The
    results are cached; calling it is optional and changes no plan.

    Raises:
        TooFewNodes: ``num_nodes < problem.min_nodes``.
    """
    template_sizes(problem, num_nodes)
    for live in range(max(problem.min_nodes, num_nodes - problem.max_failures), num_nodes + 1):
        _composed(problem, live)
    _assign(np.zeros((1, 1)))


def first_plan(problem: Problem, nodes: Sequence[int]) -> Plan:
    """Plan a job's first generation.

    Args:
        problem: The job.
        nodes: The live nodes, in any order.

    Returns:
        The best composition on the nodes in ascending order; those that no pipeline can use are left out.

    Raises:
        TooFewNodes: Fewer than ``problem.min_nodes``; the job cannot start yet.
    """
    live = _distinct(nodes)
    templates = _templates(problem, len(live))
    sizes = _composed(problem, len(live))
    return _instantiate(problem, templates, sizes, live)


def replan(problem: Problem, plan: Plan, nodes: Sequence[int]) -> Plan:
    """Plan the next generation.

    Args:
        problem: The job.
        plan: The plan whose layer states the surviving nodes hold.
        nodes: The nodes that are live now, survivors and joiners, in any order.

    Returns:
        A plan on all nodes that pipelines can use; the same for the same arguments.

    Raises:
        TooFewNodes: Fewer than ``problem.min_nodes``: store the progress and stop, or wait for nodes.
    """
    live = _distinct(nodes)
    templates = _templates(problem, len(live))
    sizes = _composed(problem, len(live))
    local = _local(problem, plan, live)
    if local is not None and all(size in templates for size in local):
        local_ns = step_ns([templates[size] for size in local], problem.num_microbatches)
        best_ns = step_ns([templates[size] for size in sizes], problem.num_microbatches)
        if best_ns >= _WORTH_COPYING * local_ns:
            sizes = local
    placed = _place(problem, plan, [templates[size] for size in sizes], live)
    return _instantiate(problem, templates, sizes, placed)


def _distinct(nodes: Sequence[int]) -> list[int]:
    live = sorted(set(nodes))
    if len(live) != len(nodes):
        raise ValueError(f"nodes must be distinct, got {list(nodes)}; name each live node once")
    return live


@lru_cache(maxsize=1024)
def _template(problem: Problem, size: int) -> PipelineTemplate:
    return plan_templates(problem, [size])[size]


def _templates(problem: Problem, num_nodes: int) -> _Templates:
    return {size: _template(problem, size) for size in template_sizes(problem, num_nodes)}


@lru_cache(maxsize=1024)
def _composed(problem: Problem, num_nodes: int) -> _Sizes:
    templates = _templates(problem, num_nodes)
    return compose(templates, usable_nodes(problem, num_nodes), problem.num_microbatches, problem.max_failures + 1)


def _local(problem: Problem, plan: Plan, live: Sequence[int]) -> _Sizes | None:
    """Return the pipelines' sizes after changing only those concerned; None where that is not possible."""
    if usable_nodes(problem, len(live)) < len(live):
        return None
    smallest, min_pipelines = problem.min_pipeline_nodes, problem.max_failures + 1
    wanted = [pipeline.template.num_nodes for pipeline in plan.pipelines]
    sizes = [len(set(pipeline.nodes).intersection(live)) for pipeline in plan.pipelines]
    joiners = len(live) - sum(sizes)
    while joiners:
        index = min(range(len(sizes)), key=lambda i: (sizes[i] >= wanted[i], sizes[i], i))
        sizes[index] += 1
        joiners -= 1
    while min(sizes) < smallest:
        needy = sizes.index(min(sizes))
        lender = sizes.index(max(sizes))
        if sizes[needy] == 0 and len(sizes) > min_pipelines:
            del sizes[needy]
        elif sizes[lender] > smallest:
            sizes[lender] -= 1
            sizes[needy] += 1
        elif len(sizes) > min_pipelines:
            borrowed = sizes.pop(needy)
            sizes[sizes.index(min(sizes))] += borrowed
        else:
            return None
    if not min_pipelines <= len(sizes) <= problem.num_microbatches:
        return None
    return tuple(sorted(sizes, reverse=True))


def _instantiate(problem: Problem, templates: _Templates, sizes: _Sizes, nodes: Sequence[int]) -> Plan:
    """Give each pipeline in turn its nodes, in order, and its microbatches."""
    chosen = [templates[size] for size in sizes]
    counts = split_microbatches(chosen, problem.num_microbatches)
    pipelines: list[Pipeline] = []
    first = 0
    for template, count in zip(chosen, counts, strict=True):
        end = first + template.num_nodes
        pipelines.append(Pipeline(template=template, nodes=tuple(nodes[first:end]), num_microbatches=count))
        first = end
    return Plan(pipelines=tuple(pipelines))


def _place(problem: Problem, plan: Plan, templates: Sequence[PipelineTemplate], live: Sequence[int]) -> list[int]:
    """Return the nodes in slot order (pipeline by pipeline) for which the fewest bytes must be copied."""
    state_bytes = np.array([layer.state_bytes for layer in problem.profile.layers], dtype=np.float64)
    held = _held(problem, plan, live)
    needed = _needed(problem, templates) * state_bytes
    saved: _Table = np.tensordot(needed, held, axes=([1, 2], [1, 2]))
    return [live[node] for node in _assign(-saved)]


def _assign(costs: _Table) -> list[int]:
    """Return each row's column in the cheapest one-to-one assignment; there may be more columns than rows."""
    from scipy.optimize import linear_sum_assignment  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    columns = cast("npt.NDArray[np.intp]", linear_sum_assignment(costs)[1])
    return [int(column) for column in columns]


def _held(problem: Problem, plan: Plan, live: Sequence[int]) -> _Table:
    """Return 1 where the worker of a live node holds a state. [live nodes, devices per node, states]"""
    held = np.zeros((len(live), problem.devices_per_node, len(problem.profile.layers)))
    rows = {node: row for row, node in enumerate(live)}
    for slot in plan.slots:
        if slot.node in rows:
            held[rows[slot.node], slot.local_rank, _states(problem, slot.stage)] = 1
    return held


def _needed(problem: Problem, templates: Sequence[PipelineTemplate]) -> _Table:
    """Return 1 where the worker of a slot needs a state. [slots, devices per node, states]"""
    num_slots = sum(template.num_nodes for template in templates)
    needed = np.zeros((num_slots, problem.devices_per_node, len(problem.profile.layers)))
    first = 0
    for template in templates:
        for stage in template.stages:
            needed[first + stage.node_index, stage.device_index, _states(problem, stage)] = 1
        first += template.num_nodes
    return needed


def _states(problem: Problem, stage: StageSpec) -> list[int]:
    return [problem.profile.index(state) for state in problem.profile.states(stage.first_layer, stage.end_layer)]
