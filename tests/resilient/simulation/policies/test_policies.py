"""Varuna, Bamboo and plain restarts on traces that can be followed by hand."""

from __future__ import annotations

import pytest

from resilient.simulation.availability.traces import AvailabilityTrace
from resilient.simulation.policies.bamboo import Bamboo, redundant_ns
from resilient.simulation.policies.restart import Restart
from resilient.simulation.policies.varuna import Varuna
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import Policy, replay
from resilient.simulation.replay.grids import Grids
from resilient.simulation.replay.outcome import ReplayOutcome
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.simulation.replays import split_s, template, templates, trace

S = 10**9
COSTS = ChangeCosts(
    restart_s=7.0,
    load_s=3.0,
    checkpoint_s=4.0,
    checkpoint_steps=2,
    regroup_ms=1000.0,
    reconfigure_s=5.0,
    bamboo_factor=1.0,
)


def outcome(trace: AvailabilityTrace, policy: Policy, *, announced: bool = False) -> ReplayOutcome:
    stretches = replay(trace, policy, announced=announced)
    return ReplayOutcome(policy=policy.name, trace=trace.name, stretches=stretches, batch=8, node_hour_dollars=1.0)


def plain_grids() -> Grids:
    """4 microbatches; 2 x 2 nodes take 12 + 6 = 18 s, 3 nodes 12 + 3 x 4 = 24 s, 2 nodes 12 + 3 x 6 = 30 s."""
    return Grids(templates(2, 4), 4)


def redundant_grids() -> Grids:
    """A stage of n takes (12 + 4) / n: 2 x 2 nodes 16 + 8 = 24 s, 3 nodes 16 + 16 = 32 s, 2 nodes 16 + 24 = 40 s."""
    return Grids(templates(2, 4), 4, redundant_ns)


@pytest.mark.parametrize(
    ("num_nodes", "plain", "redundant"),
    [
        (4, (2, 2, 18), (2, 2, 24)),
        (3, (1, 3, 24), (1, 3, 32)),
        (2, (1, 2, 30), (1, 2, 40)),
        (5, (2, 2, 18), (2, 2, 24)),
    ],
)
def test_the_best_grid_is_found(num_nodes: int, plain: tuple[int, int, int], redundant: tuple[int, int, int]) -> None:
    for grids, expected in ((plain_grids(), plain), (redundant_grids(), redundant)):
        grid = grids.best(num_nodes)
        assert grid is not None
        assert (grid.num_pipelines, grid.template.num_nodes, grid.step_ns / S) == expected
    assert plain_grids().best(1) is None


def test_grids_have_no_more_pipelines_than_microbatches_and_round_shares_up() -> None:
    grids = Grids(templates(1, 2), 3)
    best = {num_nodes: grids.best(num_nodes) for num_nodes in (2, 3, 6)}
    # Of two pipelines of one node one has two microbatches: as slow as one pipeline of two nodes, which has three.
    assert {n: (grid.num_pipelines, grid.num_nodes, grid.step_ns) for n, grid in best.items() if grid} == {
        2: (2, 2, 24 * S),
        3: (3, 3, 12 * S),
        # Three pipelines of two nodes would take the same 12 s.
        6: (3, 3, 12 * S),
    }


def test_varuna_rolls_back_on_a_loss_and_takes_joiners_in_at_a_checkpoint() -> None:
    made = outcome(
        trace((0, [0, 1, 2, 3], []), (100, [], [2]), (150, [4], []), end_s=200), Varuna(plain_grids(), COSTS)
    )
    # Saved at 40 and 80, 20 s lost; restarted at 110; saved at 162; restarted at 172.
    assert split_s(made) == {
        "training": 4 * 72 + 3 * 40 + 3 * 8 + 4 * 28,
        "redone": 4 * 20,
        "recovery": 3 * 10 + 4 * 10,
        "checkpointing": 4 * 8 + 3 * 4,
        "idle": 12,
    }
    assert made.samples == 8 * (4 + 2 + 1)


def test_varuna_takes_who_joins_during_a_restart_in_at_the_next_checkpoint() -> None:
    run = trace((0, [0, 1, 2, 3], []), (100, [], [2]), (105, [4], []), end_s=200)
    # As above: the restart that is under way from 100 to 110 is not begun anew.
    assert split_s(outcome(run, Varuna(plain_grids(), COSTS))) == {
        "training": 4 * 72 + 3 * 40 + 3 * 8 + 4 * 28,
        "redone": 4 * 20,
        "recovery": 3 * 10 + 4 * 10,
        "checkpointing": 4 * 8 + 3 * 4,
        "idle": 162 - 105,
    }


def test_varuna_cares_neither_for_idle_nodes_nor_for_joiners_without_use() -> None:
    run = trace((0, [0, 1, 2, 3], []), (10, [4], []), (50, [], [4]), end_s=80)
    made = outcome(run, Varuna(plain_grids(), COSTS))
    assert split_s(made) == {"training": 4 * 72, "checkpointing": 4 * 8, "idle": 40}


def test_varuna_waits_while_no_grid_fits() -> None:
    run = trace((0, [0], []), (10, [1], []), (55, [], [0]), (60, [2], []), end_s=105)
    # The step of 30 s is not saved at 55; from 70 on it is done again.
    assert split_s(outcome(run, Varuna(plain_grids(), COSTS))) == {
        "training": 2 * 35,
        "redone": 2 * 45,
        "recovery": 2 * 10,
        "idle": 10 + 5,
    }


def test_restarting_needs_the_same_number_of_nodes() -> None:
    run = trace((0, [0, 1, 2, 3], []), (60, [], [3]), (80, [], [0]), (130, [5], []), end_s=200)
    made = outcome(run, Restart(plain_grids(), COSTS, 3))
    assert split_s(made) == {
        # Saved at 52: at 80, a step and 4 s are lost. Restarted at 140 with one step until 164, and 36 s of others.
        "training": 3 * (48 + 60 - 4),
        "redone": 3 * 28,
        "recovery": 3 * 10,
        "checkpointing": 3 * (4 + 4),
        "idle": 60 + 2 * 50,
    }
    assert made.samples == 8 * (2 + 2)


def test_restarting_refuses_what_holds_no_pipeline() -> None:
    with pytest.raises(ValueError, match=r"^num_nodes must hold a pipeline, got 1; restart with more nodes$"):
        Restart(plain_grids(), COSTS, 1)


def test_redundancy_runs_the_forward_of_the_next_stage_and_all_of_a_lost_one() -> None:
    three = template((1, 2), (2, 4), (3, 6))
    assert redundant_ns(three, 4) == (5 + 9 + 10 + 3 * 10) * S
    assert redundant_ns(three, 4, redundancy=False) == (3 + 6 + 9 + 3 * 9) * S
    assert redundant_ns(three, 4, {1}) == (9 + 10 + 3 * 10) * S
    assert redundant_ns(three, 4, {0}) == (9 + 12 + 3 * 12) * S


def test_a_stage_stands_in_for_those_on_its_devices_of_the_next_node() -> None:
    def stage(node: int, device: int, degree: int, forward_s: int) -> StageSpec:
        return StageSpec(
            first_layer=0,
            end_layer=1,
            node_index=node,
            first_device=device,
            num_devices=degree,
            forward_ms=1e3 * forward_s,
            backward_ms=2e3 * forward_s,
        )

    wide = PipelineTemplate(num_nodes=2, stages=(stage(0, 0, 2, 10), stage(1, 0, 1, 4), stage(1, 1, 1, 3)))
    assert redundant_ns(wide, 1) == (30 + 4 + 12 + 10 + 9 + 10) * S
    assert redundant_ns(wide, 1, {1}) == (30 + 12) * S
    assert redundant_ns(wide, 1, {0}) == (12 + 30 + 9 + 30) * S


def test_bamboo_goes_on_after_one_loss_and_arranges_its_nodes_anew() -> None:
    run = trace((0, [0, 1, 2, 3], []), (100, [], [1]), end_s=200)
    # A node does all of a pipeline's work in 12 + 12 = 24 s, too: the step of 96 is finished at 121, not at 120.
    # 5 s later three nodes take 32 s.
    made = outcome(run, Bamboo(redundant_grids(), COSTS))
    assert made.samples == 8 * (4 + 1 + 2)
    parts = split_s(made)
    # 6 of 24 s, 8 of 32 s are forwards for successors; none while the slowest stage has no live one.
    assert parts == {
        "training": pytest.approx(4 * 75 + 3 * 20 + 3 * 74 * 0.75),
        "redundant": pytest.approx(4 * 25 + 3 * 74 * 0.25),
        "recovery": 3 * 1 + 3 * 5,
    }


def test_bamboo_restarts_when_two_neighbours_are_lost() -> None:
    run = trace((0, [0, 1, 2, 3, 4], []), (100, [], [2, 3]), end_s=200)
    made = outcome(run, Bamboo(redundant_grids(), COSTS))
    # Checkpoints cost nothing and come every 48 s: 4 s are lost; restarted at 110, three nodes take 32 s.
    parts = split_s(made)
    assert parts.pop("training") + parts.pop("redundant") == 4 * 96 + 3 * 90
    assert parts == {"redone": 4 * 4, "recovery": 3 * 10, "idle": 100}
    assert made.samples == 8 * (4 + 2)


def test_bamboo_survives_losses_in_different_pipelines() -> None:
    run = trace((0, [0, 1, 2, 3], []), (96, [], [1, 2]), end_s=200)
    made = outcome(run, Bamboo(redundant_grids(), COSTS))
    # At a boundary, so that the whole next step runs on two nodes: until 121; then 5 s, and 40 s a step.
    assert made.samples == 8 * (4 + 1 + 1)
    assert split_s(made)["recovery"] == 2 * 1 + 2 * 5
    assert "redone" not in split_s(made)


def test_bamboo_stops_when_no_pipeline_is_left() -> None:
    run = trace((0, [0, 1], []), (50, [], [0]), (60, [], [1]), (100, [2, 3], []), end_s=160)
    made = outcome(run, Bamboo(redundant_grids(), COSTS))
    # At 60 nobody has the layers of node 0; the finished step was not saved either. From 110 on, all is done again.
    assert made.samples == 8
    parts = split_s(made)
    assert parts.pop("training") + parts.pop("redundant") == 2 * 50
    assert parts == {"redone": 2 * 50 + 9, "recovery": 1 + 2 * 10}


def test_bamboo_takes_joiners_in_between_two_steps() -> None:
    run = trace((0, [0, 1, 2], []), (40, [3], []), end_s=100)
    made = outcome(run, Bamboo(redundant_grids(), COSTS))
    assert made.samples == 8 * (2 + 1)
    parts = split_s(made)
    assert parts["recovery"] == 4 * 5
    assert parts["idle"] == 24


def test_announced_losses_cost_nothing_but_the_pause() -> None:
    run = trace((0, [0, 1, 2, 3], []), (100, [], [1]), end_s=200)
    made = outcome(run, Bamboo(redundant_grids(), COSTS), announced=True)
    assert made.samples == 8 * (5 + 2)
    assert split_s(made)["recovery"] == 3 * 5
    rolled_back = outcome(run, Varuna(plain_grids(), COSTS), announced=True)
    # The step is finished at 116, but neither it nor the one before are saved.
    assert split_s(rolled_back)["redone"] == 4 * 36
