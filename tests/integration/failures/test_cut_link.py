"""A connection that breaks in every generation costs a node, not the job."""

from __future__ import annotations

from pathlib import Path

from tests.integration.harness import check_recovered, run_job

CUTTING = Path(__file__).parents[1] / "jobs" / "cutting.py"


def test_pair_that_cannot_talk_costs_one_of_the_two(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", nodes=5)
    run = run_job(tmp_path / "run", "--cut", "1", "3", script=CUTTING, nodes=5)
    check_recovered(run, reference, num_failures=3)
    (lost,) = run.of_kind("node_lost")
    assert (lost["node"], lost["cause"]) == (3, "its connections to node 1 keep failing, and no step is done")
    assert run.generations[-1]["nodes"] == [0, 1, 2, 4]


def test_pair_of_which_none_can_be_spared_stops_the_job_and_is_named(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", "--cut", "1", "3", script=CUTTING, nodes=4)
    assert run.exit_code == 3
    assert run.reason.startswith("communication keeps failing between live nodes (1 and 3); check the network; "), (
        run.reason
    )
