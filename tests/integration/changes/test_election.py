"""A job whose coordinators are elected in a real etcd: each may die, stand still, or lose sight of the store."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyetcd
import pytest

from resilient.agent.journal.replay import difference, replay_run
from resilient.agent.leadership.leader_store import LeaderStore
from resilient.agent.leadership.office import read_office
from tests.etcd_server import EtcdServer, etcd_server, needs_etcd
from tests.integration.changes.test_takeover import agents, held, wait_until
from tests.integration.harness import (
    Run,
    Started,
    check_equal,
    check_recovered,
    check_survivors,
    command,
    run_job,
    spare_nodes,
    started,
)
from tests.network_namespaces import Network, machines, needs_namespaces

pytestmark = needs_etcd

NODES, OUTSIDE = 6, 3
"""Of jobs with nodes of their own, and of those whose nodes are machines: each of these imports torch itself."""
SMALL = ("--min-pipeline-nodes", "1")
HEARTBEAT = "--heartbeat-s 2"
LONGER, LEASE_S = "--heartbeat-s 3", 9
"""Where a link is cut for a moment: TCP needs up to as long again to get over it."""
Agent = subprocess.Popen[bytes]
STEPS = list(range(1, 13))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


@contextmanager
def elected(
    folder: Path, server: EtcdServer, *words: object, nodes: int = NODES, options: str = ""
) -> Iterator[Started]:
    """Start a job whose coordinators are elected."""
    options = f"{HEARTBEAT} --store etcd://{server.endpoint}/jobs/this {options}"
    with started(folder / "run", *words, nodes=nodes, options=options) as job:
        yield job


def terms(folder: Path) -> list[int]:
    """Return the terms that followed the first, as far as they have begun."""
    return [event["term"] for event in Run(folder / "run", 0).of_kind("took_over")]


def leader(folder: Path) -> psutil.Process:
    """Return the process that leads the job."""
    office = read_office(folder / "run")
    assert office is not None
    return psutil.Process(office.pid)


def ended(job: Started) -> Run:
    """Wait until nothing of the job runs any more; what is left must be one story, which can be decided again."""
    assert (left := job.processes.left(90)) == [], left
    run = Run(job.directory, 0)
    told = "\n".join(map(str, [*run.events[-20:], job.output]))
    assert [step["step"] for step in run.of_kind("step")] == STEPS, f"each is told once, and none is lost: {told}"
    assert run.report["exit"]["code"] == 0
    replayed = replay_run(job.directory)
    assert (replayed.broken, difference(job.directory, replayed)) == ("", "")
    return run


def test_job_outlives_two_coordinators_and_a_node_lost_after_each(reference: Run, tmp_path: Path) -> None:
    """The launcher is killed, then a node, then the node that leads: its coordinator dies with it."""
    words, (first, second, third) = held(tmp_path, 4, 7, 10)
    with etcd_server(tmp_path / "etcd") as server, elected(tmp_path, server, *words) as job:
        pids = agents(job)
        job.wait_for_step(3)
        job.kill()
        wait_until(lambda: terms(tmp_path) == [2])
        leading = next(node for node, pid in pids.items() if pid == leader(tmp_path).ppid())
        spare = next(node for node in spare_nodes(Run(job.directory, 0).generations[-1], leading) if node != leading)
        first.touch()
        wait_until(lambda: max(Run(job.directory, 0).losses) >= 6)
        os.killpg(pids[spare], signal.SIGKILL)
        wait_until(lambda: Run(job.directory, 0).of_kind("detected") != [])
        second.touch()
        wait_until(lambda: max(Run(job.directory, 0).losses) >= 9)
        os.killpg(pids[leading], signal.SIGKILL)
        wait_until(lambda: terms(tmp_path) == [2, 3])
        third.touch()
        run = ended(job)
        assert LeaderStore(f"etcd://{server.endpoint}/jobs/this", 5).leader() is None, "its lease is given back"
    check_recovered(run, reference, num_failures=2)
    assert [event["node"] for event in run.of_kind("node_lost")] == [spare, leading]
    assert (job.directory / "report.json").exists()


def test_node_that_leads_may_leave(reference: Run, tmp_path: Path) -> None:
    """Its coordinator resigns as it goes, so nobody waits for the end of a lease."""
    words, (first, second) = held(tmp_path, 4, 8)
    with etcd_server(tmp_path / "etcd") as server, elected(tmp_path, server, *words) as job:
        pids = agents(job)
        job.wait_for_step(3)
        job.kill()
        wait_until(lambda: terms(tmp_path) == [2])
        leading = next(node for node, pid in pids.items() if pid == leader(tmp_path).ppid())
        os.kill(pids[leading], signal.SIGTERM)
        wait_until(lambda: Run(job.directory, 0).of_kind("node_leaving") != [])
        first.touch()
        wait_until(lambda: terms(tmp_path) == [2, 3])
        second.touch()
        run = ended(job)
    assert terms(tmp_path) == [2, 3], "who leads a job to its end stays until all have ended"
    check_equal(run, reference)
    check_survivors(run)
    assert (run.report["recoveries"], run.of_kind("node_lost")) == ([], [])
    assert leading not in run.generations[-1]["nodes"]


def test_coordinator_that_stands_still_and_wakes_up_resigns(reference: Run, tmp_path: Path) -> None:
    words, (gate,) = held(tmp_path, 6)
    with etcd_server(tmp_path / "etcd") as server, elected(tmp_path, server, *words) as job:
        agents(job)
        job.wait_for_step(3)
        job.processes.take_in_children(job.popen.pid)
        os.kill(job.popen.pid, signal.SIGSTOP)
        wait_until(lambda: terms(tmp_path) == [2])
        os.kill(job.popen.pid, signal.SIGCONT)
        assert job.popen.wait(60) == 1
        gate.touch()
        run = ended(job)
    assert "another coordinator has taken this job over (term 2 in" in job.output
    check_equal(run, reference)
    check_survivors(run)
    assert len(run.generations) == 1
    assert run.of_kind("node_lost") == []


def test_etcd_may_be_gone_for_half_a_minute(reference: Run, tmp_path: Path) -> None:
    """Steps 4 to 6 are done meanwhile. The launcher leads the job again, or one of its nodes; then a node is lost."""
    words, (first, second) = held(tmp_path, 4, 7)
    with etcd_server(tmp_path / "etcd") as server, elected(tmp_path, server, *words) as job:
        pids = agents(job)
        job.wait_for_step(3)
        job.processes.take_in_children(job.popen.pid)
        server.send(signal.SIGKILL)
        back_at = time.monotonic() + 30
        wait_until(lambda: "the lease of term 1 is over" in job.output)
        first.touch()
        time.sleep(back_at - time.monotonic())
        assert terms(tmp_path) == []
        server.start()
        wait_until(lambda: terms(tmp_path) == [2])
        wait_until(lambda: max(Run(job.directory, 0).losses) >= 6)
        os.killpg(pids[2], signal.SIGKILL)
        wait_until(lambda: Run(job.directory, 0).of_kind("detected") != [])
        second.touch()
        run = ended(job)
        job.popen.wait(60)
    check_recovered(run, reference)
    assert [event["node"] for event in run.of_kind("node_lost")] == [2]


@contextmanager
def agents_on(folder: Path, network: Network, count: int, address: str) -> Iterator[list[Agent]]:
    """Have so many machines join; what they say is in ``agents.log``."""
    line = command("agent", "--join", address, "--token-file", folder / "token", *HEARTBEAT.split())
    with (folder / "agents.log").open("wb") as log:
        joined = [subprocess.Popen(network.on(machine, line), stdout=log, stderr=log) for machine in range(count)]
    try:
        yield joined
    finally:
        for each in joined:
            each.kill()
            each.wait()


def lease_left_s(server: EtcdServer) -> int:
    """Return for how long the lease of whoever leads is kept."""
    host, port = server.endpoint.split(":")
    with pyetcd.client(host, int(port), timeout=5) as client:
        found = client.get_response("/jobs/this/leader").kvs
        return client.get_lease_info(found[0].lease).TTL if found else 0


@dataclass(frozen=True, kw_only=True)
class LedFromOutside:
    """A job whose launcher, nodes and etcd are machines of their own."""

    network: Network
    server: EtcdServer
    job: Started
    joined: list[Agent]
    gate: Path


@contextmanager
def led_from_outside(folder: Path, options: str = LONGER, *more: object) -> Iterator[LedFromOutside]:
    """Start such a job, up to a step that waits for a gate; etcd's machine is the last one."""
    words, (gate,) = held(folder, 6)
    (folder / "token").write_text("a secret of this test\n")
    with (
        machines(OUTSIDE + 1) as network,
        etcd_server(folder / "etcd", network.address(OUTSIDE), lambda line: network.on(OUTSIDE, line)) as server,
    ):
        url = f"etcd://{server.endpoint}/jobs/this"
        alone = f"--no-local-nodes --host {network.own_address} --port 29400 --token-file {folder / 'token'}"
        with (
            started(
                folder / "run", *SMALL, *words, *more, nodes=OUTSIDE, options=f"{options} --store {url} {alone}"
            ) as job,
            agents_on(folder, network, OUTSIDE, url) as joined,
        ):
            job.wait_for_step(5)
            yield LedFromOutside(network=network, server=server, job=job, joined=joined, gate=gate)


def check_led_on(led: LedFromOutside, folder: Path, reference: Run) -> None:
    """Check that the launcher makes way, one of the nodes leads the job to its end, and nothing else happens."""
    job = led.job
    wait_until(lambda: terms(folder) == [2])
    assert job.popen.wait(60) == 1
    led.gate.touch()
    codes = [each.wait(60) for each in led.joined]
    run = ended(job)
    assert codes == [0] * OUTSIDE, (folder / "agents.log").read_text()
    (event,) = run.of_kind("took_over")
    assert event["address"].endswith(":29400"), "one port is open"
    assert "another coordinator has taken this job over (term 2 in" in job.output
    check_equal(run, reference)
    assert len(run.generations) == 1
    assert run.of_kind("node_lost") == []


@needs_namespaces
@pytest.mark.parametrize("cut", [Network.deafen, Network.mute])
def test_coordinator_that_is_cut_off_from_etcd_resigns_and_another_leads(
    cut: Callable[[Network, int], None], reference: Run, tmp_path: Path
) -> None:
    """Whichever way: for three seconds nothing comes of it; for half a minute, and the launcher finds out who leads.

    Where it is gone before that, nobody is left who could see the link mended, and that is not waited for.
    """
    with led_from_outside(tmp_path) as led:
        cut(led.network, OUTSIDE)
        time.sleep(3)
        led.network.join(OUTSIDE)
        wait_until(lambda: lease_left_s(led.server) >= LEASE_S - 1)
        assert terms(tmp_path) == []
        cut(led.network, OUTSIDE)
        mended_at = time.monotonic() + 30
        wait_until(lambda: terms(tmp_path) == [2])
        with suppress(subprocess.TimeoutExpired):
            led.job.popen.wait(max(0.0, mended_at - time.monotonic()))
        led.network.join(OUTSIDE)
        check_led_on(led, tmp_path, reference)
        link = rf"{re.escape(led.network.own_address)} -> {re.escape(led.server.endpoint)}: last answer \d+ s ago"
    assert re.search(rf"term 1 ends in .* for want of etcd: etcd must answer at .*\({link}", led.job.output)


@needs_namespaces
@pytest.mark.parametrize("cut", [Network.deafen, Network.mute])
def test_coordinator_that_no_node_hears_resigns_and_one_of_them_leads(
    cut: Callable[[Network, int], None], reference: Run, tmp_path: Path
) -> None:
    """It keeps its lease, for etcd hears it: it would be of no use to anybody."""
    with led_from_outside(tmp_path) as led:
        for machine in range(OUTSIDE):
            cut(led.network, machine)
        check_led_on(led, tmp_path, reference)
        own = led.network.own_address
    assert f"no node is heard at {own}:29400 any more" in led.job.output
    told = (tmp_path / "agents.log").read_text()
    link = rf"the link \S+ -> {own}:29400: last heard \d+ s ago, "
    assert re.search(rf"nobody leads the job \({link}.*\): standing for it", told), told


@needs_namespaces
def test_coordinator_that_etcd_alone_can_elect_follows_itself(reference: Run, tmp_path: Path) -> None:
    """No node can reach etcd, so none stands: they come back to the launcher, which leads on in a second term."""
    words, (gate,) = held(tmp_path, 6)
    (tmp_path / "token").write_text("a secret of this test\n")
    with machines(OUTSIDE) as network, etcd_server(tmp_path / "etcd") as server:
        url = f"etcd://{server.endpoint}/jobs/this"
        alone = f"--no-local-nodes --host {network.own_address} --token-file {tmp_path / 'token'}"
        options = f"{HEARTBEAT} --store {url} {alone}"
        with started(tmp_path / "run", *SMALL, *words, nodes=OUTSIDE, options=options) as job:
            address = job.wait_for(lambda event: event["kind"] == "listening")["address"]
            with agents_on(tmp_path, network, OUTSIDE, address) as joined:
                job.wait_for_step(5)
                server.send(signal.SIGKILL)
                wait_until(lambda: "the lease of term 1 is over" in job.output)
                server.start()
                wait_until(lambda: terms(tmp_path) == [2])
                gate.touch()
                codes = [each.wait(60) for each in joined]
                exit_code = job.popen.wait(60)
            run = ended(job)
    assert (exit_code, codes) == (0, [0] * OUTSIDE), (tmp_path / "agents.log").read_text()
    assert len(re.findall(r"generation 1:", job.output)) == 1, "what was told once is not told again"
    check_equal(run, reference)
    assert (len(run.generations), run.of_kind("node_lost")) == (1, [])
