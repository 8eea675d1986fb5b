"""Runs one row of a schedule, and nothing else.

Owns the order of work within a step on this worker: what the schedule says is what happens. Arithmetic is the
stages', messages are the borders' (:mod:`resilient.pipeline.p2p`), sums are the gradient sync's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.profiler import record_function

from resilient.comm import Communicator, Pending
from resilient.errors import CommunicationError, note, place_text
from resilient.models.layer import Activations, Batch
from resilient.observability.step_trace import SpanRecorder
from resilient.pipeline.action_table import action_table
from resilient.pipeline.finite_watch import FiniteWatch
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.p2p import Downstream, Signature, Upstream, signature
from resilient.pipeline.stage import Stage
from resilient.pipeline.stage_timer import StageTimer
from resilient.protocol.fault_injection import Faults
from resilient.templates.schedules.schedule import Action, Op, Schedule

_Pass = tuple[int, int]
"""Stage and microbatch."""

_NOT_RECORDED = nullcontext()


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one step is for one pipeline.

    Args:
        step: Its number, 1 for the first.
        num_targets: Loss-bearing targets of the global batch.
        positions: Index, within the step's microbatches, of each of this pipeline's.
        batch: Loads the collated microbatch at a position, on the stage's device.
        watch: Sees what every layer makes of it, where the step is repeated for that.
    """

    step: int
    num_targets: int
    positions: tuple[int, ...]
    batch: Callable[[int], Batch]
    watch: FiniteWatch | None = None


class Executor:
    """Runs the actions of one row, step after step.

    Args:
        schedule: Of the whole pipeline.
        row: The row that is run here.
        generation: The generation it is of, for messages.
        stages: The row's stages, by index.
        gradient_sync: Sums gradients.
        comm: The generation's groups.
        upstream: By stage, the border to the stage before, where that is another worker's.
        downstream: By stage, the border to the stage after, where that is another worker's.
        faults: Told of every phase.
        stage_timer: Runs while a stage computes.

    Attributes:
        span_recorder: When what the step consists of started and ended; the worker adds what comes after the actions.
        failed_action: The action that raised, and its row, as in ``1F2 of row 1``; None if none did.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        row: int,
        generation: int,
        stages: Mapping[int, Stage],
        gradient_sync: GradientSync,
        comm: Communicator,
        upstream: Mapping[int, Upstream],
        downstream: Mapping[int, Downstream],
        faults: Faults,
        stage_timer: StageTimer,
    ) -> None:
        self._schedule = schedule
        self._row = row
        self._generation = generation
        self._actions = schedule.row(row)
        self._stages = stages
        self._gradient_sync = gradient_sync
        self._comm = comm
        self._upstream = upstream
        self._downstream = downstream
        self._faults = faults
        self._stage_timer = stage_timer
        self.span_recorder = SpanRecorder()
        self.failed_action: str | None = None
        self._states: dict[int, list[int]] = {stage: [] for stage in stages}
        for action in self._actions:
            if action.op is Op.REDUCE:
                self._states[action.stage].append(action.index)
        ends = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        self._last_backward = {action.stage: action for action in self._actions if action.op in ends}
        reads = (Op.RECV_F, Op.FORWARD, Op.SEND_F)
        self._last_read = {action.index: action for action in self._actions if action.op in reads}
        self._next_receipt = dict(pairwise(action for action in self._actions if action.op is Op.RECV_F))

    def run(self, work: StepWork) -> Tensor:
        """Run the step up to the reduced gradients; return the loss summed over this row's microbatches.

        Under ``torch.profiler`` every action is a ``record_function`` by its printed name.

        Raises:
            CommunicationError: The step is given up; gradients are to be dropped. It says at which action.
            Exception: What the job's own code raised in an action, of its own type; a note of it (from Python 3.11 on)
                names the action and shows what the rows did around it.
        """
        self._work = work
        self.span_recorder.clear()
        self._batches: dict[int, Batch] = {}
        self._received: dict[_Pass, Activations] = {}
        self._sent: dict[_Pass, Activations] = {}
        self._gradients_in: dict[_Pass, dict[str, Tensor]] = {}
        self._gradients_out: dict[_Pass, dict[str, Tensor]] = {}
        # Nobody waits for a send: what is kept here stays untouched until the receiver has shown that it has it, by
        # the gradient it returns or by passing the prepare barrier of this step.
        self._activation_sends: dict[_Pass, list[Pending]] = {}
        self._gradient_sends: list[Pending] = []
        self._loss = torch.zeros((), dtype=torch.float64)
        with self.span_recorder.during("begin"):
            for stage in self._stages.values():
                stage.begin()
            self._gradient_sync.begin()
        # record_function takes 5 us also where nobody listens, the question 0.03
        profiled = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        for action in self._actions:
            try:
                self._comm.check()  # a step that is given up is not worth another microbatch
                named = record_function(str(action)) if profiled else _NOT_RECORDED
                with self.span_recorder.during(action), named:
                    _RUN[action.op](self, action)
            except Exception as error:
                self._tell_where(error, action)
                raise
            if action is self._last_read.get(action.index):
                del self._batches[action.index]
        for stage in self._stages.values():
            stage.end()
        return self._loss

    def _tell_where(self, error: Exception, action: Action) -> None:
        """Add to an error at which action it came; a broken connection is on the way to recovery, and gets no table."""
        self.failed_action = f"{action} of row {self._row}"
        step, generation = self._work.step, self._generation
        if isinstance(error, CommunicationError):
            error.locate(generation=generation, step=step, action=self.failed_action)
            return
        place = place_text(generation=generation, step=step, action=self.failed_action)
        note(error, f"while training{place}:\n{action_table(self._schedule, self._row, action)}")

    def _forward(self, action: Action) -> None:
        self._faults.reach("forward", self._work.step)
        batch = self._batch(action.index)
        with self._stage_timer:
            activations, loss = self._stages[action.stage].forward(
                action.index,
                self._received.pop((action.stage, action.index), {}),
                batch,
                step=self._work.step,
                position=self._work.positions[action.index],
                num_targets=self._work.num_targets,
                watch=self._work.watch,
            )
        if loss is not None:
            self._loss += loss.double().cpu()
        elif action.stage in self._downstream:
            self._sent[action.stage, action.index] = activations
        else:
            handed = {
                name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in activations.items()
            }
            self._received[action.stage + 1, action.index] = handed

    def _backward(self, action: Action) -> None:
        self._faults.reach("backward", self._work.step)
        self._arm(action)
        stage = self._stages[action.stage]
        differentiate = stage.backward if action.op is Op.BACKWARD else stage.backward_input
        gradients = self._gradients_in.pop((action.stage, action.index), {})
        with self._stage_timer:
            found = differentiate(action.index, gradients)
        if action.stage in self._upstream:
            self._gradients_out[action.stage, action.index] = found
        elif action.stage > 0:
            self._gradients_in[action.stage - 1, action.index] = found

    def _backward_weight(self, action: Action) -> None:
        self._faults.reach("backward", self._work.step)
        self._arm(action)
        with self._stage_timer:
            self._stages[action.stage].backward_weight(action.index)

    def _send_f(self, action: Action) -> None:
        activations = self._sent.pop((action.stage, action.index))
        sends = self._downstream[action.stage].send(activations, action.index, self._shapes(action.index))
        self._activation_sends[action.stage, action.index] = sends

    def _recv_f(self, action: Action) -> None:
        activations = self._upstream[action.stage].receive(action.index, self._shapes(action.index))
        self._received[action.stage, action.index] = activations
        following = self._next_receipt.get(action)
        if following is not None:
            self._upstream[following.stage].post(following.index, self._shapes(following.index))

    def _send_b(self, action: Action) -> None:
        gradients = self._gradients_out.pop((action.stage, action.index))
        self._gradient_sends += self._upstream[action.stage].send(gradients, action.index)

    def _recv_b(self, action: Action) -> None:
        gradients = self._downstream[action.stage].receive(action.index)
        self._gradients_in[action.stage, action.index] = gradients
        if gradients:
            del self._activation_sends[action.stage, action.index]

    def _reduce(self, action: Action) -> None:
        self._faults.reach("reduce", self._work.step)
        self._gradient_sync.wait(action.index)

    def _arm(self, action: Action) -> None:
        if action is self._last_backward[action.stage]:
            self._gradient_sync.arm(self._states[action.stage])

    def _batch(self, microbatch: int) -> Batch:
        if microbatch not in self._batches:
            with self.span_recorder.during(f"load {microbatch}"):
                self._batches[microbatch] = self._work.batch(self._work.positions[microbatch])
        return self._batches[microbatch]

    def _shapes(self, microbatch: int) -> Signature:
        return signature(self._batch(microbatch))


_RUN: Mapping[Op, Callable[[Executor, Action], None]] = {
    Op.FORWARD: Executor._forward,
    Op.BACKWARD: Executor._backward,
    Op.BACKWARD_INPUT: Executor._backward,
    Op.BACKWARD_WEIGHT: Executor._backward_weight,
    Op.SEND_F: Executor._send_f,
    Op.RECV_F: Executor._recv_f,
    Op.SEND_B: Executor._send_b,
    Op.RECV_B: Executor._recv_b,
    Op.REDUCE: Executor._reduce,
}
"""How each action is run. Bound methods, kept by the executor, would keep it and its generation's groups alive."""
