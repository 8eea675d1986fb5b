"""What correction by measured times gains where the profile is wrong.

    python benchmarks/correction.py [--steps 30]

A planner configures and assigns by a profile in which the encoder's attention takes a fourth of what it does in truth,
and its other work two thirds; and by one that is right. Steps are simulated by the truth, and their stage times are
what correction learns from, as long as that brings more than it takes. Means of the second half of the steps: without
correction, with it, and assigned by the truth; and how many of all steps were measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product
from time import perf_counter

import numpy as np
from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.planners.costs.cost_model import CostModel, UnitCosts
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import LLM
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.measured_step import cell_times, corrected
from resilient.planners.planner import Configuration, Planner, Setting
from resilient.planners.published.dflop.planner import Dflop
from resilient.planners.published.disttrain.planner import DistTrain
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.devices import cluster_of

MODEL, DATA = "qwen2-vl-7b", "laion+coco"


def in_truth(unit: UnitCosts) -> UnitCosts:
    """Return an encoder's costs with attention that takes four times as long, and all else one and a half times."""

    def slower(curve: Curve) -> Curve:
        return Curve(attention=4 * curve.attention, linear=1.5 * curve.linear, fixed=curve.fixed)

    def changed(curves: LayerCurves) -> LayerCurves:
        return replace(
            curves,
            forward=slower(curves.forward),
            backward_input=slower(curves.backward_input),
            backward_weight=slower(curves.backward_weight),
        )

    layers = tuple(replace(layer, curves=tuple(map(changed, layer.curves))) for layer in unit.layers)
    return replace(unit, layers=layers)


def mean_ms(
    planner: Planner, known: Setting, truth: Setting, found: Configuration, steps: int, *, learns: bool
) -> tuple[float, int]:
    """Return what a step takes in truth on average, of the second half of the steps, and how many are measured."""
    replicas, taken, measured_steps, cost_ms = degraded_replicas(known, found, 0), list[float](), 0, 0.0
    for seed in range(1, steps + 1):
        batch = workload(DATA, known.global_batch, seed, MODEL)
        assignment = planner.assign(known, found, batch, replicas)
        taken.append(evaluate(truth, found, assignment, batch, replicas).iteration_ms)
        if learns and known.correction.tracking.measures(seed):
            measured_steps += 1
            measured = cell_times(truth, found, assignment, batch, replicas)
            begun = perf_counter()
            known = corrected(known, found, assignment, batch, replicas, measured, cost_ms=cost_ms)
            cost_ms = 1e3 * (perf_counter() - begun)
    return float(np.mean(taken[steps // 2 :])), measured_steps


def main() -> None:
    """Simulate the steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps
    profile = derive_costs(MODEL, "a100-80gb")
    actual = CostModel(units=tuple(each if each.name == LLM else in_truth(each) for each in profile.units))
    job = Setting(costs=profile, cluster=cluster_of("a100-80gb", 8), num_nodes=8, global_batch=512, microbatch=2)
    words = ("planner", "profile")
    table = plain_table(
        *words, "without", "corrected", "by the truth", "measured", left=words, title=f"step, in ms, of {steps} steps"
    )
    truths = {"wrong": replace(job, costs=actual), "right": job}
    for planner, (name, truth) in product((Dflop(), DistTrain()), truths.items()):
        found = planner.configure(job, workload(DATA, 4096, 0, MODEL))
        without, _ = mean_ms(planner, job, truth, found, steps, learns=False)
        learnt, measured = mean_ms(planner, job, truth, found, steps, learns=True)
        best, _ = mean_ms(planner, truth, truth, found, steps, learns=False)
        table.add_row(planner.name, name, *(f"{each:.0f}" for each in (without, learnt, best)), str(measured))
    Console().print(table)


if __name__ == "__main__":
    main()
