"""A model is measured once on a machine; what was kept is used, and what cannot be read is no obstacle."""

from __future__ import annotations

import logging
import re
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resilient.errors import ArgumentError
from resilient.models.chain import Chain
from resilient.optim import SGD
from resilient.profiling import profiler
from resilient.profiling.cache import ProfileKey, keep, load_kept
from resilient.profiling.profiler import draw_samples
from resilient.runtime.job import Job
from resilient.templates.inputs.profile import ModelProfile
from tests.resilient.small import TiedModel, Tokens, make_job, make_profile, profiled

MESSAGE = "profiling 6 layers (first run of this model here)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "resilient" / "profiles"


def key(**changes: Any) -> ProfileKey:
    job = make_job(**changes)
    return ProfileKey.of(job, job.layouts(), draw_samples(job))


def announced(**changes: Any) -> list[str]:
    told: list[str] = []
    profiled(make_job(**changes), told.append)
    return told


def test_second_run_measures_nothing(folder: Path) -> None:
    told: list[str] = []
    first = profiled(make_job(), told.append)
    assert profiled(make_job(), told.append) == first
    assert told == [MESSAGE]
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".lock"]


def test_runs_of_other_seeds_lengths_and_learning_rates_share_a_profile() -> None:
    assert announced() == [MESSAGE]
    assert announced(seed=4, num_steps=9, global_batch=8, optimizer=SGD(lr=0.1, momentum=0.9)) == [MESSAGE]
    assert announced(seed=5, num_steps=8, global_batch=8, optimizer=SGD(lr=0.2, momentum=0.9)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model": TiedModel(num_blocks=3)},
        {"dataset": Tokens(length=7)},
        {"microbatch": 4},
        {"precision": "fp32"},
        {"tp_chunks": 2},
        {"optimizer": SGD(lr=0.01)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_key_differs_where_the_numbers_would(changes: dict[str, Any]) -> None:
    assert key(**changes).file(Path()) != key().file(Path())
    assert key() == key()


def test_key_tells_frozen_from_trained_where_the_models_digest_does_not() -> None:
    class Inputs(Tokens):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input": torch.ones(3)}

    def chain(trained: bool) -> Chain:
        return Chain([lambda: nn.Linear(3, 3).requires_grad_(trained)], lambda output, batch: output.sum())

    assert chain(True).digest() == chain(False).digest()
    assert key(model=chain(True), dataset=Inputs()) != key(model=chain(False), dataset=Inputs())


class Rows(Tokens):
    """Three features."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input": torch.full((3,), float(index)), "target": torch.ones(3)}


class Centred(nn.Module):
    """Mixes samples, if it is told to."""

    def __init__(self, *, centres: bool) -> None:
        super().__init__()
        self.centres = centres

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden - hidden.mean(0) if self.centres else hidden


class Criterion:
    """Holds what computes the loss."""

    def __init__(self, reduction: str) -> None:
        self.error = nn.MSELoss(reduction=reduction)

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.error(output, batch["target"])

    def method(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.error(output, batch["target"])


@pytest.mark.parametrize("bound", [False, True])
def test_loss_that_an_object_holds_is_verified_again_when_it_is_another(bound: bool) -> None:
    def chain(reduction: str) -> Chain:
        criterion = Criterion(reduction)
        return Chain([lambda: nn.Linear(3, 3)], criterion.method if bound else criterion)

    assert len(announced(model=chain("sum"), dataset=Rows())) == 1
    assert announced(model=chain("sum"), dataset=Rows()) == []
    with pytest.raises(ArgumentError, match=r"^loss must be summed over the microbatch's targets, got a mean "):
        announced(model=chain("mean"), dataset=Rows())


def test_layer_is_verified_again_when_it_is_told_to_mix_samples() -> None:
    def chain(centres: bool) -> Chain:
        return Chain([lambda: nn.Linear(3, 3), Centred(centres=centres)], Criterion("sum"))

    assert len(announced(model=chain(False), dataset=Rows())) == 1
    with pytest.raises(ArgumentError, match=r"^a sample's loss must not depend on the other samples of its microbatch"):
        announced(model=chain(True), dataset=Rows())


def test_code_of_a_module_of_the_users_is_verified_again_when_it_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("users_losses")
    module.__file__ = str(tmp_path / "users_losses.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Path(module.__file__).write_text("REDUCTION = 'sum'")
    assert announced() == [MESSAGE]
    assert announced() == []
    Path(module.__file__).write_text("REDUCTION = 'mean'")
    assert announced() == [MESSAGE]


def test_key_knows_threads_torch_device_and_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    one_more = torch.get_num_threads() + 1
    others: list[tuple[Any, str, Any]] = [
        (torch, "get_num_threads", lambda: one_more),
        (torch, "__version__", "0.1"),
        (Job, "device_name", "abacus"),
        (profiler, "PROFILER_VERSION", 0),
    ]
    for owner, name, value in others:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert key() != before


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"key": 1}', b'{"profile": {"layers": []}}'])
def test_damaged_file_is_measured_again_with_a_warning(
    content: bytes, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert announced() == [MESSAGE]
    path = key().file(folder)
    path.write_bytes(content)
    caplog.set_level(logging.WARNING)
    assert announced() == [MESSAGE]
    assert re.match(f"{re.escape(str(path))} cannot be read and is measured again: ", caplog.messages[0])
    assert announced() == []


def test_file_of_another_key_is_measured_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, other = make_job(), key(microbatch=4)
    keep(folder, other, make_profile(job))
    other.file(folder).rename(key().file(folder))
    assert load_kept(folder, key(), ModelProfile) is None
    assert caplog.messages == [f"{key().file(folder)} holds the profile of something else and is measured again"]


def test_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert announced() == [MESSAGE]
    locked, kept = caplog.messages
    assert " is made without a lock, perhaps by several workers at once: " in locked
    assert kept.startswith("the profile is not kept, the next run measures again: ")


def test_half_written_file_is_never_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            announced()
    assert load_kept(folder, key(), ModelProfile) is None
    assert announced() == [MESSAGE]


def test_workers_that_start_at_once_measure_once() -> None:
    told: list[str] = []
    with ThreadPoolExecutor(4) as workers:  # a lock is its open file's: threads wait as processes do
        profiles = list(workers.map(lambda _: profiled(make_job(), told.append), range(8)))
    assert told == [MESSAGE]
    assert profiles == [profiles[0]] * 8
