"""What planning needs is loaded before a change has to wait for it."""

from __future__ import annotations

import subprocess
import sys

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
    planning = {"best_sizes", "split", "_solve", "to_spread", "to_save", "_chain_times", "_fastest", "_fill_counted"}
    assert planning | {"choose_senders"} <= {*loaded.split()}
