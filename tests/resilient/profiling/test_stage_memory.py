"""What is planned that a stage holds is what its allocator counts while it trains, within a tenth."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile, record_function
from transformers import LlamaConfig

from resilient.models.chain import Chain
from resilient.models.layer import Batch
from resilient.models.multimodal.module import MultimodalModule
from resilient.profiling.profiler import draw_samples, measure
from resilient.runtime.batches import Batches
from resilient.runtime.job import Job
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.known_models import Blocks
from resilient.templates.inputs.layer_work import block_works
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Pipeline, Plan, PlanningProblem, Sharding
from resilient.templates.schedules.kind import CHUNK_KINDS, ScheduleKind
from resilient.templates.search.partition import plan_templates
from resilient.templates.search.stage_cost_model import StageCosts
from tests.resilient.pipeline.test_executor_ranks import STEP, installed, work_of, write_initial
from tests.resilient.pipeline.test_tensor_parallel import pipeline
from tests.resilient.ranks import as_threads
from tests.resilient.small import make_job

WIDTH, VOCABULARY, TOKENS = 256, 512, 64
LARGE = 256
"""Samples of a microbatch whose activations are much more than its layers' states."""
BEGUN = "training begins"


class Points:
    def __len__(self) -> int:
        return 8 * 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"input": values, "labels": torch.tensor(index % WIDTH)}

    def num_targets(self, index: int) -> int:
        return 1


class Texts:
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.tensor([(7 * index + 3 * k * k) % (VOCABULARY - 1) + 1 for k in range(TOKENS + 1)])
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def num_targets(self, index: int) -> int:
        return TOKENS


def summed_loss(output: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(output, batch["labels"], reduction="sum")


def chain() -> Job:
    """Eight layers of one size, whose rectifiers keep what they hand on, or the layer after does."""
    inner = [lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())] * 7
    model = Chain([*inner, lambda: nn.Linear(WIDTH, WIDTH)], summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)


def llama() -> Job:
    """Embedding, four blocks, head."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": TOKENS}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=4, tie_word_embeddings=False)
    model = MultimodalModule(encoders={}, language_model=config, labels="shifted")
    return make_job(model=model, dataset=Texts(), precision="fp32", microbatch=2, global_batch=16)


def convolutions(*frozen: int) -> Job:
    """Four layers with small states and large activations, in front of one with large states."""

    def convolution(index: int, *modules: nn.Module) -> nn.Module:
        return nn.Sequential(*modules, nn.ReLU()).requires_grad_(index not in frozen)

    layers = [
        lambda: nn.Unflatten(1, (1, 16, 16)),
        lambda: convolution(1, nn.Conv2d(1, 8, 3, padding=1)),
        *[lambda i=i: convolution(i, nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)) for i in (2, 3, 4)],
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(8 * WIDTH, WIDTH)),
    ]
    model = Chain(layers, summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=64, global_batch=512)


def normed() -> nn.Module:
    """What it hands on it does not keep, nor does a matrix that is frozen."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))


class GatedBlock(nn.Module):
    """A block of Llama's kind, for which a sample is a sequence of four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(64), nn.RMSNorm(64)
        self.mix, self.out, self.up, self.down = (nn.Linear(*of) for of in [(64, 192), (64, 64), (64, 344), (172, 64)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (4, 64))
        query, key, value = self.mix(self.before(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        gate, up = self.up(self.between(x)).chunk(2, dim=-1)
        return (x + self.down(nn.functional.silu(gate) * up)).flatten(1)


def rectified() -> nn.Module:
    """What it hands on it keeps."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def partly_frozen(make: Callable[[], nn.Module], *frozen: int, num_layers: int = 6, microbatch: int = 64) -> Job:
    """Layers of one kind, some of which are frozen."""
    layers = [lambda index=index: make().requires_grad_(index not in frozen) for index in range(num_layers)]
    sizes = {"microbatch": microbatch, "global_batch": 8 * microbatch}
    return make_job(model=Chain(layers, summed_loss), dataset=Points(), precision="fp32", **sizes)


def widened() -> Job:
    """A layer without parameters that makes much of little, in front of one with parameters."""
    first = [nn.Unflatten(1, (1, WIDTH)), nn.Upsample(scale_factor=16), nn.Flatten()]
    model = Chain([lambda: nn.Sequential(*first), *[lambda: nn.Linear(16 * WIDTH, WIDTH)]], summed_loss)
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)


def narrow() -> Job:
    """Layers that are small beside the samples, which the last one loads as well: a chain's loss may read them."""
    last = [nn.Linear(16, WIDTH), nn.Tanh(), nn.Tanh(), nn.Linear(WIDTH, 8)]
    model = Chain([lambda: nn.Linear(WIDTH, 16), lambda: nn.Sequential(*last)], lambda output, _: output.sum())
    return make_job(model=model, dataset=Points(), precision="fp32", microbatch=32, global_batch=256)


@pytest.fixture(scope="module")
def jobs() -> dict[str, tuple[Job, ModelProfile]]:
    made = {
        "chain": chain(),
        "llama": llama(),
        "convolutions": convolutions(),
        "frozen convolutions": convolutions(1, 2, 3, 4),
        "convolutions, the third frozen": convolutions(3),
        "normed, a frozen stage": partly_frozen(normed, 2, 3),
        "normed, frozen layers among others": partly_frozen(normed, 1, 3, 5),
        "normed, 12 layers": partly_frozen(normed, 3, 4, 5, 8, 10, num_layers=12),
        "gated, a frozen stage": partly_frozen(GatedBlock, 2, 3),
        "gated, frozen layers among others": partly_frozen(GatedBlock, 1, 3, 5),
        "gated, 12 layers": partly_frozen(GatedBlock, 3, 4, 5, 8, 10, num_layers=12),
        "large rectified": partly_frozen(rectified, microbatch=LARGE),
        "large rectified, a frozen stage": partly_frozen(rectified, 2, 3, microbatch=LARGE),
        "large normed": partly_frozen(normed, microbatch=LARGE),
        "widened": widened(),
        "narrow": narrow(),
    }
    return {
        name: (job, measure(job, job.layouts(), draw_samples(job), on_layer=lambda _: None))
        for name, job in made.items()
    }


CASES: dict[str, tuple[str, Pipeline, int] | tuple[str, Pipeline, int, ScheduleKind]] = {
    "chain, 1 device": ("chain", pipeline((0, 8), 8, 0, 1), 0),
    "chain, a stage of 3 layers among others": ("chain", pipeline((0, 1, 4, 8), 8, 0, 1, 1, 1), 1),
    "chain, sharded over 3": ("chain", pipeline((0, 4, 8), 8, 0, 1, 1, shard=3), 0),
    "chain, layers that run again": ("chain", pipeline((0, 4, 8), 8, 0, 1, 1, recomputed=4), 0),
    "llama, 2 stages": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 0),
    "llama, sharded over 2": ("llama", pipeline((0, 6), 8, 0, 1, shard=2), 0),
    "llama, 2 stages of 2 tensor-parallel devices": ("llama", pipeline((0, 3, 6), 8, 0, 2, 2), 1),
    "chain, gradients of one microbatch wait": ("chain", pipeline((0, 4, 8), 8, 0, 1, 1), 1, ScheduleKind.SPLIT),
    "llama, gradients of one wait": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 1, ScheduleKind.SPLIT),
    "llama, gradients of two wait": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 1, ScheduleKind.ZB_H1),
    "llama, gradients of three wait": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 1, ScheduleKind.ZB_H2),
    "llama, none wait in a first stage": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 0, ScheduleKind.ZB_H2),
    "llama, halves of 2 tensor-parallel devices": ("llama", pipeline((0, 3, 6), 8, 0, 2, 2), 1, ScheduleKind.ZB_H1),
    "llama, one half where layers run again": ("llama", pipeline((0, 6), 8, 0, 1, recomputed=6), 0, ScheduleKind.ZB_H1),
    **{
        f"convolutions, {kind.value} and stage {row} of cut {cut}": (
            "convolutions",
            pipeline((0, cut, 6), 8, 0, 1, 1),
            row,
            kind,
        )
        for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.SPLIT, ScheduleKind.ZB_H1, ScheduleKind.ZB_H2)
        for cut in (3, 4)
        for row in (0, 1)
    },
    "samples that nobody keeps": ("narrow", pipeline((0, 1, 2), 8, 0, 1, 1), 1),
    "no parameters in a first stage": ("widened", pipeline((0, 1, 2), 8, 0, 1, 1), 0),
    "behind one without parameters": ("widened", pipeline((0, 1, 2), 8, 0, 1, 1), 1),
    **{
        f"frozen convolutions, {kind.value} and stage {row}": (
            "frozen convolutions",
            pipeline((0, 2, 4, 6), 8, 0, 1, 1, 1),
            row,
            kind,
        )
        for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE)
        for row in (0, 1, 2)
    },
}
"""The job, its pipeline, the stage that is looked at, and the schedule if it is not 1F1B."""


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_planned_memory_is_what_is_allocated(
    case: tuple[str, Pipeline, int] | tuple[str, Pipeline, int, ScheduleKind],
    jobs: dict[str, tuple[Job, ModelProfile]],
    tmp_path: Path,
) -> None:
    name, laid_out, row = case[:3]
    job, profile = jobs[name]
    plan = Plan(pipelines=(laid_out,), schedule_kind=case[3] if len(case) > 3 else ScheduleKind.ONE_F_ONE_B)
    write_initial(job, tmp_path)
    rank = next(slot.rank for slot in plan.slots if slot.row_index == row)
    assert planned(profile, plan, row) == pytest.approx(allocated(job, plan, rank, tmp_path), rel=0.1)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("kind", CHUNK_KINDS)
@pytest.mark.parametrize("name", ["chain", "llama", "normed, 12 layers", "gated, 12 layers"])
def test_planned_memory_of_rows_with_two_stages_is_what_is_allocated(
    name: str, kind: ScheduleKind, row: int, jobs: dict[str, tuple[Job, ModelProfile]], tmp_path: Path
) -> None:
    """They do not hold their most at the same time, one at a time runs, and zb-v's last row hands on to itself."""
    job, profile = jobs[name]
    profile = with_even_times(profile)  # for the same cuts every time
    problem = PlanningProblem(
        profile=profile,
        num_microbatches=8,
        cluster=Cluster(devices_per_node=1),
        max_failures=0,
        schedule=kind,
        min_pipeline_nodes=3,
        num_chunks=2,
    )
    (template,) = plan_templates(problem, 3).of(3)
    laid_out = Pipeline(template=template, nodes=(0, 1, 2), num_microbatches=8)
    plan = Plan(pipelines=(laid_out,), schedule_kind=kind)
    job = replace(job, schedule=kind, num_chunks=2)
    write_initial(job, tmp_path)
    rank = next(slot.rank for slot in plan.slots if slot.row_index == row)
    held = sum(stage.memory_bytes for stage in template.rows[row])
    assert held == pytest.approx(allocated(job, plan, rank, tmp_path), rel=0.1)


def test_gradients_that_wait_in_a_block_are_the_derived_ones(jobs: dict[str, tuple[Job, ModelProfile]]) -> None:
    shape = Blocks(num_blocks=1, hidden=128, num_heads=4, num_kv_heads=4, head_size=32, ffn=344, gated=True)
    (derived,) = block_works("llm", shape, 2, TOKENS)
    measured = jobs["llama"][1].layers[1].costs[0]
    assert measured.deferred_bytes == 2 * (derived.deferred_bytes + derived.sharded_deferred_bytes), "4 bytes, not 2"


def test_what_is_read_counts_once_where_a_view_of_it_comes_in(jobs: dict[str, tuple[Job, ModelProfile]]) -> None:
    assert jobs["convolutions"][1].layers[1].costs[0].activation_bytes == 64 * WIDTH * 4


PARTLY_FROZEN = (
    "convolutions, the third frozen",
    "normed, a frozen stage",
    "normed, frozen layers among others",
    "gated, a frozen stage",
    "gated, frozen layers among others",
)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.SPLIT, ScheduleKind.ZB_H1, ScheduleKind.ZB_H2])
@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_planned_memory_of_partly_frozen_models_is_what_is_allocated(
    name: str, kind: ScheduleKind, row: int, jobs: dict[str, tuple[Job, ModelProfile]], tmp_path: Path
) -> None:
    job, profile = jobs[name]
    plan = Plan(pipelines=(pipeline((0, 2, 4, 6), 8, 0, 1, 1, 1),), schedule_kind=kind)
    write_initial(job, tmp_path)
    assert planned(profile, plan, row) == pytest.approx(allocated(job, plan, row, tmp_path), rel=0.1)


@pytest.mark.parametrize("row", range(3))
@pytest.mark.parametrize("name", PARTLY_FROZEN)
def test_planned_memory_of_split_backwards_where_layers_run_again_is_what_is_allocated(
    name: str, row: int, jobs: dict[str, tuple[Job, ModelProfile]], tmp_path: Path
) -> None:
    job, profile = jobs[name]
    laid_out = pipeline((0, 2, 4, 6), 8, 0, 1, 1, 1)
    stages = tuple(replace(stage, recomputed_layers=2) for stage in laid_out.template.stages)
    laid_out = replace(laid_out, template=replace(laid_out.template, stages=stages))
    plan = Plan(pipelines=(laid_out,), schedule_kind=ScheduleKind.ZB_H1)
    write_initial(job, tmp_path)
    assert planned(profile, plan, row) == pytest.approx(allocated(job, plan, row, tmp_path), rel=0.1)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, row) for name in ("large rectified", "large normed") for row in range(3)),
        ("large rectified, a frozen stage", 1),
    ],
)
@pytest.mark.parametrize("again", [False, True], ids=["kept", "run again"])
@pytest.mark.parametrize("kind", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1])
def test_planned_memory_of_large_activations_is_what_is_allocated(
    name: str,
    row: int,
    kind: ScheduleKind,
    again: bool,
    jobs: dict[str, tuple[Job, ModelProfile]],
    tmp_path: Path,
) -> None:
    job, profile = jobs[name]
    laid_out = pipeline((0, 2, 4, 6), 8, 0, 1, 1, 1)
    stages = tuple(replace(stage, recomputed_layers=2 * again) for stage in laid_out.template.stages)
    laid_out = replace(laid_out, template=replace(laid_out.template, stages=stages))
    plan = Plan(pipelines=(laid_out,), schedule_kind=kind)
    write_initial(job, tmp_path)
    assert planned(profile, plan, row) == pytest.approx(allocated(job, plan, row, tmp_path), rel=0.05)


def with_even_times(profile: ModelProfile) -> ModelProfile:
    """The profile, with layers that all take as long."""
    times: dict[str, Any] = {"forward_ms": 1.0, "backward_input_ms": 1.0, "backward_weight_ms": 1.0}
    layers = [replace(layer, costs=tuple(replace(cost, **times) for cost in layer.costs)) for layer in profile.layers]
    return replace(profile, layers=tuple(layers))


def planned(profile: ModelProfile, plan: Plan, row: int) -> int:
    """What the planner expects a device of a stage to hold."""
    stages = plan.pipelines[0].template.stages
    stage = stages[row]
    sharding = Sharding.ON if stage.shard > 1 else Sharding.OFF
    cluster = Cluster(devices_per_node=stage.num_devices)
    problem = PlanningProblem(
        profile=profile,
        num_microbatches=8,
        cluster=cluster,
        max_failures=0,
        schedule=plan.schedule_kind,
        sharding=sharding,
    )
    costs = StageCosts(problem, stage.shard)
    (option,) = (index for index, each in enumerate(costs.options) if each[:2] == (stage.num_devices, stage.shard))
    again = stage.recomputed_layers > 0
    held = costs.held_of_stages(len(stages))[row]
    made = costs.stage(stage.first_layer, stage.end_layer, option, 0, held, checkpointing=again)
    return made.memory_bytes


def allocated(job: Job, plan: Plan, rank: int, path: Path) -> int:
    """The most that one rank has allocated at a time while it trains, with what it had when it began."""

    def work(own: int, address: str) -> None:
        place, batches = installed(job, plan, own, address, path), Batches(job)
        batches.enter(place.steps.cells, place.sample_agreement.reads)
        with record_function(BEGUN):
            pass
        place.executor.run(work_of(place, batches, STEP))
        place.comm.all_reduce(torch.zeros(1), tuple(range(place.comm.size))).wait()  # the barrier of every step

    return most_of_rank(rank, len(plan.slots), work)


def most_of_rank(rank: int, num_ranks: int, work: Callable[[int, str], None]) -> int:
    """The most that one of ranks has allocated at a time from :data:`BEGUN` on, with what it had then."""

    def counted(own: int, address: str) -> int:
        if own != rank:
            work(own, address)
            return 0
        with profile(profile_memory=True) as profiler:
            work(own, address)
        results: Any = profiler
        events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
        sums = list(accumulate(event.nbytes() * (event.name() == "[memory]") for event in events))
        begun = next(number for number, event in enumerate(events) if event.name() == BEGUN)
        return max(sums[begun:])

    gc.collect()  # what was counted before and goes meanwhile would be missing in the sums
    return max(as_threads(num_ranks, counted))
