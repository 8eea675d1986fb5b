"""Samples are placed once in each unit that has something to do, in pipelines however unlike."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from resilient.planners.costs.samples import LLM
from resilient.planners.own.candidates import one_stage
from resilient.planners.pipelines.decision import template_of
from resilient.planners.pipelines.sample_places import NOWHERE, SamplePlaces
from resilient.planners.planner import Encoders, Replica
from resilient.planners.published.cornstarch.planner import Cornstarch
from resilient.planners.registry import PLANNERS, planner
from resilient.planners.stages.one_pipeline import is_asked_for, pipeline_configurations, several
from resilient.templates.plan import Pipeline, Plan
from tests.resilient.planners.small_jobs import small_job

REARRANGING = ("orchmllm", "resilient")
"""Planners that may place a sample's encoder in another pipeline than its language model."""


@pytest.mark.parametrize("name", PLANNERS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=8, deadline=None)
def test_each_sample_has_one_place_in_pipelines_of_all_sizes(name: str, seed: int) -> None:
    setting, known, batch = small_job(seed, 1)
    chosen, draw = planner(name), np.random.default_rng(seed)
    answers = pipeline_configurations(chosen, replace(setting, num_nodes=5), known, range(1, 5))
    templates = [template_of(replace(setting, num_nodes=size), answer, known) for size, answer in answers.items()]
    drawn = [templates[draw.integers(len(templates))] for _ in range(draw.integers(1, 4))]
    pipelines = tuple(
        Pipeline(template=each, nodes=tuple(range(each.num_nodes)), num_microbatches=int(draw.integers(1, 4)))
        for each in drawn
    )
    placing = SamplePlaces(chosen, setting.costs, setting.cluster, setting.microbatch, Plan(pipelines=pipelines))
    places = placing.places(batch)
    assert np.array_equal(places, placing.places(batch))
    of_llm = places[list(batch.units).index(LLM), :, 0]
    assert of_llm.min() >= 0
    for unit, of_unit in zip(batch.units, places, strict=True):
        there = batch.units[unit].tokens > 0
        assert np.all(of_unit[~there] == NOWHERE)
        if name not in REARRANGING:
            assert np.array_equal(of_unit[there, 0], of_llm[there])
        for pipeline, lane, cell in of_unit[there]:
            assert (unit, lane) in pipelines[pipeline].template.lanes
            assert cell >= 0


def test_planner_may_have_the_devices_of_a_node_divide_a_copy() -> None:
    setting, known, _ = small_job(0, 2)
    (answer,) = pipeline_configurations(planner("resilient"), setting, known, range(1, 2)).values()
    assert (answer.shard, answer.encoders) == (2, Encoders.REPLICATED)
    two = replace(setting, num_nodes=2, num_pipelines=1)
    assert not any(is_asked_for(two, each) for each in one_stage(two) if each.shard > 1), "not across nodes"


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=5, deadline=None)
def test_devices_that_divide_a_copy_have_all_units_of_their_samples(seed: int) -> None:
    """Of pipelines of a node of two devices, beside some of two nodes that are cut into stages."""
    setting, known, batch = small_job(seed, 2)
    chosen, draw = planner("resilient"), np.random.default_rng(seed)
    asked = replace(setting, num_nodes=1, num_pipelines=1)
    divided = [each for each in one_stage(asked) if each.shard == 2 and is_asked_for(asked, each)]
    assume(divided)  # not where a device has no room for its part
    answers = {
        1: divided[0],
        2: planner("cornstarch").configure(replace(setting, num_nodes=2, num_pipelines=1), known),
    }
    answers[2] = replace(answers[2], assigned_by="cornstarch")
    templates = [template_of(replace(setting, num_nodes=size), answer, known) for size, answer in answers.items()]
    drawn = [templates[0], *(templates[draw.integers(2)] for _ in range(draw.integers(0, 3)))]
    pipelines = tuple(
        Pipeline(template=each, nodes=tuple(range(each.num_nodes)), num_microbatches=int(draw.integers(1, 4)))
        for each in drawn
    )
    placing = SamplePlaces(chosen, setting.costs, setting.cluster, setting.microbatch, Plan(pipelines=pipelines))
    places = placing.places(batch)
    of_llm = places[list(batch.units).index(LLM)]
    assert of_llm[:, 0].min() >= 0
    is_sharded = np.array([each.template.round_size > 1 for each in pipelines])[of_llm[:, 0]]
    for unit, of_unit in zip(batch.units, places, strict=True):
        there = batch.units[unit].tokens > 0
        assert np.array_equal(of_unit[there, 0], of_llm[there, 0])
        assert np.array_equal(of_unit[there & is_sharded], of_llm[there & is_sharded])
    work = np.sum([setting.sample_ms(unit, lengths) for unit, lengths in batch.units.items()], axis=0)
    for number, pipeline in enumerate(pipelines):
        if pipeline.template.round_size > 1 and (of_llm[:, 0] == number).sum() > 1:
            loads = [work[(of_llm[:, 0] == number) & (of_llm[:, 2] % 2 == device)].sum() for device in range(2)]
            assert min(loads) > 0, "both have something to do"


def test_faster_pipelines_get_more() -> None:
    setting, known, _ = small_job(3, 1)
    answers = pipeline_configurations(planner("resilient"), replace(setting, num_nodes=4), known, range(1, 4))
    templates = [template_of(replace(setting, num_nodes=size), answers[size], known) for size in (1, 3)]
    pipelines = tuple(
        Pipeline(template=each, nodes=tuple(range(each.num_nodes)), num_microbatches=4) for each in templates
    )
    placing = SamplePlaces(planner("resilient"), setting.costs, setting.cluster, 1, Plan(pipelines=pipelines))
    work = setting.sample_ms(LLM, known.units[LLM])
    pipeline_of = placing.places(known)[list(known.units).index(LLM), :, 0]
    slow, fast = (work[pipeline_of == number].sum() for number in (0, 1))
    assert fast > 1.5 * slow


@pytest.mark.parametrize("size", [1, 3])
def test_what_is_balanced_over_pipelines_that_are_alike_stays_where_the_planner_has_it(size: int) -> None:
    setting, known, batch = small_job(4, 1)
    chosen = planner("orchmllm")
    answer = pipeline_configurations(chosen, replace(setting, num_nodes=6), known, range(1, 4))[size]
    template = template_of(replace(setting, num_nodes=size), answer, known)
    pipelines = (Pipeline(template=template, nodes=tuple(range(size)), num_microbatches=2),) * 2
    places = SamplePlaces(chosen, setting.costs, setting.cluster, setting.microbatch, Plan(pipelines=pipelines)).places(
        batch
    )
    asked = replace(setting, num_nodes=2 * size, global_batch=len(batch))
    expected = chosen.assign(asked, several(answer, 2), batch, [Replica(num_microbatches=2)] * 2)
    crossing = 0
    for unit, of_unit in zip(batch.units, places, strict=True):
        there = batch.units[unit].tokens > 0
        assert np.array_equal(of_unit[there, 0], expected.units[unit].replica[there])
        assert np.array_equal(of_unit[there, 2], expected.units[unit].microbatch[there])
        assert {(unit, lane) for lane in of_unit[there, 1]} <= set(template.lanes)
        crossing += int((of_unit[there, 0] != expected.units[LLM].replica[there]).sum())
    assert crossing


def test_features_cross_pipelines_that_are_unlike() -> None:
    """Each pipeline places what it has of each unit in its own lanes, and has its part of the work of each."""
    setting, known, batch = small_job(4, 1)
    chosen = planner("orchmllm")
    answers = pipeline_configurations(chosen, replace(setting, num_nodes=6), known, range(1, 4))
    templates = [template_of(replace(setting, num_nodes=size), answers[size], known) for size in (1, 3)]
    pipelines = tuple(
        Pipeline(template=each, nodes=tuple(range(each.num_nodes)), num_microbatches=2) for each in templates
    )
    placing = SamplePlaces(chosen, setting.costs, setting.cluster, setting.microbatch, Plan(pipelines=pipelines))
    places = dict(zip(batch.units, placing.places(batch), strict=True))
    crossing = 0
    for unit, of_unit in places.items():
        there = batch.units[unit].tokens > 0
        crossing += int((of_unit[there, 0] != places[LLM][there, 0]).sum())
        work = [setting.sample_ms(unit, batch.units[unit])[of_unit[:, 0] == number].sum() for number in (0, 1)]
        assert 0 < work[0] < work[1], "of one node and of three"
    assert crossing


def test_encoders_of_every_stage_all_have_samples() -> None:
    setting, known, _ = small_job(4, 1)
    chosen = Cornstarch(encoders=(Encoders.REPLICATED,))
    setting = replace(setting, num_nodes=3, global_batch=len(known), microbatch=8)
    configuration = chosen.configure(setting, known)
    assert configuration.units[LLM].pp == 3
    template = template_of(setting, configuration, known)
    pipelines = (Pipeline(template=template, nodes=(0, 1, 2), num_microbatches=8),) * 2
    placing = SamplePlaces(chosen, setting.costs, setting.cluster, setting.microbatch, Plan(pipelines=pipelines))
    places = dict(zip(known.units, placing.places(known), strict=True))
    for unit, of_unit in places.items():
        there = known.units[unit].tokens > 0
        assert np.array_equal(of_unit[there][:, [0, 2]], places[LLM][there][:, [0, 2]])
        for number in (0, 1):
            assert set(of_unit[of_unit[:, 0] == number, 1]) == ({0} if unit == LLM else {0, 1, 2})
