"""How many steps were skipped is known to whoever goes on from a step, wherever its states come from."""

from __future__ import annotations

import json

from resilient.agent.membership.parts.context import Phase
from resilient.protocol.messages import Generation
from resilient.state.manifest import Manifest
from resilient.state.skipped import SkippedSteps
from tests.agent.membership.simulated import RECIPE, Job, outcome

SKIPPING = (2, 3, 5)


def started(num_nodes: int = 4) -> Job:
    job = Job(num_nodes=num_nodes, skipping=SKIPPING)
    job.start()
    assert job.machine.phase is Phase.RUNNING
    return job


def train(job: Job, *steps: int) -> None:
    for step in steps:
        job.step(step)


def published(job: Job) -> Generation:
    """Have the workers report, and return what they are told of the next generation."""
    (worker, *_) = job.placed()
    found: list[Generation] = []
    while not found:
        assert job.workers[worker].inbox or job.machine.phase is Phase.AGREEING
        job.answer([other for other in job.workers if other != worker])
        found = [message for message in job.workers[worker].inbox if isinstance(message, Generation)]
        if not found:
            job._act(worker, job.workers[worker].inbox.pop(0))
    return found[0]


def test_events_and_status_count_skipped_steps_and_are_json() -> None:
    job = started()
    train(job, 1, 2, 3)
    steps = [record.fields for record in job.records if record.kind == "step"]
    assert [(step["loss"], step["skipped"]) for step in steps] == [(1.0, False), (None, True), (None, True)]
    status = json.loads(json.dumps(job.machine.status(), allow_nan=False))
    assert (status["loss"], status["num_skipped"]) == (None, 2)


def test_joiner_learns_how_many_steps_were_skipped() -> None:
    job = started()
    train(job, 1, 2, 3)
    job.ready(job.connect())
    announced = published(job)
    assert (announced.version, announced.skipped) == (3, SkippedSteps(total=2, in_a_row=2))


def test_worker_that_rolls_forward_over_a_skipped_step_is_told_its_outcome() -> None:
    job = started(num_nodes=6)
    train(job, 1)
    behind, *others = job.placed()
    job.step(2, reported=False)
    state = job.workers[behind]
    state.version, state.passed, state.complete = 1, outcome(1), True
    job.lose(next(node for node, _ in others if node != behind[0]))
    announced = published(job)
    assert announced.roll_forward is not None
    assert (announced.roll_forward.step, announced.roll_forward.is_finite) == (2, False)
    assert announced.skipped == SkippedSteps(total=1, in_a_row=1)
    assert job.last("step")["skipped"] is True


def test_checkpoint_remembers_the_skipped_steps_and_who_resumes_does() -> None:
    job = started()
    train(job, 1, 2, 3, 4, 5)
    for worker in job.placed():
        job.say(worker, job.saved(1, 5, job.workers[worker].current))
    (made,) = job.manifests
    assert made.manifest.skipped == SkippedSteps(total=3, in_a_row=1)
    resumed = Job(num_nodes=4, resume=("/c", Manifest(step=5, recipe=RECIPE, states={}, skipped=made.manifest.skipped)))
    for _ in range(4):
        resumed.connect()
    for node in range(4):
        resumed.ready(node)
    told = [message for message in resumed.workers[0, 0].inbox if isinstance(message, Generation)]
    assert [message.skipped for message in told] == [SkippedSteps(total=3, in_a_row=1)]
    assert resumed.machine.status()["num_skipped"] == 3


def test_who_falls_back_to_a_checkpoint_has_skipped_what_it_had() -> None:
    job = started()
    train(job, 1, 2)
    for worker in job.placed():
        job.say(worker, job.saved(1, 2, job.workers[worker].current))
    train(job, 3, 4)
    for _ in range(2):
        job.ready(job.connect())
    job.lose(*(pipeline.nodes[0] for pipeline in job.plan.pipelines[:2]))
    announced = published(job)
    assert (announced.version, announced.skipped) == (2, SkippedSteps(total=1, in_a_row=1))
    assert job.machine.status()["num_skipped"] == 1


def test_last_checkpoint_of_a_job_that_stops_remembers_them_too() -> None:
    job = started()
    train(job, 1, 2, 3, 4)
    job.lose(*(node for node, _ in job.placed()[-1:]))
    job.answer()
    (made,) = job.manifests
    assert (made.manifest.step, made.manifest.skipped) == (4, SkippedSteps(total=2))
