"""Stages that read different samples are named with the sample and the entry, on every rank; equal ones agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilient.comm.agreement import all_equal
from resilient.data.reader import REPEATABLE, Cell, Reading
from resilient.runtime.sample_agreement import SampleAgreement, slot_reads
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import TiedModel, make_job, make_plan

PLAN = make_plan(((0, 2, 4, 6), 2), ((0, 6), 1))
"""Ranks 0, 1 and 2 share the microbatches 0 and 1, rank 3 has microbatch 2 to itself."""

DECLARED = ({"tokens"}, set(), {"tokens"}, set(), set(), {"labels"})


def model() -> Any:
    """Return a model of which rank 0 reads the tokens, rank 1 too, and rank 2 the labels."""
    made: Any = TiedModel()
    made.layers = tuple(
        replace(spec, reads=frozenset(reads)) for spec, reads in zip(made.layers, DECLARED, strict=True)
    )
    return made


def reading(position: int, *, of_batch: int = 0, of_sample: int = 0, entries: str = "tokens labels") -> Reading:
    names = entries.split()
    return Reading(
        indices=(2 * position, 2 * position + 1),
        samples=(dict.fromkeys(names, 5 + position), dict.fromkeys(names, 8 + position + of_sample)),
        batch=dict.fromkeys(names, 2**63 + position + of_batch),
        sample_ms=1.0,
    )


def at(position: int) -> Cell:
    return Cell.of_chain(position, 2)


def both(rank: int, **changes: int) -> dict[Cell, Reading]:
    """Return what a rank of the first pipeline reads by right, with a difference in microbatch 1."""
    entries = "labels" if rank == 2 else "tokens"
    return {at(0): reading(0, entries=entries), at(1): reading(1, entries=entries, **changes)}


RIGHT = {0: both(0), 1: both(1), 2: both(2), 3: {at(2): reading(2)}}


def told(readings: Mapping[int, Mapping[Cell, Reading]]) -> list[tuple[bool, str]]:
    """Return what each rank finds out: whether all agree, and what error there would be."""
    job = make_job(model=model())

    def rank(number: int, address: str) -> tuple[bool, str]:
        comm = join(address, number, 4)
        agreement = SampleAgreement(job, PLAN, PLAN.slots[number])
        summed = torch.tensor([float(agreement.share(readings[number]))], dtype=torch.float64)
        comm.all_reduce(summed, (0, 1, 2, 3)).wait()
        error = str(agreement.difference(comm, 3, readings[number]))
        comm.close()
        return all_equal(summed.item()), error

    return as_threads(4, rank)


def test_equal_readings_agree() -> None:
    assert [agree for agree, _ in told(RIGHT)] == [True] * 4


COLLATED = (
    "collate must make the same of equal samples, got different 'tokens' on stage 0 (node 0) and stage 1 (node 1) in "
    "step 3; have it depend on the samples alone, and draw random numbers in __getitem__"
)


@pytest.mark.parametrize(
    ("readings", "message"),
    [
        (
            {1: both(1, of_sample=1, of_batch=1)},
            "sample 3 of Tokens: 'tokens' must be the same on all stages, got different ones on stage 0 (node 0) and "
            f"stage 1 (node 1) in step 3; {REPEATABLE}",
        ),
        (
            {1: both(1, of_batch=1)},
            f"samples [2, 3] of Tokens: {COLLATED}",
        ),
        (
            {1: {**both(1), at(0): replace(reading(0), batch={})}},
            f"samples [0, 1] of Tokens: {COLLATED}",
        ),
        (
            {1: {at(0): replace(both(1)[at(1)], indices=(0, 1)), at(1): replace(both(1)[at(0)], indices=(2, 3))}},
            "sample 0 of Tokens: 'tokens' must be the same on all stages, got different ones on stage 0 (node 0) and "
            f"stage 1 (node 1) in step 3; {REPEATABLE}",
        ),
    ],
    ids=["a sample", "the collated", "one without it", "exchanged microbatches"],
)
def test_different_readings_are_named_on_all_ranks(readings: dict[int, dict[Cell, Reading]], message: str) -> None:
    assert told({**RIGHT, **readings}) == [(False, message)] * 4


def test_what_one_stage_alone_reads_is_not_compared() -> None:
    other_labels = {2: both(2, of_sample=1, of_batch=1)}
    assert [agree for agree, _ in told({**RIGHT, **other_labels})] == [True] * 4


def test_a_worker_reads_what_its_layers_read() -> None:
    made = model()
    assert [slot_reads(made, slot) for slot in PLAN.slots] == [
        {"tokens"}, {"tokens"}, {"labels"}, {"tokens", "labels"}
    ]  # fmt: skip
    made.layers = (replace(made.layers[0], reads=None), *made.layers[1:])
    assert [slot_reads(made, slot) for slot in PLAN.slots] == [None, {"tokens"}, {"labels"}, None]


LANES = (("vision", 0), ("vision", 0), ("vision", 1), ("llm", 0), ("llm", 0))
"""Of the ranks of one pipeline, a layer on each."""


def laned() -> tuple[Any, Any]:
    """Return a model whose units all read the tokens, and a plan of lanes."""
    made: Any = TiedModel(num_blocks=3)
    made.layers = tuple(
        replace(spec, unit=unit, reads=frozenset({"tokens"}))
        for spec, (unit, _) in zip(made.layers, LANES, strict=True)
    )
    slots = [
        SimpleNamespace(
            rank=rank, node=rank, pipeline_index=0, row_index=rank, lane=LaneName(*lane), group_index=0,
            stages=[SimpleNamespace(first_layer=rank, end_layer=rank + 1, lane=LaneName(*lane))],
        )
        for rank, lane in enumerate(LANES)
    ]  # fmt: skip
    return made, SimpleNamespace(slots=slots, pipelines=[None])


def test_devices_of_sharded_stages_are_compared_with_those_that_have_their_microbatches() -> None:
    """Ranks 0 and 2 have microbatch 0, ranks 1 and 3 microbatch 1."""
    stages = tuple(
        StageSpec(
            first_layer=first, end_layer=first + 3, node_index=first // 3, num_devices=2, shard=2,
            forward_ms=1.0, backward_ms=2.0,
        )
        for first in (0, 3)
    )  # fmt: skip
    pipeline = Pipeline(template=PipelineTemplate(num_nodes=2, stages=stages), nodes=(0, 1), num_microbatches=2)
    plan, job = Plan(pipelines=(pipeline,)), make_job()

    def shares(odd_rank: int | None) -> int:
        read = [{at(rank % 2): reading(rank % 2, of_batch=rank == odd_rank)} for rank in range(4)]
        return sum(SampleAgreement(job, plan, plan.slots[rank]).share(read[rank]) for rank in range(4))

    assert all_equal(float(shares(None)))
    assert not any(all_equal(float(shares(odd_rank))) for odd_rank in range(4))


VISION, OTHER_VISION, LLM = Cell("vision", (1, 0)), Cell("vision", (2,), 1), Cell("llm", (0, 1, 2))
LENGTHS = ({"llm": [3]}, {"llm": [2], "vision": [4, 4]})


def of_lanes(odd_rank: int | None = None) -> list[dict[Cell, Reading]]:
    """Return what the ranks read; of one sample each unit has checksums of its own."""
    cells = [VISION, VISION, OTHER_VISION, LLM, LLM]
    return [
        {cell: replace(reading(place, of_batch=rank == odd_rank, of_sample=rank == odd_rank), lengths=LENGTHS)}
        for rank, (cell, place) in enumerate(zip(cells, (0, 0, 1, 2, 2), strict=True))
    ]


@pytest.mark.parametrize(("odd_rank", "agree"), [(None, True), (0, False), (1, False), (2, True), (3, False)])
def test_only_the_stages_of_a_lane_are_compared(odd_rank: int | None, agree: bool) -> None:
    made, plan = laned()
    readings = of_lanes(odd_rank)
    job = make_job(model=made)
    total = sum(SampleAgreement(job, plan, slot).share(readings[slot.rank]) for slot in plan.slots)
    assert all_equal(total) is agree


def test_what_stages_of_a_lane_read_differently_is_named_by_all() -> None:
    made, plan = laned()
    job, readings = make_job(model=made), of_lanes(4)

    def rank(number: int, address: str) -> str:
        comm = join(address, number, 5)
        error = str(SampleAgreement(job, plan, plan.slots[number]).difference(comm, 3, readings[number]))
        comm.close()
        return error

    message = (
        "sample 5 of Tokens: 'labels' must be the same on all stages, got different ones on stage 3 (node 3) and "
        f"stage 4 (node 4) in step 3; {REPEATABLE}"
    )
    assert as_threads(5, rank) == [message] * 5
