"""What planners answer for one pipeline on so many nodes: on all devices, and as the runtime runs it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.curves import Curve
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Assignment, Configuration, Parallelism, Replica, Setting
from resilient.planners.registry import PLANNERS, planner
from resilient.planners.stages.device_layout import used_devices
from resilient.planners.stages.one_pipeline import pipeline_configurations
from resilient.planners.stages.pipeline_memory import most_held
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.schedules.validator import validate
from tests.resilient.planners.small_jobs import small_job, small_table, small_unit

_FEWER = {
    "fsdp": range(1, 2),
    "static-cp": range(1, 2),
    "disttrain": range(2, 6),
    "dflop": range(2, 6),
    "entrain": range(2, 6),
}
"""Numbers of nodes of one device that planners answer for, if not for 1 to 5: some have no stages, others want devices
for each unit."""


def _small(encoders: Sequence[str] = ("vision",)) -> tuple[Setting, SampleTable]:
    """Five equal layers of each encoder, seven of the language model."""
    units = [*(small_unit(name, [1.0] * 5) for name in encoders), small_unit(LLM, [1.5] * 7)]
    setting = Setting(
        costs=CostModel(units=tuple(units)), cluster=Cluster(), num_nodes=5, global_batch=12, microbatch=1
    )
    return setting, small_table(np.random.default_rng(0), [*encoders, LLM], 64)


def _answer(name: str, setting: Setting, known: SampleTable) -> Configuration | None:
    """None where the planner refuses by name."""
    try:
        return planner(name).configure(setting, known)
    except ArgumentError as error:
        if f"{name!r}" not in str(error):
            raise
    return None


@pytest.mark.parametrize("devices_per_node", [1, 2])
@pytest.mark.parametrize("name", PLANNERS)
@given(seed=st.integers(0, 2**32 - 1), num_microbatches=st.integers(1, 6))
@settings(max_examples=12, deadline=None)
def test_an_answer_for_one_pipeline_uses_all_devices_and_runs_any_number_of_microbatches(
    name: str, devices_per_node: int, seed: int, num_microbatches: int
) -> None:
    setting, known, batch = small_job(seed, devices_per_node)
    configuration = _answer(name, setting, known)
    if configuration is None:
        return
    assert configuration.units[LLM].dp == configuration.shard
    assert used_devices(configuration) == setting.num_devices
    assert all(spread.tp == spread.cp == 1 for spread in configuration.units.values())
    assert configuration.shard in ({1, devices_per_node} if name == "resilient" else {1})
    replicas = [Replica(num_microbatches=num_microbatches)] * configuration.shard
    assignment = planner(name).assign(setting, configuration, batch, replicas)
    for unit in configuration.units:
        place = assignment.units[unit]
        assert set(place.replica.tolist()) <= set(range(configuration.shard))
        assert place.microbatch.shape == (len(batch),)
        assert place.microbatch.min() >= 0
    result = evaluate(setting, configuration, assignment, batch, replicas)
    validate(result.timeline.schedule)
    assert result.iteration_ms > 0
    assert 0 <= result.bubble < 1


@pytest.mark.parametrize(
    ("name", "sizes"),
    (dict.fromkeys(PLANNERS, range(1, 6)) | _FEWER).items(),
)
def test_every_planner_answers_for_the_numbers_of_nodes_that_suit_it(name: str, sizes: range) -> None:
    setting, known = _small()
    found = pipeline_configurations(planner(name), setting, known, range(1, 6))
    assert {size: used_devices(each) for size, each in found.items()} == {size: size for size in sizes}


def test_a_number_of_nodes_without_an_answer_leaves_nodes_standing_by() -> None:
    setting, known = _small(encoders=("vision", "audio"))
    found = pipeline_configurations(planner("dhp"), setting, known, range(1, 5))
    assert list(found) == [1, 2, 3, 4]
    assert [used_devices(each) for each in found.values()] == [1, 1, 3, 4]
    assert found[2] is found[1]


@pytest.mark.parametrize("name", [name for name in PLANNERS if name not in ("fsdp", "static-cp", "entrain")])
def test_devices_that_make_nothing_faster_are_used(name: str) -> None:
    """One layer takes longer than all others: two stages would do."""
    setting, known = _small()
    units = (small_unit("vision", [0.01] * 5, fixed=0), small_unit(LLM, [*[0.01] * 6, 9.0], fixed=0))
    slow = replace(setting, costs=CostModel(units=units), num_pipelines=1)
    assert used_devices(planner(name).configure(slow, known)) == setting.num_devices


def test_a_pipeline_has_its_part_of_the_batch_and_needs_no_copy() -> None:
    """It would not be redundant by itself."""
    setting, known = _small()
    setting = replace(setting, num_nodes=7, global_batch=32, microbatch=2, max_failures=1)
    found = pipeline_configurations(planner("disttrain"), setting, known, range(2, 6))
    # Of 2 nodes there are three, of 3 two, of more one.
    assert {size: each.num_microbatches for size, each in found.items()} == {2: 6, 3: 8, 4: 16, 5: 16}


def test_a_planner_without_an_answer_is_refused_by_name() -> None:
    setting, known = _small()
    message = (
        "planner must have an answer for one pipeline on 2 to 3 nodes, got 'fsdp', which has none: num_pipelines must "
        "be one that 'fsdp' has an answer for, on all devices, and without sharding beyond a node, got 1 on 3 of 1 "
        "devices; use other numbers of nodes, or another planner; choose another one, or other min_pipeline_nodes"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        pipeline_configurations(planner("fsdp"), setting, known, range(2, 4))


@pytest.mark.parametrize("name", [name for name in PLANNERS if name not in ("fsdp", "static-cp", "dhp-across-nodes")])
def test_several_pipelines_share_all_devices(name: str) -> None:
    setting, known = _small()
    configuration = planner(name).configure(replace(setting, num_nodes=6, num_pipelines=2), known)
    assert configuration.units[LLM].dp == 2
    assert used_devices(configuration) == 6


def test_no_pipelines_are_refused() -> None:
    message = "num_pipelines must be >= 1, got 0; None leaves it to the planner"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        replace(_small()[0], num_pipelines=0)


class _Eager:
    """Answers with an encoder before two stages of the language model, which run ahead of each other."""

    name, source = "eager", ""

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        units = {
            "vision": Parallelism(dp=1, pp=1, stage_layers=(5,)),
            LLM: Parallelism(dp=1, pp=2, stage_layers=(3, 4)),
        }
        return Configuration(units=units, num_microbatches=setting.global_batch, lead=2)

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        raise NotImplementedError


def test_a_pipeline_that_memory_does_not_hold_is_refused_and_one_that_runs_too_far_ahead_shortened() -> None:
    """What a layer uses while it runs counts."""
    setting, known = _small()
    layers = tuple(
        replace(layer, curves=tuple(replace(each, workspace_bytes=Curve(fixed=1e6)) for each in layer.curves))
        for layer in setting.costs.units[1].layers
    )
    units = (setting.costs.units[0], replace(setting.costs.units[1], layers=layers))
    setting = replace(setting, costs=CostModel(units=units), num_nodes=3)
    answer = _Eager().configure(setting, known)
    eager, needed = (most_held(setting, replace(answer, lead=lead), known) for lead in (2, 1))
    assert eager > needed > 1_000_000

    def found(memory_bytes: int) -> Configuration:
        cluster = Cluster(memory_bytes=memory_bytes)
        return pipeline_configurations(_Eager(), replace(setting, cluster=cluster), known, range(3, 4))[3]

    assert [found(memory).lead for memory in (eager, eager - 1, needed)] == [2, 1, 1]
    message = (
        "planner must have an answer for one pipeline on 3 to 3 nodes, got 'eager', which has none: memory_bytes must "
        f"be >= {needed}, what a device holds of a pipeline on 3 nodes, got {needed - 1}; use more nodes, or smaller "
        "microbatches; choose another one, or other min_pipeline_nodes"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        found(needed - 1)
