"""Machines with networks of their own join a coordinator, and lose each other: for a moment, for long, one way."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.harness import Run, Started, check_equal, check_recovered, command, run_job, started
from tests.network_namespaces import Network, machines, needs_namespaces

pytestmark = needs_namespaces

MACHINES = 3
SMALL = ("--min-pipeline-nodes", "1")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nobody is cut off."""
    run = run_job(tmp_path_factory.mktemp("reference"), *SMALL, nodes=MACHINES)
    assert run.exit_code == 0, run.reason
    return run


Agents = list[subprocess.Popen[bytes]]


@contextmanager
def job_of_machines(folder: Path, network: Network, options: str) -> Iterator[tuple[Started, Agents]]:
    """Start a coordinator here and an agent on each machine, up to a step that waits for a gate, as a later one."""
    token = folder / "token"
    token.write_text("a secret of this test\n")
    options += f" --no-local-nodes --host {network.own_address} --token-file {token}"
    agents: Agents = []
    held = ("--hold-in", 5, "--gate", folder / "gate", "--hold-in", 9, "--gate", folder / "second-gate")
    with started(folder / "run", *SMALL, *held, nodes=MACHINES, options=options) as job:
        address = job.wait_for(lambda event: event["kind"] == "listening")["address"]
        line = command("agent", "--join", address, "--token-file", token)
        try:
            for machine in range(MACHINES):  # one after the other: machines and nodes have the same numbers
                with (folder / f"agent-{machine}.log").open("wb") as log:
                    agents.append(subprocess.Popen(network.on(machine, line), stdout=log, stderr=log))
                job.wait_for(lambda event, node=machine: event["kind"] == "node_connected" and event["node"] == node)
            job.wait_for_step(4)
            yield job, agents
        finally:
            for each in agents:
                each.send_signal(signal.SIGTERM)
            for each in agents:
                try:
                    each.wait(20)
                except subprocess.TimeoutExpired:
                    each.kill()


WAYS = {
    Network.cut: "{other} -> {own} is cut, or both ways",
    Network.silence: "{own} -> {other} is cut",
    Network.deafen: "{other} -> {own} is cut, or both ways",
}
"""To cut a link, and the way that its machine can tell is cut."""


@pytest.mark.parametrize(("way", "cut"), list(WAYS.items()))
def test_machine_that_is_cut_off_for_good_costs_a_step_and_ends(
    way: Callable[[Network, int], None], cut: str, reference: Run, tmp_path: Path
) -> None:
    options = "--heartbeat-s 1 --orphan-s 5"
    with machines(MACHINES) as network, job_of_machines(tmp_path, network, options) as (job, agents):
        way(network, 1)
        lost = job.wait_for(lambda event: event["kind"] == "detected")
        (tmp_path / "gate").touch()
        code = agents[1].wait(60)
        (tmp_path / "second-gate").touch()
        run = job.wait()
    told = (tmp_path / "agent-1.log").read_text()
    assert code == 1, told
    assert "cannot be reached from here; mend the network between, or stop it" in told
    own, other = network.address(1), json.loads((tmp_path / "run" / "job.json").read_text())["address"]
    link = rf"the link {own} -> {other}: last heard \d+ s ago, .*: the way {cut.format(own=own, other=other)}"
    assert re.search(rf"node 1: no coordinator answers \(.*; {link}.*\); goes on without one, for 5 s", told), told
    assert re.search(rf"before another takes over; {link}", told), told
    assert lost["nodes"] == [1]
    check_recovered(run, reference)
    assert run.generations[-1]["nodes"] == [0, 2]


def test_links_that_are_cut_for_three_seconds_each_in_its_way_cost_nothing(reference: Run, tmp_path: Path) -> None:
    with machines(MACHINES) as network, job_of_machines(tmp_path, network, "") as (job, agents):
        for machine, way in enumerate(WAYS):
            way(network, machine)
        time.sleep(3)
        for machine in range(MACHINES):
            network.join(machine)
        (tmp_path / "gate").touch()
        (tmp_path / "second-gate").touch()
        run = job.wait()
        codes = [each.wait(60) for each in agents]
    check_equal(run, reference)
    assert run.report["recoveries"] == []
    assert codes == [0, 0, 0]


@pytest.mark.parametrize("way", list(WAYS))
def test_machine_that_comes_back_after_half_a_minute_joins_anew(
    way: Callable[[Network, int], None], reference: Run, tmp_path: Path
) -> None:
    with machines(MACHINES) as network, job_of_machines(tmp_path, network, "--heartbeat-s 2") as (job, agents):
        way(network, 1)
        job.wait_for(lambda event: event["kind"] == "detected")
        (tmp_path / "gate").touch()
        time.sleep(30)
        network.join(1)
        job.wait_for(lambda event: event["kind"] == "node_ready" and event["node"] == MACHINES)
        (tmp_path / "second-gate").touch()
        run = job.wait()
        codes = [each.wait(60) for each in agents]
    check_recovered(run, reference)
    assert run.generations[-1]["nodes"] == [0, 2, MACHINES]
    assert codes == [0, 0, 0]
