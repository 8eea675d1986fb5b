"""Plausible mistakes of new users: each is named with what was given and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import resilient as rs
from resilient.errors import ResilientError
from tests.resilient.data.mistakes import DATASETS, SAMPLES
from tests.resilient.mistaken_jobs import ONE, ONES, train
from tests.resilient.models.mistakes import FOLDER, MODELS
from tests.resilient.runtime.mistakes import ARGUMENTS, OPTIMIZERS

MISTAKES = {
    f"{about}: {name}": mistake
    for about, mistakes in (
        ("sample", SAMPLES), ("dataset", DATASETS), ("optimizer", OPTIMIZERS), ("model", MODELS),
        ("arguments", ARGUMENTS),
    )
    for name, mistake in mistakes.items()
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_gpu(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_named_with_what_to_do_instead(name: str) -> None:
    make, message = MISTAKES[name]
    with pytest.raises(ValueError, match=r" must .*, got .*; ") as raised:
        make()
    error = raised.value
    assert (error.message if isinstance(error, ResilientError) else str(error)) == message


def folder_with(file: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / file).touch()
    return folder


@pytest.mark.parametrize(
    ("file", "got_and_fix"),
    [
        ("README.md", "; write one with model.save_pretrained(folder)"),
        (
            "adapter_config.json",
            ", which holds an adapter; join it with its model: model.merge_and_unload().save_pretrained(folder)",
        ),
    ],
)
def test_folder_that_is_no_checkpoint_is_named(file: str, got_and_fix: str, tmp_path: Path) -> None:
    folder = folder_with(file, tmp_path / "model")
    with pytest.raises(ValueError, match=f"^{re.escape(f'language_model {FOLDER} {str(folder)!r}{got_and_fix}')}$"):
        rs.MultimodalModule(encoders={}, language_model=folder)


@pytest.mark.parametrize(
    "samples",
    [
        [{"input": ONES, "target": ONE}] * 8,
        [{"input": np.ones(2), "target": np.ones(1)}] * 8,
        [{"input": [1.0, 2.0], "target": [3.0]}] * 8,
    ],
    ids=["tensors", "arrays", "numbers"],
)
def test_numbers_of_any_kind_are_stacked(samples: Sequence[Mapping[str, Any]]) -> None:
    train(dataset=samples)


def test_integers_of_numpy_are_integers() -> None:
    train(global_batch=np.int64(4), microbatch=np.int32(2), seed=np.int64(1), num_steps=np.int64(2))
