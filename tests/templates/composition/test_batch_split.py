from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.composition.batch_split import (
    Line,
    Lines,
    check_batch,
    finish_ns,
    idlest_ns,
    latest_ns,
    latest_with_slow_ns,
    least_finish_ns,
    least_line,
    line_table,
    lines,
    slowed_line,
    split_microbatches,
)
from resilient.templates.composition.split_time import first_done
from resilient.templates.template import PipelineTemplate
from tests.templates.jobs import step_ns, template


def test_slow_nodes_make_no_step_shorter_than_the_least_line_says() -> None:
    """The row that is slowest only with a slow node may be one that fills much more."""
    busy, filling = template(11.0, 10.0).stages
    layout = replace(template(11.0, 10.0), stages=(replace(busy, weights_ms=5.0), filling))
    (line,), least = lines([layout]), least_line(layout)
    slowed = [slowed_line(layout, factors) for factors in ((1.0, 1.0), (1.0, 1.11), (2.0, 1.0), (2.0, 3.0))]
    assert all(least.finish_ns(count) <= each.finish_ns(count) for each in slowed for count in range(1, 9))
    assert slowed[1].finish_ns(1) < line.finish_ns(1)
    assert least_line(template(11.0, 10.0)) == lines([template(11.0, 10.0)])[0]


@given(
    st.lists(st.floats(1.0, 9.0), min_size=1, max_size=6),
    st.integers(1, 3),
    st.floats(1.0, 5.0),
    st.booleans(),
    st.data(),
)
def test_a_round_takes_no_less_than_a_node_so_slow_makes_it(
    times_ms: list[float], rows: int, factor: float, alone: bool, data: st.DataObject
) -> None:
    """And no more where it is the only one and in the best place: zero-bubble schedules aside."""
    layout = template(*times_ms, num_nodes=-(-len(times_ms) // rows), sync_ms=2.0)
    least = least_finish_ns(layout, factor, alone=alone)
    only = [1.0] * layout.num_nodes
    best = min(
        slowed_line(layout, [*only[:slow], factor, *only[slow + 1 :]], alone=alone).finish_ns(1)
        for slow in range(layout.num_nodes)
    )
    assert best - 4 <= least <= best
    puts_off = data.draw(st.lists(st.floats(0, 0.5), min_size=len(times_ms), max_size=len(times_ms)))
    stages = (
        replace(stage, weights_ms=share * stage.backward_ms)
        for stage, share in zip(layout.stages, puts_off, strict=True)
    )
    layout = replace(layout, stages=tuple(stages))
    more = data.draw(st.lists(st.floats(1.0, 3.0), min_size=layout.num_nodes, max_size=layout.num_nodes))
    more[data.draw(st.integers(0, layout.num_nodes - 1))] *= factor
    assert least_finish_ns(layout, factor, alone=alone) <= slowed_line(layout, more, alone=alone).finish_ns(1)


def latest_at_least(
    layouts: Sequence[PipelineTemplate], factors: Sequence[float], num_microbatches: int, most_slow: int
) -> int:
    """Return the bound where any of some pipelines, as many as there are factors or more, may have a node so slow."""
    table = line_table([*((least_line(each),) for each in layouts), *(lines([each]) for each in layouts)])
    rows, idlest = np.arange(len(layouts)), np.array([idlest_ns(each) for each in layouts])
    bound = latest_with_slow_ns(
        table, rows, num_microbatches, rows, len(rows) + rows, idlest, np.array(factors, dtype=np.float64), most_slow
    )
    assert isinstance(bound, int)
    return bound


def test_slow_nodes_cost_what_others_must_do_instead() -> None:
    """Three do 30 in 10 ms, or two of them 24 in 12 ms while one that is half as fast does 6; with two such, 16."""
    three = [template(1.0)] * 3
    least = [latest_at_least(three, [2.0] * number, 30, number) / 1e6 for number in range(4)]
    assert least == pytest.approx([10, 12, 16, 20], abs=1e-4)


def test_no_more_pipelines_gain_by_slow_nodes_than_there_are() -> None:
    """One takes 2 ms and 11 ms a round; with a slow node it might do without the 2 ms, as far as the bound knows."""
    busy, filling = template(11.0, 10.0).stages
    layout = replace(template(11.0, 10.0), stages=(replace(busy, weights_ms=5.0), filling))
    (line,), least = lines([layout]), least_line(layout)
    assert least.slowest_ns == line.slowest_ns
    assert least.fill_ns < line.fill_ns
    # Rounds of two pipelines: as many by each, or, where one is done earlier, one more by that.
    late, early = line.finish_ns(4), least.finish_ns(4)
    assert [latest_at_least([layout] * 2, [], 8, number) for number in range(3)] == [late, late, early]
    assert [latest_at_least([layout] * 2, [], 7, number) for number in range(2)] == [late, early]


@settings(max_examples=60)
@given(st.data())
def test_with_slow_nodes_no_split_is_done_earlier_than_it_is_said(data: st.DataObject) -> None:
    times_ms = st.lists(st.floats(1.0, 9.0), min_size=1, max_size=3)
    kinds = [template(*each, sync_ms=2.0) for each in data.draw(st.lists(times_ms, min_size=1, max_size=2))]
    layouts = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    factors = data.draw(st.lists(st.floats(1.0, 5.0), max_size=min(2, len(layouts))))
    known = data.draw(st.integers(0, len(factors)))
    num_microbatches = data.draw(st.integers(len(layouts), 30))
    done: list[int] = []
    for slow in permutations(range(len(layouts)), len(factors)):
        factor_of = dict(zip(slow, factors, strict=True))
        for places in product(*(range(layouts[index].num_nodes) for index in slow)):
            of = [[1.0] * layout.num_nodes for layout in layouts]
            for index, place in zip(slow, places, strict=True):
                of[index][place] = factor_of[index]
            lines_of = [(slowed_line(*each),) for each in zip(layouts, of, strict=True)]
            counts = split_microbatches(lines_of, num_microbatches)
            done.append(max(finish_ns(*each) for each in zip(lines_of, counts, strict=True)))
    assert latest_at_least(layouts, factors[:known], num_microbatches, len(factors)) <= min(done)


def splits(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


def one(*stages_ms: float) -> Lines:
    return lines([template(*stages_ms)])


def finishes(pipelines: list[Lines], split: tuple[int, ...]) -> list[int]:
    """When the pipelines are done, latest first."""
    return sorted(map(finish_ns, pipelines, split), reverse=True)


# Few different numbers, so that there are ties and pipelines that one microbatch alone keeps longest.
def some_pipelines(*round_sizes: int) -> st.SearchStrategy[list[Lines]]:
    line = st.builds(Line, st.integers(0, 12), st.integers(1, 5), st.sampled_from(round_sizes))
    return st.lists(st.lists(line, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


@given(some_pipelines(1), st.integers(0, 8))
def test_finishing_times_latest_first_equal_exhaustive_search(pipelines: list[Lines], more: int) -> None:
    total = len(pipelines) + more
    counts = split_microbatches(pipelines, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    best = min(finishes(pipelines, split) for split in splits(total, len(pipelines)))
    assert finishes(pipelines, counts) == best
    assert step_ns(pipelines, total) == best[0]


@settings(max_examples=200)
@given(some_pipelines(1, 2, 3, 4), st.integers(0, 8))
def test_with_rounds_the_latest_finish_and_how_many_finish_then_equal_exhaustive_search(
    pipelines: list[Lines], more: int
) -> None:
    def quality(split: tuple[int, ...]) -> tuple[int, int]:
        times = finishes(pipelines, split)
        return times[0], times.count(times[0])

    total = len(pipelines) + more
    counts = split_microbatches(pipelines, total)
    assert sum(counts) == total
    assert min(counts) >= 1
    assert quality(counts) == min(quality(split) for split in splits(total, len(pipelines)))


@given(some_pipelines(1, 2, 3), st.integers(0, 8))
def test_the_latest_finish_is_that_of_the_split(pipelines: list[Lines], more: int) -> None:
    total = len(pipelines) + more
    latest = finishes(pipelines, split_microbatches(pipelines, total))[0]
    assert latest_ns(line_table(pipelines), np.arange(len(pipelines)), total) == latest


@given(some_pipelines(1, 2, 3), st.data())
def test_the_line_that_is_done_first_is_the_first_of_those_that_finish_then(
    pipelines: list[Lines], data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(1, 9), min_size=len(pipelines), max_size=len(pipelines)))
    chosen = first_done(*line_table(pipelines), np.arange(len(pipelines)), np.array(counts))
    times = [[line.finish_ns(count) for line in of] for of, count in zip(pipelines, counts, strict=True)]
    assert chosen.tolist() == [each.index(min(each)) for each in times]


def test_rounds_are_filled_before_new_ones_begin() -> None:
    assert split_microbatches([(Line(0, 8, 4),), (Line(0, 3),)], 21) == (12, 9), "24 and 27 ns"
    assert split_microbatches([(Line(0, 8, 4),), (Line(0, 8, 4),)], 16) == (8, 8)
    assert split_microbatches([(Line(0, 8, 4),), (Line(0, 8, 4),)], 17) == (9, 8)


def test_large_split_gives_each_pipeline_what_the_greedy_rule_gives_it() -> None:
    """The greedy rule, microbatch by microbatch: to whom is done with it first, of these to the one done last now."""
    pipelines = [(Line(7919 * i % 97, 13 + 31 * i % 17), Line(5, 29 + i % 3)) for i in range(40)]
    counts = [1] * len(pipelines)
    for _ in range(1000 - len(pipelines)):
        now, then = (list(map(finish_ns, pipelines, [c + more for c in counts])) for more in (0, 1))
        counts[min(range(len(pipelines)), key=lambda i: (then[i], -now[i]))] += 1
    assert split_microbatches(pipelines, 1000) == tuple(counts)


def test_faster_pipeline_gets_more() -> None:
    assert split_microbatches([one(2, 2), one(4)], 12) == (8, 4)


def test_what_counts_is_when_a_pipeline_would_be_done_with_one_more() -> None:
    assert split_microbatches([one(9), one(4, 4, 4)], 3) == (1, 2)


def test_equal_pipelines_differ_by_one_at_most_and_the_first_gets_more() -> None:
    assert split_microbatches([one(1, 1)] * 3, 8) == (3, 3, 2)


def test_of_two_that_could_finish_last_the_one_that_finishes_later_without_does() -> None:
    assert split_microbatches([(Line(0, 10),), (Line(0, 5),)], 5) == (1, 4)
    assert split_microbatches([(Line(0, 5),), (Line(0, 10),)], 5) == (4, 1)


def test_others_finish_early_where_one_microbatch_alone_takes_longest() -> None:
    assert split_microbatches([(Line(100, 1),), (Line(0, 2),), (Line(0, 3),)], 11) == (1, 6, 4)


def test_pipeline_takes_the_layout_that_suits_its_share() -> None:
    few, many = template(4, 0.5), template(3, 3, 3)
    layouts = lines([few, many])
    assert layouts == (Line(500_000, 4_000_000), Line(6_000_000, 3_000_000))
    assert [finish_ns(layouts, m) for m in (1, 5, 6)] == [4_500_000, 20_500_000, 24_000_000]
    assert split_microbatches([layouts, one(4.25)], 24) == (13, 11)


def test_a_microbatch_takes_time_though_none_was_measured() -> None:
    assert lines([template(0, 0)]) == (Line(0, 1),)
    assert split_microbatches([one(0), one(0)], 6) == (3, 3)


def test_slowed_line_moves_the_slowest_stage() -> None:
    pair = template(4, 3, 2, 1, num_nodes=2, sync_ms=0.5)
    assert slowed_line(pair, (1, 1)) == lines([pair])[0] == Line(6_500_000, 4_000_000)
    assert slowed_line(pair, (1, 2)) == Line(9_500_000, 4_000_000)
    assert slowed_line(pair, (1.0, 2.5)) == Line(10_000_000, 5_000_000)


def test_slowed_line_needs_a_factor_for_each_node() -> None:
    message = (
        "node_factors must be one for each of the template's 2 nodes, got 3; give 1.0 for nodes as fast as profiled"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        slowed_line(template(1, 1), (1, 1, 1))


@pytest.mark.parametrize(("pipelines", "num_microbatches"), [(3, 2), (0, 2)])
def test_split_refuses_pipelines_without_work(pipelines: int, num_microbatches: int) -> None:
    message = (
        f"num_microbatches must be at least the number of pipelines, one or more, got {num_microbatches} for "
        f"{pipelines}; raise the global batch, lower the microbatch, or make fewer pipelines"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        split_microbatches([one(1)] * pipelines, num_microbatches)


@pytest.mark.parametrize(("global_batch", "microbatch", "pipelines"), [(64, 4, 2), (8, 4, 2), (5, 1, 5)])
def test_batch_that_can_be_split_passes(global_batch: int, microbatch: int, pipelines: int) -> None:
    check_batch(global_batch, microbatch, pipelines)
    counts = split_microbatches([one(1)] * pipelines, global_batch // microbatch)
    assert sum(counts) * microbatch == global_batch


@pytest.mark.parametrize(
    ("global_batch", "nearest"), [(62, "60 or 64"), (4, "8"), (7, "8"), (9, "8 or 12"), (0, "8"), (-3, "8")]
)
def test_batch_that_cannot_be_split_recommends_the_nearest(global_batch: int, nearest: str) -> None:
    message = (
        "global_batch must be a multiple of microbatch 4, at least 8 (one microbatch for each of 2 pipelines), "
        f"got {global_batch}; use {nearest}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_batch(global_batch, 4, 2)


def test_microbatch_must_hold_a_sample() -> None:
    with pytest.raises(ValueError, match=r"^microbatch must be >= 1, got 0; give the samples of one microbatch$"):
        check_batch(8, 0, 1)
