"""The policy that plans as the runtime does, on traces that can be followed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from resilient.simulation.availability.traces import AvailabilityTrace, periodic_failures
from resilient.simulation.policies.resilient import RememberedPlans
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.outcome import ReplayOutcome
from resilient.simulation.scenario import Scenario
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.replan import first_plan, replan_candidates
from tests.resilient.simulation.replays import job, split_s, trace

COSTS = ChangeCosts(restart_s=7.0, load_s=3.0, checkpoint_s=4.0, regroup_ms=1000.0, insurance_steps=None)


def replayed(
    trace: AvailabilityTrace, problem: PlanningProblem, costs: ChangeCosts = COSTS, *, announced: bool = False
) -> ReplayOutcome:
    scenario = Scenario(problem=problem, batch=8, max_nodes=trace.max_nodes, costs=costs, announced=announced)
    return scenario.run(trace, "resilient")


def pairs(**kwargs: Any) -> PlanningProblem:
    """Layers of 2 s; pipelines of two nodes take 12 + 2 x 6 = 24 s for 3 of 6 microbatches, and so do 3 + 2 nodes."""
    return job(6, 2.0, 6, min_pipeline_nodes=2, **kwargs)


@pytest.mark.parametrize(
    ("lost", "copied_s"),
    [
        # The pipeline of three nodes has two layers on each; two nodes need three.
        (1, 10),  # the outer ones receive the third and the fourth layer
        (0, 20),  # the middle one receives the two first layers
        (3, 0),  # of the pipeline of two nodes: the other lends one
    ],
)
def test_a_loss_costs_the_step_under_way_regrouping_and_copying(lost: int, copied_s: int) -> None:
    problem = pairs(state_bytes=100, link=Link(bytes_per_s=10.0))
    made = replayed(trace((0, range(5), []), (100, [], [lost]), end_s=250), problem)
    if lost == 3:
        plan = next(replan_candidates(problem, first_plan(problem, range(5)), [0, 1, 2, 4]))
        copied_s = round(plan.copy_ms / 1e3)
        assert copied_s > 0
    pause_s = 1 + copied_s
    assert split_s(made) == {
        "training": 5 * 96 + 4 * (150 - pause_s),
        "redone": 5 * 4,
        "recovery": 4 * pause_s,
    }
    assert made.samples == 8 * (4 + (150 - pause_s) // 24)


def test_joiners_and_announced_losses_cost_no_work() -> None:
    run = trace((0, range(5), []), (30, [5], []), (100, [], [1]), end_s=240)
    made = replayed(run, pairs(), announced=True)
    # Six nodes as three pairs take 12 + 6 = 18 s. In from 49 on; node 1 is there until 103.
    assert split_s(made) == {
        "training": 5 * 48 + 6 * 54 + 5 * 136,
        "idle": 18,
        "recovery": 6 * 1 + 5 * 1,
    }
    assert made.samples == 8 * (2 + 3 + 5)


def test_too_few_nodes_store_their_progress_and_wait() -> None:
    run = trace((0, range(4), []), (60, [], [0]), (100, [4], []), end_s=160)
    made = replayed(run, pairs())
    # Two steps of 24 s are kept, 12 s are lost; restarted at 110.
    assert split_s(made) == {
        "training": 4 * 48 + 4 * 50,
        "redone": 4 * 12,
        "recovery": 4 * 10,
        "idle": 3 * 40,
    }
    assert made.samples == 8 * (2 + 2)


def test_a_job_waits_for_its_first_nodes_without_a_restart() -> None:
    made = replayed(trace((0, [0], []), (10, [1, 2, 3], []), end_s=58), pairs())
    assert split_s(made) == {"training": 4 * 48, "idle": 10}


def test_a_state_lost_with_all_its_holders_comes_from_the_checkpoint() -> None:
    # One pipeline of all nodes: every loss takes layers with it. A step takes 12 s on any number of nodes.
    problem = job(6, 2.0, 1, max_failures=0)
    costs = ChangeCosts(regroup_ms=1000.0, load_s=3.0, checkpoint_s=4.0, insurance_steps=2)
    run = trace((0, range(3), []), (50, [], [1]), end_s=100)
    made = replayed(run, problem, costs)
    # Saved at 28; 22 s are lost; loaded at 54, saved at 82.
    assert split_s(made) == {
        "training": 3 * 24 + 2 * (24 + 18),
        "redone": 3 * 22,
        "recovery": 2 * 4,
        "checkpointing": 3 * 4 + 2 * 4,
    }
    announced = replayed(run, problem, costs, announced=True)
    # The leaving node is still there to send, until 52; the checkpoint that is due then is saved without it.
    assert split_s(announced) == {
        "training": 3 * 48 + 2 * (24 + 15),
        "recovery": 2 * 1,
        "checkpointing": 3 * 4 + 2 * 8,
    }


def test_standby_nodes_are_no_loss() -> None:
    # Two pipelines of one layer each: a third node cannot be used.
    problem = job(1, 5.0, 2)
    run = trace((0, range(3), []), (12, [], [2]), end_s=50)
    assert split_s(replayed(run, problem)) == {"training": 2 * 50, "idle": 12}


def test_steps_take_longer_by_the_factor() -> None:
    made = replayed(trace((0, range(4), []), end_s=144), pairs(), ChangeCosts(step_factor=1.5, insurance_steps=None))
    assert made.samples == 8 * 4


def test_names_of_nodes_do_not_matter_so_plans_are_made_once() -> None:
    problem = pairs(state_bytes=100, link=Link(bytes_per_s=10.0))
    planner = RememberedPlans(problem)
    start = planner.first(5)
    moves = [planner.next(start, [lost], 1) for lost in (0, 2, 0)]
    assert moves[0] is moves[2]
    assert [sorted(move.places) for move in moves[:2]] == [[1, 2, 3, 4, 5], [0, 1, 3, 4, 5]]
    for move in moves:
        assert move.arrangement.plan.nodes == tuple(range(5))
    # The same plan, whichever node was lost.
    assert moves[0].arrangement is moves[1].arrangement


def test_every_plan_is_the_runtimes_own() -> None:
    problem = job(12, 1.0, 24, state_bytes=50, link=Link(bytes_per_s=10.0))
    planner = RememberedPlans(problem)
    arrangement = planner.first(8)
    names = list(range(8))
    plan = first_plan(problem, names)
    assert [p.template for p in arrangement.plan.pipelines] == [p.template for p in plan.pipelines]
    run = periodic_failures(8, 60.0, down_to=2, seed=4)
    for change in run.changes[1:]:
        gone = [place for place, name in enumerate(names) if name in change.lost]
        best = next(replan_candidates(problem, arrangement.plan, [p for p in range(len(names)) if p not in gone]))
        move = planner.next(arrangement, gone, 0)
        assert move.copy_ns == round(best.copy_ms * 1e6)
        assert move.arrangement.step_ns == round(best.step_ms * 1e6)
        names = [names[place] for place in move.places]
        arrangement = move.arrangement
        lost = {node for earlier in run.changes if earlier.time_ms <= change.time_ms for node in earlier.lost}
        assert sorted(names) == sorted(set(range(8)) - lost)
