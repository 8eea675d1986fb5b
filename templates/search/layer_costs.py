"""What each layer costs a stage for one round of microbatches, by the devices that the stage has.

A stage of d devices is tensor parallel at one of the profile's degrees in rounds of one microbatch. In rounds of r it
has r devices and is *sharded*: each device takes a microbatch of its own, and all of them divide the stage's states and
gradients. Jobs run no stage of r groups that are tensor parallel, nor one beside these whose devices share a round, so
none is planned.

Devices of a sharded stage gather a layer before its forward and before its backward, and scatter its gradients, summed,
after the backward: in a ring inside the node, (r - 1) messages of 1 / r of the bytes. They do so while another
layer computes, so of a layer's time and that of its messages the longer counts. In memory are then the parameters of
the layer that is differentiated and of the one that comes in meanwhile, its gradients, and those of the one before that
are being summed, of which every device receives the others' addends to its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from resilient.templates.common.durations import nanoseconds
from resilient.templates.inputs.profile import LayerCost, LayerProfile
from resilient.templates.plan import PlanningProblem


class StageOption(NamedTuple):
    """The devices that a stage may have; options are in this order.

    Args:
        num_devices: All of them.
        shard: How many of them divide its states, each with microbatches of its own; 1 where they share each.
        degree_index: Of the tensor-parallel degree: of 1 where it is sharded.
    """

    num_devices: int
    shard: int
    degree_index: int


class LayerCosts:
    """Costs of all layers in whole nanoseconds and bytes, each by option and layer.

    Layers that all take no time count for one nanosecond each, so that they are cut evenly.

    Args:
        problem: The job.
        round_size: Microbatches of a round.
        awaits_sends: Whether stages to which no gradient returns wait where it would until what they sent has arrived,
            as chains do. Elsewhere that stays until the step ends, and is not counted here.

    Attributes:
        options: Those that fit in a node.
        forward: Time of the forward.
        backward: Time of the backward, where something needs it.
        held: States and gradients that tensor-parallel devices have of a layer, without the owners it shares from: as
            many times what the one with the most has.
        kept: Activations that a device keeps of its microbatch. What enters of that is what the layer or the one before
            keeps; a sharded stage's layers have all of what wants a gradient.
        entered: What the first layer of a stage keeps besides: what enters at least, where that wants a gradient.
        workspace: The most that a device uses beside them while the layer runs.
        ending: As ``workspace``, beside what is handed on and its gradient, where a stage ends with the layer.
        apart: Used beside these where the parts of backwards are apart, with what is deferred of the layer.
        given: Of what is handed on, what the layer keeps, which is part of ``workspace``.
        again: Used where the layer runs again, beside what entered.
        ending_again: The same beside what is handed on and its gradient, where a stage ends with the layer.
        deferred: Kept of a microbatch between the two parts of a backward; a sharded stage's has one part, while its
            layers are gathered.
        deferred_before: Of that, what a stage with the layer before keeps for that one.
        viewed: Of gradients that it finds for parameters, views: see
            :attr:`resilient.templates.inputs.profile.LayerCost.viewed_bytes`.
        inputs: What enters the layer, of one microbatch.
        handed_on: Kept of it by a stage that ends before the layer, from its forward to its backward, also where that
            does nothing: what it sends, and where the gradient of that is to arrive.
        arriving: In memory of a stage that begins with the layer, beside what it keeps: what comes in ahead of its
            turn, and the gradients that go back or, where the layer has no backward, what it is computed from.
        passing: What enters a layer that has no backward: it is there while the layer runs, and kept by none.
        gathered: Parameters of a layer, whole, on a device of a sharded stage.
        scattered: Gradients.
        send: Messages over the boundary before the layer: within a node, and between nodes.
    """

    def __init__(self, problem: PlanningProblem, round_size: int, *, awaits_sends: bool = True) -> None:
        layers = problem.profile.layers
        self._cluster = problem.cluster
        self.options = sorted(
            StageOption(degree * round_size, round_size, index)
            for index, degree in enumerate(problem.profile.tp_degrees)
            if degree * round_size <= self._cluster.devices_per_node and 1 in (degree, round_size)
        )
        costs = [[layer.costs[option.degree_index] for layer in layers] for option in self.options]
        forward = [[nanoseconds(cost.forward_ms) for cost in row] for row in costs]
        backward = [[nanoseconds(layer.backward_ms(o.degree_index)) for layer in layers] for o in self.options]
        if not any(map(any, forward)) and not any(map(any, backward)):
            forward = [[1] * len(layers) for _ in self.options]
        parameters = _with_owners(layers, [layer.parameter_bytes for layer in layers])
        gradients = _with_owners(layers, [layer.gradient_bytes for layer in layers])
        gathers = [self._rings_ns(option, parameters) for option in self.options]
        scatters = [self._rings_ns(option, gradients) for option in self.options]
        runs_backward = [layer.trainable or layer.input_gradient for layer in layers]
        self.forward = [
            [max(time, gather) for time, gather in zip(*rows, strict=True)]
            for rows in zip(forward, gathers, strict=True)
        ]
        self.backward = [
            [max(time, runs * gather + scatter) for time, gather, scatter, runs in zip(*rows, strict=True)]
            for rows in zip(backward, gathers, scatters, [runs_backward] * len(backward), strict=True)
        ]
        self.workspace = [[cost.workspace_bytes for cost in row] for row in costs]
        self.given = [[cost.given_bytes for cost in row] for row in costs]
        self.ending, self.apart, self.again, self.ending_again = (
            [[use(cost) for cost in row] for row in costs] for use in (_ending, _apart, _again, _ending_again)
        )
        self.deferred = [
            [cost.deferred_bytes * (option.shard == 1) for cost in row]
            for row, option in zip(costs, self.options, strict=True)
        ]
        self.deferred_before = [
            [0, *(cost.deferred_with(before) * (option.shard == 1) for before, cost in pairwise(row))]
            for row, option in zip(costs, self.options, strict=True)
        ]
        self.viewed = [[cost.viewed_bytes for cost in row] for row in costs]
        degrees = [option.num_devices // option.shard for option in self.options]
        of_degree = {degree: [degree * layer.device_bytes(degree) for layer in layers] for degree in degrees}
        self.held = [of_degree[degree] for degree in degrees]
        self.inputs = [[-(-layer.input_bytes // degree) for layer in layers] for degree in degrees]
        wanted = [layer.input_gradient for layer in layers]
        first = [
            [
                max(cost.activation_bytes + cost.entered_bytes * wants, each * wants)
                for cost, each, wants in zip(row, entering, wanted, strict=True)
            ]
            for row, entering in zip(costs, self.inputs, strict=True)
        ]
        given = [[0, *(cost.given_bytes for cost in row[:-1])] for row in costs]
        inner = [
            [
                cost.activation_bytes + min(cost.entered_bytes, before) * wants
                for cost, before, wants in zip(*rows, wanted, strict=True)
            ]
            for rows in zip(costs, given, strict=True)
        ]
        sharded = [option.shard > 1 for option in self.options]
        self.kept = [one if shards else other for shards, one, other in zip(sharded, first, inner, strict=True)]
        self.entered = [
            [most - each for most, each in zip(*rows, strict=True)] for rows in zip(first, self.kept, strict=True)
        ]
        kept = [1 + wants if wants or awaits_sends else 0 for wants in wanted]
        self.handed_on = [
            [0, *(each * times for each, times in zip(row[1:], kept[1:], strict=True)), 0] for row in self.inputs
        ]
        beside = [1 + (layer.input_gradient or not layer.trainable) for layer in layers]
        self.arriving = [
            [0, *(each * times for each, times in zip(row[1:], beside[1:], strict=True))] for row in self.inputs
        ]
        self.passing = [
            [each * (not runs) for each, runs in zip(row, runs_backward, strict=True)] for row in self.inputs
        ]
        self.gathered = [_whole(option, parameters) for option in self.options]
        self.scattered = [_whole(option, gradients) for option in self.options]
        self.send = [
            [[0, *(self._messages_ns(option, layer, between) for layer in layers[1:])] for option in self.options]
            for between in (False, True)
        ]

    def _rings_ns(self, option: StageOption, num_bytes: Sequence[int]) -> list[int]:
        """Return how long it takes until all groups have had each layer's bytes, of which all devices have a part."""
        link = self._cluster.intra_node
        times = [nanoseconds(link.transfer_ms(each / option.num_devices)) if each else 0 for each in num_bytes]
        return [(option.shard - 1) * time for time in times]

    def _messages_ns(self, option: StageOption, layer: LayerProfile, between: bool) -> int:
        """Return the time of a round's messages before a layer.

        Those of several groups go at the same time, and share the cards of their nodes.
        """
        link, sharing = self._cluster.intra_node, 1.0
        if between:
            num_cards = self._cluster.devices_per_node * self._cluster.cards_per_device
            link, sharing = self._cluster.inter_node, max(1.0, option.shard / num_cards)
        each = nanoseconds(link.transfer_ms(layer.input_bytes * sharing))
        return each * (1 + layer.input_gradient)


def _ending(cost: LayerCost) -> int:
    return cost.ending_workspace_bytes or cost.workspace_bytes


def _apart(cost: LayerCost) -> int:
    return (
        max(cost.split_workspace_bytes - cost.workspace_bytes, 0) if cost.split_workspace_bytes else cost.deferred_bytes
    )


def _again(cost: LayerCost) -> int:
    return cost.again_bytes or cost.activation_bytes + cost.workspace_bytes


def _ending_again(cost: LayerCost) -> int:
    return cost.ending_again_bytes or cost.activation_bytes + _ending(cost)


def _whole(option: StageOption, num_bytes: Sequence[int]) -> list[int]:
    """Return how much of each layer's bytes a device has that has gathered them; nothing where none are."""
    return [-(-each * option.shard // option.num_devices) * (option.shard > 1) for each in num_bytes]


def _with_owners(layers: Sequence[LayerProfile], num_bytes: Sequence[int]) -> list[int]:
    """Return a layer's bytes with those of the layers whose states it uses."""
    of = {layer.name: each for layer, each in zip(layers, num_bytes, strict=True)}
    return [of[layer.name] + sum(of[owner] for owner in layer.shares) for layer in layers]
