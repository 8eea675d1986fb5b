"""Devices that divide a stage's states gather each layer while the one before computes, and hold two at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from resilient.comm import Communicator, Group, Pending, StoreHost
from resilient.models.layer import LayerSpec
from resilient.pipeline.sharded_stage import ShardedStage
from resilient.runtime.batches import Batches
from resilient.runtime.job import Job
from resilient.templates.plan import Plan
from tests.resilient.pipeline.test_executor_ranks import STEP, VaryingTokens, installed, work_of, write_initial
from tests.resilient.pipeline.test_sharded_stage import pipeline
from tests.resilient.ranks import HOST, SECRET, processes
from tests.resilient.small import make_job

PLAN = Plan(pipelines=(pipeline((0, 6), 2, 2, 0),))
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
    place = installed(job, PLAN, rank, address, path)
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
