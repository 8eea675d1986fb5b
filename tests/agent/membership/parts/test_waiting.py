"""Workers that all stand still: they are asked for reports, who hangs shows where and is given up, the job goes on."""

from __future__ import annotations

import pytest

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeLeaving, Tell, Tick
from resilient.protocol.messages import Finished, NotSaved, Regroup, ShowStacks, Shutdown
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from tests.agent.membership.simulated import PROFILE, STATES, Job, job_spec, started

LIMIT_S = 15 * 120.0
"""Of a job whose workers wait two minutes for each other."""


def pass_time(job: Job, until_s: float) -> None:
    job.now = until_s
    job.feed(Tick())


def stall(job: Job) -> None:
    """Let so much time pass without a word of any worker that it is noticed."""
    pass_time(job, job.now + LIMIT_S - 1)
    assert job.machine.phase is not Phase.AGREEING or job.workers[0, 0].inbox[-1].at_boundary
    pass_time(job, job.now + 1)
    assert job.machine.phase is Phase.AGREEING
    regroup = Regroup(generation=2, heard_step=job.machine.status()["step"])
    assert all(state.inbox[-1] == regroup for state in job.workers.values())


def shown(job: Job) -> list[tuple[int, int]]:
    """Return the workers that were asked for their stacks."""
    return [(told.node, told.message.local_rank) for told in job.told if isinstance(told.message, ShowStacks)]


def cause(node: int, *ranks: int) -> str:
    logs = " and ".join(f"/runs/x/logs/node-{node}/worker-{rank}.log" for rank in ranks or (0,))
    return f"no step done for 1800 s, no report within 60 s; where it hangs is at the end of {logs}"


def test_job_without_a_step_for_too_long_goes_on_without_those_who_hang() -> None:
    job = started()
    job.step(1)
    stall(job)
    assert job.last("detected") == {"nodes": [], "cause": "no step done for 1800 s", "step": 1}
    job.answer([(0, 0), (1, 0), (2, 0), (4, 0)])
    pass_time(job, job.now + 29)
    assert shown(job) == []
    pass_time(job, job.now + 1)
    assert shown(job) == [(3, 0)]
    pass_time(job, job.now + 29)
    assert 3 in job.machine.members
    pass_time(job, job.now + 1)
    assert shown(job) == [(3, 0)]
    assert job.told[-1] == Tell(node=3, message=Shutdown(exit_code=1, reason=f"evicted: {cause(3)}"))
    assert job.last("node_lost") == {"node": 3, "cause": cause(3)}
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert (job.last("generation")["nodes"], job.last("generation")["cause"]) == ([0, 1, 2, 4], "failure")
    job.step(2)
    pass_time(job, job.now + LIMIT_S - 1)
    assert job.machine.phase is Phase.RUNNING


def test_job_whose_workers_all_hang_stops_and_says_where_to_look() -> None:
    job = started(spec=job_spec(min_pipeline_nodes=1), num_nodes=2, workers_per_node=2)
    job.step(3)
    for worker in job.placed():
        job.say(worker, job.saved(1, 3, job.workers[worker].current))
    stall(job)
    pass_time(job, job.now + 30)
    assert shown(job) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    pass_time(job, job.now + 30)
    assert [record.fields for record in job.records if record.kind == "node_lost"] == [
        {"node": node, "cause": cause(node, 0, 1)} for node in (0, 1)
    ]
    assert job.stop is not None
    assert job.stop.exit_code == 3
    assert job.stop.reason == (
        f"all nodes are lost, the last one (1) because of: {cause(1, 0, 1)}; resume with: resilient run --nodes 2 "
        "--resume /runs/x/checkpoints/step-00000003 train.py"
    )


def test_stacks_are_shown_before_anybody_is_given_up_however_late_the_tick() -> None:
    job = started()
    stall(job)
    pass_time(job, job.now + 3600)
    assert shown(job) == [(node, 0) for node in range(5)]
    assert job.stop is None
    pass_time(job, job.now + 1)
    assert job.stop is not None


def test_workers_that_hang_while_they_install_or_before_a_boundary_are_noticed_too() -> None:
    installing = Job(num_nodes=5)
    for _ in range(5):
        installing.connect()
    for node in range(5):
        installing.ready(node)
    assert installing.machine.phase is Phase.INSTALLING
    stall(installing)
    leaving = started()
    leaving.feed(NodeLeaving(node=4, reason="spot notice"))
    assert leaving.machine.phase is Phase.AGREEING
    stall(leaving)


@pytest.mark.parametrize("word", ["installed", "step", "saved", "not saved", "finished"])
def test_whatever_a_worker_gets_done_counts(word: str) -> None:
    job = Job(num_nodes=5)
    for _ in range(5):
        job.connect()
    job.now = 500.0
    for node in range(5):
        job.ready(node)
    job.now += LIMIT_S - 1
    job.answer()
    if word == "installed":
        pass_time(job, job.now + 1)
        assert job.machine.phase is Phase.RUNNING
        return
    job.now += LIMIT_S - 1
    if word == "step":
        job.step(1)
    elif word == "saved":
        job.say((0, 0), job.saved(1, 1, STATES[:1]))
    elif word == "not saved":
        job.say((0, 0), NotSaved(step=1, error="no room"))
    else:
        job.say((0, 0), Finished(generation=1))
    pass_time(job, job.now + LIMIT_S - 1)
    assert job.machine.phase is Phase.RUNNING
    pass_time(job, job.now + 1)
    assert job.machine.phase is Phase.AGREEING


def test_step_that_is_planned_to_take_long_is_given_its_time() -> None:
    slow = ModelProfile(
        layers=tuple(
            LayerProfile(
                name=layer.name,
                costs=(LayerCost(forward_ms=1e6, backward_input_ms=1e6, backward_weight_ms=1e6),),
                parameter_bytes=40,
                optimizer_bytes=60,
            )
            for layer in PROFILE.layers
        )
    )
    job = Job(job_spec(profile=slow), num_nodes=5)
    job.start()
    planned_s = max(p.template.iteration_ms(p.num_microbatches) for p in job.plan.pipelines) / 1e3
    assert planned_s > 1000
    pass_time(job, 14 * planned_s)
    assert job.machine.phase is Phase.RUNNING
    pass_time(job, 15 * planned_s)
    assert job.machine.phase is Phase.AGREEING


def test_reports_are_waited_for_no_longer_than_workers_wait_for_each_other() -> None:
    job = Job(job_spec(comm_timeout_s=2.0), num_nodes=5)
    job.start()
    pass_time(job, 30.0)
    job.answer([(0, 0), (1, 0), (2, 0), (4, 0)])
    pass_time(job, 31.0)
    assert shown(job) == [(3, 0)]
    pass_time(job, 32.0)
    assert job.last("node_lost")["cause"].startswith("no step done for 30 s, no report within 2 s; ")


def test_workers_that_answer_and_yet_do_no_step_end_in_a_stop_that_says_what_to_raise() -> None:
    job = started()
    job.step(1)
    for _ in range(4):
        assert job.stop is None
        pass_time(job, job.now + LIMIT_S)
        job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 3
    assert job.stop.reason == (
        "no step is done within 1800 s, and yet all workers answer; raise the Trainer's comm_timeout_s if steps may "
        "take that long; resume with: resilient run --nodes 4 --resume /runs/x/checkpoints/step-00000001 train.py"
    )
