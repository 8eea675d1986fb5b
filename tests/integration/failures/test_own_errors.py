"""An error or a crash on one node costs that node; the same on a second one is the job's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.harness import Run, check_recovered, resume_command, run_job, started

NODES = 5
STEP = 8
ERRING = Path(__file__).parents[1] / "jobs" / "erring.py"
DISK = r"OSError: \[Errno 5\] Input/output error: '/data/\d+' \(generation \d, step 8, action .*\)"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run in which nothing fails."""
    return run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)


def arguments(marks: Path, *more: str) -> tuple[str, ...]:
    marks.mkdir()
    return ("--err-step", str(STEP), "--marks", str(marks), *more)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (("--err", "disk"), DISK),
        (("--err", "disk", "--num-workers", "1"), DISK),
        (
            ("--err", "kill", "--num-workers", "1"),
            r"DataProcessError: data process 1 \(pid \d+\), which reads samples, must live as long as its worker, got "
            r"killed by SIGKILL; if memory ran out, lower num_workers or the microbatch, else see the worker's log .*",
        ),
    ],
    ids=["disk", "disk of a data process", "killed data process"],
)
def test_error_of_one_node_costs_that_node_only(
    more: tuple[str, ...], error: str, reference: Run, tmp_path: Path
) -> None:
    with started(tmp_path / "run", *arguments(tmp_path / "marks", *more), nodes=NODES, script=ERRING) as job:
        run = job.wait()
    check_recovered(run, reference)
    (failed,) = run.of_kind("node_failed")
    node = int((tmp_path / "marks" / "0").read_text())
    assert failed["node"] == node
    assert re.fullmatch(error, failed["error"]), failed["error"]
    (lost,) = run.of_kind("node_lost")
    assert (lost["node"], lost["cause"]) == (node, failed["error"])
    assert run.report["recoveries"][0]["nodes"] == [node]
    assert node not in run.generations[-1]["nodes"]
    assert f"node {node} failed: {failed['error'][:30]}" in " ".join(job.output.split())


def test_same_error_on_a_second_node_ends_the_job_and_names_both(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", *arguments(tmp_path / "marks", "--err-on", "2"), script=ERRING, nodes=NODES + 1)
    first, second = ((tmp_path / "marks" / turn).read_text() for turn in "01")
    assert run.exit_code == 1
    ends = rf"(node {second}: {DISK}; node {first}|node {first}: {DISK}; node {second}) had the same error before, "
    assert re.fullmatch(
        rf"{ends}so it is the job's own; resume with: resilient run --nodes 4 .*/step-00000007 .*", run.reason
    ), run.reason
    assert max(run.losses) == STEP - 1


def test_different_error_costs_a_second_node(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", nodes=NODES + 1)
    more = arguments(tmp_path / "marks", "--err-on", "2", "--then-err", "memory")
    run = run_job(tmp_path / "run", *more, script=ERRING, nodes=NODES + 1)
    check_recovered(run, reference, num_failures=2)
    assert sorted(event["error"].partition(":")[0] for event in run.of_kind("node_failed")) == [
        "MemoryError",
        "OSError",
    ]
    assert len(run.generations[-1]["nodes"]) == NODES - 1


ALONE = ("--min-pipeline-nodes", "1", "--checkpoint-every", str(STEP - 1))


def test_crash_of_all_nodes_ends_the_job_and_names_two(tmp_path: Path) -> None:
    more = arguments(tmp_path / "marks", "--err", "crash", "--err-on", "3", "--max-failures", "2", *ALONE)
    run = run_job(tmp_path / "run", *more, script=ERRING, nodes=3, wait_for_nodes_s=60)
    assert run.exit_code == 1
    ends = re.match(
        r"node (\d): a worker killed by SIGSEGV; one of node (\d) was, too, and no step was done since, so it is the "
        r"job's own; see (\S+/worker-0\.log); ",
        run.reason,
    )
    assert ends is not None, run.reason
    assert ends[1] != ends[2]
    words = resume_command(run.reason)
    assert words[words.index("--resume") + 1].endswith(f"/checkpoints/step-{STEP - 1:08d}")
    assert "Fatal Python error: Segmentation fault" in Path(ends[3]).read_text()
    assert max(run.losses) == STEP - 1


def test_crash_of_the_only_node_ends_the_job_with_the_signal(tmp_path: Path) -> None:
    more = arguments(tmp_path / "marks", "--err", "crash", "--max-failures", "0", *ALONE)
    run = run_job(tmp_path / "run", *more, script=ERRING, nodes=1, wait_for_nodes_s=60)
    assert run.exit_code == 3
    assert run.reason.startswith("all nodes are lost, the last one (0) because of: worker killed by SIGSEGV; resume")
    assert resume_command(run.reason)


def test_crash_of_one_node_of_several_costs_that_node_only(reference: Run, tmp_path: Path) -> None:
    more = arguments(tmp_path / "marks", "--err", "crash")
    run = run_job(tmp_path / "run", *more, script=ERRING, nodes=NODES)
    check_recovered(run, reference)
    (lost,) = run.of_kind("node_lost")
    assert lost["cause"] == "worker killed by SIGSEGV"
    assert run.of_kind("failed") == []
