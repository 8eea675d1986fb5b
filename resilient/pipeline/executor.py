"""Runs one row of a schedule, and nothing else.

Owns the order of work within a step on this worker: what the schedule says is what happens. Arithmetic is the
stages', messages are the borders' (:mod:`resilient.pipeline.p2p`), sums are the gradient sync's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function

from resilient.comm import Communicator, Pending
from resilient.errors import CommunicationError, note, place_text
from resilient.models.layer import Activations, Batch
from resilient.observability.step_trace import SpanRecorder
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.handovers import Handovers
from resilient.pipeline.p2p import Downstream, Signature, Upstream, signature
from resilient.pipeline.row_actions import Border, CellPart, RowActions, StageLink
from resilient.pipeline.sharded_stage import ShardedStage
from resilient.pipeline.stage import Stage
from resilient.pipeline.stage_timer import StageTimer
from resilient.pipeline.step_work import StepWork
from resilient.pipeline.token_borders import SplitDownstream, SplitUpstream
from resilient.protocol.fault_injection import Faults
from resilient.templates.schedules.action_table import action_table
from resilient.templates.schedules.graph import StageName
from resilient.templates.schedules.schedule import Action, Op

_NOT_RECORDED = nullcontext()

_SHAPES_KNOWN_STEPS = 100
"""Steps for which borders remember the shapes of messages: all workers begin anew in the same ones."""

_AHEAD_BYTES = 32 << 20
"""Of samples that are read while the first message of a step is on its way: little beside what plans leave free."""


class Executor:
    """Runs the actions of one worker's row, step after step.

    Args:
        generation: The generation, for messages.
        stages: The worker's stages.
        gradient_sync: Sums gradients.
        comm: The generation's groups.
        upstream: The borders over which activations are received from other workers.
        downstream: Those over which they are sent to others.
        faults: Told of every phase.
        stage_timer: Runs while a stage computes.
        num_losses: Units of the model that have one.

    Attributes:
        span_recorder: When what the step consists of started and ended; the worker adds what comes after the actions.
        failed_action: The action that raised, and its row, as in ``1F2 of row 1``; None if none did.
    """

    def __init__(
        self,
        *,
        generation: int,
        stages: Mapping[StageName, Stage],
        gradient_sync: GradientSync,
        comm: Communicator,
        upstream: Mapping[Border, Upstream | SplitUpstream],
        downstream: Mapping[Border, Downstream | SplitDownstream],
        faults: Faults,
        stage_timer: StageTimer,
        num_losses: int = 1,
    ) -> None:
        self._generation = generation
        self._stages = stages
        self._gradient_sync = gradient_sync
        self._comm = comm
        self._upstream = upstream
        self._downstream = downstream
        self._faults = faults
        self._stage_timer = stage_timer
        self._num_losses = num_losses
        self.span_recorder = SpanRecorder()
        self.failed_action: str | None = None
        self._taken: RowActions | None = None

    def run(self, work: StepWork, *, reads_here: bool = False) -> Tensor:
        """Run the step up to the reduced gradients; return the losses summed over this row's microbatches.

        Float64, ``[num_losses]``, in the order of :func:`resilient.models.summed_loss.loss_units`.

        Under ``torch.profiler`` every action is a ``record_function`` by its printed name.

        Args:
            work: The step.
            reads_here: Samples are read by this process, which can do so while it has nothing to compute.

        Raises:
            CommunicationError: The step is given up; gradients are to be dropped. It says at which action.
            Exception: What the job's own code raised in an action, of its own type; a note of it (from Python 3.11 on)
                names the action and shows what the rows did around it.
        """
        self._work = work
        if self._taken is None or self._taken.schedule is not work.schedule:
            self._taken = RowActions(work.schedule, work.row)
        self._of_row = of_row = self._taken
        self.span_recorder.clear()
        if work.step % _SHAPES_KNOWN_STEPS == 0:
            for border in (*self._upstream.values(), *self._downstream.values()):
                border.forget()
        self._handovers = Handovers(of_row, work.samples, work.num_features)
        self._reads_here = reads_here
        self._batches: dict[CellPart, Batch] = {}
        self._received: dict[StageLink, Activations] = {}
        self._sent: dict[StageLink, Activations] = {}
        self._gradients_in: dict[StageLink, dict[str, Tensor]] = {}
        self._gradients_out: dict[StageLink, dict[str, Tensor]] = {}
        # What is kept here stays untouched until the receiver has it. It shows that by the gradient that it returns; of
        # activations that want none their send is waited for where that would come. Of gradients the last ones are
        # kept: there was room for them from the moment the activations were sent, so that those before have arrived by
        # then. What no action comes for any more stays until the receiver has passed the prepare barrier of this step.
        self._activation_sends: dict[StageLink, list[Pending]] = {}
        self._gradient_sends: list[Pending] = []
        self._losses = torch.zeros(self._num_losses, dtype=torch.float64)
        with self.span_recorder.during("begin"):
            for stage in self._stages.values():
                stage.begin()
            self._gradient_sync.begin()
        # record_function takes 5 us also where nobody listens, the question 0.03
        profiled = torch.autograd._profiler_enabled()  # pyright: ignore[reportPrivateImportUsage]
        for action in of_row.actions:
            try:
                self._comm.check()  # a step that is given up is not worth another microbatch
                for phase in _phases(action):
                    self._faults.reach(phase, work.step, action.lane.unit)
                if action.op is Op.FORWARD and not self._is_idle(action):  # reading is no part of what is planned
                    for part in of_row.parts(of_row.stage(action), action.index):
                        self._batch(part)
                named = record_function(str(action)) if profiled else _NOT_RECORDED
                with self.span_recorder.during(action), named:
                    self._handler(action)(self, action)
            except Exception as error:
                self._tell_where(error, action)
                raise
            if action is of_row.last_read.get((action.lane, action.index)):
                for part in of_row.parts(of_row.stage(action), action.index):
                    self._batches.pop(part, None)
        for stage in self._stages.values():
            stage.end()
        return self._losses

    def _handler(self, action: Action) -> Callable[[Executor, Action], None]:
        return _RUN_IDLE.get(action.op, _do_nothing) if self._is_idle(action) else _RUN[action.op]

    def _is_idle(self, action: Action) -> bool:
        return action.op is not Op.REDUCE and (action.lane, action.index) in self._work.idle

    def _tell_where(self, error: Exception, action: Action) -> None:
        """Add to an error at which action it came; a broken connection is on the way to recovery, and gets no table."""
        self.failed_action = f"{action} of row {self._work.row}"
        step, generation = self._work.step, self._generation
        if isinstance(error, CommunicationError):
            error.locate(generation=generation, step=step, action=self.failed_action)
            return
        place = place_text(generation=generation, step=step, action=self.failed_action)
        table = action_table(self._work.schedule, [(self._work.row, self._of_row.actions.index(action))])
        note(error, f"while training{place}:\n{table}")

    def _forward(self, action: Action) -> None:
        number, cell = self._of_row.stage(action), action.index
        arrived = {link: self._received.pop(link) for link in self._of_row.inputs(number, cell)}
        for part in self._of_row.parts(number, cell):
            if self._of_row.is_first(number):
                received = self._handovers.joined(part, arrived)
            else:
                (received,) = (each for link, each in arrived.items() if link.part == part.part)
            self._forward_part(number, part, received)

    def _forward_part(self, number: int, part: CellPart, received: Activations) -> None:
        batch = self._batch(part)
        with self._stage_timer.during(number, part.cell):
            activations, losses = self._stages[self._of_row.name(number)].forward(
                part,
                received,
                batch,
                step=self._work.step,
                position=self._work.position(part),
                num_targets=self._work.num_targets,
                watch=self._work.watch,
            )
        if not self._of_row.has_backward(number):
            self._stages[self._of_row.name(number)].forget(part)
        if losses is not None:
            self._losses += losses.cpu()
        for link in self._of_row.outputs(number, part):
            given = activations
            if self._of_row.is_first(link.target):
                given = self._handovers.outgoing(link, activations)
            if self._of_row.crosses(link):
                self._sent[link] = given
            else:
                self._received[link] = {
                    name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in given.items()
                }

    def _backward(self, action: Action) -> None:
        self._arm(action)
        number, part = self._of_row.stage(action), self._of_row.part(action)
        stage = self._stages[self._of_row.name(number)]
        differentiate = stage.backward_input if self._of_row.is_split(action) else stage.backward
        links = self._of_row.outputs(number, part)
        if links and self._of_row.is_first(links[0].target):
            gradients = self._handovers.of_part({link: self._returned(link) for link in links})
        else:
            gradients = self._gradients_in.pop(links[0]) if links else {}
        with self._stage_timer.during(number, part.cell):
            found = differentiate(part, gradients)
        inputs = self._of_row.inputs(number, part.cell)
        if self._of_row.is_first(number):
            self._handovers.keep(part, inputs, found)
            return
        (link,) = (each for each in inputs if each.part == part.part)
        (self._gradients_out if self._of_row.crosses(link) else self._gradients_in)[link] = found

    def _returned(self, link: StageLink) -> dict[str, Tensor]:
        """Return the gradients of what went over a link between units."""
        return self._gradients_in.pop(link) if self._of_row.crosses(link) else self._handovers.returned(link)

    def _backward_weight(self, action: Action) -> None:
        self._arm(action)
        part = self._of_row.part(action)
        with self._stage_timer.during(self._of_row.stage(action), part.cell):
            self._stages[action.lane, action.stage].backward_weight(part)

    def _forward_idle(self, action: Action) -> None:
        self._sharded(action).forward_idle(self._work.step)

    def _backward_idle(self, action: Action) -> None:
        self._arm(action)
        self._sharded(action).backward_idle()

    def _sharded(self, action: Action) -> ShardedStage:
        stage = self._stages[action.lane, action.stage]
        assert isinstance(stage, ShardedStage), "only the devices of a sharded stage have different samples"
        return stage

    def _send_f(self, action: Action) -> None:
        for link in self._of_row.links(action):
            border = self._downstream[self._of_row.border(link)]
            sends = border.send(self._sent.pop(link), self._of_row.number(link), self._shapes(link))
            self._activation_sends[link] = sends

    def _recv_f(self, action: Action) -> None:
        for part in self._of_row.parts(self._of_row.stage(action), action.index):
            self._batch(part)  # its forward needs it: it is read while the message is on its way
        following = self._of_row.next_receipt.get(action)
        ahead: list[StageLink] = []
        if following is not None and (following.lane, following.index) not in self._work.idle:
            ahead = self._of_row.links(following)
        to_post = [(link, self._shapes(link)) for link in ahead]
        if self._reads_here and action is self._of_row.first_receipt:
            for link in self._of_row.links(action):
                self._upstream[self._of_row.border(link)].post(self._of_row.number(link), self._shapes(link))
            self._read_ahead()
        for link in self._of_row.links(action):
            border = self._upstream[self._of_row.border(link)]
            self._received[link] = border.receive(self._of_row.number(link), self._shapes(link))
        for link, shapes in to_post:
            self._upstream[self._of_row.border(link)].post(self._of_row.number(link), shapes)

    def _read_ahead(self) -> None:
        """Read what the row computes later in the step, as far as it is little, while it has nothing to compute."""
        left, receipt = _AHEAD_BYTES, self._of_row.first_receipt
        assert receipt is not None
        for action in self._of_row.actions[self._of_row.actions.index(receipt) :]:
            if action.op is not Op.FORWARD or self._is_idle(action):
                continue
            for part in self._of_row.parts(self._of_row.stage(action), action.index):
                self._comm.check()
                num_bytes = sum(value.nbytes for value in self._batch(part).values() if not value.is_meta)
                left -= num_bytes
                if left < num_bytes:  # the next one is as large, as far as is known
                    return

    def _send_b(self, action: Action) -> None:
        (link,) = self._of_row.links(action)
        between = self._of_row.is_first(link.target)
        gradients = self._handovers.returned(link) if between else self._gradients_out.pop(link)
        for sent in self._gradient_sends:
            sent.wait()
        self._gradient_sends = self._upstream[self._of_row.border(link)].send(gradients, self._of_row.number(link))

    def _recv_b(self, action: Action) -> None:
        if self._reads_here and action is self._of_row.first_receipt:
            self._read_ahead()
        (link,) = self._of_row.links(action)
        border = self._downstream[self._of_row.border(link)]
        gradients = self._gradients_in[link] = border.receive(self._of_row.number(link))
        sends = self._activation_sends.pop(link)
        if not gradients:
            for sent in sends:
                sent.wait()

    def _reduce(self, action: Action) -> None:
        self._gradient_sync.wait(action.index)

    def _arm(self, action: Action) -> None:
        stage = self._of_row.stage(action)
        if action is self._of_row.last_backward.get(stage):
            self._gradient_sync.arm(self._of_row.states.get(stage, []))

    def _batch(self, part: CellPart) -> Batch:
        if part not in self._batches:
            with self.span_recorder.during(f"load {part}"):
                self._batches[part] = self._work.batch(part)
        return self._batches[part]

    def _shapes(self, link: StageLink) -> Signature:
        """Return what the shapes of a link's activations depend on, as both of its ends know it."""
        if self._of_row.is_first(link.target):
            return self._handovers.rows(link).num_rows
        return signature(self._batch(self._of_row.source(link)))


def _phases(action: Action) -> tuple[str, ...]:
    """Return the phases that begin with an action (:data:`resilient.protocol.phases.PHASES`)."""
    if action.part and action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
        return "backward", "part"
    return _PHASES.get(action.op, ())


_PHASES: Mapping[Op, tuple[str, ...]] = {
    Op.FORWARD: ("forward",),
    Op.SEND_F: ("send",),
    Op.BACKWARD: ("backward",),
    Op.BACKWARD_INPUT: ("backward",),
    Op.BACKWARD_WEIGHT: ("weight",),
    Op.SEND_B: ("return",),
    Op.REDUCE: ("reduce",),
}

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


def _do_nothing(executor: Executor, action: Action) -> None:
    """There is nothing to send or receive: the device of the next stage has no samples of the cell, either."""


_RUN_IDLE: Mapping[Op, Callable[[Executor, Action], None]] = {
    Op.FORWARD: Executor._forward_idle,
    Op.BACKWARD: Executor._backward_idle,
    Op.BACKWARD_INPUT: Executor._backward_idle,
    Op.BACKWARD_WEIGHT: Executor._arm,
}
"""How an action is run for a cell that other devices of the stage alone have samples of."""
