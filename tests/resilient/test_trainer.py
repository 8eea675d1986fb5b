"""A script run by itself trains as a hand-written loop does, resumes where it stopped, and names what is wrong."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch import Tensor, nn

from resilient.data import StepSampler
from resilient.data.reader import Cell
from resilient.errors import ArgumentError, CheckpointError, DataProcessError, SampleError
from resilient.models.layer import Activations, Batch
from resilient.optim import SGD, AdamW, Optimizer, WarmupCosine
from resilient.pipeline import stage
from resilient.runtime.batches import Batches
from resilient.runtime.job import Job
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import Held
from resilient.templates.search.stage_cost_model import StageCosts
from resilient.trainer import Trainer
from tests.resilient.small import CPU, TiedModel, Tokens, assemble, make_job, profiled, split_decay

pytestmark = pytest.mark.usefixtures("one_process")

SCHEDULE = WarmupCosine(warmup_steps=3, total_steps=8, floor=0.1)
OPTIMIZERS: dict[str, tuple[Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "AdamW": (
        AdamW(lr=0.05, weight_decay=0.1, lr_schedule=SCHEDULE),
        lambda parameters: torch.optim.AdamW(split_decay(parameters, 0.1), lr=0.05),
    ),
    "SGD": (
        SGD(lr=0.5, momentum=0.9, lr_schedule=SCHEDULE),
        lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    ),
}


def make_trainer(**changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "model": TiedModel(num_blocks=2),
        "dataset": Tokens(),
        "optimizer": OPTIMIZERS["AdamW"][0],
        "global_batch": 16,
        "microbatch": 4,
        "seed": 3,
        "precision": "fp64",
        "clip_grad_norm": 0.3,
        "device": CPU,
        **changes,
    }
    return Trainer(arguments.pop("model"), arguments.pop("dataset"), **arguments)


def parameters(trainer: Trainer) -> dict[str, Tensor]:
    return dict(trainer.whole_model().named_parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_a_hand_written_loop(name: str, tmp_path: Path) -> None:
    ours, theirs = OPTIMIZERS[name]
    trainer = make_trainer(optimizer=ours)
    result = trainer.fit(6)
    whole = assemble(TiedModel(num_blocks=2), seed=3, dtype=torch.float64)
    optimizer = theirs(whole.parameters())
    batches = Batches(make_job(microbatch=16))
    norms = []
    for step in range(1, 7):
        optimizer.zero_grad()
        (whole.loss(batches.batch(step, Cell.of_chain(0, 16))) / (16 * 5)).backward()
        norms.append(nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None]).item())
        for parameter in whole.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, 0.3 / norms[-1]))
        for group in optimizer.param_groups:
            group["lr"] = ours.lr * SCHEDULE(step)
        optimizer.step()
    assert min(norms) > 0.3, "the limit was reached"
    assert (result.step, result.is_main) == (6, True)
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step-00000006"
    torch.testing.assert_close(parameters(trainer), dict(whole.named_parameters()), rtol=1e-9, atol=1e-11)


def test_run_by_itself_is_kept_in_a_folder_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RESILIENT_RUN_DIR")
    monkeypatch.chdir(tmp_path)
    make_trainer().fit(1)
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-one-process-{os.getpid()}", folder.name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_training_ends_where_training_through_does(name: str, tmp_path: Path) -> None:
    optimizer, model = OPTIMIZERS[name][0], TiedModel(num_blocks=2, dropout=0.3)
    through = make_trainer(optimizer=optimizer, model=model, checkpoint_every=2)
    through.fit(5)
    expected = parameters(through)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [f"step-0000000{step}" for step in (2, 4, 5)]
    resumed = make_trainer(optimizer=optimizer, model=model)
    resumed.fit(5, resume=checkpoints / "step-00000002")
    for key, value in parameters(resumed).items():
        assert torch.equal(value, expected[key])


def test_checkpoints_that_come_by_themselves_change_no_result(tmp_path: Path) -> None:
    through = make_trainer(checkpoint_every="auto")
    through.fit(6)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names[0] == "step-00000003", "the first one measures what one costs"
    assert names[-1] == "step-00000006"
    plain = make_trainer()
    plain.fit(6)
    for key, value in parameters(plain).items():
        assert torch.equal(value, parameters(through)[key])


def test_checkpoint_that_cannot_be_written_ends_the_training_only_if_it_is_the_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-00000002" / "manifest.json").mkdir(parents=True)  # a part can be written, the manifest cannot
    make_trainer(checkpoint_every=1).fit(3)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [re.sub(r"json\.[0-9a-f]{8}'", "json.*'", message) for message in warnings] == [
        f"no checkpoint of step 2: {checkpoints / 'step-00000002'} cannot be written ([Errno 21] Is a directory: "
        f"'{checkpoints / 'step-00000002'}/.manifest.json.*' -> "
        f"'{checkpoints / 'step-00000002' / 'manifest.json'}'); make room there, or choose another folder",
        f"the newest checkpoint is {checkpoints / 'step-00000001'}",
    ]
    with pytest.raises(CheckpointError, match=r"step-00000002 cannot be written"):
        make_trainer(comm_timeout_s=1.0).fit(2)


class Interrupting(Tokens):
    """Raises signals, one after another, as samples are read in the first step: those before are looked at only.

    They are looked at once, the first one twice.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        super().__init__()
        self._signals = list(signals)
        self._num_reads = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._num_reads += 1
        if self._num_reads > 17 and self._signals:
            signal.raise_signal(self._signals.pop(0))
        return super().__getitem__(index)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_training_ends_with_a_checkpoint_to_go_on_from(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    through = make_trainer()
    through.fit(4)
    monkeypatch.setenv("RESILIENT_RUN_DIR", str(tmp_path / "interrupted"))
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended:
        make_trainer(dataset=Interrupting(number)).fit(4)
    assert ended.value.code == 130
    assert signal.getsignal(number) is before
    path = tmp_path / "interrupted" / "checkpoints" / "step-00000001"
    assert [checkpoint.name for checkpoint in path.parent.iterdir()] == [path.name]
    message = f"interrupted ({number.name}); go on with fit(num_steps, resume='{path}')"
    assert [record.getMessage() for record in caplog.records][-1] == message
    resumed = make_trainer(dataset=Interrupting())
    resumed.fit(4, resume=path)
    for key, value in parameters(resumed).items():
        assert torch.equal(value, parameters(through)[key])


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=["heeded", "ignored before"])
def test_second_interruption_ends_the_training_at_once(handler: Any, tmp_path: Path) -> None:
    trainer = make_trainer(dataset=Interrupting(signal.SIGINT, signal.SIGINT))
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(4)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not (tmp_path / "run").exists()


def test_model_that_fits_with_checkpointing_only_trains_with_it_to_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = TiedModel(num_blocks=6, dropout=0.3)
    roomy = make_trainer(model=model)
    roomy.fit(3)
    profile = profiled(roomy._job, lambda _: None)
    problem = PlanningProblem(profile=profile, num_microbatches=4, max_failures=0)
    alone = partial(StageCosts(problem).stage, 0, len(profile.layers), 0, 0, (Held(1, 0),))
    kept, again = (alone(checkpointing=each).memory_bytes for each in (False, True))
    assert again < kept
    monkeypatch.setattr(Job, "memory_bytes", property(lambda _: again))
    runs_again = Mock(wraps=stage.checkpoint)
    monkeypatch.setattr(stage, "checkpoint", runs_again)
    narrow = make_trainer(model=model)
    narrow.fit(3)
    assert runs_again.call_count == 3 * 4 * len(profile.layers)
    for key, value in parameters(narrow).items():
        assert torch.equal(value, parameters(roomy)[key])


def test_bf16_trains_about_as_fp32_does() -> None:
    batch = Batches(make_job(precision="fp32", microbatch=16)).batch(1, Cell.of_chain(0, 16))
    untrained = assemble(TiedModel(num_blocks=2), seed=3)
    losses = {"untrained": untrained.loss(batch).item()}
    for precision in ("fp32", "bf16"):
        trainer = make_trainer(precision=precision)
        trainer.fit(20)
        whole = trainer.whole_model()
        assert not whole.training
        assert all(parameter.dtype is torch.float32 for parameter in whole.parameters())
        losses[precision] = whole.loss(batch).item()
    assert losses["bf16"] != losses["fp32"]
    change = losses["fp32"] - losses["untrained"]
    assert change < 0
    assert losses["bf16"] - losses["untrained"] == pytest.approx(change, rel=0.1)


def test_bad_sample_stops_the_job_and_is_named() -> None:
    message = "sample 7 of Tokens: tokens must be < 11, got "
    with pytest.raises(SampleError, match=f"^{re.escape(message)}"):
        make_trainer(dataset=Tokens(bad=7)).fit(3)


def test_error_of_the_model_reaches_the_caller() -> None:
    class Broken(TiedModel):
        def loss(self, activations: Any, batch: Any) -> Tensor:
            raise ZeroDivisionError("in the loss")

    with pytest.raises(ZeroDivisionError) as raised:
        make_trainer(model=Broken(num_blocks=2)).fit(1)
    assert str(raised.value) == "in the loss"


def test_resume_from_nothing_or_beyond_the_end_is_refused(tmp_path: Path) -> None:
    message = (
        f"resume must be a finished checkpoint, a folder step-* with manifest.json, got {tmp_path} (a folder without "
        f"manifest.json); choose one from the checkpoints/ of a run"
    )
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        make_trainer().fit(3, resume=tmp_path)
    path = make_trainer().fit(2).checkpoint
    message = f"num_steps must be >= the resumed checkpoint's step, got 1 for {path}; train longer"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_trainer().fit(1, resume=path)


def test_resume_of_another_model_says_so() -> None:
    path = make_trainer().fit(1).checkpoint
    message = f"resume must be a checkpoint of this job, got {path}, written with model "
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}"):
        make_trainer(model=TiedModel(num_blocks=3)).fit(2, resume=path)


@pytest.mark.parametrize(
    ("wanted", "rank", "device"),
    [(None, 5, "cuda:1"), ("cuda", 3, "cuda:3"), ("cuda:2", 3, "cuda:2"), ("cpu", 3, "cpu"), (None, None, "cuda:0")],
)
def test_workers_of_all_nodes_share_out_the_gpus_of_a_machine(
    wanted: str | None, rank: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers of two nodes with two GPUs each have the ranks 0 and 1, 2 and 3: each has one of its own then, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", str(rank))
    assert make_trainer(device=wanted)._job.device == torch.device(device)


def test_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = "device must be one that can train here (cpu), got 'cuda:1'; leave it out to train on the CPU"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_trainer(device="cuda:1")
    assert make_trainer(device=None)._job.device == CPU


def test_names_for_the_patterns_of_parameter_groups_are_listed() -> None:
    assert make_trainer(model=TiedModel(num_blocks=1)).parameter_names == (
        "embed.weight",
        "block.0.linear.weight",
        "block.0.linear.bias",
        "head.shift",
    )


def test_calls_out_of_turn_are_refused() -> None:
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"^whole_model must be called after fit"):
        trainer.whole_model()
    with pytest.raises(ValueError, match=r"^note must be called after fit, got 'accuracy' before it; call fit first$"):
        trainer.note("accuracy", 1.0)
    trainer.fit(1)
    trainer.note("accuracy", 1.0)
    with pytest.raises(ValueError, match=r"^fit must be called once per Trainer"):
        trainer.fit(1)


class Watched(Tokens):
    """Tells when a sample is read, and ends the data process that reads another."""

    def __init__(self, awaited: int | None = None, deadly: int | None = None) -> None:
        super().__init__(num_samples=64)
        self.is_read = get_context("fork").Event()
        self._worker = os.getpid()
        self._awaited, self._deadly = awaited, deadly

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if os.getpid() != self._worker and index == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.getpid() != self._worker and index == self._awaited:
            self.is_read.set()
        return super().__getitem__(index)


ORDER = StepSampler(num_samples=64, global_batch=16, seed=3)


def test_the_next_step_is_read_while_this_one_is_computed() -> None:
    dataset = Watched(awaited=int(ORDER.indices(2)[-1]))

    class Patient(TiedModel):
        def loss(self, activations: Activations, batch: Batch) -> Tensor:
            if torch.equal(batch["tokens"], last_of_first_step):
                assert dataset.is_read.wait(60), "the last sample of step 2 is read before step 1 is over"
            return super().loss(activations, batch)

    last_of_first_step = torch.stack([dataset[int(index)]["tokens"] for index in ORDER.indices(1)[-4:]])
    ahead = make_trainer(model=Patient(num_blocks=2), dataset=dataset, num_workers=1)
    ahead.fit(3)
    assert dataset.is_read.is_set()
    here = make_trainer(dataset=Tokens(num_samples=64), num_workers=0)
    here.fit(3)
    for key, value in parameters(ahead).items():
        assert torch.equal(value, parameters(here)[key])


def test_a_data_process_that_is_killed_ends_the_training_and_is_named() -> None:
    others = psutil.Process().children()  # such as the forkserver of tests before this one
    trainer = make_trainer(dataset=Watched(deadly=int(ORDER.indices(2)[0])), num_workers=2)
    message = (
        r"data process 1 \(pid \d+\), which reads samples, must live as long as its worker, got killed by SIGKILL; if "
        r"memory ran out, lower num_workers or the microbatch, else see the worker's log \(generation 1, step [12], "
        r"action 0F\d of row 0\)"  # it reads ahead, and is missed as soon as somebody waits for a sample
    )
    with pytest.raises(DataProcessError, match=f"^{message}\n"):  # the rows around it follow
        trainer.fit(3)
    assert psutil.Process().children() == others
