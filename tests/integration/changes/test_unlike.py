"""Nodes of other sources, code or data than the others' are refused by name, or admitted by an option."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import resilient
from tests.integration.harness import CHAIN, Run, Started, check_equal, command, run_job, started

NODES = 4
VALUE, HERE, THERE = r"[0-9a-f]{12,16}", rf"on node {NODES} \(\S+\)", r"on node [0-3] \(\S+\)"


def script(folder: Path) -> Path:
    return Path(shutil.copy(CHAIN, folder))


def changed_package(folder: Path) -> Path:
    """Return where a copy of the package lies whose learning rate is doubled."""
    shutil.copytree(Path(resilient.__file__).parent, folder / "resilient", ignore=shutil.ignore_patterns("__pycache__"))
    source = folder / "resilient" / "optim.py"
    before = source.read_text()
    after = before.replace("return optimizer.lr * _factor", "return 2 * optimizer.lr * _factor")
    assert before != after
    source.write_text(after)
    return folder


def other_version(folder: Path) -> Path:
    """Return where the package is said to be installed in another version."""
    metadata = folder / "resilient_train-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: resilient-train\nVersion: 9.9.9\n")
    return folder


def join(job: Started, **environment: str) -> tuple[int, str]:
    """Have an agent join until it ends; return its exit code and what it logged."""
    access = json.loads((job.directory / "job.json").read_text())
    agent = subprocess.Popen(
        command("agent", "--join", access["address"]),
        env={**os.environ, "RESILIENT_TOKEN": access["token"], **environment},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, errors = agent.communicate(timeout=100)
    finally:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
    return agent.returncode, errors


REFUSALS = {
    "versions": rf"versions must be the same on all nodes, got resilient 9\.9\.9 {HERE} and \S+ {THERE}; install the "
    "same versions on all nodes, or start the job with --allow-different versions",
    "data": rf"data must be the same on all nodes, got sample \d+ {VALUE} {HERE} and {VALUE} {THERE}, .* and \d+ more; "
    "give the data set the same samples on all nodes, or start the job with --allow-different data",
    "schedule": rf"schedule must be the same on all nodes, got code {VALUE} {HERE} and {VALUE} {THERE}; have the "
    "learning rate's schedule depend on nothing that differs between nodes, or start the job with --allow-different "
    "schedule",
    "loss": rf"loss must be the same on all nodes, got code {VALUE} {HERE} and {VALUE} {THERE}; have the loss depend "
    "on nothing that differs between nodes, or start the job with --allow-different loss",
    "package": rf"package must be the same on all nodes, got sources {VALUE} {HERE} and {VALUE} {THERE}; install the "
    "same version of resilient, unchanged, on all nodes, or start the job with --allow-different package",
    "script": rf"script must be the same on all nodes, got chain\.py {VALUE} {HERE} and {VALUE} {THERE}; copy the "
    "script and its modules to all nodes, or start the job with --allow-different script",
}


INSTALLED = {"package": changed_package, "versions": other_version}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nobody comes or goes."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


@pytest.mark.parametrize("what", REFUSALS)
def test_joiner_that_differs_is_refused_by_name_and_the_job_goes_on(what: str, reference: Run, tmp_path: Path) -> None:
    gate, path = tmp_path / "gate", script(tmp_path)
    with started(tmp_path / "run", "--hold-in", 6, "--gate", gate, nodes=NODES, script=path) as job:
        job.wait_for_step(5)
        if what == "script":
            path.write_text(f"{path.read_text()}# edited while the job runs\n")
        environment = {"UNLIKE": what}
        if what in INSTALLED:
            environment = {"PYTHONPATH": str(INSTALLED[what](tmp_path))}
        exit_code, errors = join(job, **environment)
        gate.touch()
        run = job.wait()
    cause = rf"cannot join: {REFUSALS[what]}"
    (refused,) = run.of_kind("not_joined")
    assert refused["node"] == NODES
    assert re.fullmatch(REFUSALS[what], refused["cause"]), refused["cause"]
    assert not run.of_kind("node_lost")
    assert exit_code == 1
    assert re.search(rf"(this node|node {NODES}): {cause}\n", errors), errors
    assert f"cannot join: {refused['cause']}" in job.output
    check_equal(run, reference)
    assert run.report["joins"] == []


def test_joiner_that_may_differ_is_admitted_and_told_of(reference: Run, tmp_path: Path) -> None:
    gate, path = tmp_path / "gate", script(tmp_path)
    arguments = ("--hold-in", 6, "--gate", gate, "--change-after", 6)
    options = "--allow-different script"
    with started(tmp_path / "run", *arguments, nodes=NODES, script=path, options=options) as job:
        job.wait_for_step(5)
        path.write_text(f"{path.read_text()}# edited while the job runs\n")
        gate.touch()
        exit_code, errors = join(job)
        run = job.wait()
    assert exit_code == 0, errors
    check_equal(run, reference)
    (join_report,) = run.report["joins"]
    assert join_report["nodes"] == [NODES]
    (allowed,) = run.of_kind("difference_allowed")
    assert (allowed["node"], allowed["what"]) == (NODES, "script")
    assert re.fullmatch(rf"chain\.py {VALUE} {HERE} and {VALUE} {THERE}", allowed["difference"])
