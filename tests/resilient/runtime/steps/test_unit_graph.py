"""Stages of units: who sends to whom, and what each differentiates."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from resilient.pipeline.p2p import Channel
from resilient.pipeline.row_actions import Border
from resilient.runtime.steps.unit_graph import PlanLanes, stage_backwards
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import Backward, LaneName
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.templates.jobs import cut

FEEDS = (("vision", "llm"), ("audio", "llm"))
LANES = [("vision", 0, (0, 1)), ("vision", 0, (1, 2)), ("vision", 1, (0, 2)), ("audio", 0, (2, 3)), ("llm", 0, (3, 4)),
         ("llm", 0, (4, 5))]  # fmt: skip
TEMPLATE = PipelineTemplate(
    num_nodes=6,
    stages=tuple(
        StageSpec(
            lane=LaneName(unit, lane), first_layer=first, end_layer=end, node_index=node, forward_ms=1.0,
            backward_ms=2.0,
        )
        for node, (unit, lane, (first, end)) in enumerate(LANES)
    ),
)  # fmt: skip


def lanes_of(*templates: PipelineTemplate, feeds: tuple[tuple[str, str], ...] = FEEDS) -> PlanLanes:
    pipelines = tuple(
        Pipeline(template=each, nodes=tuple(range(each.num_nodes)), num_microbatches=2) for each in templates
    )
    return PlanLanes(Plan(pipelines=pipelines), feeds, [True] * 5)


def borders_of(lanes: PlanLanes, num_ranks: int) -> dict[tuple[int, int], list[Channel]]:
    """Return the channels between ranks; both ends must have the same ones."""
    found: dict[tuple[int, int], list[Channel]] = {}
    ends: Counter[tuple[Border, Channel]] = Counter()
    for rank in range(num_ranks):
        of_rank = lanes.borders(rank)
        ends.update(of_rank.items())
        for (source, target), channel in of_rank.items():
            assert rank in (lanes.row_of[source], lanes.row_of[target])
            if lanes.row_of[source] == rank:
                found.setdefault((rank, lanes.row_of[target]), []).append(channel)
    assert set(ends.values()) <= {2}
    return found


def test_borders_are_within_lanes_and_between_units_that_feed_each_other() -> None:
    assert borders_of(lanes_of(TEMPLATE), 6) == {pair: [Channel()] for pair in [(0, 1), (4, 5), (1, 4), (2, 4), (3, 4)]}


def test_borders_lead_from_any_pipeline_to_any() -> None:
    found = borders_of(lanes_of(TEMPLATE, TEMPLATE), 12)
    within = [(0, 1), (4, 5), (6, 7), (10, 11)]
    assert sorted(found) == sorted([*within, *product((1, 2, 3, 7, 8, 9), (4, 10))])


def test_borders_of_one_pair_of_ranks_have_channels_of_their_own() -> None:
    stages = tuple(replace(stage, node_index=number % 2) for number, stage in enumerate(TEMPLATE.stages))
    found = borders_of(lanes_of(replace(TEMPLATE, num_nodes=2, stages=stages)), 2)
    channels = [channel for each in found.values() for channel in each]
    assert sorted(channel.index for channel in channels) == [0, 1, 2, 3]
    assert {channel.count for channel in channels} == {4}, "in both directions"


def test_borders_of_a_chain_are_those_of_its_neighbours() -> None:
    assert list(borders_of(lanes_of(cut(1, 2, 3), feeds=()), 3)) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ((), "AAAAAA"),
        ((0, 1), "NNNAAA"),
        ((0,), "NAAAAA"),
        ((0, 1, 2), "NNNNAA"),
        ((3, 4), "AAAAII"),
        ((0, 1, 2, 3), "NNNNNA"),
        ((0, 1, 3), "NNNAIA"),
        ((1,), "AIAAAA"),
    ],
)
def test_frozen_stages_pass_on_what_something_trained_before_them_wants(frozen: tuple[int, ...], expected: str) -> None:
    trained = [layer not in frozen for layer in range(5)]
    kinds = {"N": Backward.NONE, "I": Backward.INPUTS, "A": Backward.ALL}
    found = stage_backwards(TEMPLATE, trained, FEEDS)
    assert tuple(each.kind for each in found) == tuple(kinds[each] for each in expected)


@pytest.mark.parametrize(
    ("frozen", "changes", "expected"),
    [
        ((), {}, "-x--xx"),
        ((0, 1), {}, "----xx"),
        ((0, 1, 2), {}, "-----x"),
        ((3,), {}, "-x---x"),
        ((), {4: {"recomputed_layers": 1}, 0: {"recomputed_layers": 1}}, "-x---x"),
        ((), {1: {"num_devices": 2, "shard": 2}}, "----xx"),
    ],
)
def test_stages_are_run_in_halves_where_there_are_two(
    frozen: tuple[int, ...], changes: dict[int, dict[str, int]], expected: str
) -> None:
    stages = tuple(replace(stage, **changes.get(number, {})) for number, stage in enumerate(TEMPLATE.stages))
    trained = [layer not in frozen for layer in range(5)]
    found = stage_backwards(replace(TEMPLATE, stages=stages), trained, FEEDS)
    assert "".join("-x"[each.halved] for each in found) == expected
