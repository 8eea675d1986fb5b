from __future__ import annotations

import random
from itertools import chain

import pytest

from resilient.templates.composition import slow_nodes
from resilient.templates.composition.batch_split import Lines, lines, slowed_line
from resilient.templates.composition.slow_nodes import MixedComposition, compose_with_slow
from resilient.templates.template import TemplateSet
from tests.templates.jobs import step_ns, template, template_set

ANY_NS = 0, 10**12


def step_of(templates: TemplateSet, found: MixedComposition, num_microbatches: int) -> int:
    alone = len(found.slow) + len(found.fast) == 1
    layouts = list(chain.from_iterable(templates.layouts))
    slow: list[Lines] = [(slowed_line(layouts[each.layout], each.factors, alone=alone),) for each in found.slow]
    return step_ns([*slow, *(lines(templates.of(size)) for size in found.fast)], num_microbatches)


def random_templates(draw: random.Random, smallest: int) -> TemplateSet:
    return template_set(
        *(
            [
                template(*(draw.uniform(1, 9) for _ in range(size)), sync_ms=draw.choice([0, 2]))
                for _ in range(draw.randint(1, 3))
            ]
            for size in range(smallest, smallest + 4)
        )
    )


@pytest.mark.parametrize("seed", range(12))
def test_tables_that_count_only_to_the_fewest_pipelines_find_the_same_step(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are for clusters whose tables would be too large; here there are microbatches for every pipeline."""
    draw = random.Random(seed)
    templates = random_templates(draw, 1 + seed % 2)
    slow = [draw.choice([1.5, 2.0, 2.0, 8.0]) for _ in range(1 + seed % 4)]
    case = (templates, 9, slow, 40, 1 + seed % 3, ANY_NS)
    counted = compose_with_slow(*case)
    monkeypatch.setattr(slow_nodes, "_MOST_CELLS", 0)
    saturated = compose_with_slow(*case)
    assert counted is not None
    assert saturated is not None
    assert step_of(templates, counted, 40) == step_of(templates, saturated, 40)


def test_what_is_no_shorter_than_is_known_is_nothing() -> None:
    templates = template_set(template(4), template(2, 2))
    found = compose_with_slow(templates, 3, [1.5], 8, 2, ANY_NS)
    assert found is not None
    step = step_of(templates, found, 8)
    assert compose_with_slow(templates, 3, [1.5], 8, 2, (0, step)) is not None
    assert compose_with_slow(templates, 3, [1.5], 8, 2, (0, step - 1)) is None


def test_a_slow_node_goes_where_it_has_least_to_do() -> None:
    templates = template_set(template(9, 3))
    found = compose_with_slow(templates, 3, [3.0], 8, 2, ANY_NS)
    assert found is not None
    assert [pipeline.factors for pipeline in found.slow] == [(1.0, 3.0)]
    assert found.fast == (2,)


def test_slow_nodes_beside_the_last_pipeline_stand_by() -> None:
    templates = template_set(template(2.5, 1), template(1.5, 1, 1))
    found = compose_with_slow(templates, 3, [3.0] * 4, 58, 3, ANY_NS)
    assert found is not None
    assert [pipeline.factors for pipeline in found.slow] == [(1.0, 3.0)] * 3
    assert found.fast == ()


def test_of_many_slow_nodes_one_may_be_beside_a_fast_one() -> None:
    """Tables with a row for each number of pipelines are large: such pipelines are shorter then, and there are some."""
    templates = template_set(template(9), *(template(4, 1, *([0.5] * each)) for each in range(11)))
    slow = [2.0 + number / 8 for number in range(24)]
    few, many = (compose_with_slow(templates, 101, of, 51, 2, ANY_NS) for of in (slow[:2], slow))
    assert few is not None
    assert many is not None
    assert step_of(templates, many, 51) == step_of(templates, few, 51) == 6_000_000
    assert many.slow[0].factors == (1.0, 2.0)
