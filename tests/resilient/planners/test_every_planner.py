"""Whatever a planner decides is simulated, and its devices compute no more and no less than the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Encoders, Planner, Setting
from resilient.planners.published.cornstarch.planner import Cornstarch
from resilient.planners.registry import PLANNERS, planner
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.device_layout import used_devices
from resilient.planners.stages.redundancy import check_redundancy
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.schedules.validator import validate

DEGREES = ((1, 1), (1, 2), (2, 1))
EVERY: list[Planner] = [
    *(planner(name) for name in PLANNERS),
    *(Cornstarch(name=each.value, encoders=(each,)) for each in Encoders),
]


def _unit(name: str, rng: np.random.Generator) -> UnitCosts:
    """More devices share the work of a layer without loss."""
    layers: list[UnitLayer] = []
    for index in range(int(rng.integers(1, 7))):
        ms, squared = float(rng.uniform(0.5, 2)), float(rng.uniform(0, 0.01))
        curves = [
            LayerCurves(
                forward=Curve(linear=ms / (tp * cp), attention=squared / (tp * cp)),
                backward_input=Curve(linear=ms / (tp * cp)),
                backward_weight=Curve(linear=ms / (tp * cp)),
                activation_bytes=100 / (tp * cp),
            )
            for tp, cp in DEGREES
        ]
        layers.append(
            UnitLayer(
                name=str(index),
                curves=tuple(curves),
                parameter_bytes=1000,
                gradient_bytes=1000,
                optimizer_bytes=2000,
            )
        )
    return UnitCosts(name=name, layers=tuple(layers), degrees=DEGREES, boundary_bytes=10.0, output_bytes=10.0)


def planned_job(rng: np.random.Generator, *, large: bool = False) -> tuple[Setting, SampleTable, SampleTable]:
    """Draw a job, samples that planners know, and a batch; if large, on 1024 devices."""
    names = [*("vision", "audio", "video")[: int(rng.integers(1, 4))], LLM]
    frozen = [name for name in names if rng.random() < 0.4]
    setting = Setting(
        costs=CostModel(units=tuple(_unit(name, rng) for name in names)).frozen(frozen[: len(names) - 1]),
        cluster=Cluster(
            devices_per_node=int(rng.choice([1, 2, 4])),
            inter_node=Link(latency_ms=0.01, bytes_per_s=1e8),
            intra_node=Link(bytes_per_s=1e9),
        ),
        num_nodes=int(rng.integers(2, 9)),
        global_batch=int(rng.integers(1, 33)),
        microbatch=int(rng.integers(1, 4)),
    )
    if large:
        cluster, batch_size = replace(setting.cluster, devices_per_node=8), 64 * setting.global_batch
        setting = replace(setting, cluster=cluster, num_nodes=128, global_batch=batch_size)

    def table(count: int) -> SampleTable:
        lengths = {name: np.rint(rng.lognormal(3, 1, count)).astype(np.int64) for name in names}
        pictures = {name: each * (rng.random(count) < 0.7) for name, each in lengths.items() if name != LLM}
        return SampleTable(
            units={name: Lengths.of(each) for name, each in ({LLM: lengths[LLM] + 1} | pictures).items()}
        )

    known, batch = table(64), _strange(table(setting.global_batch), rng)
    return replace(setting, global_batch=len(batch)), known, batch


def _strange(batch: SampleTable, rng: np.random.Generator) -> SampleTable:
    """Return a batch as it is, of one sample, with nothing for encoders, or with a sample longer than all others."""
    kind = rng.integers(0, 5)
    if kind == 2:
        return batch[:1]
    units = {name: lengths.tokens.copy() for name, lengths in batch.units.items()}
    for name, tokens in units.items():
        if kind == 0 and name != LLM:
            tokens[:] = 0
        elif kind == 1:
            tokens[0] = 100 * tokens.max() + 1
    return SampleTable(units={name: Lengths.of(tokens) for name, tokens in units.items()})


def _runs(each: Planner, setting: Setting, known: SampleTable, batch: SampleTable) -> bool:
    """Check that a planner's answer could run, before and after nodes are lost; return whether it has one."""
    try:
        configuration = each.configure(setting, known)
    except ValueError:
        return False  # it fits in no way
    work_ms = sum(float(setting.sample_ms(name, lengths).sum()) for name, lengths in batch.units.items())
    for lost in {0, 1, 2, 4} & set(range(setting.num_nodes)):
        replicas = degraded_replicas(setting, configuration, lost)
        assignment = each.assign(setting, configuration, batch, replicas)
        result = evaluate(setting, configuration, assignment, batch, replicas)
        validate(result.timeline.schedule)
        assert 0 <= result.bubble < 1
        assert 0 <= result.sum_ms < result.iteration_ms
        left_ms = (setting.num_nodes - lost) * setting.cluster.devices_per_node * result.iteration_ms
        assert work_ms <= left_ms * (1 + 1e-6), (each.name, lost)  # devices that are gone do nothing
        if not lost:
            assert result.iteration_ms >= (1 - 1e-6) * bound_ms(setting, batch), each.name
        if not lost and configuration.encoders is not Encoders.REPLICATED:
            computing_ms = (1 - result.bubble) * result.iteration_ms * used_devices(configuration)
            assert computing_ms == pytest.approx(work_ms, rel=1e-5), each.name
    return True


@given(seed=st.integers(0, 2**32 - 1))
@example(seed=1285)  # one encoder for two replicas of the language model, on three devices
@settings(max_examples=8, deadline=None)
def test_every_answer_could_run_before_and_after_nodes_are_lost(seed: int) -> None:
    setting, known, batch = planned_job(np.random.default_rng(seed))
    found = [_runs(each, setting, known, batch) for each in EVERY]
    assert any(found)


@given(each=st.sampled_from(EVERY), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=6, deadline=None)
def test_answers_for_a_thousand_devices_could_run(each: Planner, seed: int) -> None:
    _runs(each, *planned_job(np.random.default_rng(seed), large=True))


@pytest.mark.parametrize("max_failures", [1, 2])
def test_redundant_answers_go_on_after_as_many_losses(max_failures: int) -> None:
    """With copies that are divided among the devices of a node, or of all nodes, too."""
    found = 0
    for seed in range(5):
        setting, known, batch = planned_job(np.random.default_rng(seed))
        setting = replace(setting, max_failures=max_failures)
        for each in EVERY:
            try:
                configuration = each.configure(setting, known)
            except ValueError:
                continue  # it fits in no way
            in_node = setting.cluster.devices_per_node
            shards = {configuration.shard, in_node} if configuration.units[LLM].dp % in_node == 0 else {1}
            for shard in shards if configuration.colocated else {1}:
                found += shard > 1
                divided = replace(configuration, shard=shard)
                check_redundancy(setting, divided)
                for lost in {0, max_failures} & set(range(setting.num_nodes)):
                    replicas = degraded_replicas(setting, divided, lost)
                    assignment = each.assign(setting, divided, batch, replicas)
                    result = evaluate(setting, divided, assignment, batch, replicas)
                    validate(result.timeline.schedule)
                    assert 0 <= result.sum_ms < result.iteration_ms
    assert found > 5


@pytest.mark.parametrize("each", EVERY, ids=lambda each: each.name)
def test_no_planner_refuses_jobs_that_have_devices_for_it(each: Planner) -> None:
    """Of twelve jobs two have fewer devices than units; Entrain also wants stages in proportion to the work."""
    refused: list[str] = []
    for seed in range(12):
        setting, known, _ = planned_job(np.random.default_rng(seed))
        try:
            each.configure(setting, known)
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) <= {"entrain": 4}.get(each.name, 2)
    assert all(message.startswith("num_nodes must ") for message in refused)
