"""Pipelines of real ranks compute the gradients of one process, whatever their cuts and shares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from ranks import HOST, as_threads
from small import CPU, TiedModel, Tokens, make_job, make_plan, make_profile
from torch import Tensor

from resilient import checkpoint
from resilient.comm import DONE, Pending, SoloCommunicator
from resilient.commit import Ledger
from resilient.errors import CommunicationError
from resilient.executor import Executor, StepWork
from resilient.faults import Faults
from resilient.feed import Feed
from resilient.fence import Fence
from resilient.job import Job
from resilient.manifest import Manifest, write_manifest
from resilient.messages import Generation, Injection
from resilient.models.layer import WholeModel, assemble
from resilient.recovery import Installer
from resilient.state import LayerState
from resilient.templates.generators import Kind, generate
from resilient.templates.plan import Plan

STEP = 2
PLANS = {
    "1 stage": make_plan(((0, 6), 8)),
    "2 stages": make_plan(((0, 4, 6), 8)),
    "3 stages": make_plan(((0, 1, 3, 6), 8)),
    "3 stages, fewer microbatches": make_plan(((0, 2, 5, 6), 1), ((0, 6), 7)),
    "2 pipelines": make_plan(((0, 3, 6), 3), ((0, 2, 4, 6), 5)),
}


class VaryingTokens(Tokens):
    """Two lengths, so that carries change their shapes within a step."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index)

    def collate(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        length = 3 if int(samples[0]["tokens"][0]) % 2 else 5
        return {key: torch.stack([sample[key][:length] for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0", "block.3")], ids=["all trained", "partly frozen"])
def test_gradients_equal_those_of_one_process(plan: Plan, frozen: Sequence[str], tmp_path: Path) -> None:
    job = make_job(model=TiedModel(frozen=frozen), dataset=VaryingTokens())
    feed = Feed(job)
    expected, expected_loss = in_one_process(job, feed)
    write_initial(job, tmp_path)
    results = as_threads(len(plan.slots), lambda rank, address: one_step(job, feed, plan, rank, address, tmp_path))
    assert sum(loss for loss, _ in results) == pytest.approx(expected_loss, rel=1e-12)
    held = [name for _, states in results for name in states]
    assert set(held) == {spec.name for spec in job.model.layers}
    for _, states in results:
        for name, state in states.items():
            for entry in state.layout.entries:
                wanted = expected.layer(name).get_parameter(entry.name).grad
                torch.testing.assert_close(state.parameters[entry.name].grad, wanted, rtol=1e-11, atol=1e-13)


def in_one_process(job: Job, feed: Feed) -> tuple[WholeModel, float]:
    whole = assemble(job.model, job.seed, torch.float64)
    losses = [whole.loss(feed.batch(STEP, position)) for position in range(8)]
    total = torch.stack(losses).sum()
    (total / feed.num_targets(STEP)).backward()
    return whole, total.item()


def write_initial(job: Job, path: Path) -> None:
    """Ranks that are threads share torch's random state: their initial values come from files."""
    states = [LayerState(job.layer(n), at, job.optimizer.slots, job.dtype, CPU) for n, at in job.layouts().items()]
    for state in states:
        state.initialize(job.seed)
    write_manifest(path, Manifest(step=STEP - 1, digest="", states=checkpoint.save(path, states)))


def one_step(
    job: Job, feed: Feed, plan: Plan, rank: int, address: str, path: Path
) -> tuple[float, dict[str, LayerState]]:
    """Enter a generation and run one step, up to the reduced gradients, twice: nothing may be left of the first run."""
    layouts = job.layouts()
    ledger = Ledger(job.optimizer, None)
    installer = Installer(
        job=job, profile=make_profile(job), layouts=layouts, ledger=ledger, fence=Fence(),
        faults=Faults(str(path)), host=HOST,
    )  # fmt: skip
    session, installed = installer.install(
        Generation(generation=1, rank=rank, plan=plan, version=STEP - 1, roll_forward=None, transfers=(),
                   source=str(path), store_address=address)
    )  # fmt: skip
    assert installed.bytes_copied == 0
    work = session.work(STEP, feed.num_targets(STEP), lambda position: feed.batch(STEP, position))
    for _ in range(2):
        loss = session.executor.run(work)
        session.comm.all_reduce(torch.zeros(1), tuple(range(session.comm.size))).wait()  # the barrier of every step
    session.sync.close()
    return loss.item(), ledger.current


class Recorder:
    """Stands in for stage, sync and both borders, and writes down what the executor asks of them."""

    def __init__(self, stage: int, is_last: bool) -> None:
        self.events: list[str] = []
        self._stage, self._is_last = stage, is_last

    def begin(self) -> None: ...

    def arm(self) -> None:
        self.events.append("arm")

    def forward(self, microbatch: int, carry: object, batch: object, **_: int) -> tuple[dict, Tensor | None]:
        self._add("F", microbatch)
        return {}, torch.tensor(1.0) if self._is_last else None

    def backward(self, microbatch: int, gradients: object) -> dict[str, Tensor]:
        self._add("B", microbatch)
        return {}

    def wait(self, index: int) -> None:
        self._add("REDUCE", index)

    def _add(self, op: str, index: int) -> None:
        self.events.append(f"{self._stage}{op}{index}")


class Border:
    def __init__(self, recorder: Recorder, sends: str, receives: str) -> None:
        self._recorder, self._sends, self._receives = recorder, sends, receives
        self.posted: list[int] = []

    def post(self, microbatch: int, shapes: object) -> None:
        self.posted.append(microbatch)

    def send(self, *arguments: object) -> list[Pending]:
        self._recorder._add(self._sends, next(a for a in arguments if isinstance(a, int)))
        return [DONE]

    def receive(self, microbatch: int, *_: object) -> dict[str, Tensor]:
        self._recorder._add(self._receives, microbatch)
        return {}


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_executed_is_the_schedule(stage: int, tmp_path: Path) -> None:
    schedule = generate(Kind.ONE_F_ONE_B, 3, 4, states=[[0, 1], [2, 3], [0, 4]])
    recorder = Recorder(stage, is_last=stage == 2)
    upstream = Border(recorder, "SEND_B", "RECV_F")
    killed: list[Injection] = []
    faults = Faults(str(tmp_path), kill=killed.append)
    for phase in ("forward", "backward", "reduce"):
        faults.arm(Injection(node=0, at_step=7, at_phase=phase))
    loaded: list[int] = []

    def load(position: int) -> dict[str, Tensor]:
        loaded.append(position)
        return {"x": torch.zeros(1)}

    executor = Executor(
        actions=schedule.rows[stage],
        stage=recorder,  # pyright: ignore[reportArgumentType]
        sync=recorder,  # pyright: ignore[reportArgumentType]
        comm=SoloCommunicator(),
        upstream=upstream,  # pyright: ignore[reportArgumentType]
        downstream=Border(recorder, "SEND_F", "RECV_B"),  # pyright: ignore[reportArgumentType]
        faults=faults,
    )
    loss = executor.run(StepWork(step=7, num_targets=4, first_position=10, batch=load))
    wanted = [str(action) for action in schedule.rows[stage]]
    wanted.insert(wanted.index(f"{stage}B3"), "arm")
    assert recorder.events == wanted
    assert loaded == [10, 11, 12, 13], "each microbatch is loaded once, by its position in the step"
    assert upstream.posted == ([] if stage == 0 else [1, 2, 3]), "the next receipt is posted ahead of its time"
    assert loss.item() == (4.0 if stage == 2 else 0.0)
    assert [injection.at_phase for injection in killed] == ["forward", "backward", "reduce"]


class AbortedAfter(SoloCommunicator):
    """A generation that ends after so many checks."""

    def __init__(self, num_checks: int) -> None:
        self.num_checks = num_checks

    def check(self) -> None:
        self.num_checks -= 1
        if self.num_checks < 0:
            raise CommunicationError("generation 1 was aborted")


def test_step_of_an_aborted_generation_stops_before_the_next_action(tmp_path: Path) -> None:
    (actions,) = generate(Kind.ONE_F_ONE_B, 1, 4, states=[[0]]).rows
    recorder = Recorder(0, is_last=True)
    executor = Executor(
        actions=actions,
        stage=recorder,  # pyright: ignore[reportArgumentType]
        sync=recorder,  # pyright: ignore[reportArgumentType]
        comm=AbortedAfter(3),
        upstream=Border(recorder, "SEND_B", "RECV_F"),  # pyright: ignore[reportArgumentType]
        downstream=Border(recorder, "SEND_F", "RECV_B"),  # pyright: ignore[reportArgumentType]
        faults=Faults(str(tmp_path)),
    )
    with pytest.raises(CommunicationError):
        executor.run(StepWork(step=1, num_targets=4, first_position=0, batch=lambda _: {"x": torch.zeros(1)}))
    assert recorder.events == ["0F0", "0B0", "0F1"]
