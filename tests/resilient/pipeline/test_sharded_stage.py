"""Devices that divide a stage's states compute what one process does, and hold no more than their parts in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient.pipeline.sharded_stage import ShardedStage
from resilient.runtime.batches import Batches
from resilient.state.layer_state import LayerState
from resilient.templates.common.byte_intervals import NO_BYTES
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.pipeline.test_executor_ranks import (
    LIMIT,
    PLANS,
    Place,
    VaryingTokens,
    in_one_process,
    installed,
    one_step,
    three_steps,
    write_initial,
)
from tests.resilient.ranks import as_threads
from tests.resilient.small import TiedModel, make_job, make_profile


def pipeline(
    cut: Sequence[int], shard: int, num_microbatches: int, first_node: int, *, recomputed: int = 0
) -> Pipeline:
    """A pipeline with a node for each stage, of so many devices."""
    stages = tuple(
        StageSpec(
            first_layer=first, end_layer=end, node_index=index, num_devices=shard, shard=shard,
            recomputed_layers=min(recomputed, end - first), forward_ms=0.3, backward_ms=0.7,
        )
        for index, (first, end) in enumerate(pairwise(cut))
    )  # fmt: skip
    nodes = tuple(range(first_node, first_node + len(stages)))
    return Pipeline(
        template=PipelineTemplate(num_nodes=len(stages), stages=stages), nodes=nodes, num_microbatches=num_microbatches
    )


SHARDED = {
    "1 stage of 2": Plan(pipelines=(pipeline((0, 6), 2, 8, 0),)),
    "1 stage of 3, 2 idle": Plan(pipelines=(pipeline((0, 6), 3, 7, 0), pipeline((0, 6), 1, 1, 1))),
    "2 stages of 2, 1 idle": Plan(pipelines=(pipeline((0, 3, 6), 2, 5, 0), pipeline((0, 6), 2, 3, 2))),
    "2 of 2 and 3 of 1": Plan(pipelines=(pipeline((0, 4, 6), 2, 5, 0), pipeline((0, 1, 3, 6), 1, 3, 2))),
    "recomputed": Plan(pipelines=(pipeline((0, 3, 6), 2, 8, 0, recomputed=2),)),
    "1 microbatch for 2": Plan(pipelines=(pipeline((0, 6), 2, 1, 0), pipeline((0, 2, 6), 2, 7, 1))),
}


def held_gradient(state: LayerState, whole: torch.Tensor) -> torch.Tensor:
    """Return what is held of a state's canonical gradient."""
    itemsize = whole.element_size()
    trained = (each for each in state.held & state.segments[0])
    return torch.cat([whole[:0], *(whole[start // itemsize : end // itemsize] for start, end in trained)])


@pytest.mark.parametrize("plan", SHARDED.values(), ids=SHARDED.keys())
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0", "block.3")], ids=["all trained", "partly frozen"])
def test_gradients_equal_those_of_one_process(plan: Plan, frozen: Sequence[str], tmp_path: Path) -> None:
    job = make_job(model=TiedModel(frozen=frozen), dataset=VaryingTokens())
    batches = Batches(job)
    expected, expected_loss = in_one_process(job, batches)
    write_initial(job, tmp_path)
    results = as_threads(
        len(plan.slots), lambda rank, address: one_step(installed(job, plan, rank, address, tmp_path), Batches(job))
    )
    assert sum(loss for loss, _ in results) == pytest.approx(expected_loss, rel=1e-12)
    for _, states in results:
        for name, state in states.items():
            trained = [entry for entry in state.layout.entries if entry.trainable]
            whole = torch.zeros(state.layout.num_trainable, dtype=torch.float64)
            for entry in trained:
                gradient = expected.layer(name).get_parameter(entry.name).grad
                assert gradient is not None
                whole[entry.offset : entry.offset + entry.numel] = entry.stored(gradient)
            torch.testing.assert_close(state.grad, held_gradient(state, whole), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "kind", [each for each in ScheduleKind if each.value not in ("forward-only", "interleaved-1f1b")]
)
def test_every_schedule_trains_to_the_same_parameters(kind: ScheduleKind, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"dataset": VaryingTokens(), "clip_grad_norm": LIMIT}
    job = make_job(**changes)
    write_initial(job, tmp_path)
    expected = three_steps(installed(job, PLANS["1 stage"], 0, "", tmp_path), Batches(job))
    plan = replace(SHARDED["2 of 2 and 3 of 1"], schedule_kind=kind)
    results = as_threads(
        len(plan.slots), lambda rank, address: three_steps(installed(job, plan, rank, address, tmp_path), Batches(job))
    )
    found = dict.fromkeys(expected, NO_BYTES)
    for states in results:
        for name, state in states.items():
            found[name] |= state.held
            wanted = expected[name].held_bytes(state.held).view(torch.float64)
            torch.testing.assert_close(state.buffer, wanted, rtol=1e-9, atol=1e-12)
    assert found == {name: state.held for name, state in expected.items()}


def test_between_steps_the_parts_are_all_that_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan = make_job(dataset=VaryingTokens()), SHARDED["2 stages of 2, 1 idle"]
    profile = make_profile(job)
    write_initial(job, tmp_path)

    def work(rank: int, address: str) -> tuple[int, int, int]:
        place = installed(job, plan, rank, address, tmp_path)
        (stage,) = place.executor._stages.values()
        assert isinstance(stage, ShardedStage)
        peak = watch_peak(stage, monkeypatch)
        one_step(place, Batches(job))
        gathered = {id(state): state for layer in stage._sharded for state in layer.gathered}
        kept = sum(state.num_bytes for state in gathered.values())
        grads = sum(p.grad is not None for state in gathered.values() for p in state.parameters.values())
        assert grads == 0
        held = sum(state.bytes.untyped_storage().nbytes() for state in place.ledger.current.values())
        return kept, held, max(peak)

    for slot, (kept, held, peak) in zip(plan.slots, as_threads(len(plan.slots), work), strict=True):
        assert kept == 0
        assert held == sum(part.size for part in slot.intervals(profile).values())
        layers = profile.layers[slot.stages[0].first_layer : slot.stages[0].end_layer]
        assert 0 < peak <= 2 * max(layer.parameter_bytes + 11 * 6 * 8 * bool(layer.shares) for layer in layers)
    of_layers = {layer.name: layer.state_bytes for layer in profile.layers}
    holders = plan.holders(profile)
    for first in (0, 4):  # the first two of each pipeline are its first stage
        pair = [holders["embed"][rank].size for rank in (first, first + 1)]
        assert sum(pair) == of_layers["embed"]
        assert abs(pair[0] - pair[1]) <= 8 * 3


def watch_peak(stage: ShardedStage, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the bytes that are gathered taken down whenever a layer is to be gathered, and while one runs."""
    peaks = [0]
    gathered = {id(state): state for layer in stage._sharded for state in layer.gathered}.values()
    run, acquire = stage._run, stage._acquire

    def note() -> None:
        peaks.append(sum(state.num_bytes for state in gathered))

    def noted_run(*arguments: Any) -> Any:
        note()
        return run(*arguments)

    def noted_acquire(layers: Sequence[int]) -> None:
        acquire(layers)
        note()

    monkeypatch.setattr(stage, "_run", noted_run)
    monkeypatch.setattr(stage, "_acquire", noted_acquire)
    return peaks


def test_place_of_a_device_knows_its_own_microbatches(tmp_path: Path) -> None:
    job, plan = make_job(dataset=VaryingTokens()), SHARDED["2 stages of 2, 1 idle"]
    write_initial(job, tmp_path)

    def work(rank: int, address: str) -> list[int]:
        place: Place = installed(job, plan, rank, address, tmp_path)
        cells = place.steps.cells(1)
        place.gradient_sync.close()
        assert cells is not None
        return [cell.samples[0] // 2 for cell in cells]

    assert as_threads(len(plan.slots), work) == [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3], [5, 7], [6]]
