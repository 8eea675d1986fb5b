"""A job that cannot run is refused with the fix; what workers agree on is described in full."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from resilient.optim import SGD, AdamW, ParameterGroup
from resilient.protocol.job_config import SCHEDULES
from resilient.templates.schedules.kind import ScheduleKind
from tests.resilient.small import Tokens, make_job, make_profile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"global_batch": 15},
         "global_batch must be a multiple of microbatch 2, at least 2 (one microbatch for each of 1 pipelines), "
         "got 15; use 14 or 16"),
        ({"global_batch": 3, "microbatch": 8},
         "global_batch must be a multiple of microbatch 8, at least 8 (one microbatch for each of 1 pipelines), "
         "got 3; use 8"),
        ({"model": torch.nn.Linear(2, 2)},
         "model must be cut into layers, got a Linear; make it a resilient.Chain of modules or a "
         "resilient.MultimodalModule"),
        ({"optimizer": torch.optim.SGD(torch.nn.Linear(2, 2).parameters())},
         "optimizer must be a description such as resilient.AdamW(lr=3e-4), got torch's SGD; each worker builds "
         "torch's own for the layers it holds"),
        ({"microbatch": 0}, "microbatch must be >= 1, got 0; give the samples of one microbatch"),
        ({"num_steps": 0}, "num_steps must be >= 1, got 0; train for at least one step"),
        ({"max_failures": -1}, "max_failures must be >= 0, got -1; 0 means no redundancy"),
        ({"min_pipeline_nodes": 0}, "min_pipeline_nodes must be >= 1, got 0; a pipeline has at least one node"),
        (
            {"checkpoint_every": -5},
            'checkpoint_every must be >= 0, got -5; 0 means at the end only, "auto" by what one costs',
        ),
        ({"num_workers": -1}, "num_workers must be >= 0, got -1; 0 reads samples in the worker itself"),
        ({"read_ahead": 0}, "read_ahead must be >= 1, got 0; num_workers=0 reads none ahead of time"),
        ({"tp_chunks": 0}, "tp_chunks must be >= 1, got 0; 1 exchanges tokens before or after they are computed with"),
        ({"precision": "fp16"},
         "precision must be one of ['bf16', 'fp32', 'fp64'], got 'fp16'; choose one of them"),
        ({"schedule": "forward-only"},
         "schedule must be one of gpipe, 1f1b, eager-1f1b, interleaved-1f1b, split-1f1b, zb-h1, zb-h2, interleaved-zb, "
         "zb-v, auto, got 'forward-only'; choose one of these"),
        ({"schedule": "interleaved-1f1b", "num_chunks": 1},
         "num_chunks must be >= 2, got 1; 1f1b is the schedule with one stage on each worker"),
        ({"optimizer": AdamW(lr=0.1, groups=[ParameterGroup("*.bias", lr=0.2), ParameterGroup("blok.*", lr=0.2)])},
         "groups[1] must fit the name of a parameter that is trained, got 'blok.*'; names are embed.weight, "
         "block.0.linear.weight, block.0.linear.bias, ... (Trainer.parameter_names); a tied parameter has its owner's "
         "name"),
        ({"optimizer": SGD(lr=0.1, groups=[ParameterGroup("head.weight", lr=0.2)])},
         "groups[0] must fit the name of a parameter that is trained, got 'head.weight'; names are embed.weight, "
         "block.0.linear.weight, block.0.linear.bias, ... (Trainer.parameter_names); a tied parameter has its owner's "
         "name"),
        ({"optimizer": SGD(lr=0.1, groups=[ParameterGroup("*", lr=0.2), ParameterGroup("embed.*", lr=0.3)])},
         "groups[1] must have parameters that no group before it takes, got 'embed.*'; put the special pattern before "
         "the general one"),
        ({"on_nonfinite": "ignore"},
         "on_nonfinite must be one of ['stop', 'skip'], got 'ignore'; stop ends the job at such a step, skip goes on "
         "without it"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be > 0, got 0.0; pass None not to clip"),
        ({"comm_timeout_s": 0.0}, "comm_timeout_s must be > 0, got 0.0; leave it out for 120"),
        ({"dataset": Tokens(0)}, "dataset must hold at least one sample, got 0; check how it is built"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_job(**arguments)


@pytest.mark.parametrize(
    ("precision", "dtype", "autocast"),
    [("fp32", torch.float32, None), ("bf16", torch.float32, torch.bfloat16), ("fp64", torch.float64, None)],
)
def test_precision_says_how_states_are_kept_and_products_computed(precision: str, dtype: object, autocast: Any) -> None:
    job = make_job(precision=precision)
    assert (job.dtype, job.autocast) == (dtype, autocast)


def test_description_is_for_the_device_and_its_times_are_not_part_of_what_must_be_equal() -> None:
    job = make_job()
    here, there = (replace(make_profile(job), source=source) for source in ("here", "there"))
    specs = [job.spec(profile, {"job": {"model": "m"}}) for profile in (here, there)]
    assert [spec.profile for spec in specs] == [here, there]
    assert [spec.alike for spec in specs] == [{"job": {"model": "m"}}] * 2
    assert specs[0].memory_bytes is None, "a CPU's memory is not planned with"
    assert make_job(schedule="zb-h1").spec(here, {}).schedule == "zb-h1"
    chunks = {kind: make_job(schedule=kind, num_chunks=3).spec(here, {}).num_chunks for kind in SCHEDULES}
    several = {"interleaved-1f1b": 3, "interleaved-zb": 3, "zb-v": 2}
    assert chunks == {kind: several.get(kind, 1) for kind in SCHEDULES}


def test_schedule_to_be_chosen_has_as_many_stages_as_may_be_and_is_planned_as_1f1b_until_then() -> None:
    specs = [make_job(schedule=kind, num_chunks=3).spec(make_profile(make_job()), {}) for kind in ("auto", "zb-v")]
    assert [(spec.schedule, spec.num_chunks) for spec in specs] == [("auto", 3), ("zb-v", 2)]
    assert [spec.first_schedule for spec in specs] == [(ScheduleKind.ONE_F_ONE_B, 1), (ScheduleKind.ZB_V, 2)]
