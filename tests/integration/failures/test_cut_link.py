"""A connection that breaks in every generation costs a node, not the job."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.harness import check_recovered, run_job

CUTTING = Path(__file__).parents[1] / "jobs" / "cutting.py"


def test_pair_that_cannot_talk_costs_one_of_the_two(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", nodes=5)
    run = run_job(tmp_path / "run", "--cut", "1", "3", script=CUTTING, nodes=5)
    check_recovered(run, reference, num_failures=3)
    (lost,) = run.of_kind("node_lost")
    assert lost["node"] in (1, 3), "which of the two, chance decides: the one that complains first"
    assert re.fullmatch(r"its connections to (node \d( and )?)+ keep failing, and no step is done", lost["cause"])
    assert run.generations[-1]["nodes"] == [node for node in range(5) if node != lost["node"]]


def test_pair_of_which_none_can_be_spared_stops_the_job_and_is_named(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", "--cut", "1", "3", script=CUTTING, nodes=4)
    assert run.exit_code == 3
    told = (
        r"communication keeps failing between live nodes \((\d and \d, )*1 and 3(, \d and \d)*\); check the network; "
    )
    assert re.match(told, run.reason), run.reason
