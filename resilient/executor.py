"""Runs one stage's actions of a schedule, and nothing else.

Owns the order of work within a step on this worker: what the schedule says is what happens. Arithmetic is the
stage's, messages are the wire's, sums are the gradient sync's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from resilient.comm import Communicator, Pending
from resilient.faults import Faults
from resilient.models.layer import Batch, Carry
from resilient.stage import Stage
from resilient.sync import GradientSync
from resilient.templates.schedule import Action, Op
from resilient.wire import Downstream, Upstream, signature


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What one step is for one pipeline.

    Args:
        step: Its number, 1 for the first.
        num_targets: Loss-bearing targets of the global batch.
        first_position: Index, within the step's microbatches, of this pipeline's first.
        batch: Loads the collated microbatch at a position, on the stage's device.
    """

    step: int
    num_targets: int
    first_position: int
    batch: Callable[[int], Batch]


class Executor:
    """Interprets the actions of one stage.

    Args:
        actions: The stage's actions, in order.
        stage: Computes.
        sync: Sums gradients.
        comm: The generation's groups.
        upstream: The border to the stage before; unused on the first.
        downstream: The border to the stage after; unused on the last.
        faults: Told of every phase.
    """

    def __init__(
        self,
        *,
        actions: Sequence[Action],
        stage: Stage,
        sync: GradientSync,
        comm: Communicator,
        upstream: Upstream,
        downstream: Downstream,
        faults: Faults,
    ) -> None:
        self._actions = tuple(actions)
        self._stage = stage
        self._sync = sync
        self._comm = comm
        self._upstream = upstream
        self._downstream = downstream
        self._faults = faults
        backwards = [action for action in self._actions if action.op is Op.BACKWARD]
        self._last_backward = backwards[-1] if backwards else None
        receipts = [action.index for action in self._actions if action.op is Op.RECV_F]
        self._next_receipt = dict(pairwise(receipts))
        self._run = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.SEND_F: self._send_f,
            Op.RECV_F: self._recv_f,
            Op.SEND_B: self._send_b,
            Op.RECV_B: self._recv_b,
            Op.REDUCE: self._reduce,
        }

    def run(self, work: StepWork) -> Tensor:
        """Run the step up to the reduced gradients; return the loss summed over this stage's microbatches.

        Raises:
            CommunicationError: The step is given up; gradients are to be dropped.
        """
        self._work = work
        self._batches: dict[int, Batch] = {}
        self._received: dict[int, Carry] = {}
        self._sent: dict[int, Carry] = {}
        self._gradients_in: dict[int, dict[str, Tensor]] = {}
        self._gradients_out: dict[int, dict[str, Tensor]] = {}
        # Nobody waits for a send: what is kept here stays untouched until the receiver has shown that it has it, by
        # the gradient it returns or by passing the prepare barrier of this step.
        self._carry_sends: dict[int, list[Pending]] = {}
        self._gradient_sends: list[Pending] = []
        self._loss = torch.zeros((), dtype=torch.float64)
        self._stage.begin()
        self._sync.begin()
        for action in self._actions:
            self._comm.check()  # a step that is given up is not worth another microbatch
            self._run[action.op](action)
        return self._loss

    def _forward(self, action: Action) -> None:
        self._faults.reach("forward", self._work.step)
        carry, loss = self._stage.forward(
            action.index,
            self._received.pop(action.index, {}),
            self._batch(action.index),
            step=self._work.step,
            position=self._work.first_position + action.index,
            num_targets=self._work.num_targets,
        )
        if loss is None:
            self._sent[action.index] = carry
        else:
            self._loss += loss.double().cpu()

    def _backward(self, action: Action) -> None:
        self._faults.reach("backward", self._work.step)
        if action is self._last_backward:
            self._sync.arm()
        gradients = self._gradients_in.pop(action.index, {})
        self._gradients_out[action.index] = self._stage.backward(action.index, gradients)
        del self._batches[action.index]

    def _send_f(self, action: Action) -> None:
        carry = self._sent.pop(action.index)
        shapes = signature(self._batch(action.index))
        self._carry_sends[action.index] = self._downstream.send(carry, action.index, shapes)

    def _recv_f(self, action: Action) -> None:
        shapes = signature(self._batch(action.index))
        self._received[action.index] = self._upstream.receive(action.index, shapes)
        following = self._next_receipt.get(action.index)
        if following is not None:
            self._upstream.post(following, signature(self._batch(following)))

    def _send_b(self, action: Action) -> None:
        self._gradient_sends += self._upstream.send(self._gradients_out.pop(action.index), action.index)

    def _recv_b(self, action: Action) -> None:
        gradients = self._gradients_in[action.index] = self._downstream.receive(action.index)
        if gradients:
            del self._carry_sends[action.index]

    def _reduce(self, action: Action) -> None:
        self._faults.reach("reduce", self._work.step)
        self._sync.wait(action.index)

    def _batch(self, microbatch: int) -> Batch:
        if microbatch not in self._batches:
            self._batches[microbatch] = self._work.batch(self._work.first_position + microbatch)
        return self._batches[microbatch]
