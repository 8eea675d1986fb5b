"""Random histories: whatever happens in whatever order, the machine goes on or stops, and never waits for the dead."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.agent.membership.machine import Membership
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import Interrupted, NodeBack, NodeCutOff, NodeLeaving, Tick
from resilient.protocol.messages import Failed, Suspect
from tests.agent.membership.simulated import Job, job_spec

_ACTIONS = (
    "step",
    "half step",
    "lose",
    "cut off",
    "back",
    "kill worker",
    "suspect",
    "suspect a node",
    "err",
    "join",
    "leave",
    "answer one",
    "answer",
    "tick",
    "plans",
    "interrupt",
)


def _act(job: Job, action: str, choice: int) -> None:
    nodes = sorted({node for node, _ in job.workers})
    node = nodes[choice % len(nodes)] if nodes else None
    machine = job.machine
    if action in ("step", "half step"):
        if machine.phase is Phase.RUNNING and job.placed():
            number = machine.status()["step"] + 1
            if action == "half step":
                for worker in job.placed():
                    job.workers[worker].complete = True
                job.report_step(number)
            else:
                job.step(number)
    elif action == "join":
        job.ready(job.connect())
    elif action == "tick":
        job.now += 40.0
        job.feed(Tick())
    elif action == "interrupt":
        job.feed(Interrupted(reason="SIGTERM"))
    elif action == "plans":
        job.prepare_plans()
    elif action == "answer":
        job.answer()
    elif node is None:
        return
    elif action == "lose":
        job.lose(node)
    elif action == "cut off":
        job.feed(NodeCutOff(node=node))
        job.workers = {worker: state for worker, state in job.workers.items() if worker[0] in machine.members}
    elif action == "back":
        job.feed(NodeBack(node=node))
    elif action == "kill worker":
        job.workers = {worker: state for worker, state in job.workers.items() if worker[0] != node}
        job.end_worker((node, 0), -9)
    elif action == "suspect":
        job.feed(NodeBack(node=node))
        job.say((node, 0), Suspect(generation=machine.generation, reason="reset"))
        job.workers = {worker: state for worker, state in job.workers.items() if worker[0] in machine.members}
    elif action == "suspect a node":
        if machine.generation:
            job.feed(NodeBack(node=node))
            peer = choice % len(job.plan.slots)
            job.say((node, 0), Suspect(generation=machine.generation, reason="reset", peer=peer))
            job.workers = {worker: state for worker, state in job.workers.items() if worker[0] in machine.members}
    elif action == "err":
        kind = f"OSError at data.py:{len(job.history) % 3}"
        job.workers = {worker: state for worker, state in job.workers.items() if worker[0] != node or choice % 2}
        job.say((node, 0), Failed(error="OSError: disk gone", kind=kind))
        if not choice % 2:
            job.end_worker((node, 0), 1)
    elif action == "leave":
        job.feed(NodeLeaving(node=node, reason="drain"))
    else:
        job.answer([(node, 0)])


@settings(max_examples=300, deadline=None)
@given(
    num_nodes=st.integers(2, 6),
    min_pipeline_nodes=st.integers(1, 2),
    max_failures=st.integers(0, 1),
    comm_timeout_s=st.sampled_from([2.0, 120.0]),
    started=st.booleans(),
    plans_at_once=st.booleans(),
    history=st.lists(st.tuples(st.sampled_from(_ACTIONS), st.integers(0, 7)), max_size=25),
)
def test_every_history_ends_in_training_or_in_a_stop(
    num_nodes: int,
    min_pipeline_nodes: int,
    max_failures: int,
    comm_timeout_s: float,
    started: bool,
    plans_at_once: bool,
    history: list[tuple[str, int]],
) -> None:
    spec = job_spec(min_pipeline_nodes=min_pipeline_nodes, max_failures=max_failures, comm_timeout_s=comm_timeout_s)
    job = Job(spec, num_nodes=num_nodes)
    if started:
        job.start()
    job.plans_at_once = plans_at_once
    for action, choice in history:
        if job.stop is None:
            _act(job, action, choice)
    for node in sorted({node for node, _ in job.workers}):
        job.ready(node)
    while job.stop is None and len(job.machine.members) < num_nodes and job.machine.phase is Phase.STARTING:
        job.ready(job.connect())
    job.plans_at_once = True
    job.prepare_plans()
    job.answer()
    phase = job.machine.phase
    assert phase in (Phase.RUNNING, Phase.STOPPED)
    kinds = job.kinds()
    if "interrupted" in kinds:
        assert phase is Phase.STOPPED
        assert "generation" not in kinds[kinds.index("interrupted") :]
    if phase is Phase.RUNNING:
        generations = [record.generation for record in job.records if record.kind == "generation"]
        assert generations == sorted(set(generations))
        job.step(job.spec.num_steps)
        job.finish()
        job.answer()
    assert job.stop is not None
    assert job.stop.exit_code in (0, 1, 3, 4, 130)
    again = Membership(job.machine.settings)
    for stimulus, now, instructions in job.history:
        assert again.handle(stimulus, now) == instructions, "the same history leads to the same decisions"
