"""A job whose etcd is gone for good, or out of reach for good: it is led on, or ends in time, to be resumed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import psutil
import pytest

from resilient.agent.journal.replay import difference, replay_run
from resilient.state.manifest import folder as checkpoint_folder
from resilient.state.manifest import read_manifest
from tests.etcd_server import etcd_server, needs_etcd
from tests.integration.changes.test_election import (
    HEARTBEAT,
    OUTSIDE,
    SMALL,
    STEPS,
    elected,
    ended,
    leader,
    led_from_outside,
    terms,
)
from tests.integration.changes.test_takeover import agents, wait_until
from tests.integration.harness import Run, Started, check_equal, resume_command, run_job
from tests.network_namespaces import needs_namespaces

pytestmark = needs_etcd

LAST = (*SMALL, "--change-after", 6)
"""Of a job that ends before its seventh step: the sixth waits until that is known."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run."""
    run = run_job(tmp_path_factory.mktemp("reference"), *SMALL, nodes=OUTSIDE)
    assert run.exit_code == 0, run.reason
    return run


def stopped(job: Started, folder: Path, exit_code: int) -> Run:
    """Check that nothing of a job runs any more, that it was led twice, and that step 6's checkpoint is left."""
    assert (left := job.processes.left(60)) == [], left
    run = Run(job.directory, exit_code)
    told = "\n".join(map(str, [*run.events[-20:], job.output]))
    assert (run.events[-1]["kind"], run.events[-1]["exit_code"]) == ("stopped", exit_code), told
    assert terms(folder) == [2], told
    steps = [step["step"] for step in run.of_kind("step")]
    assert steps == STEPS[:6], "each is told once, and none is lost"
    assert read_manifest(checkpoint_folder(job.directory, 6)).step == 6
    replayed = replay_run(job.directory)
    assert (replayed.broken, difference(job.directory, replayed)) == ("", "")
    return run


def test_etcd_killed_for_good_ends_the_job_with_a_checkpoint(reference: Run, tmp_path: Path) -> None:
    """The launcher does not lead for longer than its lease; its nodes end the job when nobody has led it for long."""
    with etcd_server(tmp_path / "etcd") as server:
        with elected(tmp_path, server, *LAST, nodes=OUTSIDE, options="--orphan-s 3") as job:
            agents(job)
            job.wait_for_step(5)
            job.processes.take_in_children(job.popen.pid)
            server.send(signal.SIGKILL)
            assert job.popen.wait(60) == 1
            run = stopped(job, tmp_path, 3)
        link = rf"127\.0\.0\.1 -> {re.escape(server.endpoint)}: "
        assert re.search(rf"term 1 ends in .* for want of etcd: .*\({link}last answer \d+ s ago", job.output)
        assert re.search(rf"\(term 2 in .*for want of etcd: .*\({link}", job.output), job.output
        reason = rf"interrupted \(no coordinator for 3 s; etcd must answer at .*\({link}"
        assert re.match(reason, run.reason), run.reason
    words = resume_command(run.reason)
    assert words[words.index("--resume") + 1] == str(checkpoint_folder(job.directory, 6))
    assert run.losses == pytest.approx({step: reference.losses[step] for step in STEPS[:6]}, rel=1e-9)


def test_job_without_its_etcd_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """By a signal to the launcher, which leads nothing: it ends the job at once, and not when nodes give up."""
    with etcd_server(tmp_path / "etcd") as server, elected(tmp_path, server, *LAST, nodes=OUTSIDE) as job:
        agents(job)
        job.wait_for_step(5)
        job.processes.take_in_children(job.popen.pid)
        server.send(signal.SIGKILL)
        wait_until(lambda: "the lease of term 1 is over" in job.output)
        job.popen.send_signal(signal.SIGTERM)
        assert job.popen.wait(60) == 130, job.output
        run = stopped(job, tmp_path, 130)
    assert run.of_kind("node_lost") == []


@needs_namespaces
def test_etcd_out_of_everybodys_reach_for_good_ends_the_job_with_a_checkpoint(tmp_path: Path) -> None:
    """Its machine is cut off: no connection to it is ever refused."""
    with led_from_outside(tmp_path, f"{HEARTBEAT} --orphan-s 3", *LAST) as led:
        led.network.cut(OUTSIDE)
        led.gate.touch()
        assert led.job.popen.wait(60) == 1
        codes = [each.wait(60) for each in led.joined]
        run = stopped(led.job, tmp_path, 3)
        etcd, addresses = re.escape(led.server.endpoint), map(led.network.address, range(OUTSIDE))
    told = (tmp_path / "agents.log").read_text()
    assert codes == [3] * OUTSIDE, told
    links = [rf"goes on without one, for 3 s|{re.escape(address)} -> {etcd}: " for address in addresses]
    assert all(re.search(rf"no coordinator answers \(.*etcd must answer at .*\({link}", told) for link in links), told
    assert re.match(rf"interrupted \(no coordinator for 3 s; etcd must answer at {etcd}, got ", run.reason), run.reason


@needs_namespaces
def test_node_that_leads_and_is_cut_off_from_etcd_for_good_is_led_by_another(reference: Run, tmp_path: Path) -> None:
    """It takes part on, as all can reach each other, and finds out from the run's folder who leads."""
    with led_from_outside(tmp_path, HEARTBEAT) as led:
        led.job.kill()
        wait_until(lambda: terms(tmp_path) == [2])
        first = leader(tmp_path)
        cut_off = [each.pid for each in led.joined].index(first.ppid())
        led.network.part(cut_off, OUTSIDE)
        wait_until(lambda: terms(tmp_path) == [2, 3])
        wait_until(lambda: not psutil.pid_exists(first.pid))
        assert led.joined[cut_off].poll() is None
        assert leader(tmp_path).ppid() in {each.pid for each in led.joined} - {led.joined[cut_off].pid}
        led.gate.touch()
        codes = [each.wait(60) for each in led.joined]
        run = ended(led.job)
        link = f"{led.network.address(cut_off)} -> {led.server.endpoint}: last answer "
    told = (tmp_path / "agents.log").read_text()
    assert codes == [0] * OUTSIDE, told
    assert re.search(rf"term 2 ends in .* for want of etcd: .*\({re.escape(link)}\d+ s ago", told), told
    check_equal(run, reference)
    assert (len(run.generations), run.of_kind("node_lost")) == (1, [])
