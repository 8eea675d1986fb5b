"""Stages of units: who sends to whom, and what each differentiates."""

from __future__ import annotations

import pytest

from resilient.runtime.steps.unit_graph import borders, stage_backwards
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


def test_borders_are_within_lanes_and_between_units_that_feed_each_other() -> None:
    assert borders(TEMPLATE, FEEDS) == ((0, 1), (4, 5), (1, 4), (2, 4), (3, 4))


def test_borders_of_a_chain_are_those_of_its_neighbours() -> None:
    assert borders(cut(1, 2, 3), ()) == ((0, 1), (1, 2))


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
    assert stage_backwards(TEMPLATE, trained, FEEDS) == tuple(kinds[each] for each in expected)
