"""What planning needs is loaded before a change has to wait for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from resilient.templates.composition import compose, slow_nodes
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan import replan as replan_module
from resilient.templates.replan.replan import first_plan, prepare, replan, templates_for
from tests.templates.jobs import profile

_SCRIPT = """
import gc
from numba.core.dispatcher import Dispatcher
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.replan import first_plan, prepare, replan, warm_up
from resilient.templates.replan.transfer import plan_transfers

def loaded():
    loops = (each for each in gc.get_objects() if isinstance(each, Dispatcher))
    return {loop.py_func.__qualname__: len(loop.signatures) for loop in loops if "resilient" in loop.py_func.__module__}

warm_up()
before = loaded()
layer = dict(costs=(LayerCost(forward_ms=1.0),), parameter_bytes=8)
layers = tuple(LayerProfile(name=f"layer{i}", **layer) for i in range(12))
problem = PlanningProblem(profile=ModelProfile(layers=layers), num_microbatches=32, min_pipeline_nodes=2)
prepare(problem, 10)
plan = first_plan(problem, range(10))
zones = {node: str(place) for pipeline in plan.pipelines for place, node in enumerate(pipeline.nodes)}
replan(problem, plan, range(1, 10), domains=zones)
replan(problem, plan, range(1, 10), slowdowns={3: 2.0, 5: 3.0})
plan_transfers(problem, plan, {layer.name: {0: layer.whole} for layer in layers})
print(*(name for name, number in loaded().items() if before.get(name) != number))
print(*sorted(name for name, number in before.items() if number))
"""


def test_first_change_with_slow_nodes_and_domains_loads_nothing_after_warm_up() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], check=True, capture_output=True, text=True)

    added, loaded = done.stdout.splitlines()
    assert added == ""
    planning = {
        "best_sizes",
        "split",
        "cheapest",
        "flow_from",
        "exchange_nodes",
        "_chain_times",
        "_get_through_most",
        "_fill_counted",
        "go_on",
        "make_viable",
        "use_spare",
    }
    assert planning | {"choose_senders"} <= {*loaded.split()}


def test_where_slow_nodes_may_be_is_known_after_preparing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PlanningProblem(profile=profile([1.0] * 3), num_microbatches=13, min_pipeline_nodes=1)
    prepare(problem, 9)
    monkeypatch.delattr(slow_nodes, "Arrangements")

    for num_fast in (1, 3, 5, 9):
        templates = templates_for(problem, num_fast + 2)
        found = slow_nodes.compose_with_slow(templates, num_fast, [3.0, 2.0], 13, 2, (0, 10**12))
        assert found is not None


def test_whoever_stands_by_and_comes_or_goes_no_templates_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the nodes is lost, and more stand by: so few are left as smaller templates are for."""
    problem = PlanningProblem(profile=profile([1.0] * 7), num_microbatches=32, min_pipeline_nodes=1)
    prepare(problem, 21)
    plan, live = first_plan(problem, range(21)), range(5, 21)
    monkeypatch.delattr(replan_module, "plan_templates")
    assert {*replan(problem, plan, live).nodes} == {*live}
    slow = dict.fromkeys(live[-9:], 90.0)
    assert {*replan(problem, plan, live, slowdowns=slow).nodes} == {*live[:-9]}


@pytest.mark.parametrize("num_nodes", [33, 64])
def test_no_templates_are_planned_when_half_of_the_nodes_is_lost(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    """Of 33, so few are left that their templates are for a quarter of the nodes that those before are for."""
    problem = PlanningProblem(profile=profile([1.0] * 9), num_microbatches=2 * num_nodes, min_pipeline_nodes=1)
    prepare(problem, num_nodes)
    plan, live = first_plan(problem, range(num_nodes)), range(num_nodes // 2)
    monkeypatch.delattr(replan_module, "plan_templates")
    assert {*replan(problem, plan, live).nodes} == {*live}


def test_compositions_of_a_quarter_less_and_more_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PlanningProblem(profile=profile([1.0] * 5), num_microbatches=40, min_pipeline_nodes=1)
    prepare(problem, 40)
    plan = first_plan(problem, range(40))
    monkeypatch.delattr(compose, "_Knapsack")
    for live in (range(30), range(50)):
        assert replan(problem, plan, live).pipelines
