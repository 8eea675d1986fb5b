"""What is made of a run: throughput, prices, the picture and the what-if table."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from resilient.cli.simulate.figure import draw_outcomes
from resilient.simulation.availability.spot_market import spot_trace
from resilient.simulation.availability.traces import AvailabilityTrace
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.job import Stretch
from resilient.simulation.replay.outcome import TIME_PARTS, ReplayOutcome
from resilient.simulation.scenario import POLICIES, DoesNotFit, Scenario
from resilient.simulation.sweep import SweepRow, best, parse_sweeps, run_sweep
from resilient.templates.inputs.cluster import Cluster
from tests.resilient.simulation.replays import GIB, job, trace

H = 3600 * 10**9


def outcome(*stretches: Stretch, dollars: float = 2.0) -> ReplayOutcome:
    return ReplayOutcome(policy="resilient", trace="t", stretches=stretches, batch=10, node_hour_dollars=dollars)


def two_stretches() -> ReplayOutcome:
    return outcome(
        Stretch(start_ns=H, end_ns=2 * H, live=4, working=3, steps=360, training_ns=H // 2, recovery_ns=H // 2),
        Stretch(start_ns=2 * H, end_ns=4 * H, live=2, working=0, stopped_ns=2 * H),
    )


def test_prices_and_shares() -> None:
    made = two_stretches()
    assert made.node_ns == 8 * H
    assert made.split_ns == dict.fromkeys(TIME_PARTS, 0) | {
        "training": 3 * H // 2,
        "recovery": 3 * H // 2,
        "idle": 5 * H,
    }
    assert (made.samples, made.samples_per_s) == (3600, 3600 / (3 * 3600))
    assert made.dollars == 16.0
    assert made.dollars_per_million == pytest.approx(16 / 3600 * 1e6)
    written = json.loads(json.dumps(made.to_dict()))
    assert written["share_by_part"]["idle"] == 0.625
    assert written["stopped_hours"] == 2
    assert len(written["stretches"]) == 2


def test_without_samples_there_is_no_price_for_them() -> None:
    made = outcome(Stretch(start_ns=0, end_ns=H, live=1, working=0, stopped_ns=H))
    assert (made.samples_per_s, made.dollars_per_million) == (0.0, None)


def test_throughput_comes_after_the_recovery_and_adds_up() -> None:
    made = two_stretches()
    # 3600 samples in the second half of the first hour: 2 a second.
    hours, rates = zip(*made.throughput(1800), strict=True)
    assert hours == pytest.approx((1.25, 1.75, 2.25, 2.75, 3.25, 3.75))
    assert rates == pytest.approx((0, 2, 0, 0, 0, 0))
    for window_s in (700, 1000, 5000, 99999):
        points = list(made.throughput(window_s))
        lengths = [window_s] * (len(points) - 1)
        lengths.append(3 * 3600 - sum(lengths))
        assert sum(rate * length for (_, rate), length in zip(points, lengths, strict=True)) == pytest.approx(3600)


def scenario(**kwargs: Any) -> Scenario:
    return Scenario(problem=job(8, 2.0, 16, state_bytes=GIB), batch=16, max_nodes=8, node_hour_dollars=1.0, **kwargs)


@pytest.mark.parametrize("policy", POLICIES)
def test_replays_are_deterministic_and_account_for_all_nodes(policy: str) -> None:
    run = spot_trace("ec2-p3", 8, 3, seed=2)
    costs = ChangeCosts(checkpoint_s=3.0, load_s=3.0)
    made = scenario(costs=costs).run(run, policy)
    assert made == scenario(costs=costs).run(run, policy)
    assert sum(made.split_ns.values()) == made.node_ns
    live_ns = 0
    counts = [*run.counts(), (run.end_ms, 0)]
    for (start, count), (end, _) in pairwise(counts):
        live_ns += count * (end - start) * 10**6
    assert made.node_ns == live_ns
    assert made.samples > 0


def test_resilient_gets_most_done_on_spot_nodes() -> None:
    run = spot_trace("ec2-p3", 8, 6, seed=1)
    made = {policy: scenario(costs=ChangeCosts(checkpoint_s=10.0, load_s=10.0)).run(run, policy) for policy in POLICIES}
    assert max(made, key=lambda policy: made[policy].samples) == "resilient"


@pytest.mark.parametrize("policy", ["varuna", "restart"])
def test_tuned_checkpoints_are_near_the_best_of_all_fixed_ones(policy: str) -> None:
    """A step takes 2 to 5 s, a checkpoint 20: every ten steps, as published, is too often."""
    run = spot_trace("g4dn", 8, 12, seed=3)
    costs = ChangeCosts(checkpoint_s=20.0, load_s=20.0)
    fixed = {
        steps: scenario(costs=replace(costs, checkpoint_steps=steps)).run(run, policy).samples
        for steps in (1, 3, 10, 30, 60, 100, 150, 200, 300, 500, 1000)
    }
    tuned = scenario(costs=costs).run(run, f"{policy}-tuned").samples
    assert tuned > 0.97 * max(fixed.values())
    assert tuned > 1.1 * fixed[10]


def test_checkpoints_are_as_rare_as_losses_that_need_them() -> None:
    job_of = scenario(costs=ChangeCosts(checkpoint_s=20.0, load_s=20.0))
    job_of = replace(job_of, problem=replace(job_of.problem, min_pipeline_nodes=4))

    def checkpoints(run: AvailabilityTrace, policy: str, job: Scenario = job_of) -> int:
        return sum(stretch.checkpointing_ns for stretch in job.run(run, policy).stretches) // (20 * 10**9)

    single = trace((0, range(9), []), *((600 * i, [10 + i], [i]) for i in range(1, 9)), end_s=36_000)
    several = trace((0, range(9), []), (18_000, range(10, 17), range(7)), end_s=36_000)
    assert checkpoints(single, "varuna-tuned") > 2 * checkpoints(single, "resilient") > 0
    assert checkpoints(several, "resilient") > 1.5 * checkpoints(single, "resilient")
    told = replace(job_of, costs=replace(job_of.costs, risk_s=600.0))
    assert checkpoints(single, "resilient", told) > 5 * checkpoints(single, "resilient")
    assert told.run(single, "varuna") == job_of.run(single, "varuna"), "as published"


def test_twice_the_layers_may_not_fit() -> None:
    problem = replace(job(4, 2.0, 16, state_bytes=3 * GIB), cluster=Cluster(memory_bytes=5 * GIB))
    small = Scenario(problem=problem, batch=16, max_nodes=8)
    assert small.run(trace((0, range(8), []), end_s=60), "varuna").samples > 0
    message = (
        "half of the memory is for the next node's layers: memory_bytes must hold layer 'l0' alone in a stage, "
        "3221225472 bytes on each device, got 2684354560; use smaller microbatches or devices with more memory"
    )
    with pytest.raises(DoesNotFit, match=f"^{re.escape(message)}$"):
        small.run(trace((0, range(8), []), end_s=60), "bamboo")


def test_unknown_policies_and_too_few_nodes_to_restart_on_are_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^policy must be one of resilient, bamboo, .*, got 'varun'; did you mean 'varuna' or 'varuna-tuned'\?$",
    ):
        scenario().run(trace((0, [0], []), end_s=1), "varun")
    few = Scenario(problem=job(8, 2.0, 16, min_pipeline_nodes=2), batch=16, max_nodes=8, restart_nodes=1)
    with pytest.raises(DoesNotFit, match=r"^restart_nodes must hold a pipeline, got 1; restart with more nodes$"):
        few.run(trace((0, range(4), []), end_s=1), "restart")
    with pytest.raises(DoesNotFit, match=r"^restart_nodes must hold a pipeline, got 1; that is how many the trace "):
        replace(few, restart_nodes=None).run(trace((0, range(1), []), end_s=1), "restart")
    never = (
        r"^restart_nodes must be at most 8, the most nodes that there ever are, got 9; say fewer, or replay more nodes$"
    )
    with pytest.raises(DoesNotFit, match=never):
        replace(few, restart_nodes=9).run(trace((0, range(8), []), end_s=1), "restart")


def test_the_picture_shows_each_policy_and_part(tmp_path: Path) -> None:
    run = spot_trace("ec2-p3", 8, 3, seed=2)
    costs = ChangeCosts(checkpoint_s=30.0, load_s=30.0)
    draw_outcomes([scenario(costs=costs).run(run, policy) for policy in POLICIES], tmp_path / "all.png")
    image = matplotlib.image.imread(tmp_path / "all.png")[..., :3]
    colours = {"resilient": "#1c5fa8", "bamboo": "#2b8a3e", "varuna": "#e8890c", "redone": "#c92a2a", "idle": "#cbd2d9"}
    for what, hexadecimal in colours.items():
        colour = np.array([int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        assert (np.abs(image - colour).max(axis=-1) < 0.01).sum() > 300, what


def test_sweeps_are_read() -> None:
    assert parse_sweeps(["nodes=4, 8", "max-failures=1"]) == {"nodes": (4, 8), "max-failures": (1,)}


@pytest.mark.parametrize("texts", [["nodes"], ["gpus=1"], ["nodes=4,x"], ["nodes=4", "nodes=8"], ["nodes="]])
def test_bad_sweeps_are_refused(texts: list[str]) -> None:
    message = (
        f'sweep must look like "nodes=16,24,32", got {texts[-1]!r}; give each of nodes and max-failures at most once'
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_sweeps(texts)


def test_a_sweep_has_a_row_for_each_combination_and_marks_the_best() -> None:
    def of(failures: int | None, max_nodes: int) -> Scenario:
        problem = job(8, 2.0, 16, max_failures=1 if failures is None else failures)
        return Scenario(problem=problem, batch=16, max_nodes=max_nodes, node_hour_dollars=1.0)

    rows = list(
        run_sweep(
            {"nodes": (2, 8), "max-failures": (1, 3)},
            lambda count: trace((0, range(count or 1), []), end_s=600),
            of,
            ["resilient"],
        )
    )
    assert [tuple(row.values.values()) for row in rows] == [(2, 1), (2, 3), (8, 1), (8, 3)]
    assert [row.reason for row in rows if not row.outcome] == [
        "the number of nodes must be at least 4 (max_failures + 1 = 4 pipelines of 1 node, the fewest that hold the "
        "model), got 2; add 2 nodes"
    ]
    samples = [row.outcome.samples if row.outcome else 0 for row in rows]
    assert samples[2] > 3 * samples[0] > samples[1] == 0
    assert best(rows, lambda made: made.samples_per_s, least=False) == 2
    assert best(rows, lambda made: made.dollars_per_million, least=True) in (0, 2)
    assert best([SweepRow(values={}, policy="p", outcome=None, reason="r")], lambda made: 1.0, least=True) is None
