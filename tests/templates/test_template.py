from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings

from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.graph import LaneName
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate, StageSpec, TemplateSet
from tests.templates.jobs import enough_nodes, problems, template, template_set

TWO = template_set([template(4.0, 2.0, num_nodes=3), template(3.0, 3.5, num_nodes=3)], template(1.5, 2.5, num_nodes=4))


@settings(max_examples=25)
@given(problems())
def test_templates_survive_json(problem: PlanningProblem) -> None:
    templates = plan_templates(problem, enough_nodes(problem))
    again = TemplateSet.from_json(templates.to_json())
    assert again == templates
    assert again.digest == templates.digest


def test_sets_are_told_apart_by_their_digest() -> None:
    again, others = TemplateSet.from_json(TWO.to_json()), replace(TWO, problem_digest="another")
    assert {TWO: "known"}[again] == "known"
    assert others.digest != TWO.digest
    assert others not in {TWO: "known"}


def test_file_of_another_version_is_refused() -> None:
    data = TWO.to_json().replace(b'"version":7', b'"version":6')
    with pytest.raises(ValueError, match=r"^version must be 7, got 6; compute the templates again$"):
        TemplateSet.from_json(data)


def test_changed_file_is_refused() -> None:
    data = TWO.to_json()
    changed = data.replace(b'"first_layer":1', b'"first_layer":0', 1)
    assert changed != data
    with pytest.raises(
        ValueError,
        match=r"^templates must have the digest [0-9a-f]{12}, got [0-9a-f]{12}: the file was changed; "
        r"compute the templates again$",
    ):
        TemplateSet.from_json(changed)


def test_other_files_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"^Object missing required field `version`$"):
        TemplateSet.from_json(b"{}")
    with pytest.raises(msgspec.DecodeError, match=r"^Input data was truncated$"):
        TemplateSet.from_json(TWO.to_json()[:-1])


def test_times_of_a_template_are_those_of_its_stages() -> None:
    made = template(4.0, 2.0, 3.0, sync_ms=1.0)
    assert (made.slowest_ms, made.fill_ms) == (4.0, 6.0)
    assert made.iteration_ms(10) == 46.0


@pytest.mark.parametrize(("encoder_ms", "gain_ms"), [(18.0, 0.0), (9.0, 27.0)])
def test_lane_of_several_stages_on_each_device_fills_faster_where_its_cells_are_there(
    encoder_ms: float, gain_ms: float
) -> None:
    """As in simulation of the same: what an encoder takes as long for is there no sooner than a stage is."""
    found: list[PipelineTemplate] = []
    for chunks in (1, 2):
        placed = [(LaneName("vision"), 0, encoder_ms)]
        placed += [(LaneName("llm"), 1 + stage % 4, 18.0 / chunks) for stage in range(4 * chunks)]
        stages = [
            StageSpec(lane=lane, first_layer=0, end_layer=1, node_index=node, forward_ms=ms / 3, backward_ms=ms / 1.5)
            for lane, node, ms in placed
        ]
        found.append(PipelineTemplate(num_nodes=5, stages=tuple(stages)))
    assert [each.slowest_ms for each in found] == [18.0, 18.0]
    assert found[0].iteration_ms(16) - found[1].iteration_ms(16) == pytest.approx(gain_ms)
    assert found[0].fill_ms == pytest.approx(encoder_ms + 3 * 18.0)


def test_best_layout_depends_on_the_number_of_microbatches() -> None:
    first, second = TWO.of(3)
    assert [TWO.best(3, count) for count in (1, 2, 3)] == [first, first, second], "of equal ones the first"


def test_size_without_templates_is_refused() -> None:
    assert TWO.sizes == range(3, 5)
    with pytest.raises(
        ValueError,
        match=r"^num_nodes of a template must be 3 to 4, got 5; plan templates for more nodes$",
    ):
        TWO.of(5)
