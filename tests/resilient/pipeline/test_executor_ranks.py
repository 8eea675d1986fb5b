"""Pipelines of real ranks compute what one process does, whatever their cuts, shares and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from resilient.comm import Communicator, StoreClient
from resilient.data.reader import Cell
from resilient.models.layer import WholeModel
from resilient.pipeline.executor import Executor
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.step_work import StepWork
from resilient.protocol.fault_injection import Faults
from resilient.protocol.job_config import SCHEDULES
from resilient.protocol.messages import Generation
from resilient.runtime.batches import Batches
from resilient.runtime.commit import Ballot, Ledger
from resilient.runtime.generation_guard import GenerationGuard
from resilient.runtime.install import WorkerContext, install
from resilient.runtime.job import Job
from resilient.runtime.sample_agreement import SampleAgreement
from resilient.runtime.steps.learning import Learning
from resilient.runtime.steps.planning import UnitPlanning
from resilient.runtime.steps.steps import Steps
from resilient.state import checkpoint
from resilient.state.layer_state import LayerState
from resilient.state.manifest import Manifest, folder, write_manifest
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.kind import ScheduleKind, rows_of_stages
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.ranks import HOST, SECRET, as_threads
from tests.resilient.small import CPU, TiedModel, Tokens, all_of, assemble, make_job, make_plan, make_profile

STEP = 2
LIMIT = 0.3
PLANS = {
    "1 stage": make_plan(((0, 6), 8)),
    "2 stages": make_plan(((0, 4, 6), 8)),
    "3 stages": make_plan(((0, 1, 3, 6), 8)),
    "3 stages, fewer microbatches": make_plan(((0, 2, 5, 6), 1), ((0, 6), 7)),
    "2 pipelines": make_plan(((0, 3, 6), 3), ((0, 2, 4, 6), 5)),
}


class VaryingTokens(Tokens):
    """Two lengths, so that activations change their shapes within a step."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index)

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = 3 if int(samples[0]["tokens"][0]) % 2 else 5
        return {key: torch.stack([sample[key][:length] for sample in samples]) for key in samples[0]}


@dataclass(frozen=True, kw_only=True)
class Place:
    """One rank, ready to train."""

    executor: Executor
    gradient_sync: GradientSync
    comm: Communicator
    ledger: Ledger
    steps: Steps
    sample_agreement: SampleAgreement


def installed(
    job: Job, plan: Plan, rank: int, address: str, path: Path, planned: tuple[ModelProfile, UnitPlanning] | None = None
) -> Place:
    """Enter a generation of a plan, of units if they are planned."""
    profile, planning = planned or (make_profile(job), None)
    layouts = job.layouts()
    ledger = Ledger(job.optimizer, job.clip_grad_norm)
    context = WorkerContext(
        job=job, profile=profile, layouts=layouts, ledger=ledger, guard=GenerationGuard(),
        faults=Faults(str(path)), host=HOST, ports="", store_client=StoreClient(SECRET), planning=planning,
        learning=Learning(planning.units, planning.degrees) if planning else None,
    )  # fmt: skip
    session, report = install(
        context,
        Generation(generation=1, rank=rank, plan=plan, version=STEP - 1, roll_forward=None, transfers=(),
                   source=str(folder(path, STEP - 1)), store_address=address)
    )  # fmt: skip
    assert report.bytes_copied == 0
    return Place(
        executor=session.executor, gradient_sync=session.gradient_sync, comm=session.comm, ledger=ledger,
        steps=session.steps, sample_agreement=session.sample_agreement,
    )  # fmt: skip


def plan_of_chunks(kind: ScheduleKind, num_rows: int) -> Plan:
    """A pipeline of four stages in these rows, and one of a single stage."""
    cut, alone = (0, 1, 3, 5, 6), make_plan(((0, 6), 3)).pipelines[0]
    rows = rows_of_stages(kind, num_rows, (len(cut) - 1) // num_rows)
    template = PipelineTemplate(
        num_nodes=num_rows,
        stages=tuple(
            StageSpec(first_layer=first, end_layer=end, node_index=row, forward_ms=0.3, backward_ms=0.7)
            for (first, end), row in zip(pairwise(cut), rows, strict=True)
        ),
    )
    chunked = Pipeline(template=template, nodes=tuple(range(num_rows)), num_microbatches=5)
    return Plan(pipelines=(chunked, replace(alone, nodes=(num_rows,))), schedule_kind=kind)


def work_of(place: Place, batches: Batches, step: int) -> StepWork:
    return place.steps.work(step, batches.num_targets(step), partial(batches.batch, step))


def one_step(place: Place, batches: Batches) -> tuple[float, dict[str, LayerState]]:
    """Run one step, up to the reduced gradients, twice: nothing may be left of the first run."""
    loss = torch.zeros(())
    for _ in range(2):
        loss = place.executor.run(work_of(place, batches, STEP))
        place.comm.all_reduce(torch.zeros(1), tuple(range(place.comm.size))).wait()  # the barrier of every step
    place.gradient_sync.close()
    return loss.sum().item(), place.ledger.current


def three_steps(place: Place, batches: Batches) -> dict[str, LayerState]:
    """Train; the gradient's norm is limited, so every rank must know it."""
    for step in range(STEP, STEP + 3):
        work = work_of(place, batches, step)
        loss = place.executor.run(work)
        ballot = Ballot(losses=loss, squares=place.gradient_sync.squares, num_targets=work.num_targets)
        outcome = place.ledger.prepare(place.comm, ballot).outcome
        assert outcome.grad_norm > LIMIT
        place.ledger.apply(outcome)
    place.gradient_sync.close()
    return place.ledger.current


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0", "block.3")], ids=["all trained", "partly frozen"])
def test_gradients_equal_those_of_one_process(plan: Plan, frozen: Sequence[str], tmp_path: Path) -> None:
    job = make_job(model=TiedModel(frozen=frozen), dataset=VaryingTokens())
    batches = Batches(job)
    expected, expected_loss = in_one_process(job, batches)
    write_initial(job, tmp_path)
    results = as_threads(
        len(plan.slots), lambda rank, address: one_step(installed(job, plan, rank, address, tmp_path), batches)
    )
    assert sum(loss for loss, _ in results) == pytest.approx(expected_loss, rel=1e-12)
    held = [name for _, states in results for name in states]
    assert set(held) == {spec.name for spec in job.model.layers}
    for _, states in results:
        for name, state in states.items():
            for entry in state.layout.entries:
                wanted = expected.layer(name).get_parameter(entry.name).grad
                torch.testing.assert_close(state.parameters[entry.name].grad, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("frozen", [(), ("embed", "block.1")], ids=["all trained", "partly frozen"])
@pytest.mark.parametrize(
    "chosen", [*SCHEDULES, "interleaved-1f1b in 2 rows", "interleaved-1f1b in 1", "interleaved-zb in 2", "zb-v in 2"]
)
def test_every_schedule_trains_to_the_same_parameters(chosen: str, frozen: Sequence[str], tmp_path: Path) -> None:
    changes: dict[str, Any] = {"model": TiedModel(frozen=frozen), "dataset": VaryingTokens(), "clip_grad_norm": LIMIT}
    alone = make_job(**changes)
    batches = Batches(alone)
    write_initial(alone, tmp_path)
    expected = three_steps(installed(alone, PLANS["1 stage"], 0, "", tmp_path), batches)

    name, _, num_rows = chosen.removesuffix(" rows").partition(" in ")
    plan = plan_of_chunks(ScheduleKind(name), int(num_rows)) if num_rows else PLANS["2 pipelines"]
    plan = replace(plan, schedule_kind=ScheduleKind(name))
    results = as_threads(
        len(plan.slots), lambda rank, address: three_steps(installed(alone, plan, rank, address, tmp_path), batches)
    )
    assert {name for states in results for name in states} == set(expected)
    for states in results:
        for name, state in states.items():
            torch.testing.assert_close(state.buffer, expected[name].buffer, rtol=1e-9, atol=1e-12)


def in_one_process(job: Job, batches: Batches) -> tuple[WholeModel, float]:
    whole = assemble(job.model, job.seed, torch.float64)
    losses = [whole.loss(batches.batch(STEP, Cell.of_chain(position, 2))) for position in range(8)]
    total = torch.stack(losses).sum()
    (total / batches.num_targets(STEP)).backward()
    return whole, total.item()


def write_initial(job: Job, directory: Path) -> None:
    """Ranks that are threads share torch's random state: their initial values come from files."""
    states = [LayerState(job.layer(n), at, job.optimizer.slots, job.dtype, CPU) for n, at in job.layouts().items()]
    for state in states:
        state.initialize(job.seed)
    path = folder(directory, STEP - 1)
    write_manifest(path, Manifest(step=STEP - 1, recipe=job.recipe(), states=checkpoint.save(path, all_of(states))))
