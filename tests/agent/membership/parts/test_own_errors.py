"""An error or crash of one node costs that node; the same on a second node, or ever different ones, end the job."""

from __future__ import annotations

import signal

import pytest

from resilient.agent.membership.parts.context import EXIT_FAILED, EXIT_INTERRUPTED, Phase
from resilient.agent.membership.parts.events import Interrupted
from resilient.protocol.messages import Failed, Shutdown, Suspect
from tests.agent.membership.simulated import Job, job_spec, started

STEP = 3
DISK = Failed(error="OSError: disk gone (generation 1, step 4)", traceback="tb", kind="OSError at data.py:7")
OTHER_DISK = Failed(error="OSError: no such device (generation 2, step 4)", kind="OSError at data.py:7")
DEVICE = Failed(error="AcceleratorError: fault", kind="AcceleratorError at stage.py:9")
KEY = Failed(error="KeyError: 'x'", kind="KeyError at data.py:8")
CHECKPOINT = "resume with: resilient run --nodes 4 --resume /runs/x/checkpoints/step-00000003 train.py"


def trained(num_nodes: int = 6, **changes: object) -> Job:
    """Return a job that has done some steps."""
    job = started(num_nodes, **changes)
    for number in range(1, STEP + 1):
        job.step(number)
    for worker in job.placed():
        job.workers[worker].begun = True
    return job


def shutdowns(job: Job) -> list[tuple[int, Shutdown]]:
    return [(tell.node, tell.message) for tell in job.told if isinstance(tell.message, Shutdown)]


def test_error_of_one_node_costs_that_node_only() -> None:
    job = trained(5)
    job.say((1, 0), DISK)
    assert job.last("node_failed") == {"node": 1, "error": DISK.error, "traceback": "tb"}
    assert job.last("detected") == {"nodes": [1], "cause": DISK.error, "step": STEP}
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert sorted(job.plan.nodes) == [0, 2, 3, 4]
    assert job.last("node_lost") == {"node": 1, "cause": DISK.error}
    assert job.last("generation")["lost_steps"] == 1
    assert shutdowns(job) == [(1, Shutdown(exit_code=EXIT_FAILED, reason=DISK.error))]
    assert "failed" not in job.kinds()


def test_node_is_let_go_once_all_have_reported_what_it_knows_of_the_last_step() -> None:
    """It alone has passed the barrier of step 4, which all can apply then."""
    job = trained(5)
    for worker in job.placed():
        job.workers[worker].complete = True
    job.report_step(STEP)
    erring = job.placed()[-1]
    state = job.workers[erring]
    job.step(STEP + 1, reported=False)
    for worker in job.placed():
        if worker != erring:
            job.workers[worker].version, job.workers[worker].complete, job.workers[worker].passed = STEP, True, None
    assert state.version == STEP + 1
    job.say(erring, DISK)
    job.answer()
    assert (job.last("generation")["version"], job.last("generation")["roll_forward"]) == (STEP + 1, True)
    assert erring[0] not in job.plan.nodes


def test_same_error_on_a_second_node_ends_the_job_and_names_both() -> None:
    job = trained()
    job.say((1, 0), DISK)
    job.answer()
    job.step(STEP + 1)
    job.say((2, 0), OTHER_DISK)
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (
        EXIT_FAILED,
        f"node 2: {OTHER_DISK.error}; node 1 had the same error before, so it is the job's own; "
        + CHECKPOINT.replace("00000003", "00000004"),
    )
    assert job.manifests[-1].path == "/runs/x/checkpoints/step-00000004"


def test_same_error_on_two_nodes_of_one_generation_ends_the_job_without_delay() -> None:
    job = trained()
    job.say((1, 0), DISK)
    job.say((2, 0), OTHER_DISK)
    job.answer()
    assert job.stop is not None
    assert job.stop.reason == (
        f"node 2: {OTHER_DISK.error}; node 1 had the same error before, so it is the job's own; {CHECKPOINT}"
    )
    assert job.machine.generation == 2, "nothing is formed but the last checkpoint"
    assert "node_lost" not in job.kinds(), "what either holds is saved"


def test_same_error_on_a_second_node_names_both_also_where_too_few_are_left() -> None:
    job = trained(5)
    job.say((1, 0), DISK)
    job.say((2, 0), OTHER_DISK)
    job.answer()
    assert job.stop is not None
    assert job.stop.reason == (
        f"node 2: {OTHER_DISK.error}; node 1 had the same error before, so it is the job's own; {CHECKPOINT}"
    )


def test_different_error_costs_a_second_node_and_not_a_third_without_a_step() -> None:
    job = trained(7)
    for node, failed in ((1, DISK), (2, DEVICE)):
        job.say((node, 0), failed)
        job.answer()
        assert node not in job.plan.nodes
    job.say((3, 0), KEY)
    job.answer()
    assert job.stop is not None
    assert job.stop.reason == (
        "node 3: KeyError: 'x'; 2 nodes (1 and 2) had others since the last step, so they are the job's own; "
        + CHECKPOINT
    )


def test_different_errors_with_steps_between_them_cost_a_node_each() -> None:
    job = trained(7)
    for step, (node, failed) in enumerate(((1, DISK), (2, DEVICE), (3, KEY)), start=STEP + 1):
        job.say((node, 0), failed)
        job.answer()
        job.step(step)
    assert sorted(job.plan.nodes) == [0, 4, 5, 6]
    assert [record.fields["node"] for record in job.records if record.kind == "node_failed"] == [1, 2, 3]


def test_error_without_which_too_few_nodes_are_left_ends_the_job() -> None:
    job = trained(4)
    job.say((1, 0), DISK)
    assert job.last("failed") == {"node": 1, "error": DISK.error, "traceback": "tb"}
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (EXIT_FAILED, f"node 1: {DISK.error}; {CHECKPOINT}")


def test_node_that_was_to_be_let_go_is_missed_when_another_is_lost() -> None:
    job = trained(5)
    job.say((1, 0), DISK)
    job.lose(2)
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (EXIT_FAILED, f"node 1: {DISK.error}; {CHECKPOINT}")


def test_state_that_only_the_erring_node_holds_ends_the_job_and_is_saved() -> None:
    job = trained(4, spec=job_spec(max_failures=0, min_pipeline_nodes=2, global_batch=24, microbatch=24))
    node = job.placed()[0]
    job.say(node, DISK)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == EXIT_FAILED
    assert job.stop.reason.startswith(f"node {node[0]}: {DISK.error}; resume with: ")
    assert job.manifests[-1].path == "/runs/x/checkpoints/step-00000003"


def test_error_before_the_first_step_ends_the_job_at_once() -> None:
    job = started(6)
    job.say((1, 0), DISK)
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (
        EXIT_FAILED,
        f"node 1: {DISK.error}; start again with: resilient run --nodes 4 train.py",
    )


def test_error_that_can_only_be_the_jobs_ends_it_at_once() -> None:
    job = trained()
    job.say((1, 0), DISK)
    job.say((2, 0), Failed(error="SampleError: sample 7"))
    job.answer()
    assert job.stop is not None
    assert job.stop.reason == f"node 2: SampleError: sample 7; {CHECKPOINT}"


def test_end_of_the_erring_process_is_no_further_error() -> None:
    job = trained()
    job.say((1, 0), DISK)
    job.end_worker((1, 0), 1, "OSError: disk gone")
    del job.workers[1, 0]
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert job.kinds().count("node_failed") == 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        ("KeyError: 'x'", "KeyError: 'x'"),
        ("", "a worker ended with exit code 7; see /runs/x/logs/node-{node}/worker-0.log"),
    ],
)
def test_worker_that_ends_by_itself_costs_its_node_and_on_a_second_node_the_job(error: str, told: str) -> None:
    job = trained()
    for node in (1, 2):
        job.end_worker((node, 0), 7, error)
        del job.workers[node, 0]
        job.answer()
    assert job.last("node_failed") == {"node": 1, "error": told.format(node=1), "traceback": ""}
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (
        EXIT_FAILED,
        f"node 2: {told.format(node=2)}; node 1 had the same error before, so it is the job's own; {CHECKPOINT}",
    )


def test_interrupted_job_saves_what_the_erring_node_holds() -> None:
    job = trained(5)
    job.feed(Interrupted(reason="SIGTERM"))
    job.say((1, 0), DISK)
    job.answer()
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason.partition(";")[0]) == (EXIT_INTERRUPTED, "interrupted (SIGTERM)")


def test_error_heard_of_after_its_peers_suspicion_names_the_node() -> None:
    job = trained(5)
    job.say((0, 0), Suspect(generation=1, reason="reset", peer=1))
    job.say((1, 0), DISK)
    job.answer()
    assert job.last("node_lost") == {"node": 1, "cause": DISK.error}
    assert job.machine.parts.suspicions.count == 0, "it was no suspicion"


def crash(job: Job, node: int, number: signal.Signals) -> None:
    """Have a node's worker be killed by a signal; its agent begins anew, as a further node, that is not ready yet."""
    job.end_worker((node, 0), -number)
    del job.workers[node, 0]
    job.answer()


def crashed_text(second: int, first: int, name: str = "SIGSEGV") -> str:
    return (
        f"node {second}: a worker killed by {name}; one of node {first} was, too, and no step was done since, so it is "
        f"the job's own; see /runs/x/logs/node-{second}/worker-0.log"
    )


def test_same_crash_on_a_second_node_ends_the_job_and_names_both() -> None:
    job = trained()
    crash(job, 1, signal.SIGSEGV)
    assert job.machine.phase is Phase.RUNNING
    assert job.last("node_lost") == {"node": 1, "cause": "worker killed by SIGSEGV"}
    crash(job, 2, signal.SIGSEGV)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (EXIT_FAILED, f"{crashed_text(2, 1)}; {CHECKPOINT}")
    assert job.manifests[-1].path == "/runs/x/checkpoints/step-00000003"


def test_same_crash_on_all_nodes_at_once_ends_the_job() -> None:
    job = trained(5)
    for node in range(5):
        if job.stop is None:
            job.end_worker((node, 0), -signal.SIGABRT)
    assert job.stop is not None
    assert job.stop.exit_code == EXIT_FAILED
    assert job.stop.reason == (
        f"{crashed_text(1, 0, 'SIGABRT')}; all nodes are lost, the last one (4) because of: worker killed by SIGABRT; "
        "there is no checkpoint; start again with: resilient run --nodes 4 train.py"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [(signal.SIGKILL, signal.SIGKILL), (signal.SIGTERM, signal.SIGTERM), (signal.SIGSEGV, signal.SIGBUS)],
)
def test_signals_from_outside_and_unlike_crashes_cost_a_node_each(
    first: signal.Signals, second: signal.Signals
) -> None:
    job = trained()
    crash(job, 1, first)
    crash(job, 2, second)
    assert job.machine.phase is Phase.RUNNING
    assert "failed" not in job.kinds()


def test_crash_of_a_node_that_stands_by_is_held_against_no_other() -> None:
    job = started(spec=job_spec(global_batch=4), num_nodes=9)
    job.step(STEP)
    (spare,) = set(range(9)) - set(job.plan.nodes)
    crash(job, spare, signal.SIGSEGV)
    crash(job, job.plan.nodes[1], signal.SIGSEGV)
    assert job.machine.phase is Phase.RUNNING
    assert "failed" not in job.kinds()


def test_crashes_with_a_step_between_them_cost_a_node_each() -> None:
    job = trained()
    crash(job, 1, signal.SIGSEGV)
    job.step(STEP + 1)
    crash(job, 2, signal.SIGSEGV)
    assert job.machine.phase is Phase.RUNNING
    assert sorted(job.plan.nodes) == [0, 3, 4, 5]


def test_worker_that_is_started_again_on_its_machine_and_crashes_again_is_no_second_node() -> None:
    job = trained(5)
    crash(job, 1, signal.SIGSEGV)
    again = job.connect(pid=1)
    job.ready(again)
    job.answer()
    assert again in job.plan.nodes
    crash(job, again, signal.SIGSEGV)
    assert job.machine.phase is Phase.RUNNING
    crash(job, 2, signal.SIGSEGV)
    assert job.stop is not None
    assert job.stop.reason.startswith(crashed_text(2, 1))


def test_joiner_that_crashes_is_its_own_affair() -> None:
    job = trained()
    crash(job, 1, signal.SIGSEGV)
    crash(job, job.connect(), signal.SIGSEGV)
    assert job.machine.phase is Phase.RUNNING
    assert "failed" not in job.kinds()


def test_same_crash_on_two_nodes_before_the_first_generation_ends_the_job() -> None:
    job = Job(num_nodes=5)
    for _ in range(5):
        job.connect()
    crash(job, 1, signal.SIGSEGV)
    assert job.stop is None
    crash(job, 2, signal.SIGSEGV)
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (EXIT_FAILED, crashed_text(2, 1))
