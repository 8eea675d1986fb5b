"""What plans are made with: prepared templates, failure domains, observed speeds."""

from __future__ import annotations

from collections import defaultdict

import pytest

from resilient.agent.membership.next_generation.forming import problem_of
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import PlansPrepared, PreparePlans, Tick
from resilient.protocol.messages import Regroup, Suspect
from resilient.templates.inputs.cluster import Link
from resilient.templates.replan.replan import first_plan, templates_for
from resilient.templates.replan.schedule_choice import choose_schedule
from resilient.templates.schedules.kind import ScheduleKind
from tests.agent.membership.simulated import STATES, Job, job_spec, regroups, started


def joins(job: Job) -> int:
    node = job.connect()
    job.ready(node)
    return node


# ---------------------------------------------------------------- preparation


def test_plans_are_prepared_from_the_first_worker_on_and_waited_for() -> None:
    job = Job(num_nodes=5, plans_at_once=False)
    for _ in range(5):
        job.connect()
    job.ready(0)
    assert job.plans_wanted == [5]
    for node in range(1, 5):
        job.ready(node)
    assert (job.machine.generation, job.plans_wanted) == (0, [5])
    job.prepare_plans()
    assert job.machine.generation == 1


def test_plans_are_made_for_the_network_and_the_failures_that_are_expected() -> None:
    slow = Link(latency_ms=1.0, bytes_per_s=1e6)
    job = Job(plans_at_once=False, network=slow, failure_interval_s=60.0)
    job.connect()
    (instruction,) = [made for made in job.ready(0) if isinstance(made, PreparePlans)]
    assert instruction.problem.cluster.inter_node == slow
    assert instruction.problem.failure_interval_s == 60.0


def test_plans_are_made_for_the_schedule_of_the_job() -> None:
    """Layers do not suffice for two stages on each of three nodes: the fifth stands by."""
    job = started(spec=job_spec(schedule=ScheduleKind.INTERLEAVED, num_chunks=2, min_pipeline_nodes=2))
    assert [p["nodes"] for p in job.last("generation")["pipelines"]] == [[0, 1], [2, 3]]
    job.lose(1)
    job.answer()
    for pipeline in job.last("generation")["pipelines"]:
        assert [stage["node"] for stage in pipeline["stages"]] == 2 * pipeline["nodes"]
        bounds = [0, *(stage["end_layer"] for stage in pipeline["stages"])]
        assert [stage["first_layer"] for stage in pipeline["stages"]] == bounds[:-1]
    assert job.last("generation")["nodes"] == [0, 2, 3, 4]


def test_schedule_to_be_chosen_is_that_of_all_plans_once_it_is() -> None:
    """The choice is asked for with the first plans, recorded, and not asked for again."""
    job = Job(num_nodes=4, plans_at_once=False)
    for _ in range(4):
        job.connect()
    spec = job_spec(schedule="auto", num_chunks=2, min_pipeline_nodes=2)
    (asked,) = [made for made in job.ready(0, spec=spec) if isinstance(made, PreparePlans)]
    assert (asked.problem.schedule, asked.most_chunks) == (ScheduleKind.ONE_F_ONE_B, 2)
    for node in range(1, 4):
        job.ready(node, spec=spec)
    choice = choose_schedule(asked.problem, 4, asked.most_chunks)
    assert choice.chosen.schedule is ScheduleKind.ZB_V
    job.feed(PlansPrepared(num_nodes=4, choice=choice))
    job.answer()
    assert job.plan.schedule_kind is ScheduleKind.ZB_V
    assert job.plan == first_plan(choice.of(asked.problem), range(4))
    event = job.last("schedule")
    assert (event["num_nodes"], event["chosen"]["schedule"], event["chosen"]["num_chunks"]) == (4, "zb-v", 2)
    assert {each["schedule"] for each in event["others"]} >= {"1f1b", "zb-h1"}
    job.prepare_plans()  # around the nodes that the job began with
    job.connect()
    (again,) = [made for made in job.ready(4, spec=spec) if isinstance(made, PreparePlans)]
    assert (again.problem.schedule, again.most_chunks) == (ScheduleKind.ZB_V, 0)


def test_job_whose_schedule_could_not_be_chosen_is_planned_as_1f1b_is() -> None:
    job = Job(num_nodes=4, plans_at_once=False)
    for _ in range(4):
        job.connect()
    spec = job_spec(schedule="auto", min_pipeline_nodes=2)
    for node in range(4):
        job.ready(node, spec=spec)
    job.feed(PlansPrepared(num_nodes=4))
    job.answer()
    assert job.plan.schedule_kind is ScheduleKind.ONE_F_ONE_B
    job.prepare_plans()  # around the nodes that the job began with
    job.connect()
    (again,) = [made for made in job.ready(4, spec=spec) if isinstance(made, PreparePlans)]
    assert again.most_chunks == 2


def test_generations_say_by_their_digest_what_templates_they_are_made_of() -> None:
    job = started()
    digest = templates_for(problem_of(job_spec(), 1, Link(), 3600.0), 5).digest
    assert job.last("generation")["templates"] == digest
    job.lose(3)
    job.answer()
    assert (len(job.last("generation")["nodes"]), job.last("generation")["templates"]) == (4, digest)


@pytest.mark.parametrize(("num_nodes", "live"), [(3, "3 nodes are live ([0, 1, 2])"), (1, "1 node is live ([0])")])
def test_job_that_cannot_be_planned_stops_after_the_attempt(num_nodes: int, live: str) -> None:
    job = Job(num_nodes=num_nodes)
    job.start()
    assert job.stop is not None
    assert job.stop.exit_code == 3
    needed = "4 are needed, for 2 pipelines of 2 nodes (max_failures=1, min_pipeline_nodes=2)"
    assert job.stop.reason == f"{live}, {needed}; start again with: resilient run --nodes 4 train.py"


def _wait(job: Job) -> None:
    """Let so much time pass that nobody else is taken to come with those who join."""
    job.now += 0.5
    job.feed(Tick())


def test_joiner_that_no_plans_are_prepared_for_disturbs_nobody_until_they_are() -> None:
    job = started(num_nodes=5)
    job.plans_at_once = False
    joiner = joins(job)
    assert job.plans_wanted == [6]
    assert (job.machine.phase, regroups(job, 0)) == (Phase.RUNNING, [])
    job.step(1)
    job.prepare_plans()
    assert regroups(job, 0) == [Regroup(generation=2, at_boundary=True, heard_step=1)]
    job.answer()
    assert joiner in job.last("generation")["nodes"]


def test_plans_for_many_who_join_are_prepared_for_all_at_once() -> None:
    job = started(num_nodes=5)
    job.plans_at_once = False
    joiners = [joins(job) for _ in range(8)]
    assert job.plans_wanted == [6], "and no others until these are there"
    job.plans_wanted.clear()
    job.feed(PlansPrepared(num_nodes=6))
    assert job.plans_wanted == [13]
    assert regroups(job, 0) == [], "a change for one costs as much as for all"
    job.prepare_plans()
    _wait(job)
    job.answer()
    assert {*joiners} <= {*job.last("generation")["nodes"], *job.last("generation")["standby"]}
    assert job.machine.generation == 2


def test_failure_does_not_wait_for_a_joiners_plans() -> None:
    job = started(num_nodes=5)
    job.plans_at_once = False
    joiner, another = joins(job), joins(job)
    job.lose(2)
    job.answer()
    generation = job.last("generation")
    assert (job.machine.phase, generation["cause"]) == (Phase.RUNNING, "failure")
    assert not {joiner, another} & {*generation["nodes"], *generation["standby"]}
    job.step(1)
    job.prepare_plans()
    _wait(job)
    job.answer()
    assert job.last("generation")["cause"] == "join"
    assert {joiner, another} <= set(job.last("generation")["nodes"])


def test_node_that_replaces_a_lost_one_needs_no_new_plans() -> None:
    job = started(num_nodes=5)
    job.lose(2)
    job.answer()
    job.plans_at_once = False
    joins(job)
    assert regroups(job, 0) == [Regroup(generation=3, at_boundary=True)]


def test_joiner_lost_while_its_plans_are_made_is_forgotten() -> None:
    job = started(num_nodes=5)
    job.plans_at_once = False
    job.lose(joins(job))
    job.prepare_plans()
    assert (job.machine.phase, regroups(job, 0)) == (Phase.RUNNING, [])


# ---------------------------------------------------------------- domains


def test_holders_of_a_state_are_in_different_domains() -> None:
    job = Job(num_nodes=4)
    domains = ["a", "b", "a", "b"]
    for domain in domains:
        job.connect(domain)
    for node in range(4):
        job.ready(node)
    job.answer()
    found: dict[str, set[str]] = defaultdict(set)
    for (node, _), worker in job.workers.items():
        for state in worker.current:
            found[state].add(domains[node])
    assert found == {state: {"a", "b"} for state in STATES}


# ---------------------------------------------------------------- speeds


def microbatches(job: Job) -> dict[int, int]:
    """Per node, the microbatches of its pipeline."""
    return {node: pipeline.num_microbatches for pipeline in job.plan.pipelines for node in pipeline.nodes}


def measure(job: Job, slow: dict[int, float]) -> None:
    """Have the workers measure what was planned, but for a factor."""
    for slot in job.plan.slots:
        planned_ms = sum(stage.forward_ms + stage.backward_ms for stage in slot.stages)
        job.workers[slot.node, slot.local_rank].stage_ms = slow.get(slot.node, 1.0) * planned_ms


def regroup(job: Job) -> None:
    job.say(job.placed()[0], Suspect(generation=job.machine.generation, reason="reset"))
    job.answer()
    assert job.machine.phase is Phase.RUNNING


def test_slow_node_gets_fewer_microbatches_from_the_next_generation_on() -> None:
    job = started(num_nodes=4)
    job.step(1)
    assert set(microbatches(job).values()) == {6}
    measure(job, {2: 2.0})
    regroup(job)
    assert job.last("generation")["slowdowns"] == {"2": 2.0}
    pipeline = next(p for p in job.plan.pipelines if 2 in p.nodes)
    assert pipeline.num_microbatches == 4
    job.step(2)
    regroup(job)  # too early for another measurement
    assert job.last("generation")["slowdowns"] == {"2": 2.0}
    job.step(3)
    measure(job, {})
    regroup(job)
    assert job.last("generation")["slowdowns"] == {}
    assert set(microbatches(job).values()) == {6}


def test_slow_node_stands_by_where_that_is_faster_and_comes_in_when_it_is_needed() -> None:
    job = started(num_nodes=6)
    job.step(1)
    measure(job, {0: 20.0})
    job.lose(5)
    job.answer()
    generation = job.last("generation")
    assert (generation["standby"], generation["standby_reasons"]) == ([0], {"0": "faster"})
    assert generation["slowdowns"] == {"0": 20.0}
    assert generation["step_ms"] < generation["with_standby_ms"]
    job.step(2)
    job.lose(4)
    job.answer()
    generation = job.last("generation")
    assert (generation["standby"], generation["with_standby_ms"]) == ([], None)
    assert 0 in generation["nodes"]


def test_who_stands_by_for_want_of_a_place_or_because_as_many_train_as_may_is_told_so() -> None:
    job = started(spec=job_spec(schedule=ScheduleKind.INTERLEAVED, num_chunks=2, min_pipeline_nodes=2))
    assert job.last("generation")["standby_reasons"] == {"4": "no_place"}
    job = started(num_nodes=5, most_nodes=4)
    assert job.last("generation")["standby_reasons"] == {"4": "most_nodes"}


def test_what_was_known_of_a_lost_node_does_not_matter() -> None:
    job = started(num_nodes=5)
    job.step(1)
    measure(job, {2: 2.0})
    job.lose(2)
    job.answer()
    assert job.last("generation")["slowdowns"] == {}


@pytest.mark.parametrize("slow", [{}, {0: 1.2, 3: 1.1}], ids=["equal", "noise"])
def test_equal_nodes_keep_their_plan(slow: dict[int, float]) -> None:
    job = started(num_nodes=4)
    job.step(1)
    before = job.plan
    measure(job, slow)
    regroup(job)
    assert job.plan == before
