"""What a stage costs: time and memory of contiguous layers on some devices of a node, as whole nanoseconds and bytes.

A stage of layers i .. j - 1 costs, for one round of microbatches, their forward, their backward and the messages over
the boundary before it (the gradients' only where layer i needs them); :mod:`resilient.templates.search.layer_costs` has
each layer's. Activation checkpointing adds the forward of all its layers once more, where it runs a backward at all.
Each of d devices holds

    (states + gradients) / d + before * (activations + handed_on) + waiting * what stays until weights' backwards
        + arriving + workspace + gradients put off + gathered

where the states and gradients are those of the layers and of the owners they share from, and all in the second line are
there once: what comes in and goes out beside what is computed, what the layer that runs uses beside what it keeps, the
gradients that the microbatch has left at parameters of later layers where the halves of backwards are apart, and what a
sharded stage has gathered for it (:mod:`resilient.templates.search.layer_costs`). The activations of the microbatch
that is differentiated are those up to that layer, or all where the halves are apart: others may use more then than the
last one does, before it. What the last one hands on, and the gradient of that, are in ``handed_on``. How many rounds
are in flight before their backward, or its first half, is over, and how many wait for the second, follows from the
schedule (:func:`resilient.templates.schedules.kind.held_counts`) of a pipeline that has enough microbatches, so that a
template holds whatever its share becomes. Between the halves activations stay, with what was sent and the gradients put
off, but not the gradient that came back: it has been used. Stages of frozen layers have no second half, nor have those
whose layers run again; stages whose input wants no gradient have no first one, and keep all until then. Where a device
has several stages, these hold their most at different times: :mod:`resilient.templates.search.chunk_counts`. With
checkpointing, the layers' inputs count, and what was loaded of each microbatch; what the layer that runs again makes
and uses comes on top, for one microbatch. A stage keeps its activations if they fit, and checkpoints if only that fits.

Before the first stage's gradient sum there is no backward left that could hide it: its time comes on top of the step
once. The sums of later stages are taken to hide behind the backwards of the stages before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.common.durations import nanoseconds
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import SPLIT_KINDS, Held, ScheduleKind, held_counts
from resilient.templates.search.layer_costs import LayerCosts
from resilient.templates.search.stage_memory import StageMemory
from resilient.templates.search.stage_reach import HeldRounds, StageReach, falls
from resilient.templates.template import StageSpec

CostTable = Ints

STAGE_BITS = 12
"""Sums of times are kept with the number of stages in the low bits: one comparison finds the least sum, then stages."""

UNLIMITED = 1 << 50
"""More than any time or memory of a device; sums over devices fit into 64 bits."""

_MOST_NS = 10**14
"""Of a microbatch through all layers: about a day. Sums of times, with the number of stages, then fit into 64 bits."""


class Tables(NamedTuple):
    """The costs as the compiled search reads them. D options of devices, L layers, M devices of a node.

    Times are shifted left by ``STAGE_BITS``. An end is the last j up to which stages i .. j - 1 qualify, i where none
    does.

    Args:
        devices: Of each option, ascending. [D]
        sums: Times of the layers before each one: forward and backward, or two forwards and backward; without, or with
            the gradient sum of a first stage that ends there. [forward again, with gradient sum, D, L + 1]
        send: Messages before a stage that starts with the layer, within a node or between nodes. [2, D, L]
        next_backward: First layer, from each one on, that runs a backward; L where none does. [L]
        ends: Ends of stages that fit in memory with activations kept, or with those or checkpoints, by how much is in
            flight. [2, D, L, L + 1]
        farthest: Of stages that begin with a layer, or before it, the last end with those or checkpoints. [D, L, L + 1]
        fewest: Least number of stages that use x devices of a node; L + 1 where none can. [M + 1]
        most: The greatest number of those stages, where a stage before may hold least with that; else the least. In
            between no stage holds less than with both. [M + 1]
    """

    devices: CostTable
    sums: CostTable
    send: CostTable
    next_backward: CostTable
    ends: CostTable
    farthest: CostTable
    fewest: CostTable
    most: CostTable


class SingleDeviceCosts(NamedTuple):
    """Costs of stages on one device, for cuts that are evaluated many at a time. L layers; prefix sums are [L + 1].

    Args:
        forward: Prefix sums of forward times, in nanoseconds.
        work: Of forward and backward times.
        send: Messages before a stage that starts with the layer, within a node or between nodes. [2, L]
        held: What is there once of layers i .. j - 1: states, gradients, what comes in. [L, L + 1]
        kept: Of each microbatch that layers i .. j - 1 keep. [L, L + 1]
        waiting: Of each that is between the parts of its backward. [L, L + 1]
        workspace: Used beside what they keep. [L, L + 1]
        inputs: As ``kept`` where they run again. [L, L + 1]
        waiting_inputs: As ``waiting`` where they run again. [L, L + 1]
        largest: Used by the largest of them that runs again. [L, L + 1]
        within: What a row does not hold that hands on to itself, before a layer: once, and of each microbatch whose
            backward through the first of the two stages, or the first part of it, is not over. [L, 2]
        next_backward: First layer, from each one on, that runs a backward; L where none does. [L]
        weights: Prefix sums of what schedules put off where layers do not run again, as :attr:`StageSpec.weights_ms`
            says.
        sync: Gradient sum of a first stage that ends there. [L + 1]
    """

    forward: CostTable
    work: CostTable
    send: CostTable
    held: CostTable
    kept: CostTable
    waiting: CostTable
    workspace: CostTable
    inputs: CostTable
    waiting_inputs: CostTable
    largest: CostTable
    within: CostTable
    next_backward: CostTable
    weights: CostTable
    sync: CostTable


class StageCosts:
    """Costs of all stages of a problem.

    Args:
        problem: The job.
        round_size: Microbatches of a round.
    """

    def __init__(self, problem: PlanningProblem, round_size: int = 1) -> None:
        profile, cluster = problem.profile, problem.cluster
        layers = profile.layers
        self.problem = problem
        self.num_layers = len(layers)
        self.round_size = round_size
        costs = LayerCosts(problem, round_size)
        self.options = costs.options
        self._forward = [_prefix_sums(row) for row in costs.forward]
        self._backward = [_prefix_sums(row) for row in costs.backward]
        self._send = costs.send
        self._numbers = self._numbers_of_stages()
        gradients = _prefix_sums([layer.gradient_bytes for layer in layers])
        self._sync = [
            [nanoseconds(cluster.inter_node.transfer_ms(2 * total / of)) if total else 0 for total in gradients]
            for option in self.options
            for of in [option.num_devices * cluster.cards_per_device]
        ]
        messages = max(sum(row) for rows in self._send for row in rows) + max(map(max, self._sync))
        _check_times(2 * max(map(sum, costs.forward)) + max(map(sum, costs.backward)) + messages)
        self._next_backward = [self.num_layers] * (self.num_layers + 1)
        for i in reversed(range(self.num_layers)):
            runs = layers[i].trainable or layers[i].input_gradient
            self._next_backward[i] = i if runs else self._next_backward[i + 1]
        self._memory = [StageMemory(problem, costs, index) for index in range(len(self.options))]
        self._exact = [StageMemory(problem, costs, index, rising=False) for index in range(len(self.options))]
        self._reach = StageReach(problem, self._memory)
        self._held_rounds: dict[int, HeldRounds] = {}

    @property
    def fewest_per_node(self) -> int:
        """The least number of stages that use all devices of a node; more than the layers where none can."""
        return self._numbers[-1][0]

    @property
    def least_total(self) -> int:
        """A time that all stages take at least."""
        work = np.diff(np.array(self._forward, dtype=np.int64) + np.array(self._backward, dtype=np.int64))
        return int(work.min(axis=0).sum())

    def held_rounds(self, num_stages: int) -> HeldRounds | None:
        """Return what every stage of a pipeline of so many stages must hold; None where memory is not limited.

        Of stages that have more of them behind, what they hold at least in a deeper pipeline.
        """
        if self.problem.cluster.memory_bytes is None:
            return None
        if num_stages not in self._held_rounds:  # asked for with every bound
            deeper = (self._held(number, 0) for number in range(num_stages + 1, self.num_layers + 1))
            held = (*self.held_of_stages(num_stages)[::-1], *deeper)
            known = self._held_rounds.values()
            self._held_rounds[num_stages] = next((each for each in known if each == held), held)
        return self._held_rounds[num_stages]

    def held_of_stages(self, num_stages: int) -> HeldRounds:
        """Return what each stage of a pipeline of so many must hold, from the first one on."""
        return tuple(self._held(num_stages, row) for row in range(num_stages))

    def _held(self, num_stages: int, row: int) -> tuple[Held, ...]:
        most_rounds = -(-self.problem.most_microbatches // self.round_size)
        return held_counts(self.problem.schedule, num_stages, row, most_rounds)

    def tables(self, *, with_sync: bool, held: HeldRounds | None) -> Tables:
        """Return the costs for the search.

        Args:
            with_sync: Whether there are pipelines to sum gradients with.
            held: As :meth:`held_rounds` returns it.
        """
        forward = np.array(self._forward, dtype=np.int64)
        work = forward + np.array(self._backward, dtype=np.int64)
        sync = np.array(self._sync, dtype=np.int64) * with_sync
        sums = np.stack([np.stack([times, times + sync]) for times in (work, work + forward)])
        fewest, most = np.array(self._numbers, dtype=np.int64).T.copy()
        ends = self._reach.ends(held)
        return Tables(
            devices=np.array([option.num_devices for option in self.options], dtype=np.int64),
            sums=sums << STAGE_BITS,
            send=np.array(self._send, dtype=np.int64) << STAGE_BITS,
            next_backward=np.array(self._next_backward[:-1], dtype=np.int64),
            ends=ends,
            farthest=np.maximum.accumulate(ends[1], axis=1),
            fewest=fewest,
            most=most if held is not None and falls(held) else fewest,
        )

    def times(self) -> CostTable:
        """Return all distinct times of stages, ascending."""
        size = self.num_layers
        forward = np.array(self._forward, dtype=np.int64)
        work = forward + np.array(self._backward, dtype=np.int64)
        first, end = np.triu_indices(size + 1, 1)
        spans = [work[:, end] - work[:, first]]
        if self.problem.cluster.memory_bytes is not None and self.problem.activation_checkpointing:
            again = np.array(self._next_backward)[first] < end
            spans.append(spans[0] + again * (forward[:, end] - forward[:, first]))
        sends = np.unique(np.array(self._send, dtype=np.int64)[:, :, first], axis=0)
        return np.unique([span + send for span in spans for send in sends])

    def single_device(self) -> SingleDeviceCosts:
        """Return the costs of stages on one device, the first option."""
        memory = self._memory[0]
        forward = np.array(self._forward[0], dtype=np.int64)
        each = [layer.costs[0].backward_weight_ms * layer.trainable for layer in self.problem.profile.layers]
        weights = _prefix_sums([nanoseconds(self._put_off * weight_ms) for weight_ms in each])
        return SingleDeviceCosts(
            forward=forward,
            work=forward + np.array(self._backward[0], dtype=np.int64),
            send=np.array(self._send, dtype=np.int64)[:, 0],
            held=memory.held,
            kept=memory.kept,
            waiting=memory.waiting,
            workspace=memory.workspace,
            inputs=memory.inputs,
            waiting_inputs=memory.waiting_inputs,
            largest=memory.largest,
            within=np.stack([memory.arriving, memory.handed_on[:-1]], axis=-1),
            next_backward=np.array(self._next_backward[:-1], dtype=np.int64),
            weights=np.array(weights, dtype=np.int64),
            sync=np.array(self._sync[0], dtype=np.int64),
        )

    @property
    def _put_off(self) -> float:
        """How much of the backwards for weights is put off, half of it where they only delay nobody."""
        if self.problem.schedule is ScheduleKind.SPLIT:
            return 0.5
        return float(self.problem.schedule in SPLIT_KINDS)

    def stage(
        self,
        first: int,
        end: int,
        option: int,
        device: int,
        held: Sequence[Held],
        *,
        checkpointing: bool | None = None,
        send_ms: float | None = None,
    ) -> StageSpec:
        """Return the stage of layers ``first .. end - 1``.

        Args:
            first: First layer.
            end: One past the last layer.
            option: Index of its devices in :attr:`options`.
            device: Its first device, counted over the nodes of the template.
            held: Rounds that it must hold, at the moments at one of which it holds most.
            checkpointing: Whether it does that; by default where only that fits.
            send_ms: Of its messages; by default they come from the device before.
        """
        devices_per_node = self.problem.cluster.devices_per_node
        forward = self._forward[option][end] - self._forward[option][first]
        backward = self._backward[option][end] - self._backward[option][first]
        limit = self.problem.cluster.memory_bytes
        if checkpointing is None:
            kept = self._memory[option].num_bytes(first, end, held, checkpointing=False)
            checkpointing = limit is not None and kept > limit
        memory = self._exact[option].num_bytes(first, end, held, checkpointing=checkpointing)
        if checkpointing:
            backward += forward * (self._next_backward[first] < end)
        most: int | None = None
        if limit is not None and self.problem.schedule is ScheduleKind.EAGER:
            _, of_each, _ = self._exact[option].of_rounds(checkpointing=checkpointing)
            each = int(of_each[first, end])
            most = held[0].before + (limit - memory) // each if each else self.problem.num_microbatches
        return StageSpec(
            first_layer=first,
            end_layer=end,
            node_index=device // devices_per_node,
            first_device=device % devices_per_node,
            num_devices=self.options[option].num_devices,
            shard=self.options[option].shard,
            recomputed_layers=(end - first) * checkpointing,
            forward_ms=forward / 1e6,
            backward_ms=backward / 1e6,
            weights_ms=self._weights_part(first, end, option, checkpointing=checkpointing) * backward / 1e6,
            send_ms=self._send[device % devices_per_node == 0][option][first] / 1e6 if send_ms is None else send_ms,
            memory_bytes=memory,
            max_in_flight=most,
        )

    def _weights_part(self, first: int, end: int, option: int, *, checkpointing: bool) -> float:
        """Return the part of a stage's backward that is :attr:`StageSpec.weights_ms`; 0 where none is split."""
        if not self._put_off or self.options[option].shard > 1 or checkpointing:
            return 0.0  # all of a backward is done while layers are gathered, and where they run again
        profile = self.problem.profile
        degree = profile.tp_degrees.index(self.options[option].num_devices)
        layers = [(layer, layer.costs[degree]) for layer in profile.layers[first:end]]
        of_inputs = sum(cost.backward_input_ms for layer, cost in layers if layer.input_gradient)
        of_weights = sum(cost.backward_weight_ms for layer, cost in layers if layer.trainable)
        return self._put_off * of_weights / (of_inputs + of_weights) if of_weights else 0.0

    def sync_ms(self, end: int, option: int) -> float:
        """Return the time of the gradient sum of a first stage of layers ``0 .. end - 1``."""
        return self._sync[option][end] / 1e6

    def least_memory_bytes(self, layer: int, num_stages: int) -> int:
        """Return what a stage of one layer needs at least, on each device, with the best of places and of devices."""
        checkpointing = (False, True) if self.problem.activation_checkpointing else (False,)
        return min(
            memory.num_bytes(layer, layer + 1, self._held(num_stages, row), checkpointing=again)
            for memory in self._memory
            for again in checkpointing
            for row in {0, num_stages - 1}  # of others none holds less than both
        )

    def _numbers_of_stages(self) -> list[tuple[int, int]]:
        """Return the least and the greatest number of stages that use x devices of a node; L + 1 where none can."""
        none = self.num_layers + 1
        numbers = [(0, 0)]
        for devices in range(1, self.problem.cluster.devices_per_node + 1):
            before = [numbers[devices - of.num_devices] for of in self.options if of.num_devices <= devices]
            before = [(fewest + 1, most + 1) for fewest, most in before if fewest < none]
            fewest, most = zip(*before, strict=True) if before else ((none,), (none,))
            numbers.append((min(fewest), max(most)))
        return numbers


def _check_times(sum_ns: int) -> None:
    if sum_ns > _MOST_NS:
        raise ValueError(
            f"costs and messages of all layers must be at most {_MOST_NS // 10**6} ms in all, got "
            f"{sum_ns / 1e6:g}; times are in milliseconds: profile the layers again"
        )


def _prefix_sums(values: Sequence[int]) -> list[int]:
    return list(accumulate(values, initial=0))
