"""Devices that divide a stage's states compute what one process does, and hold no more than their parts in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from resilient.comm import Communicator, Group, Pending, StoreHost
from resilient.models.layer import LayerSpec
from resilient.pipeline.sharded_stage import ShardedStage
from resilient.runtime.batches import Batches
from resilient.runtime.job import Job
from resilient.state.layer_state import LayerState
from resilient.templates.common.byte_intervals import NO_BYTES
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.pipeline.test_executor_ranks import (
    LIMIT,
    PLANS,
    STEP,
    Place,
    VaryingTokens,
    in_one_process,
    installed,
    one_step,
    three_steps,
    work_of,
    write_initial,
)
from tests.resilient.ranks import HOST, SECRET, as_threads, processes
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


AHEAD = Plan(pipelines=(pipeline((0, 6), 2, 2, 0),))
"""A microbatch for each of two devices."""

EVENTS = """
gather embed             | embed
gather block.0           | embed, block.0
forward embed            | embed, block.0
forward embed, done      | embed, block.0
gather block.1           | block.0, block.1
forward block.0          | block.0, block.1
forward block.0, done    | block.0, block.1
gather block.2           | block.1, block.2
forward block.1          | block.1, block.2
forward block.1, done    | block.1, block.2
gather block.3           | block.2, block.3
forward block.2          | block.2, block.3
forward block.2, done    | block.2, block.3
gather head              | block.3, head
gather embed             | embed, block.3, head
forward block.3          | embed, block.3, head
forward block.3, done    | embed, block.3, head
forward head             | embed, head
forward head, done       | embed, head
gather head              | head
gather embed             | embed, head
gather block.3           | embed, block.3, head
backward head            | embed, block.3, head
backward head, done      | embed, block.3, head
sum head                 | embed, block.3, head
sum embed                | embed, block.3, head
gather block.2           | block.2, block.3
backward block.3         | block.2, block.3
backward block.3, done   | block.2, block.3
summed head              | block.2, block.3
summed embed             | block.2, block.3
sum block.3              | block.2, block.3
gather block.1           | block.1, block.2
backward block.2         | block.1, block.2
backward block.2, done   | block.1, block.2
summed block.3           | block.1, block.2
sum block.2              | block.1, block.2
gather block.0           | block.0, block.1
backward block.1         | block.0, block.1
backward block.1, done   | block.0, block.1
summed block.2           | block.0, block.1
sum block.1              | block.0, block.1
gather embed             | embed, block.0
backward block.0         | embed, block.0
backward block.0, done   | embed, block.0
summed block.1           | embed, block.0
sum block.0              | embed, block.0
backward embed           | embed
backward embed, done     | embed
summed block.0           | embed
sum embed                | embed
summed embed             |
"""
"""What each device does for its microbatch, and whose parameters are there then; the head uses the embedding's matrix.

A gather or a sum begins where it stands here: the messages are on their way while what follows computes.
"""


class Told:
    """A communicator that tells of a state's parts: when they begin to come and go, and when they have gone."""

    def __init__(self, comm: Communicator, name: str, tell: Callable[[str], None]) -> None:
        self._comm, self._name, self._tell = comm, name, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        self._tell(f"gather {self._name}")
        return self._comm.all_gather(parts, group)

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        self._tell(f"sum {self._name}")
        return ToldPending(self._comm.reduce_scatter(parts, group), f"summed {self._name}", self._tell)


class ToldPending:
    """Tells when it is over."""

    def __init__(self, pending: Pending, text: str, tell: Callable[[str], None]) -> None:
        self._pending, self._text, self._tell = pending, text, tell

    def wait(self) -> None:
        self._pending.wait()
        self._tell(self._text)


def watch(stage: ShardedStage, layers: Sequence[LayerSpec]) -> list[str]:
    """Have a stage's events be told, in order, and with each the layers whose parameters are there."""
    events: list[str] = []
    states = {layer.name: sharded.gathered[0] for layer, sharded in zip(layers, stage._sharded, strict=True)}

    def tell(event: str) -> None:
        there = [name for name, state in states.items() if state.num_bytes]
        events.append(f"{event:24} | {', '.join(there)}".strip())

    def told(what: str, call: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def telling(*arguments: Any) -> Any:
            tell(f"{what} {name(*arguments)}")
            result = call(*arguments)
            tell(f"{what} {name(*arguments)}, done")
            return result

        return telling

    for name, state in states.items():
        state._comm = cast(Communicator, Told(state._comm, name, tell))
    numbers: list[int] = []
    catch_gradients = stage._catch_gradients

    def noted_catch(number: int) -> Any:
        numbers.append(number)
        return catch_gradients(number)

    stage._catch_gradients = noted_catch  # pyright: ignore
    stage._run = told("forward", stage._run, lambda layer, *_: layers[layer.index].name)
    torch.autograd.backward = told("backward", torch.autograd.backward, lambda *_: layers[numbers[-1]].name)
    return events


def train(rank: int, connection: Connection, address: str, path: Path) -> None:
    job = small_job()
    place = installed(job, AHEAD, rank, address, path)
    (stage,) = place.executor._stages.values()
    assert isinstance(stage, ShardedStage)
    events = watch(stage, job.model.layers)
    place.executor.run(work_of(place, Batches(job), STEP))
    connection.send(events)
    connection.recv()


def small_job() -> Job:
    return make_job(dataset=VaryingTokens(), global_batch=4)


def test_next_layer_is_on_its_way_while_one_computes_and_no_third_is_there(tmp_path: Path) -> None:
    write_initial(small_job(), tmp_path)
    store = StoreHost(HOST, SECRET)
    with processes(train, 2, store.address, tmp_path) as started:
        results = [connection.recv() for _, connection in started]
    assert results[0] == EVENTS.strip().splitlines()
    assert results[1] == results[0], "devices begin and end all exchanges in the same order"
