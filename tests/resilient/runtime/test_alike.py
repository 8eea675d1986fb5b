"""What workers tell of themselves differs where their steps would, and is the same for equal jobs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from resilient.models.chain import Chain
from resilient.optim import SGD, AdamW, ParameterGroup, WarmupCosine
from resilient.protocol.alike import ALLOWABLE, FIXES, Alike
from resilient.runtime.alike import alike
from resilient.runtime.preflight import first_samples
from tests.resilient.small import TiedModel, Tokens, make_job

EARLIER = ("versions", "package")
"""What nodes tell, not workers."""


def told(**changes: Any) -> Alike:
    job = make_job(**changes)
    return alike(job, itertools.chain(*first_samples(job)))


def different(one: Alike, other: Alike) -> dict[str, list[str]]:
    """Return the kinds and details that differ."""
    kinds = {kind: {**one[kind], **other[kind]} for kind in one}
    found = {
        kind: [detail for detail in details if one[kind].get(detail) != other[kind].get(detail)]
        for kind, details in kinds.items()
    }
    return {kind: details for kind, details in found.items() if details}


def test_all_that_is_told_has_a_fix() -> None:
    assert [*EARLIER, *told()] == list(FIXES)
    assert set(ALLOWABLE) < FIXES.keys()


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"optimizer": SGD(lr=0.01)}, "optimizer"),
        ({"optimizer": AdamW(lr=0.02)}, "optimizer"),
        ({"optimizer": AdamW(lr=0.01, weight_decay=0.5)}, "optimizer"),
        ({"optimizer": AdamW(lr=0.01, betas=(0.5, 0.9))}, "optimizer"),
        ({"optimizer": AdamW(lr=0.01, groups=[ParameterGroup("head.*", lr=0.02)])}, "optimizer"),
        ({"schedule": "zb-h1"}, "schedule"),
        ({"global_batch": 32}, "global_batch"),
        ({"microbatch": 4}, "microbatch"),
        ({"precision": "fp32"}, "precision"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm"),
        ({"num_steps": 7}, "num_steps"),
        ({"on_nonfinite": "skip"}, "on_nonfinite"),
        ({"checkpoint_every": 3}, "checkpoint_every"),
        ({"compare_replicas_every": 3}, "compare_replicas_every"),
        ({"read_ahead": 3}, "read_ahead"),
    ],
    ids=str,
)
def test_arguments_that_differ_are_told_by_name(changes: dict[str, Any], detail: str) -> None:
    differences = different(told(), told(**changes))
    differences.pop("data", None)  # of larger microbatches, more samples are looked at
    assert differences == {"job": [detail]}


def test_models_of_other_layers_differ() -> None:
    assert different(told(), told(model=TiedModel(num_blocks=3))) == {"job": ["model", "num_layers", "num_parameters"]}


def test_stages_of_each_worker_count_where_there_are_several() -> None:
    schedule = "interleaved-1f1b"
    two, three = told(schedule=schedule, num_chunks=2), told(schedule=schedule, num_chunks=3)
    assert different(two, three) == {"job": ["num_chunks"]}
    assert told(num_chunks=3) == told(), "1f1b has one stage on each worker, whatever is asked for"


def test_equal_jobs_tell_the_same() -> None:
    assert told() == told(model=TiedModel(), optimizer=AdamW(lr=0.01))
    schedules = [WarmupCosine(warmup_steps=1, total_steps=5) for _ in range(2)]
    one, other = (told(optimizer=AdamW(lr=0.01, lr_schedule=schedule)) for schedule in schedules)
    assert one == other


def scaled(factor: float) -> Callable[[int], float]:
    return lambda step: factor**step


def test_learning_rate_schedules_differ_by_code_and_by_what_it_uses() -> None:
    schedules = [None, scaled(0.5), scaled(0.25), lambda step: 0.5 / step]
    jobs = [told(optimizer=AdamW(lr=0.01, lr_schedule=schedule)) for schedule in schedules]
    for one, other in itertools.combinations(jobs, 2):
        assert different(one, other) == {"schedule": ["code"]}


class Rows(Tokens):
    def __init__(self, offset: float = 0.0, changed: int = -1) -> None:
        super().__init__()
        self._offset, self._changed = offset, changed

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": torch.full((3,), index + self._offset * (index == self._changed)), "target": torch.ones(3)}


class Doubled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * hidden


class Tripled(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return 3 * hidden


def chain(loss: Callable[[Tensor, Mapping[str, Tensor]], Tensor], own: type[nn.Module] = Doubled) -> Chain:
    return Chain([lambda: nn.Sequential(nn.Linear(3, 3), own())], loss)


def squared(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return ((output - batch["target"]) ** 2).sum()


def absolute(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return (output - batch["target"]).abs().sum()


def test_losses_differ_and_the_model_does_not() -> None:
    one, other = (told(model=chain(loss), dataset=Rows()) for loss in (squared, absolute))
    assert different(one, other) == {"loss": ["code"]}


def test_code_of_the_users_layers_counts() -> None:
    Tripled.__qualname__ = Doubled.__qualname__  # as it is on another node
    one, other = (told(model=chain(squared, own), dataset=Rows()) for own in (Doubled, Tripled))
    assert different(one, other)["model"] == ["Doubled"]


def test_sample_that_differs_is_told_by_its_index() -> None:
    index = next(iter(first_samples(make_job(model=chain(squared), dataset=Rows()))))[0].index
    one, other = (told(model=chain(squared), dataset=Rows(offset, index)) for offset in (0.0, 1.0))
    assert different(one, other) == {"data": [f"sample {index}"]}
    assert 0 < len(one["data"]) <= 8
