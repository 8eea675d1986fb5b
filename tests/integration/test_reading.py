"""Samples are read ahead of time, by processes that leave with their worker, and alike on all nodes, or refused."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest

from resilient.data.reader import REPEATABLE
from resilient.testing import fail_at
from tests.integration.harness import (
    LONGEST_RECOVERY_MS,
    check_equals_one_process,
    run_alone,
    run_job,
    started,
)

AUGMENTED = Path(__file__).parent / "jobs" / "augmented.py"


def loads(record: Path) -> dict[str, Counter[str]]:
    """Return ``NODE-KIND-PID`` of each process that read -> how often it loaded each entry."""
    return {path.name: Counter(path.read_text().splitlines()) for path in record.iterdir()}


def still_run(record: Path) -> list[psutil.Process]:
    """Return the data processes that have not ended in the time it may take."""
    pids = [int(name.split("-")[2]) for name in loads(record) if "-data-" in name]
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=30)
    return alive


def test_augmented_job_whose_worker_is_killed_equals_one_process(tmp_path: Path) -> None:
    log = run_alone(tmp_path / "alone", "--workers", "0", "--record", str(tmp_path / "record-alone"), script=AUGMENTED)
    record = tmp_path / "record"
    failure = fail_at(node=1, step=4, phase="backward", worker_only=True)
    run = run_job(tmp_path / "run", "--record", str(record), script=AUGMENTED, nodes=5, inject=[failure])
    check_equals_one_process(run, tmp_path / "alone", log)
    (recovery,) = run.report["recoveries"]
    assert recovery["total_ms"] < LONGEST_RECOVERY_MS, "nobody waited for connections that data processes hold"
    read = loads(record)
    assert sum("-data-" in name for name in read) >= 8
    assert all(counts["1 sockets"] == 1 for name, counts in read.items() if "-data-" in name), "its worker's, no other"
    assert still_run(record) == []


def test_a_node_that_needs_only_targets_loads_no_points(tmp_path: Path) -> None:
    arguments = ("--max-failures", "0", "--workers", "1", "--record", str(tmp_path / "record"))
    run = run_job(tmp_path / "run", *arguments, script=AUGMENTED, nodes=2)
    assert run.exit_code == 0, run.reason
    (pipeline,) = run.generations[0]["pipelines"]
    first, last = (stage["node"] for stage in pipeline["stages"])
    read = {name.split("-")[0]: counts for name, counts in loads(tmp_path / "record").items() if "-data-" in name}
    assert read[str(first)]["input"] == read[str(first)]["target"] == 8 * 16 + 1, "the first sample is read twice"
    assert (read[str(last)]["input"], read[str(last)]["target"]) == (0, 8 * 16 + 1)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_generator_of_its_own_is_refused_in_one_process(workers: str, tmp_path: Path) -> None:
    arguments = ("--added", "own", "--workers", workers, "--record", str(tmp_path / "record"))
    with pytest.raises(subprocess.CalledProcessError) as ended:
        run_alone(tmp_path / "alone", *arguments, script=AUGMENTED)
    last = ended.value.stderr.splitlines()[-1]
    assert last.startswith("resilient.errors.SampleError: sample ")
    assert (
        f" of Augmented: 'input' must be the same whenever it is read, got another the second time; {REPEATABLE}"
        in last
    )


def test_what_differs_from_node_to_node_is_refused_at_the_start(tmp_path: Path) -> None:
    arguments = ("--added", "node", "--max-failures", "0", "--record", str(tmp_path / "record"))
    run = run_job(tmp_path / "run", *arguments, script=AUGMENTED, nodes=2)
    assert (run.exit_code, run.generations) == (1, [])
    message = (
        r"node (\d): data must be the same on all nodes, got sample \d+ [0-9a-f]{16} on node \1 \(\S+\) and "
        r"[0-9a-f]{16} on node \d \(\S+\), .* and 5 more; give the data set the same samples on all nodes, or start "
        "the job with --allow-different data"
    )
    assert re.fullmatch(message, run.reason), run.reason


def test_what_differs_between_stages_is_refused_in_the_step(tmp_path: Path) -> None:
    arguments = ("--added", "node", "--max-failures", "0", "--record", tmp_path / "record")
    options = "--allow-different data"  # or it would be refused before
    with started(tmp_path / "run", *arguments, script=AUGMENTED, nodes=2, options=options) as job:
        run = job.wait()
    assert (run.exit_code, run.losses) == (1, {})
    (pipeline,) = run.generations[0]["pipelines"]
    first, last = (stage["node"] for stage in pipeline["stages"])
    assert (
        "of Augmented: 'input' must be the same on all stages, got different ones on stage 0 "
        f"(node {first}) and stage 1 (node {last}) in step 1; {REPEATABLE}"
    ) in run.reason


def test_random_numbers_in_collate_are_refused(tmp_path: Path) -> None:
    arguments = ("--added", "jitter", "--max-failures", "0", "--record", str(tmp_path / "record"))
    run = run_job(tmp_path / "run", *arguments, script=AUGMENTED, nodes=2)
    assert (run.exit_code, run.losses) == (1, {})
    assert (
        "SampleError: collate of Jittered must draw no random numbers, got some; draw them in __getitem__, for after a "
        "failure other samples may be collated together"
    ) in run.reason
