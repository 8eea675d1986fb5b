"""What is executed is the schedule, whatever the kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from resilient.comm import DONE, Communicator, Pending, SingleProcessCommunicator
from resilient.errors import CommunicationError
from resilient.models.layer import Activations
from resilient.observability.trace_events import ACTION, PART
from resilient.pipeline.executor import Executor
from resilient.pipeline.row_actions import CellPart
from resilient.pipeline.stage import Stage
from resilient.pipeline.stage_timer import StageTimer
from resilient.pipeline.step_work import StepWork
from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import Injection
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.graph import CHAIN
from resilient.templates.schedules.kind import ScheduleKind, chunks_of, rows_of_stages
from resilient.templates.schedules.schedule import Op, Schedule
from tests.resilient.pipeline.chain_work import chain_work
from tests.resilient.small import CPU

TRAINING = [kind for kind in ScheduleKind if kind is not ScheduleKind.FORWARD_ONLY]


def written(stage: int, microbatch: int) -> Activations:
    return {"by": torch.tensor([stage, microbatch])}


def read(activations: Activations) -> tuple[int, ...] | None:
    return tuple(activations["by"].tolist()) if activations else None


class Recorder:
    """Stands in for the gradient sync, and keeps what the executor asks of it, of the stages and of the borders."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.posted: list[str] = []
        self.num_forgotten = 0

    def begin(self) -> None: ...

    def arm(self, indices: Sequence[int]) -> None:
        self.events.append(f"arm {indices}")

    def wait(self, index: int) -> None:
        self.events.append(f"REDUCE{index}")


class RecordedStage:
    """Checks that activations come from the stage before, gradients from the stage after."""

    def __init__(self, recorder: Recorder, index: int, is_last: bool) -> None:
        self._recorder, self._index, self._is_last = recorder, index, is_last

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def forward(
        self, part: CellPart, activations: Activations, batch: object, **_: int
    ) -> tuple[Activations, Tensor | None]:
        self._recorder.events.append(f"{self._index}F{part.cell}")
        assert read(activations) == (None if self._index == 0 else (self._index - 1, part.cell))
        return written(self._index, part.cell), torch.tensor(1.0) if self._is_last else None

    def backward(self, part: CellPart, gradients: Activations, op: str = "B") -> Activations:
        self._recorder.events.append(f"{self._index}{op}{part.cell}")
        assert read(gradients) == (None if self._is_last else (self._index + 1, part.cell))
        return written(self._index, part.cell)

    def backward_input(self, part: CellPart, gradients: Activations) -> Activations:
        return self.backward(part, gradients, "I")

    def backward_weight(self, part: CellPart) -> None:
        self._recorder.events.append(f"{self._index}W{part.cell}")


class RecordedBorder:
    def __init__(self, recorder: Recorder, stage: int, neighbour: int, sends: str, receives: str) -> None:
        self._recorder, self._stage, self._neighbour = recorder, stage, neighbour
        self._sends, self._receives = sends, receives

    def forget(self) -> None:
        self._recorder.num_forgotten += 1

    def post(self, microbatch: int, shapes: object) -> None:
        self._recorder.posted.append(f"{self._stage}{self._receives}{microbatch}")

    def send(self, tensors: Activations, microbatch: int, *_: object) -> list[Pending]:
        assert read(tensors) == (self._stage, microbatch)
        self._recorder.events.append(f"{self._stage}{self._sends}{microbatch}")
        return [DONE]

    def receive(self, microbatch: int, *_: object) -> Activations:
        self._recorder.events.append(f"{self._stage}{self._receives}{microbatch}")
        return written(self._neighbour, microbatch)


def recorded(schedule: Schedule, row: int, comm: Communicator, faults: Faults) -> tuple[Executor, Recorder]:
    recorder, last = Recorder(), len(schedule.graph.row_of) - 1
    mine = [stage for stage, at in enumerate(schedule.graph.row_of) if at == row]
    alone = len(schedule.rows) == 1
    parts: dict[str, Any] = {
        "stages": {(CHAIN, s): RecordedStage(recorder, s, s == last) for s in mine},
        "gradient_sync": recorder,
        "upstream": {
            ((CHAIN, s - 1), (CHAIN, s)): RecordedBorder(recorder, s, s - 1, "SEND_B", "RECV_F")
            for s in mine
            if s > 0 and not alone
        },
        "downstream": {
            ((CHAIN, s), (CHAIN, s + 1)): RecordedBorder(recorder, s, s + 1, "SEND_F", "RECV_B")
            for s in mine
            if s < last and not alone
        },
    }
    stage_timer = StageTimer(CPU)
    parts |= {"generation": 3, "comm": comm, "faults": faults}
    return Executor(**parts, stage_timer=stage_timer), recorder


def work(schedule: Schedule, row: int, step: int = 1) -> StepWork:
    return chain_work(
        step=step,
        schedule=schedule,
        row=row,
        num_targets=4,
        positions=(0, 1, 2, 3),
        batch=lambda _: {"x": torch.zeros(1)},
    )


def schedule_of(kind: ScheduleKind, num_rows: int) -> Schedule:
    """Every stage has a state of its own, and all share one."""
    num_stages = chunks_of(kind, 2) * num_rows
    states = [[stage, 99] for stage in range(num_stages)]
    return generate(kind, num_rows, 4, num_chunks=num_stages // num_rows, states=states)


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("kind", TRAINING)
def test_what_is_executed_is_the_schedule(kind: ScheduleKind, row: int, tmp_path: Path) -> None:
    schedule = schedule_of(kind, 3)
    killed: list[Injection] = []
    faults = Faults(str(tmp_path), kill=killed.append)
    of_ops = {Op.FORWARD: "forward", Op.SEND_F: "send", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward"}
    of_ops |= {Op.BACKWARD_WEIGHT: "weight", Op.SEND_B: "return", Op.REDUCE: "reduce"}
    phases = list(dict.fromkeys(of_ops[action.op] for action in schedule.row(row) if action.op in of_ops))
    for phase in reversed(phases):
        faults.arm(Injection(node=0, at_step=7, at_phase=phase))
    loaded: list[int] = []

    def load(position: int) -> dict[str, Tensor]:
        loaded.append(position)
        return {"x": torch.zeros(1)}

    executor, recorder = recorded(schedule, row, SingleProcessCommunicator(), faults)
    positions = (4, 10, 31, 11)
    loss = executor.run(chain_work(step=7, schedule=schedule, row=row, num_targets=4, positions=positions, batch=load))
    actions = schedule.row(row)
    assert without_arms(recorder) == [f"REDUCE{a.index}" if a.op is Op.REDUCE else str(a) for a in actions]
    assert sorted(loaded) == [4, 10, 11, 31], "each microbatch is loaded once, by its position in the step"
    spans = executor.span_recorder.spans()
    assert [name for category, name, *_ in spans if category == ACTION] == [str(action) for action in actions]
    parts = [name for category, name, *_ in spans if category == PART]
    assert (parts[0], sorted(parts[1:])) == ("begin", [f"load {index}" for index in range(4)])
    assert [start for _, _, start, *_ in spans] == sorted(start for _, _, start, *_ in spans)
    receipts = [str(action) for action in actions if action.op is Op.RECV_F]
    assert recorder.posted == receipts[1:], "the next receipt is posted ahead of its time"
    assert loss.item() == (4.0 if row == rows_of_stages(kind, 3, chunks_of(kind, 2))[-1] else 0.0)
    assert [injection.at_phase for injection in killed] == phases


@pytest.mark.parametrize("kind", TRAINING)
def test_what_the_next_forwards_need_is_read_before_a_message_is_waited_for(kind: ScheduleKind, tmp_path: Path) -> None:
    schedule = generate(kind, 3, 4, num_chunks=chunks_of(kind, 2))
    executor, recorder = recorded(schedule, 1, SingleProcessCommunicator(), Faults(str(tmp_path)))

    def load(position: int) -> dict[str, Tensor]:
        recorder.events.append(f"read {position}")
        return {"x": torch.zeros(1)}

    executor.run(chain_work(step=7, schedule=schedule, row=1, num_targets=4, positions=(0, 1, 2, 3), batch=load))
    forwards = [action for action in schedule.row(1) if action.op is Op.FORWARD]
    for place, forward in enumerate(forwards):
        if forward.stage == 1:
            waited = recorder.events.index(f"1RECV_F{forward.index}")
            for needed in forwards[place : place + 2]:
                assert recorder.events.index(f"read {needed.index}") < waited


@pytest.mark.parametrize(
    ("row", "first_receipt", "megabytes", "num_read"),
    [
        (1, "1RECV_F0", 1, 4),
        (1, "1RECV_F0", 10, 3),
        (1, "1RECV_F0", 20, 2),
        (0, "0RECV_B0", 1, 4),
        (0, "0RECV_B0", 20, 3),
    ],
)
def test_rows_read_as_much_as_is_little_before_they_first_wait(
    row: int, first_receipt: str, megabytes: int, num_read: int, tmp_path: Path
) -> None:
    """32 MB of the step, beside the two microbatches that are needed next, or were before."""
    schedule = generate(ScheduleKind.ONE_F_ONE_B, 2, 4)
    executor, recorder = recorded(schedule, row, SingleProcessCommunicator(), Faults(str(tmp_path)))

    def load(position: int) -> dict[str, Tensor]:
        recorder.events.append(f"read {position}")
        return {"x": torch.empty(megabytes << 20, dtype=torch.uint8), "y": torch.empty(1 << 30, device="meta")}

    step = chain_work(step=7, schedule=schedule, row=row, num_targets=4, positions=(0, 1, 2, 3), batch=load)
    executor.run(step, reads_here=True)
    begun = [event for event in recorder.events[: recorder.events.index(first_receipt)] if event.startswith("read")]
    assert begun == [f"read {position}" for position in range(num_read)]
    assert [event for event in recorder.events if event.startswith("read")] == [f"read {i}" for i in range(4)]
    assert recorder.posted[:1] == (["1RECV_F0"] if row else [])


@pytest.mark.parametrize(("step", "num_forgotten"), [(1, 0), (99, 0), (100, 2), (200, 2)])
def test_shapes_are_forgotten_in_the_same_steps_on_all_workers(step: int, num_forgotten: int, tmp_path: Path) -> None:
    schedule = generate(ScheduleKind.ONE_F_ONE_B, 3, 4)
    executor, recorder = recorded(schedule, 1, SingleProcessCommunicator(), Faults(str(tmp_path)))
    executor.run(work(schedule, 1, step))
    assert recorder.num_forgotten == num_forgotten, "those of the borders to both sides"


def without_arms(recorder: Recorder) -> list[str]:
    return [event for event in recorder.events if not event.startswith("arm")]


@pytest.mark.parametrize("kind", TRAINING)
def test_a_row_alone_hands_everything_on_by_itself(kind: ScheduleKind, tmp_path: Path) -> None:
    schedule = schedule_of(kind, 1)
    executor, recorder = recorded(schedule, 0, SingleProcessCommunicator(), Faults(str(tmp_path)))
    executor.run(work(schedule, 0, step=1))
    computations = [str(action) for action in schedule.row(0) if action.op is not Op.REDUCE]
    assert without_arms(recorder)[: len(computations)] == computations


@pytest.mark.parametrize(
    ("kind", "row", "armed"),
    [
        (ScheduleKind.GPIPE, 0, {"0B3": [99, 0]}),
        (ScheduleKind.ONE_F_ONE_B, 1, {"1B3": [99, 1]}),
        (ScheduleKind.INTERLEAVED, 1, {"4B3": [4], "1B3": [99, 1]}),
        (ScheduleKind.ZB_H1, 2, {"2W3": [99, 2]}),
    ],
)
def test_sums_are_armed_before_the_last_backward_of_their_states(
    kind: ScheduleKind, row: int, armed: dict[str, list[int]], tmp_path: Path
) -> None:
    schedule = schedule_of(kind, 3)
    executor, recorder = recorded(schedule, row, SingleProcessCommunicator(), Faults(str(tmp_path)))
    executor.run(work(schedule, row, step=1))
    found = {recorder.events[at + 1]: event for at, event in enumerate(recorder.events) if event.startswith("arm")}
    assert found == {backward: f"arm {states}" for backward, states in armed.items()}


class AbortedAfter(SingleProcessCommunicator):
    """A generation that ends after so many checks."""

    def __init__(self, num_checks: int) -> None:
        self.num_checks = num_checks

    def check(self) -> None:
        self.num_checks -= 1
        if self.num_checks < 0:
            raise CommunicationError("the generation was aborted")


def test_step_of_an_aborted_generation_stops_before_the_next_action(tmp_path: Path) -> None:
    schedule = generate(ScheduleKind.ONE_F_ONE_B, 1, 4)
    executor, recorder = recorded(schedule, 0, AbortedAfter(3), Faults(str(tmp_path)))
    told = r"^the generation was aborted \(generation 3, step 1, action 0B1 of row 0\)$"
    with pytest.raises(CommunicationError, match=told) as raised:
        executor.run(work(schedule, 0, step=1))
    assert not hasattr(raised.value, "__notes__"), "recovery does not wait for a table"
    assert recorder.events == ["0F0", "0B0", "0F1"]
    assert [span[1] for span in executor.span_recorder.spans() if span[0] == ACTION] == ["0F0", "0B0", "0F1"]


class Breaks(RecordedStage):
    """Fails in the forward of microbatch 1, as a model may."""

    def forward(
        self, part: CellPart, activations: Activations, batch: object, **more: int
    ) -> tuple[Activations, Tensor | None]:
        if part.cell == 1:
            raise FloatingPointError("loss is nan")
        return super().forward(part, activations, batch, **more)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_error_of_a_layer_keeps_its_type_and_shows_what_the_rows_did_around_it(tmp_path: Path) -> None:
    schedule = generate(ScheduleKind.ONE_F_ONE_B, 3, 4)
    executor, recorder = recorded(schedule, 1, SingleProcessCommunicator(), Faults(str(tmp_path)))
    executor._stages = {(CHAIN, 1): cast(Stage, Breaks(recorder, 1, is_last=False))}
    with pytest.raises(FloatingPointError) as raised:
        executor.run(work(schedule, 1, step=17))
    assert str(raised.value) == "loss is nan"
    assert executor.failed_action == "1F1 of row 1"
    assert vars(raised.value)["__notes__"] == [
        "while training (generation 3, step 17, action 1F1 of row 1):\n"
        "time   3         4         5         6      7         8         9\n"
        "row 0  0SEND_F1  0F2       0SEND_F2  .      .         .         .\n"
        "row 1  1F0       1SEND_F0  1RECV_F1  [1F1]  1SEND_F1  .         1RECV_B0\n"
        "row 2  .         .         2RECV_F0  2F0    2B0       2SEND_B0  2RECV_F1"
    ]


def test_profiler_sees_the_actions_by_their_names(tmp_path: Path) -> None:
    schedule = schedule_of(ScheduleKind.ZB_H1, 1)
    executor, _ = recorded(schedule, 0, SingleProcessCommunicator(), Faults(str(tmp_path)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        executor.run(work(schedule, 0, step=1))
    found = sorted((event.time_range.start, event.name) for event in profiler.events() or () if event.name[0] == "0")
    assert [name for _, name in found] == [str(action) for action in schedule.row(0)]
