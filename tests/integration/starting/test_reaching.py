"""Machines with networks of their own that reach others and are not reached get no work, and are told why."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.integration.harness import Started, command, started
from tests.network_namespaces import Network, machines, needs_namespaces

pytestmark = needs_namespaces

SMALL = ("--min-pipeline-nodes", "1", "--steps", "2")
PORTS = (30000, 30100)
FIX = f"open ports {PORTS[0]}:{PORTS[1]} between the job's machines, both ways, or give another address of "
ELSEWHERE = "10.99.0.1"


@contextmanager
def coordinator(folder: Path, network: Network, nodes: int) -> Iterator[tuple[Started, list[str]]]:
    """Start one alone; yield the command line of its agents, too."""
    (folder / "token").write_text("a secret of this test\n")
    options = f"--no-local-nodes --host {network.own_address} --token-file {folder / 'token'}"
    options += " --port-range {}:{}".format(*PORTS)
    with started(folder / "run", *SMALL, nodes=nodes, options=options) as job:
        address = job.wait_for(lambda event: event["kind"] == "listening")["address"]
        yield job, command("agent", "--join", address, "--token-file", folder / "token")


def refused(network: Network, machine: int, line: list[str]) -> str:
    """Run an agent that gets no work; return what it says."""
    done = subprocess.run(network.on(machine, line), capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr
    return done.stderr


@contextmanager
def joining(network: Network, machine: int, line: list[str]) -> Iterator[subprocess.Popen[str]]:
    agent = subprocess.Popen(network.on(machine, line), stderr=subprocess.PIPE, text=True)
    try:
        yield agent
    finally:
        agent.kill()
        agent.communicate()


def connected(job: Started, node: int) -> None:
    job.wait_for(lambda event: event["kind"] == "node_connected" and event["node"] == node)


def test_machine_that_reaches_others_and_is_not_reached_gets_no_work(tmp_path: Path) -> None:
    with machines(2) as network, coordinator(tmp_path, network, 2) as (job, line):
        first, second = network.address(0), network.address(1)
        network.shield(0, "{}-{}".format(*PORTS))
        told = refused(network, 0, line)
        alone = (
            f"got the coordinator cannot connect to {first}:{PORTS[0]} (no answer within 5 s); {FIX}{first}'s machine"
        )
        assert alone in told, "there is no node that could ask"
        with joining(network, 1, line) as other:
            connected(job, 0)
            told = refused(network, 0, line)
            asked = f"got {second}:{PORTS[0]} cannot connect to {first}:{PORTS[0]} (no answer within 5 s); {FIX}"
            assert asked in told
            network.unshield(0, "{}-{}".format(*PORTS))
            with joining(network, 0, line) as again:
                run = job.wait()
                codes = [each.wait(60) for each in (other, again)]
    assert (run.exit_code, codes) == (0, [0, 0])
    assert [event["address"] for event in run.of_kind("node_refused")] == [first, first]
    assert f"was refused: a node and the others must reach each other, {alone}" in job.output
    assert run.of_kind("node_lost") == []


def test_machine_tells_the_address_that_it_was_given_if_others_reach_it_there(tmp_path: Path) -> None:
    with machines(2) as network, coordinator(tmp_path, network, 2) as (job, line):
        network.give_address(1, ELSEWHERE)
        with joining(network, 0, line) as first:
            connected(job, 0)
            told = refused(network, 1, [*line, "--interface", ELSEWHERE])
            assert f"{network.address(0)}:{PORTS[0]} cannot connect to {ELSEWHERE}:{PORTS[0]} (" in told
            assert "or give another address of 10.99.0.1's machine with `resilient agent --interface`" in told
            with joining(network, 1, [*line, "--interface", "eth0"]) as second:
                run = job.wait()
                codes = [each.wait(60) for each in (first, second)]
    assert (run.exit_code, codes) == (0, [0, 0])


def test_link_that_is_cut_is_not_tried_for_ever_and_one_peer_that_is_reached_will_do(tmp_path: Path) -> None:
    """The node that came first cannot be asked any more; the one after it can."""
    with (
        machines(3) as network,
        coordinator(tmp_path, network, 3) as (job, line),
        joining(network, 0, line),
        joining(network, 1, line),
    ):
        for node in range(2):
            connected(job, node)
        network.cut(0)
        with joining(network, 2, line):
            connected(job, 2)
