"""Every invariant of the machine can be broken, and says what is wrong."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable

import pytest

from resilient.agent.membership import invariants
from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.machine import MembershipError
from resilient.agent.membership.next_generation.forming import Checkpoint
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Interrupted
from resilient.protocol.messages import Report, WorkerProgress
from tests.agent.membership.simulated import Job, job_spec, outcome, started

PROGRESS = WorkerProgress(version=3, complete=False)


def starting() -> Job:
    job = Job(num_nodes=6)
    job.connect()
    return job


def installing() -> Job:
    job = starting()
    for _ in range(5):
        job.connect()
    for node in range(6):
        job.ready(node)
    return job


def running() -> Job:
    job = started(num_nodes=6)
    job.step(3)
    return job


def agreeing() -> Job:
    job = running()
    job.lose(2)
    return job


def saving() -> Job:
    job = running()
    job.feed(Interrupted(reason="SIGINT"))
    for worker, state in job.workers.items():
        job._act(worker, state.inbox.pop(0))
    return job


def finished() -> Job:
    job = running()
    job.step(job_spec().num_steps)
    job.finish()
    return job


def stopped() -> Job:
    job = running()
    job.lose(*range(6))
    return job


def pattern(text: ast.expr | None) -> str:
    """What a text of the source can become, as a regular expression."""
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*" for part in parts)


def enter_phase(phase: Phase) -> Callable[[JobParts], None]:
    def spoil(parts: JobParts) -> None:
        parts.phase = phase

    return spoil


def turn_back_time(parts: JobParts) -> None:
    parts.context.begin(-1.0)


def skip_generations(parts: JobParts) -> None:
    parts.context.next_generation()
    parts.context.next_generation()


def take_a_step_back(parts: JobParts) -> None:
    parts.progress.commit(outcome(2))


def forget_the_plan(parts: JobParts) -> None:
    parts.participants._plan = None


def forget_the_job(parts: JobParts) -> None:
    parts.job._spec = None


def change_a_number(parts: JobParts) -> None:
    parts.context.members[3].node = 4


def grow_a_worker(parts: JobParts) -> None:
    parts.context.members[3].done.add(7)


def hold_a_node_back(parts: JobParts) -> None:
    parts.context.members[0].lacks_plans = True


def admit_a_node(parts: JobParts) -> None:
    parts.context.members[0].admitted = True


def plan_without_asking(parts: JobParts) -> None:
    parts.job.take(99)


def forget_a_node(parts: JobParts) -> None:
    del parts.context.members[4]


def forget_a_writer(parts: JobParts) -> None:
    del parts.context.members[min(parts.awaiting)[0]]


def forget_all_nodes(parts: JobParts) -> None:
    parts.context.members.clear()


def admit_nobody(parts: JobParts) -> None:
    parts.context.members[0].admitted = False


def suspect_too_often(parts: JobParts) -> None:
    parts.suspicions._count = 4


def send_on(parts: JobParts) -> None:
    parts.participants._senders = {(9, 0)}


def send_from_a_place(parts: JobParts) -> None:
    parts.participants._senders = {(0, 0)}


def err_unnoticed(parts: JobParts) -> None:
    parts.own_errors.take(3, "OSError", "no")


def install_unnoticed(parts: JobParts) -> None:
    for worker in parts.participants.placed():
        parts.participants.note_installed(worker)


def install_nothing(parts: JobParts) -> None:
    parts.participants.leave()


def finish_a_stranger(parts: JobParts) -> None:
    parts.participants.note_finished((9, 0))


def advance_in_the_future(parts: JobParts) -> None:
    parts.stalls._advanced_at = 1.0


def report_for_all(parts: JobParts) -> None:
    assert parts.change is not None
    for worker in parts.awaiting:
        parts.change.hear(worker, Report(generation=2, progress=PROGRESS))


def form_a_later_generation(parts: JobParts) -> None:
    assert parts.change is not None
    parts.change.generation = 9


def hear_the_dead(parts: JobParts) -> None:
    assert parts.change is not None
    parts.change.hear((2, 0), Report(generation=2, progress=PROGRESS))


def save_an_older_step(parts: JobParts) -> None:
    assert parts.last_checkpoint is not None
    parts.last_checkpoint.step = 1


def have_failed(parts: JobParts) -> None:
    parts.ending.note_failure("no")


def count_a_checkpoint_twice(parts: JobParts) -> None:
    parts.checkpoints._whole += 2 * [Checkpoint(step=1, path="/c")]


def lose_the_checkpoint(parts: JobParts) -> None:
    parts.checkpoints._whole.clear()


def finish_too_early(parts: JobParts) -> None:
    parts.progress._outcome = outcome(9)


CASES: tuple[tuple[Callable[[], Job], Callable[[JobParts], None], str], ...] = (
    (running, turn_back_time, "the job advanced in the future; time goes back from 0.0 to -1.0"),
    (running, skip_generations, "generation 3 follows 1"),
    (running, take_a_step_back, "step 2 follows 3, and is not what a new generation loads"),
    (running, enter_phase(Phase.STARTING), "the job is starting in generation 1; the job starts again after running"),
    (finished, enter_phase(Phase.RUNNING), "the job goes on (running) after it was finished"),
    (
        stopped,
        enter_phase(Phase.RUNNING),
        "nodes [0, 1, 2, 3, 4, 5] take part in generation 1 and are gone; no node is left while running; "
        "the job goes on (running) after it was stopped",
    ),
    (
        running,
        enter_phase(Phase.AGREEING),
        "a change is not under way while agreeing; nobody is waited for while agreeing",
    ),
    (
        running,
        enter_phase(Phase.SAVING),
        "the last checkpoint is not waited for while saving; nobody is waited for while saving",
    ),
    (running, forget_the_plan, "there is no plan in generation 1"),
    (running, forget_the_job, "a generation is in force, and nobody has said what the job is"),
    (starting, enter_phase(Phase.RUNNING), "the job is running in generation 0"),
    (running, change_a_number, "node 3 is not what it connected as"),
    (running, grow_a_worker, "node 3 has workers that it was not started with"),
    (starting, hold_a_node_back, "node 0 is held back for plans before it is up"),
    (starting, admit_a_node, "node 0 was admitted before it was ready"),
    (running, plan_without_asking, "plans for 99 nodes are there, asked for were 6"),
    (running, forget_a_node, "nodes [4] take part in generation 1 and are gone"),
    (running, admit_nobody, "nodes [0] have a place and were not told"),
    (running, suspect_too_often, "a generation follows 4 suspicions without a step"),
    (running, err_unnoticed, "nodes [3] are to be let go, and generation 1 goes on"),
    (agreeing, send_on, "[(9, 0)] still have states to send while agreeing"),
    (installing, send_from_a_place, "[(0, 0)] send states as if they had no place"),
    (installing, install_unnoticed, "everybody has installed the generation, and it does not run"),
    (running, install_nothing, "the generation runs before everybody has installed it"),
    (running, finish_a_stranger, "[(9, 0)] have finished without a place"),
    (running, advance_in_the_future, "the job advanced in the future"),
    (saving, forget_a_writer, "nodes [0] are waited for and are gone"),
    (agreeing, report_for_all, "nobody is waited for while agreeing"),
    (agreeing, form_a_later_generation, "generation 9 is being formed in 1"),
    (agreeing, hear_the_dead, "reports of nodes [2] count, which are gone"),
    (saving, save_an_older_step, "step 1 is saved after step 3"),
    (running, have_failed, "the job has failed and is running"),
    (running, count_a_checkpoint_twice, "a checkpoint is counted twice"),
    (
        finished,
        finish_too_early,
        "the job is finished at step 9 of 10; step 9 follows 10, and is not what a new generation loads",
    ),
    (finished, lose_the_checkpoint, "the job is finished without a checkpoint of step 10"),
    (
        running,
        forget_all_nodes,
        "nodes [0, 1, 2, 3, 4, 5] take part in generation 1 and are gone; no node is left while running",
    ),
)
"""For each invariant, in the order of the module: a sound job, how it is spoilt, and all that is found then."""


@pytest.mark.parametrize(("sound", "spoil", "found"), CASES)
def test_broken_invariant_is_named(sound: Callable[[], Job], spoil: Callable[[JobParts], None], found: str) -> None:
    job = sound()
    assert job.machine.phase.value == sound.__name__
    job.machine.validate()
    spoil(job.machine.parts)
    with pytest.raises(MembershipError) as error:
        job.machine.validate()
    assert error.value.reason == f"the membership is inconsistent: {found}"


def test_every_invariant_has_a_case_that_breaks_it() -> None:
    yields = [node for node in ast.walk(ast.parse(inspect.getsource(invariants))) if isinstance(node, ast.Yield)]
    said = [pattern(each.value) for each in sorted(yields, key=lambda each: each.lineno)]
    for wanted, (_, _, found) in zip(said, CASES, strict=True):
        assert any(re.fullmatch(wanted, each) for each in found.split("; ")), wanted


def test_steps_may_go_back_to_what_a_new_generation_loads() -> None:
    job = running()
    parts = job.machine.parts
    parts.checkpoints._whole.append(Checkpoint(step=2, path="/c"))
    parts.context.next_generation()
    parts.progress.commit(outcome(2))
    job.machine.validate()
