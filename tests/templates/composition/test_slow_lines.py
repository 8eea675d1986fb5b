from __future__ import annotations

import random

import numpy as np
import pytest

from resilient.templates.composition.batch_split import Line, slowed_line
from resilient.templates.composition.slow_lines import Arrangements
from tests.templates.jobs import template

ANY_NS = 0, 10**12


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("group", [(2.5,), (3.0, 1.5)])
def test_no_arrangement_is_faster_than_the_lines_whatever_the_microbatches(
    group: tuple[float, ...], alone: bool
) -> None:
    draw = random.Random(len(group))
    sizes = [2, 2, 3, 3, 3, 4]
    layouts = [template(*(draw.uniform(1, 9) for _ in range(size)), sync_ms=2) for size in sizes]
    arrangements = Arrangements(layouts, len(group))
    found = arrangements.lines(np.array([group]), range(2, 5), ANY_NS, alone=alone)
    fill, slowest, round_size = (column[:, 0].tolist() for column in found.table)
    lines = [Line(*line) for line in zip(fill, slowest, round_size, strict=True)]
    for index, line in enumerate(lines):
        pipeline = found.pipelines.pipeline(index)
        assert sorted(factor for factor in pipeline.factors if factor > 1) == sorted(group)
        assert slowed_line(layouts[pipeline.layout], pipeline.factors, alone=alone) == line
    for size in set(sizes):
        kept = [line for line, of in zip(lines, found.sizes.tolist(), strict=True) if of == size]
        for layout in layouts:
            if layout.num_nodes == size:
                for _ in range(20):
                    factors = draw.sample([*group, *[1.0] * (size - len(group))], size)
                    for microbatches in (1, 2, 5, 40):
                        least = min(line.finish_ns(microbatches) for line in kept)
                        assert least <= slowed_line(layout, factors, alone=alone).finish_ns(microbatches)


@pytest.mark.parametrize("group", [(2.5,), (3.0, 1.5)])
def test_lines_of_some_sizes_are_those_of_all_that_have_them(group: tuple[float, ...]) -> None:
    layouts = [template(*range(1, size + 1)) for size in (1, 2, 3, 4)]
    arrangements = Arrangements(layouts, len(group))
    groups = np.array([group])
    every, some = (arrangements.lines(groups, sizes, ANY_NS, alone=False) for sizes in (range(2, 5), range(3, 4)))
    chosen = every.sizes == 3
    assert some.sizes.tolist() == every.sizes[chosen].tolist() != []
    for column, of_every in zip(some.table, every.table, strict=True):
        assert column.tolist() == of_every[chosen].tolist()
    first = int(chosen.argmax())
    for index in range(len(some.sizes)):
        assert some.pipelines.pipeline(index) == every.pipelines.pipeline(first + index)


@pytest.mark.parametrize("seed", range(20))
def test_between_two_times_fewer_lines_get_through_as_much(seed: int) -> None:
    draw = random.Random(seed)
    layouts = [template(*(draw.uniform(1, 9) for _ in range(size)), sync_ms=2) for size in (2, 2, 3, 3, 3, 4)]
    arrangements = Arrangements(layouts, 2)
    low = draw.randint(10**7, 10**8)
    within = low, low + draw.choice([0, 10**5, 10**7])
    every, some = (arrangements.lines(np.array([(3.0, 1.5)]), range(2, 5), of, alone=False) for of in (ANY_NS, within))
    assert len(some.sizes) <= len(every.sizes)
    for tau in (*within, *(draw.randint(*within) for _ in range(50))):
        of_every, of_some = (lines.table.capacities(tau) for lines in (every, some))
        for size in (2, 3, 4):
            most = of_every[every.sizes == size].max()
            assert max(0, most) == of_some[some.sizes == size].max(initial=0)
