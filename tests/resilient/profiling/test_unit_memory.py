"""What is planned that a device of a planned job holds is what its allocator counts in a step, within a tenth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import record_function
from transformers import LlamaConfig, ViTConfig

from resilient.data.lengths import SampleLengths
from resilient.models.multimodal.generator import GeneratorModule
from resilient.models.multimodal.module import EncoderModule, MultimodalModule
from resilient.models.packing import Packable
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.pipelines.decision import template_of
from resilient.planners.planner import Assignment, Configuration, Encoders, Parallelism, Replica, Setting
from resilient.planners.published.baselines.mean_microbatch import in_order
from resilient.profiling.planned_job import planned_job
from resilient.profiling.unit_cells import draw_lengths
from resilient.profiling.unit_costs import mean_profile, measure_units
from resilient.runtime.batches import Batches
from resilient.runtime.job import Job
from resilient.runtime.steps.planning import UnitPlanning, feeds_of
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.kind import ScheduleKind
from tests.resilient.pipeline.test_executor_ranks import STEP, installed, work_of, write_initial
from tests.resilient.profiling.test_stage_memory import BEGUN, most_of_rank
from tests.resilient.small import make_job

PATCH, PATCHES, WORDS, DRAWN = 4, 24, 40, 16
VOCABULARY = 513
"""Two devices divide it unevenly."""
READ_ID, DRAWN_ID = 510, 509


class Drawings:
    """A picture to read, words, and one to draw: all samples of equal lengths, so that all cells are the mean one."""

    def __len__(self) -> int:
        return 64

    def lengths(self, index: int) -> dict[str, list[int]]:
        return {"vision": [PATCHES], "llm": [PATCHES + WORDS + DRAWN], "image": [DRAWN]}

    def num_targets(self, index: int) -> int:
        return WORDS + DRAWN

    def __getitem__(self, index: int) -> dict[str, Tensor | list[Tensor]]:
        drawn = torch.Generator().manual_seed(index)
        words = torch.randint(3, 500, (WORDS,), generator=drawn)
        ids = torch.cat((torch.full((PATCHES,), READ_ID), words[:1], torch.full((DRAWN,), DRAWN_ID), words[1:]))
        labels = torch.full_like(ids, -100)
        labels[(ids != READ_ID) & (ids != DRAWN_ID)] = words.roll(-1)
        pictures = [torch.randn(3, PATCH, PATCH * count, generator=drawn) for count in (PATCHES, DRAWN)]
        return {
            "input_ids": ids,
            "labels": labels,
            "vision.pixels": pictures[:1],
            "image.pixels": pictures[1:],
        }


class InOrder:
    """Places samples as they come."""

    name, source = "in-order", ""

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        raise NotImplementedError

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        return Assignment(units=dict.fromkeys(batch.units, in_order(len(batch), replicas)))


def of_pictures(num_layers: int) -> ViTConfig:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 2}
    dropout: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape: dict[str, Any] = {"image_size": PATCHES * PATCH, "patch_size": PATCH}
    return ViTConfig(**sizes, **dropout, **shape, num_hidden_layers=num_layers)


def measure_drawings(*, frozen_language_model: bool = False) -> tuple[Job, CostModel, SampleTable]:
    """A job with an encoder of 5 layers, a language model of 6, and a generator of 4; its costs, its lengths."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
    model = MultimodalModule(
        encoders={"vision": EncoderModule(of_pictures(3), placeholder_id=READ_ID)},
        language_model=LlamaConfig(**sizes, **heads, num_hidden_layers=4, tie_word_embeddings=False),
        generators={"image": GeneratorModule(of_pictures(2), placeholder_id=DRAWN_ID)},
        labels="shifted",
        frozen_language_model=frozen_language_model,
    )
    job = make_job(
        model=model, dataset=Drawings(), precision="fp32", planner="resilient", num_steps=STEP, global_batch=8
    )
    drawn = draw_lengths(job)
    return job, measure_units(job, drawn, on_layer=lambda _: None, timed=once), drawn.table


@pytest.fixture(scope="module")
def measured() -> tuple[Job, CostModel, SampleTable]:
    return measure_drawings()


@pytest.fixture(scope="module")
def measured_frozen() -> tuple[Job, CostModel, SampleTable]:
    return measure_drawings(frozen_language_model=True)


def once(run: Callable[[], object]) -> float:
    """Say of what is run, by a clock that is too fast, that it takes too long to run again."""
    started = time.thread_time()
    run()
    return 1e7 * (time.thread_time() - started)


def test_planner_is_asked_for_pipelines_that_a_device_holds(
    measured: tuple[Job, CostModel, SampleTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, costs, _ = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("resilient.profiling.planned_job.job_unit_costs", lambda *_: costs)

    def largest(memory_bytes: int | None) -> int:
        monkeypatch.setattr(Job, "memory_bytes", property(lambda _: memory_bytes))
        _, planning = planned_job(job, Cluster(), 2, lambda _: None)
        return max(stage.memory_bytes for template in planning.templates for stage in template.stages)

    unlimited = largest(None)
    assert largest(unlimited - 1) < unlimited
    with pytest.raises(ValueError, match="planner must have an answer for one pipeline"):
        largest(unlimited // 3)


def spread(dp: int = 1, tp: int = 1, llm: tuple[int, ...] = (3, 3)) -> dict[str, Parallelism]:
    layers = {"vision": (5,), "llm": llm, "image": (4,)}
    return {unit: Parallelism(dp=dp, pp=len(each), tp=tp, stage_layers=each) for unit, each in layers.items()}


LANES = {**spread(), "vision": Parallelism(dp=2, pp=1, stage_layers=(5,), recompute=0.5)}
IN_TURN = {**spread(), "llm": Parallelism(dp=1, pp=2, chunks=2, stage_layers=(1, 2, 2, 1))}
SHARDED: dict[str, Any] = {"colocated": True, "encoders": Encoders.REPLICATED, "shard": 2}

CASES: dict[str, tuple[Configuration, int, int]] = {
    "2 lanes of an encoder, half of which runs again": (Configuration(units=LANES, num_microbatches=4), 5, 1),
    "an encoder ahead of fewer cells than fit": (Configuration(units=IN_TURN, num_microbatches=4), 4, 1),
    "2 tensor-parallel devices": (Configuration(units=spread(tp=2), num_microbatches=4), 4, 2),
    "all units sharded over 2": (Configuration(units=spread(dp=2, llm=(6,)), num_microbatches=2, **SHARDED), 1, 2),
}
"""The planner's decision, its nodes, and their devices. The first one is looked at."""


@pytest.mark.parametrize(("configuration", "num_nodes", "devices"), CASES.values(), ids=CASES.keys())
def test_planned_memory_is_what_is_allocated(
    configuration: Configuration,
    num_nodes: int,
    devices: int,
    measured: tuple[Job, CostModel, SampleTable],
    tmp_path: Path,
) -> None:
    job, costs, samples = measured
    setting = Setting(
        costs=costs, cluster=Cluster(devices_per_node=devices), num_nodes=num_nodes, global_batch=job.global_batch,
        microbatch=job.microbatch, num_pipelines=1,
    )  # fmt: skip
    template = template_of(setting, configuration, samples)
    plan = Plan(pipelines=(Pipeline(template=template, nodes=tuple(range(num_nodes)), num_microbatches=4),))
    of_rows = [sum(stage.memory_bytes for stage in row) for row in template.rows]
    allocated = most_allocated(plan, setting, measured, tmp_path)
    assert of_rows[0] == pytest.approx(allocated, rel=0.1)
    assert simulated_peak(setting, configuration, samples[: job.global_batch]) == pytest.approx(max(of_rows), rel=0.1)


@pytest.mark.parametrize("row", range(5))
def test_planned_memory_of_split_backwards_is_what_is_allocated(
    row: int, measured: tuple[Job, CostModel, SampleTable], tmp_path: Path
) -> None:
    """Later stages keep as many cells as the first one, with the gradients that wait."""
    check_split_backwards(row, measured, tmp_path)


@pytest.mark.parametrize("row", [2, 3])
def test_planned_memory_of_frozen_stages_among_split_backwards_is_what_is_allocated(
    row: int, measured_frozen: tuple[Job, CostModel, SampleTable], tmp_path: Path
) -> None:
    """They keep nothing until the second part."""
    check_split_backwards(row, measured_frozen, tmp_path)


def check_split_backwards(row: int, measured: tuple[Job, CostModel, SampleTable], tmp_path: Path) -> None:
    """Compare a row of five, of which three have the language model."""
    job, costs, samples = measured
    setting = Setting(
        costs=costs, cluster=Cluster(devices_per_node=1), num_nodes=5, global_batch=job.global_batch,
        microbatch=job.microbatch, num_pipelines=1, splits=True,
    )  # fmt: skip
    configuration = Configuration(units=spread(llm=(2, 2, 2)), num_microbatches=4)
    template = template_of(setting, configuration, samples)
    pipeline = Pipeline(template=template, nodes=tuple(range(5)), num_microbatches=4)
    plan = Plan(pipelines=(pipeline,), schedule_kind=ScheduleKind.ZB_H1)
    held = sum(stage.memory_bytes for stage in template.rows[row])
    assert held == pytest.approx(most_allocated(plan, setting, measured, tmp_path, row), rel=0.1)
    most = max(sum(stage.memory_bytes for stage in each) for each in template.rows)
    assert simulated_peak(setting, configuration, samples[: job.global_batch]) == pytest.approx(most, rel=0.1)


def simulated_peak(setting: Setting, configuration: Configuration, batch: SampleTable) -> int:
    """What planners compare: cells of a step."""
    replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.shard
    assignment = InOrder().assign(setting, configuration, batch, replicas)
    return evaluate(setting, configuration, assignment, batch, replicas).peak_bytes


def most_allocated(
    plan: Plan, setting: Setting, measured: tuple[Job, CostModel, SampleTable], path: Path, rank: int = 0
) -> int:
    """The most that a rank has allocated at a time in a step."""
    job, costs, samples = measured
    assert isinstance(job.model, Packable)
    planning = UnitPlanning(
        planner=InOrder(), costs=costs, lengths=SampleLengths(job.dataset, job.model),
        feeds=feeds_of(job.model.units), templates=(), cluster=setting.cluster,
    )  # fmt: skip
    profile = mean_profile(job, costs, samples)
    write_initial(job, path)

    def work(own: int, address: str) -> None:
        place, batches = installed(job, plan, own, address, path, (profile, planning)), Batches(job)
        place.steps.begin(STEP - 1)
        batches.enter(place.steps.cells, place.sample_agreement.reads, place.steps.lengths)
        with record_function(BEGUN):
            pass
        place.executor.run(work_of(place, batches, STEP))
        place.comm.all_reduce(torch.zeros(1), tuple(range(place.comm.size))).wait()  # the barrier of every step
        place.gradient_sync.close()
        place.steps.close()

    return most_of_rank(rank, len(plan.slots), work)
