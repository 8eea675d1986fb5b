"""Stages that read different samples are named with the sample and the entry, on every rank; equal ones agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from resilient.comm.agreement import all_equal
from resilient.data.reader import REPEATABLE, Reading
from resilient.runtime.sample_agreement import SampleAgreement, slot_reads
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


def both(rank: int, **changes: int) -> dict[int, Reading]:
    """Return what a rank of the first pipeline reads by right, with a difference in microbatch 1."""
    entries = "labels" if rank == 2 else "tokens"
    return {0: reading(0, entries=entries), 1: reading(1, entries=entries, **changes)}


RIGHT = {0: both(0), 1: both(1), 2: both(2), 3: {2: reading(2)}}


def told(readings: Mapping[int, Mapping[int, Reading]]) -> list[tuple[bool, str]]:
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
            {1: {**both(1), 0: replace(reading(0), batch={})}},
            f"samples [0, 1] of Tokens: {COLLATED}",
        ),
        (
            {1: {0: replace(both(1)[1], indices=(0, 1)), 1: replace(both(1)[0], indices=(2, 3))}},
            "sample 0 of Tokens: 'tokens' must be the same on all stages, got different ones on stage 0 (node 0) and "
            f"stage 1 (node 1) in step 3; {REPEATABLE}",
        ),
    ],
    ids=["a sample", "the collated", "one without it", "exchanged microbatches"],
)
def test_different_readings_are_named_on_all_ranks(readings: dict[int, dict[int, Reading]], message: str) -> None:
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
