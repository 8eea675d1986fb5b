"""The membership machine from start to end, joins and injections: driven synchronously with simulated workers."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import (
    FailureWanted,
    NodeConnected,
    NodeLeaving,
    Send,
    StopWanted,
    Tell,
    Tick,
    WriteManifest,
)
from resilient.protocol.messages import (
    Arm,
    Failed,
    FromWorkerMessage,
    Generation,
    Injection,
    Kill,
    Note,
    Output,
    Regroup,
    Shutdown,
    Suspect,
)
from resilient.state.manifest import Manifest, SavedState
from tests.agent.membership.simulated import NUM_LAYERS, RECIPE, STATES, Job, job_spec, regroups, started

# ---------------------------------------------------------------- start and end


def test_first_generation_begins_when_all_nodes_are_ready() -> None:
    job = Job()
    for _ in range(5):
        job.connect()
    for node in range(4):
        job.ready(node)
    assert job.machine.generation == 0
    job.ready(4)
    announced = job.workers[0, 0].inbox[-1]
    assert isinstance(announced, Generation)
    assert (announced.generation, announced.version, announced.source, announced.transfers) == (1, 0, "init", ())
    assert announced.store_address == f"h:{job.plan.slots[0].node}"
    assert job.machine.phase is Phase.INSTALLING
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    assert job.last("generation")["cause"] == "start"
    assert job.last("job")["num_layers"] == NUM_LAYERS


def test_job_finishes_with_a_checkpoint_and_stops_when_the_last_worker_has_ended() -> None:
    job = started()
    job.step(10)
    job.finish()
    path = "/runs/x/checkpoints/step-00000010"
    assert job.last("finished") == {"step": 10, "path": path}
    assert [(m.path, m.manifest.step, m.manifest.recipe, set(m.manifest.states)) for m in job.manifests] == [
        (path, 10, RECIPE, set(STATES))
    ]
    assert job.stop is None
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 0
    assert job.kinds()[-1] == "stopped"  # who follows the events need not look for more
    assert job.last("stopped") == {"exit_code": 0, "reason": "the job is finished", "path": path}


def test_node_lost_after_the_end_does_not_fail_the_job() -> None:
    job = started()
    job.step(10)
    job.finish()
    job.lose(3)
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 0
    assert job.last("node_lost") == {"node": 3, "cause": "node lost"}


def test_resumed_job_begins_at_the_checkpoint() -> None:
    states = {name: (SavedState(file=name, num_bytes=1, sha256="f"),) for name in STATES}
    job = started(resume=("/ckpt", Manifest(step=7, recipe=RECIPE, states=states)))
    generation = job.last("generation")
    assert (generation["cause"], generation["version"]) == ("resume", 7)
    job.lose(0)
    job.answer()
    assert job.last("generation")["version"] == 7


def test_checkpoint_beyond_the_last_step_is_refused() -> None:
    manifest = Manifest(
        step=12, recipe=RECIPE, states={name: (SavedState(file="", num_bytes=0, sha256=""),) for name in STATES}
    )
    job = Job(num_nodes=4, resume=("/runs/y/checkpoints/step-00000012", manifest))
    job.start()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == "num_steps must be at least 12, the checkpoint's, got 10; train for more steps"


def test_checkpoint_of_another_job_is_refused() -> None:
    states = {name: (SavedState(file=name, num_bytes=1, sha256="f"),) for name in STATES}
    job = Job(
        job_spec(recipe=replace(RECIPE, seed=1)),
        num_nodes=4,
        resume=("/ckpt", Manifest(step=7, recipe=RECIPE, states=states)),
    )
    job.start()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        "resume must be a checkpoint of this job, got /ckpt, written with seed 0, now 1; use the script and the "
        "arguments that wrote it, or begin without a checkpoint"
    )


def test_script_exception_saves_what_is_done_and_stops_everything() -> None:
    job = started()
    job.step(3)
    job.say((1, 0), Failed(error="ValueError: no", traceback="tb"))
    assert job.last("failed") == {"node": 1, "error": "ValueError: no", "traceback": "tb"}
    job.answer()
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        "node 1: ValueError: no; resume with: "
        "resilient run --nodes 4 --resume /runs/x/checkpoints/step-00000003 train.py"
    )
    assert job.manifests[-1].path == "/runs/x/checkpoints/step-00000003"
    assert "detected" not in job.kinds()


def test_script_exception_on_every_worker_is_one_failure() -> None:
    job = started()
    job.step(3)
    for worker in job.placed():
        job.say(worker, Failed(error="ValueError: no"))
    job.answer()
    assert job.kinds().count("failed") == 1
    assert job.stop is not None
    assert job.stop.exit_code == 1


def test_script_exception_before_training_stops_at_once() -> None:
    job = Job()
    job.connect()
    job.say((0, 0), Failed(error="ValueError: no"))
    assert job.stop is not None
    assert (job.stop.exit_code, job.stop.reason) == (1, "node 0: ValueError: no")


def test_batch_that_cannot_be_split_is_refused_with_a_recommendation() -> None:
    job = Job(job_spec(global_batch=2), num_nodes=4)
    job.connect()
    job.ready(0)
    assert job.stop is not None
    assert job.stop.reason == (
        "global_batch must be a multiple of microbatch 2, at least 4 (one microbatch for each of 2 pipelines), got 2; "
        "use 4"
    )


def test_node_that_connects_after_the_stop_is_sent_away() -> None:
    job = Job(job_spec(global_batch=2), num_nodes=4)
    job.connect()
    job.ready(0)
    (told,) = job.feed(NodeConnected(node=1, host="late", pid=1, num_workers=1))
    assert isinstance(told, Tell)
    assert isinstance(told.message, Shutdown)


def test_script_that_never_trains_ends_the_job_quietly() -> None:
    job = Job(num_nodes=2)
    for node in (job.connect(), job.connect()):
        job.end_worker((node, 0), 0)
    assert job.stop is not None
    assert job.stop.exit_code == 0


def test_stop_says_how_to_go_on() -> None:
    job = started(arguments=("--lr", "1 e"), options=("--grace-s", "30"))
    job.feed(StopWanted(exit_code=1, reason="the forkserver is gone"))
    assert job.stop is not None
    assert job.stop.exit_code == 1
    assert job.stop.reason == (
        "the forkserver is gone; start again with: resilient run --nodes 4 --grace-s 30 train.py --lr '1 e'"
    )


# ---------------------------------------------------------------- joins and departures


def test_joiners_ready_together_share_one_boundary() -> None:
    job = started(num_nodes=4)
    job.step(1)
    first, second = job.connect(), job.connect()
    assert job.machine.phase is Phase.RUNNING
    job.ready(first)
    job.ready(second)
    assert regroups(job, 0) == [], "others may come with them"
    job.now = 0.2
    job.ready(job.connect())
    job.now = 0.4
    job.feed(Tick())
    assert regroups(job, 0) == []
    job.now = 0.5
    job.feed(Tick())
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True, heard_step=1)]
    assert regroups(job, first) == []
    job.step(2)
    job.answer()
    generation = job.last("generation")
    assert (generation["cause"], generation["version"], generation["lost_steps"]) == ("join", 2, 0)
    assert {first, second, 6} <= set(generation["nodes"])
    assert job.machine.generation == 2


def test_joiners_one_after_another_are_waited_for_no_longer_than_the_first_would_wait() -> None:
    job = started(num_nodes=4)
    for joining in range(6):
        job.now = 0.2 * joining
        job.feed(Tick())
        together = [job.connect(), job.connect()]
        for node in together:
            job.ready(node)
        assert bool(regroups(job, 0)) == (job.now >= 1)


def test_joiners_who_came_during_a_change_wait_after_it_for_others() -> None:
    """The change may have kept others of the same wave from being heard: changes must not chase each other."""
    job = Job(num_nodes=4)
    for node in [job.connect() for _ in range(4)]:
        job.ready(node)
    assert job.machine.phase is Phase.INSTALLING
    for node in [job.connect() for _ in range(2)]:
        job.ready(node)
    job.now = 5.0
    job.answer()
    assert job.machine.phase is Phase.RUNNING
    late = job.connect()
    assert regroups(job, 0) == []
    job.now = 5.8
    job.ready(late)
    job.now = 5.9
    job.feed(Tick())
    assert regroups(job, 0) == [], "somebody has got ready a moment ago"
    job.now = 6.0
    job.feed(Tick())
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True)], "a second after the change"


def test_joiner_waits_for_others_who_are_getting_ready_as_long_as_it_took_itself_to() -> None:
    job = started(num_nodes=4)
    first, second = job.connect(), job.connect()
    job.now = 20.0
    job.ready(first)
    third = job.connect()
    job.now = 30.0
    job.ready(second)
    job.now = 39.9
    job.feed(Tick())
    assert regroups(job, 0) == []
    job.now = 40.0
    job.feed(Tick())
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True)]
    job.answer()
    assert {first, second} <= set(job.last("generation")["nodes"])
    job.ready(third)
    assert regroups(job, 0) == [Regroup(generation=3, at_boundary=True)], "nobody else is coming"


@pytest.mark.parametrize("stays", [True, False])
def test_joiner_waits_no_longer_where_all_pause_anyway_or_where_nobody_else_comes(stays: bool) -> None:
    job = started()
    first, second = job.connect(), job.connect()
    job.now = 20.0
    job.ready(first)
    assert regroups(job, 0) == []
    if stays:
        job.feed(NodeLeaving(node=4, reason="SIGTERM"))
    else:
        job.lose(second)
        job.feed(Tick())
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True)]


def test_failure_during_a_pending_boundary_upgrades_the_same_generation() -> None:
    job = started()
    job.step(1)
    joiner = job.connect()
    job.ready(joiner)
    job.answer([(0, 0)])
    job.lose(2)
    assert regroups(job, 1) == [
        Regroup(generation=2, at_boundary=True, heard_step=1),
        Regroup(generation=2, heard_step=1),
    ]
    job.answer()
    generation = job.last("generation")
    assert (job.machine.generation, generation["cause"]) == (2, "failure")
    assert joiner in generation["nodes"]


def test_suspicion_during_a_pending_boundary_upgrades_it() -> None:
    job = started()
    job.ready(job.connect())
    job.say((1, 0), Suspect(generation=1, reason="reset"))
    assert regroups(job, 0)[-1] == Regroup(generation=2)


def test_joiner_lost_before_it_is_ready_disturbs_nobody() -> None:
    job = started()
    node = job.connect()
    job.lose(node)
    assert (job.machine.phase, job.machine.generation) == (Phase.RUNNING, 1)


def test_node_with_another_number_of_workers_is_sent_away() -> None:
    job = started()
    instructions = job.feed(NodeConnected(node=9, host="h", pid=1, num_workers=2))
    reason = "workers per node must be 1 in this job, got 2; start this agent with --workers 1"
    assert instructions[-1] == Tell(node=9, message=Shutdown(exit_code=1, reason=f"cannot join: {reason}"))
    assert job.last("not_joined") == {"node": 9, "cause": reason}


# ---------------------------------------------------------------- injections


def test_injection_at_once_goes_to_the_agent_and_a_later_one_to_the_workers() -> None:
    job = started()
    now, later = Injection(node=1), Injection(node=1, at_step=5, at_phase="reduce")
    assert job.feed(FailureWanted(injection=now)) == [Tell(node=1, message=Kill(injection=now))]
    assert job.feed(FailureWanted(injection=later)) == [Send(node=1, local_rank=None, message=Arm(injection=later))]
    of_worker = Injection(node=1, at_step=5, worker_only=True, worker=1)
    assert job.feed(FailureWanted(injection=of_worker)) == [
        Send(node=1, local_rank=1, message=Arm(injection=of_worker))
    ]


def test_injection_waits_for_its_node() -> None:
    wanted = Injection(node=1, at_step=3, worker_only=True)
    job = Job(num_nodes=4, injections=(wanted,))
    job.connect()
    job.connect()
    assert not job.workers[1, 0].inbox
    job.ready(1)
    assert job.workers[1, 0].inbox == [Arm(injection=wanted)]


@pytest.mark.parametrize("prefix", ["../", "/etc/", "x/", ""])
def test_a_checkpoint_has_no_files_that_lie_elsewhere(prefix: str) -> None:
    job = started(num_nodes=5)
    job.step(1)
    said = job.saved(job.machine.generation, 1, STATES)
    files = {name: tuple(replace(each, file=f"{prefix}{each.file}") for each in of) for name, of in said.states.items()}
    instructions = job.say(job.placed()[0], replace(said, states=files))
    assert [type(each) for each in instructions] == ([] if prefix else [WriteManifest])


@pytest.mark.parametrize("said", [Note(name="x", value=1), Output(text="x")], ids=repr)
def test_who_stands_by_says_nothing_for_the_job(said: FromWorkerMessage) -> None:
    job = started(spec=job_spec(global_batch=4), num_nodes=9)
    (spare,) = set(range(9)) - set(job.plan.nodes)
    assert job.say((spare, 0), said) == []
    node, _ = job.placed()[0]
    assert job.say((node, 99), said) == []
    assert job.say((node, -1), said) == []
    assert job.say((node, 0), said) != []
