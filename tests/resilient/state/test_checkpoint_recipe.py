"""Checkpoints are taken by jobs of the recipe they were written under, and refused by others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from resilient.errors import CheckpointError
from resilient.optim import AdamW, ParameterGroup, WarmupCosine
from resilient.state.manifest import Manifest, check_recipe
from tests.resilient.small import TiedModel, Tokens, make_job

RECIPE = make_job().recipe()


def test_checkpoint_of_the_same_job_is_accepted_whatever_may_change(tmp_path: Path) -> None:
    may_change = {
        "microbatch": 4,
        "max_failures": 0,
        "min_pipeline_nodes": 3,
        "num_steps": 99,
        "checkpoint_every": 7,
        "on_nonfinite": "skip",
        "schedule": "gpipe",
        "comm_timeout_s": 1.0,
        "optimizer": AdamW(lr=0.01, lr_schedule=WarmupCosine(1, 99)),
    }
    manifest = Manifest(step=3, recipe=RECIPE, states={})
    check_recipe(tmp_path, manifest, make_job(**may_change).recipe())


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"seed": 4}, "seed 3, now 4"),
        ({"global_batch": 32}, "global_batch 16, now 32"),
        ({"precision": "fp32"}, "precision fp64, now fp32"),
        ({"clip_grad_norm": 1.0}, "clip_grad_norm None, now 1.0"),
        ({"dataset": Tokens(num_samples=25)}, "num_samples 24, now 25"),
        (
            {"optimizer": AdamW(lr=0.02)},
            "optimizer AdamW(betas=(0.9, 0.999), eps=1e-08, groups=(), lr=0.01, weight_decay=0.01), "
            "now AdamW(betas=(0.9, 0.999), eps=1e-08, groups=(), lr=0.02, weight_decay=0.01)",
        ),
        (
            {"optimizer": AdamW(lr=0.01, groups=[ParameterGroup("*.bias", lr=0.1)])},
            "optimizer AdamW(betas=(0.9, 0.999), eps=1e-08, groups=(), lr=0.01, weight_decay=0.01), now AdamW("
            "betas=(0.9, 0.999), eps=1e-08, groups=(ParameterGroup(pattern='*.bias', lr=0.1, weight_decay=None),), "
            "lr=0.01, weight_decay=0.01)",
        ),
        (
            {"model": TiedModel(dropout=0.5), "seed": 0},
            f"model {TiedModel().digest()[:12]}, now {TiedModel(dropout=0.5).digest()[:12]}; seed 3, now 0",
        ),
        (
            {"model": TiedModel(num_blocks=5)},
            f"model {TiedModel().digest()[:12]}, now {TiedModel(num_blocks=5).digest()[:12]}; num_layers 6, now 7; "
            "num_parameters 245, now 287",
        ),
    ],
)
def test_checkpoint_of_another_job_is_refused_with_all_that_differs(
    changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    message = (
        f"resume must be a checkpoint of this job, got {tmp_path}, written with {difference}; use the script and the "
        "arguments that wrote it, or begin without a checkpoint"
    )
    manifest = Manifest(step=3, recipe=RECIPE, states={})
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        check_recipe(tmp_path, manifest, make_job(**changes).recipe())
