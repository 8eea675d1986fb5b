from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.composition.batch_split import Lines, least_line, lines, slowed_line
from resilient.templates.composition.compose import compose, compositions, least_step_ns
from resilient.templates.template import TemplateSet
from tests.templates.jobs import step_ns, template, template_set


def sums(total: int, sizes: range) -> Iterator[tuple[int, ...]]:
    """All multisets of ``sizes`` that sum up to ``total``, descending."""
    if total == 0:
        yield ()
    for size in sizes:
        if size <= total:
            for rest in sums(total - size, range(sizes.start, size + 1)):
                yield (size, *rest)


def exhaustive(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> tuple[int, ...]:
    """The best of all compositions, ties as documented; () where there is none."""
    # A pipeline of all nodes has no others to sum gradients with.
    pipelines = {size: lines(templates.of(size), alone=size == num_nodes) for size in templates.sizes}
    steps = {
        sizes: step_ns([pipelines[size] for size in sizes], num_microbatches)
        for sizes in sums(num_nodes, templates.sizes)
        if min_pipelines <= len(sizes) <= num_microbatches
    }
    best = min(steps.values(), default=0)

    def microbatches(pipeline: Lines) -> int:
        return max((best - fill) // slowest * round_size for fill, slowest, round_size in pipeline)

    ties = [sizes for sizes, step in steps.items() if step == best]
    return max(ties, key=lambda sizes: (sum(microbatches(pipelines[s]) for s in sizes), sizes), default=())


def check(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> None:
    best = exhaustive(templates, num_nodes, num_microbatches, min_pipelines)
    if best:
        assert compose(templates, num_nodes, num_microbatches, min_pipelines) == best
    else:
        with pytest.raises(ValueError, match=f"got {num_nodes}; leave nodes out or plan templates for more nodes$"):
            compose(templates, num_nodes, num_microbatches, min_pipelines)


def steps_of_any(templates: TemplateSet, num_nodes: int, num_microbatches: int, min_pipelines: int) -> dict[int, int]:
    """The shortest step of each number of nodes up to all that has one."""
    steps: dict[int, int] = {}
    for used in range(1, num_nodes + 1):
        for sizes in sums(used, templates.sizes):
            if min_pipelines <= len(sizes) <= num_microbatches:
                step = step_of(templates, sizes, num_microbatches)
                steps[used] = min(step, steps.get(used, step))
    return steps


def step_of(templates: TemplateSet, sizes: tuple[int, ...], num_microbatches: int) -> int:
    return step_ns([lines(templates.of(size), alone=len(sizes) == 1) for size in sizes], num_microbatches)


@given(st.data())
def test_nodes_stand_by_exactly_where_that_is_faster(data: st.DataObject) -> None:
    templates = drawn_templates(data)
    case = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 16)), data.draw(st.integers(1, 3))
    steps = steps_of_any(templates, *case)
    if case[0] not in steps:
        return
    found = compositions(templates, *case)
    assert found.every == compose(templates, *case)
    fastest_ns = min(steps.values())
    assert step_of(templates, found.fastest, case[1]) == fastest_ns
    # Of these layouts the slowest row fills most.
    assert least_step_ns(templates, *case) == fastest_ns
    assert case[2] <= len(found.fastest) <= case[1]
    assert list(found.fastest) == sorted(found.fastest, reverse=True)
    if steps[case[0]] == fastest_ns:
        assert found.fastest == found.every


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_a_step_may_take_what_slow_nodes_make_it_shorter_by(num_pipelines: int) -> None:
    """The row that is slowest only with a slow node fills more; a lone pipeline has no gradients to sum."""
    busy, filling = template(11.0, 10.0).stages
    layout = replace(template(11.0, 10.0, sync_ms=3.0), stages=(replace(busy, weights_ms=5.0), filling))
    case = template_set(layout), 2 * num_pipelines, num_pipelines, num_pipelines
    alone = num_pipelines == 1
    profiled, slowed = (slowed_line(layout, (1.0, each), alone=alone).finish_ns(1) for each in (1.0, 1.11))
    assert slowed < profiled
    assert least_step_ns(*case) == least_line(layout, alone=alone).finish_ns(1) <= slowed


def test_of_more_nodes_than_help_as_many_are_in_use_as_do_no_harm() -> None:
    """Microbatches are too few for three pipelines, and pipelines of two nodes wait for their messages."""
    templates = template_set(template(4), template(5, num_nodes=2))
    assert compositions(templates, 5, 3, 2) == ((2, 2, 1), (1, 1, 1))
    slack = template_set(template(4), template(5, num_nodes=2), template(9, num_nodes=3))
    assert compositions(slack, 7, 3, 2) == ((3, 3, 1), (1, 1, 1))
    equal = template_set(template(4), template(4, num_nodes=2), template(9, num_nodes=3))
    assert compositions(equal, 7, 3, 2) == ((3, 2, 2), (2, 2, 2))


def test_a_lone_pipeline_takes_the_layout_that_suits_it() -> None:
    """Another node would be a pipeline by itself, which is slow."""
    templates = template_set([template(10)], [template(4, num_nodes=2), template(20, num_nodes=2)])
    assert compositions(templates, 3, 2, 1) == ((2, 1), (2,))


def test_nodes_that_no_pipeline_has_a_place_for_count_as_standing_by() -> None:
    """Pipelines of three are fast; a seventh node would have to be one by itself, which is not done in that time."""
    templates = template_set(template(100), template(100, num_nodes=2), template(10, num_nodes=3))
    assert compositions(templates, 7, 8, 2) == ((3, 3, 1), (3, 3))


@given(st.data())
def test_composition_equals_exhaustive_search(data: st.DataObject) -> None:
    templates = drawn_templates(data)
    check(templates, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 16)), data.draw(st.integers(1, 3)))


def drawn_templates(data: st.DataObject) -> TemplateSet:
    smallest = data.draw(st.integers(1, 3))
    stages = st.lists(st.integers(1, 12), min_size=1, max_size=3)
    return template_set(
        *(
            [
                template(
                    *stages_ms,
                    num_nodes=size,
                    shard=data.draw(st.sampled_from([1, 1, 2, 3])),
                    sync_ms=data.draw(st.sampled_from([0, 0, 1, 20])),
                )
                for stages_ms in data.draw(st.lists(stages, min_size=1, max_size=3))
            ]
            for size in range(smallest, smallest + data.draw(st.integers(1, 5)))
        )
    )


@pytest.mark.parametrize("seed", range(6))
def test_composition_of_24_nodes_equals_exhaustive_search(seed: int) -> None:
    """Templates as planned: more nodes are faster, a layout with more stages has a faster slowest one."""
    draw = random.Random(seed)
    smallest = 1 + seed % 3
    templates = template_set(
        *(
            [
                template(*(draw.uniform(80, 100) / (size * stages) for _ in range(stages)), num_nodes=size)
                for stages in (size, 2 * size, 3 * size)
            ]
            for size in range(smallest, 9)
        )
    )
    check(templates, 24, draw.choice([8, 64, 1000]), 1 + seed % 4)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 20, 25, 28, 32, 48, 52, 70, 134])
def test_composition_with_fewer_microbatches_than_small_pipelines_equals_exhaustive_search(seed: int) -> None:
    """Times at random: the most microbatches that so many pipelines get through jump up and down with the number."""
    draw = random.Random(seed)
    smallest = 1 + seed % 2
    templates = template_set(
        *(
            [
                template(
                    *(draw.choice([1, 3, 10]) / draw.choice([1, size]) for _ in range(draw.randint(1, 4))),
                    num_nodes=size,
                )
                for _ in range(3)
            ]
            for size in range(smallest, 9)
        )
    )
    check(templates, 26, draw.randint(4, 25 // smallest), 1 + seed % 4)


def test_capacities_as_large_as_the_step_in_nanoseconds_are_compared_exactly() -> None:
    """One pipeline takes months for a microbatch, in which the others could do more than products of 64 bits hold."""
    fast, slow = 1e-6, 1e10
    templates = template_set(*(template(fast if size < 4 else slow, num_nodes=size) for size in range(1, 7)))
    check(templates, 11, 3, 2)
    assert compose(templates, 11, 3, 2) == (6, 3, 2)


def test_fewer_microbatches_than_nodes_make_larger_pipelines() -> None:
    """Small pipelines are fastest, but four of the twelve that fit would have nothing to do."""
    templates = template_set(template(4), template(5, num_nodes=2), template(6, num_nodes=3))
    assert compose(templates, 12, 12, 2) == (1,) * 12
    assert compose(templates, 12, 8, 2) == (2, 2, 2, 2, 1, 1, 1, 1)
    assert compose(templates, 12, 5, 2) == (3, 3, 3, 2, 1)


def test_there_may_be_fewer_pipelines_than_microbatches_though_more_nodes_would_do_one_each() -> None:
    """Six single nodes would be done first, but three microbatches keep three busy, and pairs are slow."""
    templates = template_set(template(10), template(100, num_nodes=2), template(*[1] * 13, num_nodes=3))
    assert compose(templates, 6, 3, 2) == (3, 3)


def test_a_layout_for_few_microbatches_decides() -> None:
    """Pipelines of two nodes have a layout that is slow, but done with one microbatch soonest."""
    single = template(8)
    pair = [template(5, 5, num_nodes=2), template(7, num_nodes=2)]
    assert compose(template_set(single, pair), 4, 2, 2) == (2, 2)
    assert compose(template_set(single, pair[0]), 4, 4, 2) == (1, 1, 1, 1)


def test_a_pipeline_of_all_nodes_has_no_gradients_to_sum_with_others() -> None:
    """With the sum two pipelines of one node would be done first, after 28 ms."""
    templates = template_set(template(4, sync_ms=20), template(3, num_nodes=2, sync_ms=20))
    assert compose(templates, 2, 4, 1) == (2,)
    assert compose(templates, 4, 8, 2) == (1, 1, 1, 1)


def test_of_equal_steps_the_one_with_room_for_more_then_the_one_with_the_largest_template() -> None:
    assert compose(template_set(template(2), template(1, num_nodes=2)), 4, 4, 1) == (2, 2)
    faster_pair = template_set(template(2), template(0.9, num_nodes=2))
    assert compose(faster_pair, 4, 4, 1) == (2, 2)
    assert compose(template_set(template(4), template(3, num_nodes=2)), 3, 3, 1) == (1, 1, 1)


@pytest.mark.parametrize(
    ("num_nodes", "num_microbatches", "min_pipelines"),
    [(5, 8, 2), (2, 8, 1), (0, 8, 1), (9, 2, 1), (6, 1, 2), (4, 8, 2)],
)
def test_a_sum_that_does_not_exist_is_refused(num_nodes: int, num_microbatches: int, min_pipelines: int) -> None:
    message = (
        f"num_nodes must be a sum of {min_pipelines} to {num_microbatches} template sizes from 3 to 4, "
        f"got {num_nodes}; leave nodes out or plan templates for more nodes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        compose(template_set(template(1, 1, 1), template(1, 1, 1, 1)), num_nodes, num_microbatches, min_pipelines)
