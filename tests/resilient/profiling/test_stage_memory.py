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
from torch.autograd.profiler import profile, record_function

from resilient.optim import SGD
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
from tests.resilient.profiling.jobs_of_stages import (
    LARGE,
    TOKENS,
    WIDTH,
    GatedBlock,
    Shifted,
    Twice,
    chain,
    convolutions,
    llama,
    narrow,
    normed,
    partly_frozen,
    parts,
    rectified,
    shared,
    widened,
)
from tests.resilient.ranks import as_threads

BEGUN = "training begins"


@pytest.fixture(scope="module")
def jobs() -> dict[str, tuple[Job, ModelProfile]]:
    made = {
        "chain": chain(),
        "llama": llama(),
        "llama in bf16": llama(precision="bf16", optimizer=SGD(lr=0.1), microbatch=1, global_batch=8),
        "convolutions": convolutions(),
        "frozen convolutions": convolutions(1, 2, 3, 4),
        "convolutions, the third frozen": convolutions(3),
        "normed, a frozen stage": partly_frozen([normed] * 6, 2, 3),
        "normed, frozen layers among others": partly_frozen([normed] * 6, 1, 3, 5),
        "normed, 12 layers": partly_frozen([normed] * 12, 3, 4, 5, 8, 10),
        "gated, a frozen stage": partly_frozen([GatedBlock] * 6, 2, 3),
        "gated, frozen layers among others": partly_frozen([GatedBlock] * 6, 1, 3, 5),
        "gated, 12 layers": partly_frozen([GatedBlock] * 12, 3, 4, 5, 8, 10),
        "large rectified": partly_frozen([rectified] * 6, num_points=LARGE),
        "large rectified, a frozen stage": partly_frozen([rectified] * 6, 2, 3, num_points=LARGE),
        "large normed": partly_frozen([normed] * 6, num_points=LARGE),
        "large twice": partly_frozen([Twice] * 6, num_points=LARGE),
        "large shifted": partly_frozen([normed, Shifted] * 3, num_points=LARGE),
        "large parts": partly_frozen(parts(), num_points=LARGE),
        "tied": llama(16384, tied=True, microbatch=1, global_batch=8),
        "tied, bf16": llama(16384, tied=True, microbatch=1, global_batch=8, precision="bf16"),
        "exchanged in chunks": llama(microbatch=16, global_batch=128, tp_chunks=2),
        "a shared matrix": shared(0, 4, 5, 7),
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
    **{
        f"layers that keep nothing and run again, stage {row}": (
            "large shifted",
            pipeline((0, 2, 4, 6), 8, 0, 1, 1, 1, recomputed=2),
            row,
        )
        for row in range(3)
    },
    **{
        f"layers that keep nothing, {kind.value} and stage {row}": (
            "large shifted",
            pipeline((0, 1, 3, 6), 8, 0, 1, 1, 1),
            row,
            kind,
        )
        for kind in (ScheduleKind.SPLIT, ScheduleKind.ZB_H1)
        for row in range(3)
    },
    "llama, 2 stages": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 0),
    "llama, sharded over 2": ("llama", pipeline((0, 6), 8, 0, 1, shard=2), 0),
    "llama, 2 stages of 2 tensor-parallel devices": ("llama", pipeline((0, 3, 6), 8, 0, 2, 2), 1),
    "chain, gradients of one microbatch wait": ("chain", pipeline((0, 4, 8), 8, 0, 1, 1), 1, ScheduleKind.SPLIT),
    "llama, gradients of one wait": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 1, ScheduleKind.SPLIT),
    "llama, gradients of two wait": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 1, ScheduleKind.ZB_H1),
    "llama, gradients of three wait": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 1, ScheduleKind.ZB_H2),
    "llama, none wait in a first stage": ("llama", pipeline((0, 3, 6), 8, 0, 1, 1), 0, ScheduleKind.ZB_H2),
    "llama, halves of 2 tensor-parallel devices": ("llama", pipeline((0, 3, 6), 8, 0, 2, 2), 1, ScheduleKind.ZB_H1),
    "llama in bf16, layers that run again": ("llama in bf16", pipeline((0, 6), 8, 0, 1, recomputed=6), 0),
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
    "tied, 1 device": ("tied", pipeline((0, 6), 8, 0, 1), 0),
    "tied, 2 tensor-parallel devices": ("tied", pipeline((0, 6), 8, 0, 2), 0),
    "tied, layers that run again": ("tied", pipeline((0, 6), 8, 0, 1, recomputed=6), 0),
    "tied, sharded over 2": ("tied", pipeline((0, 6), 8, 0, 1, shard=2), 0),
    "tied, owner and user in 2 stages": ("tied", pipeline((0, 3, 6), 8, 0, 1, 1), 1),
    "tied, bf16": ("tied, bf16", pipeline((0, 6), 8, 0, 1), 0),
    "tied, bf16 and layers that run again": ("tied, bf16", pipeline((0, 6), 8, 0, 1, recomputed=6), 0),
    **{
        f"a shared matrix, {kind.value} and {again} layers that run again": (
            "a shared matrix",
            pipeline((0, 4, 8), 8, 0, 1, 1, recomputed=again),
            1,
            kind,
        )
        for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)
        for again in (0, 4)
    },
    **{
        f"exchanged in chunks, {degree} devices and stage {row} of {len(cuts) - 1}": (
            "exchanged in chunks",
            pipeline(cuts, 8, 0, *[degree] * (len(cuts) - 1)),
            row,
        )
        for degree, cuts, row in [(2, (0, 6), 0), (4, (0, 6), 0), (2, (0, 3, 6), 0), (2, (0, 3, 6), 1)]
    },
    "exchanged in chunks, layers that run again": ("exchanged in chunks", pipeline((0, 6), 8, 0, 2, recomputed=6), 0),
    "exchanged in chunks, halves": ("exchanged in chunks", pipeline((0, 3, 6), 8, 0, 2, 2), 1, ScheduleKind.ZB_H1),
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
        *((f"large {name}", row) for name in ("rectified", "normed", "twice", "parts") for row in range(3)),
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
