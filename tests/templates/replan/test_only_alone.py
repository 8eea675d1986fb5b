"""Sizes that memory holds as a plan's only pipeline, with all microbatches, but not with whatever share it may get."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations_with_replacement, pairwise

import pytest

from resilient.templates.composition.batch_split import lines
from resilient.templates.composition.compose import compose, compositions
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan, PlanningProblem
from resilient.templates.replan.replan import first_plan, replan_candidates, templates_for
from resilient.templates.replan.way import ReplanCandidate
from resilient.templates.schedules.kind import INTERLEAVED_KINDS, SPLIT_KINDS, ScheduleKind
from resilient.templates.search.partition import plan_templates
from resilient.templates.search.template_sizes import usable_nodes
from resilient.templates.template import TemplateSet
from tests.templates.jobs import step_ns
from tests.templates.search.every_cut import every_cut, moments, row_bytes, uneven_job
from tests.templates.search.stage_bytes import StageBytes

_MOST_NODES = 9


def with_memory(problem: PlanningProblem, memory_bytes: int) -> PlanningProblem:
    return replace(problem, cluster=replace(problem.cluster, memory_bytes=memory_bytes))


def least_memory(problem: PlanningProblem, *, alone: bool) -> int:
    """Bytes of a device that hold a pipeline of the fewest nodes."""
    too_few, enough = 0, 1 << 14
    while too_few + 1 < enough:
        middle = (too_few + enough) // 2
        fits = next(every_cut(with_memory(problem, middle), alone=alone), None) is not None
        too_few, enough = (too_few, middle) if fits else (middle, enough)
    return enough


def scarce_jobs(kind: ScheduleKind, number: int) -> Iterator[PlanningProblem]:
    """Yield jobs whose fewest nodes hold a lone pipeline, and no pipeline beside others."""
    draw = random.Random(3)
    while number:
        problem = uneven_job(draw, kind, 9)
        least, enough = (least_memory(problem, alone=alone) for alone in (True, False))
        if least < enough:
            yield with_memory(problem, draw.randrange(least, enough))
            number -= 1


def taken(problem: PlanningProblem, pipeline: Pipeline) -> int:
    """The most bytes of a device, with the pipeline's own number of microbatches."""
    template = pipeline.template
    rows = len(template.rows)
    seen = moments(problem.schedule, rows, template.num_chunks, pipeline.num_microbatches)
    most = 0
    for row, stages in enumerate(template.rows):
        of_row = [StageBytes(problem.profile, stage.first_layer, stage.end_layer) for stage in stages]
        turns = (row, row) in pairwise(template.row_of)
        splits = problem.schedule in SPLIT_KINDS
        most = max(most, row_bytes(of_row, seen[row], again=stages[0].checkpointing, turns=turns, splits=splits))
    return most


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS)
def test_jobs_that_only_a_lone_pipeline_fits_are_planned_and_others_refused(kind: ScheduleKind) -> None:
    """Of the fewest nodes all cuts are looked at."""
    for problem in scarce_jobs(kind, 12):
        size, memory = problem.min_pipeline_nodes, problem.cluster.memory_bytes
        assert memory is not None
        templates = plan_templates(problem, size)
        best = min(each.iteration_ms(problem.num_microbatches, alone=True) for each in every_cut(problem, alone=True))
        (template,) = templates.of(size)
        assert template.only_alone
        assert template.iteration_ms(problem.num_microbatches, alone=True) == pytest.approx(best, rel=1e-6)
        assert (templates.sizes_beside, templates.most_pipelines(size, 9)) == (range(size + 1, size + 1), 1)
        beyond = with_memory(problem, least_memory(problem, alone=True) - 1)
        with pytest.raises(ValueError, match=r"must (hold the stages|be at least)"):  # more nodes may hold it, or not
            plan_templates(beyond, size)


def steps_of_all(templates: TemplateSet, num_nodes: int, num_microbatches: int) -> dict[tuple[int, ...], int]:
    """The step of every composition of up to so many nodes, by its sizes."""
    of_several = {
        size: beside
        for size in templates.sizes
        if (beside := tuple(each for each in templates.of(size) if not each.only_alone))
    }
    steps: dict[tuple[int, ...], int] = {}
    for size in templates.sizes:
        if size <= num_nodes:
            steps[(size,)] = step_ns([lines(templates.of(size), alone=True)], num_microbatches)
    for number in range(2, min(num_nodes, num_microbatches) + 1):
        for sizes in combinations_with_replacement(sorted(of_several, reverse=True), number):
            if sum(sizes) <= num_nodes:
                steps[sizes] = step_ns([lines(of_several[size]) for size in sizes], num_microbatches)
    return steps


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS)
def test_compositions_are_the_best_in_which_such_sizes_are_alone(kind: ScheduleKind) -> None:
    both = 0
    for problem in scarce_jobs(kind, 12):
        templates = plan_templates(problem, _MOST_NODES)
        both += bool(templates.sizes_beside) and templates.sizes_beside.start > templates.sizes.start
        for num_nodes in range(templates.sizes.start, _MOST_NODES + 1):
            usable = usable_nodes(problem, templates, num_nodes)
            steps = steps_of_all(templates, num_nodes, problem.num_microbatches)
            assert usable == max(map(sum, steps))
            every, fastest = compositions(templates, usable, problem.num_microbatches, 1)
            assert every == compose(templates, usable, problem.num_microbatches, 1)
            assert steps[every] == min(step for sizes, step in steps.items() if sum(sizes) == usable)
            assert steps[fastest] == min(steps.values())
    assert both >= 3, "jobs that have larger sizes beside others"


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS)
def test_no_plan_after_losses_and_joins_takes_more_memory_than_there_is(kind: ScheduleKind) -> None:
    """Of any way to go on, with slow nodes, too; also where larger clusters have other templates."""
    draw, lone, several = random.Random(0), 0, 0
    for problem in scarce_jobs(kind, 12):
        memory, size = problem.cluster.memory_bytes, problem.min_pipeline_nodes
        assert memory is not None
        plan, live = Plan(pipelines=(), schedule_kind=kind), set(range(draw.randint(size, _MOST_NODES)))
        for change in range(8):
            slow = {node: draw.choice([1.5, 3.0]) for node in live if draw.random() < 0.2}
            if change == 0:
                plans = [first_plan(problem, sorted(live), slowdowns=slow)]
            else:
                plans = [each.plan for each in replan_candidates(problem, plan, sorted(live), slowdowns=slow)]
            templates = templates_for(problem, len(live))
            for each in plans:
                assert sum(pipeline.num_microbatches for pipeline in each.pipelines) == problem.num_microbatches
                assert max(taken(problem, pipeline) for pipeline in each.pipelines) <= memory
            plan = plans[0]
            lone += any(each.template.num_nodes not in templates.sizes_beside for each in plan.pipelines)
            several += len(plan.pipelines) > 1
            gone = set(draw.sample(sorted(live), draw.randint(0, min(2, len(live) - size))))
            live = (live - gone) | set(range(20 * (change + 1), 20 * (change + 1) + draw.randint(0, 4)))
    assert lone >= 10
    assert several >= 10


def lone_pipelines(kind: ScheduleKind) -> Iterator[tuple[PlanningProblem, Pipeline]]:
    """Yield jobs, and pipelines of up to eight nodes that memory does not hold beside others."""
    draw = random.Random(5)
    while True:
        problem = uneven_job(draw, kind, 12)
        try:
            layouts = chain.from_iterable(templates_for(problem, 8).layouts if problem.cluster.memory_bytes else ())
        except ValueError:
            continue
        for layout in layouts:
            if layout.only_alone:
                nodes, count = tuple(range(layout.num_nodes)), problem.num_microbatches
                yield problem, Pipeline(template=layout, nodes=nodes, num_microbatches=count)


def with_four_more(problem: PlanningProblem, before: Pipeline) -> Iterator[ReplanCandidate]:
    """Yield the ways to go on when four nodes join; all fit into memory, with whatever share of the batch they get."""
    plan = Plan(pipelines=(before,), schedule_kind=problem.schedule)
    for candidate in replan_candidates(problem, plan, range(len(before.nodes) + 4)):
        assert problem.cluster.memory_bytes is not None
        pipelines = candidate.plan.pipelines
        assert max(taken(problem, each) for each in pipelines) <= problem.cluster.memory_bytes
        assert len(pipelines) == 1 or not any(each.template.only_alone for each in pipelines)
        yield candidate


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS)
def test_a_pipeline_beside_which_others_come_gives_up_a_layout_that_is_only_alone(kind: ScheduleKind) -> None:
    """Where more nodes have other templates: up to eight, no others have room beside it."""
    num_seen = 0
    for problem, before in lone_pipelines(kind):
        for candidate in with_four_more(problem, before):
            num_seen += len(candidate.plan.pipelines) > 1 and candidate.kind != "composed"
        if num_seen >= 6:
            break


def test_a_pipeline_that_is_larger_than_any_of_more_nodes_goes_on_with_a_size_there_is() -> None:
    """Which layout there is in place of its own may be one that is only alone: of the sixth, it is."""
    num_seen = 0
    for problem, before in lone_pipelines(ScheduleKind.INTERLEAVED):
        sizes = templates_for(problem, len(before.nodes) + 4).sizes
        if len(before.nodes) not in sizes:
            for candidate in with_four_more(problem, before):
                assert {each.template.num_nodes for each in candidate.plan.pipelines} <= {*sizes, len(before.nodes)}
            num_seen += 1
            if num_seen == 6:
                break


@pytest.mark.parametrize("kind", INTERLEAVED_KINDS)
def test_a_lone_pipeline_is_planned_with_what_all_microbatches_take(kind: ScheduleKind) -> None:
    """Also where memory would hold it beside others."""
    draw, differs = random.Random(7), 0
    for _ in range(20):
        problem = replace(uneven_job(draw, kind, 9), cluster=Cluster())
        size = problem.min_pipeline_nodes
        (template,) = plan_templates(problem, size).of(size)
        lone = Pipeline(template=template, nodes=tuple(range(size)), num_microbatches=problem.num_microbatches)
        planned = max(sum(stage.memory_bytes for stage in row) for row in template.rows)
        assert planned == taken(problem, lone)
        assert not template.only_alone
        differs += any(taken(problem, replace(lone, num_microbatches=n)) > planned for n in range(1, 12))
    assert differs >= 3
