"""What stages of contiguous layers hold on each of their devices, in bytes, with all choices of layers in tables.

:mod:`resilient.templates.search.stage_cost_model` says what that consists of. In the tables, i is a stage's first layer
and j one past its last one, of L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Ints
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.kind import SPLIT_KINDS, Held
from resilient.templates.search.layer_costs import LayerCosts, StageOption

_NONE = -(1 << 62)
"""Less than any number of bytes."""


class StageMemory:
    """Stages with one choice of devices.

    Args:
        problem: The job.
        costs: Of its layers.
        option: Index of the devices in the costs' options.
        rising: Whether no stage is to hold less than one that ends before it, as the search relies on. It does only
            where far less is handed on behind a layer than before it.

    Attributes:
        held: What is there once, whatever runs: states, gradients, what comes in and goes out, what is loaded of a
            microbatch. [L, L + 1]
        kept: Of each microbatch in flight, with what is handed on, until its backward or the first part of it is over.
            [L, L + 1]
        inputs: The same where layers run again, which keep their inputs alone, and what was loaded; the first layer's
            is there anyway. [L, L + 1]
        waiting: Of each microbatch between the two parts of a split backward: as much, and the gradients that wait at
            parameters, without the one that came back. Nothing where the second part has nothing to do, and no more
            than before where the first has not, as no input wants a gradient. [L, L + 1]
        waiting_inputs: The same where layers run again: they do so in the first part, which then is all of it. Where no
            input wants a gradient there is a second part alone. [L, L + 1]
        workspace: Used beside what is kept, by the layer for which that is most; where backwards are split, with the
            gradients that are left at parameters until then. [L, L + 1]
        largest: Used beside inputs, by the layer that runs again for which that is most. [L, L + 1]
        handed_on: Of ``kept`` and of ``inputs`` what a stage hands on that ends before a layer. [L + 1]
        arriving: Of ``held`` what comes in and goes back before a stage that begins with a layer. [L]
    """

    def __init__(self, problem: PlanningProblem, costs: LayerCosts, option: int, *, rising: bool = True) -> None:
        layers = problem.profile.layers
        table = _rising if rising else _of_stages
        activations = _prefix_sums(costs.kept[option])
        runs = [layer.trainable or layer.input_gradient for layer in layers]  # others are never run again
        entering = np.array(costs.inputs[option], dtype=np.int64) * runs
        unkept = entering * [layer.keeps_nothing for layer in layers]
        inputs = _prefix_sums(entering - unkept)
        loaded = _largest([layer.loaded_bytes * run for layer, run in zip(layers, runs, strict=True)])
        self.handed_on = handed_on = np.array(costs.handed_on[option], dtype=np.int64)
        self.arriving = np.array(costs.arriving[option], dtype=np.int64)
        users = _users_of_tied(problem, costs.options[option])
        once = _AtOnce(problem, costs, option, users)
        returned = once.returned
        entered = np.array(costs.entered[option], dtype=np.int64)[:, None]  # the first layer's input is there anyway
        kept = activations + handed_on - activations[:-1, None] + entered
        self.kept = table(kept)
        among, ending, apart, given, again, ending_again = (
            np.array(of[option], dtype=np.int64)
            for of in (costs.workspace, costs.ending, costs.apart, costs.given, costs.again, costs.ending_again)
        )
        newest = once.of(activations[1:], among, ending, sums=True) - activations[:-1, None] + entered
        kept_inputs = inputs + handed_on - inputs[:-1, None] + unkept[:, None] + loaded
        self.inputs = table(kept_inputs)
        newest_again = once.of(inputs[1:] + unkept, again, ending_again, sums=True) - inputs[:-1, None]
        self.largest = table(np.maximum(kept_inputs, newest_again + unkept[:, None] + loaded)) - self.inputs
        held = -(-_with_owners(problem, costs.held[option]) // costs.options[option].num_devices)
        read = _largest([layer.read_bytes for layer in layers])
        self.held = np.triu(held + self.arriving[:, None] + read, 1)
        trained = _prefix_sums([layer.trainable for layer in layers])
        # a sharded stage does all of a backward while its layers are gathered
        trains = (trained - trained[:-1, None] > 0) & (costs.options[option].shard == 1)
        splits = np.array([layer.input_gradient for layer in layers])[:, None]
        once_more = np.array(costs.deferred_before[option], dtype=np.int64)
        left = _prefix_sums(costs.deferred[option] - once_more)
        deferred = np.triu(left - left[:-1, None] + once_more[:, None], 1) * splits
        self.waiting = table(np.where(splits, kept - returned // 2 + deferred, self.kept) * trains)
        self.waiting_inputs = self.inputs * (trains & ~splits)
        if problem.schedule in SPLIT_KINDS and costs.options[option].shard == 1:
            # whatever a layer keeps is there until the second part
            differentiated = once.of(-left[1:], among + apart - given, ending + apart) + left + activations
            first_part = differentiated - activations[:-1, None] + entered
            second_part = kept + _found_apart(users, len(layers))
            newest = np.where(splits & trains, np.maximum(first_part, second_part), newest)
        self.workspace = table(np.maximum(kept, newest)) - self.kept

    def num_bytes(self, first: int, end: int, held: Sequence[Held], *, checkpointing: bool) -> int:
        """Return what a stage of layers ``first .. end - 1`` holds at one of some moments, that at which it is most.

        Args:
            first: First layer.
            end: One past the last one.
            held: Rounds at each of them.
            checkpointing: Whether its layers run again.
        """
        if checkpointing:
            kept, waiting, besides = self.inputs, self.waiting_inputs, self.largest
        else:
            kept, waiting, besides = self.kept, self.waiting, self.workspace
        moving = max(each.before * kept[first, end] + each.waiting * waiting[first, end] for each in held)
        return int(self.held[first, end] + besides[first, end] + moving)

    def of_rounds(self, *, checkpointing: bool) -> tuple[Ints, Ints, Ints]:
        """Return what stages hold once, of each round that is not differentiated, and of each that waits for the rest.

        ``[L, L + 1]`` each. With ``rising`` no stage holds less of any than one that ends before it, with one round in
        flight or more.

        Args:
            checkpointing: Whether their layers run again.
        """
        if checkpointing:
            return self.held + self.largest, self.inputs, self.waiting_inputs
        return self.held + self.workspace, self.kept, self.waiting


def _rising(num_bytes: Ints) -> Ints:
    """Return a table in which no stage holds less than one that ends before it. [L, L + 1]"""
    return np.maximum.accumulate(_of_stages(num_bytes), axis=1)


def _of_stages(num_bytes: Ints) -> Ints:
    """Return a table with nothing where there are no layers. [L, L + 1]"""
    return np.triu(num_bytes, 1)


def _largest(read_bytes: Sequence[int]) -> Ints:
    """Return what is loaded of a microbatch: as much as one layer reads, for layers read the same. [L, L + 1]

    What nobody keeps of it is that of the next microbatch, which is loaded to be ready for what comes in, or goes with
    the forward.
    """
    read = np.array([0, *read_bytes], dtype=np.int64)
    return np.maximum.accumulate(np.triu(np.tile(read, (len(read) - 1, 1)), 1), axis=1)


def _prefix_sums(values: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(values, dtype=np.int64))])


class _AtOnce:
    """What is there while one layer is differentiated: its workspace and, of a sharded stage, what is gathered for it.

    That is its parameters, those of the layer before that are on their way, its gradients, and those of the layer
    behind it with the others' addends to this device's part, and the sums of these. Of any other stage, sums of tied
    states' gradients.

    Args:
        problem: The job.
        costs: Of its layers.
        option: Index of the stage's devices in their options.
        users: Of tied states.

    Attributes:
        returned: What is there of what a stage hands on that ends before a layer, and of the gradient of that, when it
            comes back. [L + 1]
    """

    def __init__(self, problem: PlanningProblem, costs: LayerCosts, option: int, users: Sequence[_Users]) -> None:
        shard = costs.options[option].shard
        self._before, gradients = (np.array(of[option], dtype=np.int64) for of in (costs.gathered, costs.scattered))
        # of two addends the sum takes a part's bytes, of more it does so twice while one is added
        addends_and_sums = shard - 1 + min(shard, 3) - 1
        self._behind = np.append(gradients[1:] + -(-gradients[1:] * addends_and_sums // shard), 0)
        self._gathered = self._before + gradients
        self._passing = np.array(costs.passing[option], dtype=np.int64)
        self._handed_on = np.array(costs.handed_on[option], dtype=np.int64)
        self.returned = self._handed_on * [*(layer.input_gradient for layer in problem.profile.layers), False]
        viewed = costs.viewed[option]
        pairs = [(first, end, each.num_bytes) for each in users for first, end in pairwise(each.layers)]
        self._sums = sorted((end, first, size, min(size, viewed[end])) for first, end, size in pairs)

    def of(self, there: Ints, among: Ints, ending: Ints, *, sums: bool = False) -> Ints:
        """Return the most of layers i .. j - 1, with what is handed on. [L, L + 1]

        One backward adds to gradients once, when what all layers have found is there. So what came of a tied state from
        one of its users is held, or the sum, until the one before it has been differentiated; and the first such sum is
        a tensor beside the two that it is of where it cannot be made in the first one's place.

        Args:
            there: What is there besides while each runs. [L]
            among: What each uses among others. [L]
            ending: What it uses where the stage ends with it. [L]
            sums: Whether the backward is one of all parameters.
        """
        size = len(there)
        most = np.zeros((size, size + 1), dtype=np.int64)
        for i in range(size):
            runs = there[i:] + self._gathered[i:]
            runs[1:] += self._before[i:-1] + self._passing[i + 1 :]
            last = runs + ending[i:] + self._handed_on[i + 1 :]
            runs += among[i:] + self._behind[i:]
            inner = _most_before(runs)
            for end, first, num_bytes, viewed in self._sums if sums else ():
                if first >= i:  # stages without the second one have no such sum
                    runs[first - i : end - i] += num_bytes
                    runs[first - i] += viewed
                    inner[end - i :] = _most_before(runs)[end - i :]
            most[i, i + 1 :] = np.maximum(last, inner + self.returned[i + 1 :])
        return most


def _most_before(values: Ints) -> Ints:
    """Return the largest of those before each."""
    return np.append(_NONE, np.maximum.accumulate(values)[:-1])


class _Users(NamedTuple):
    """Layers that use a tied state, in tensor-parallel or other stages that have all of it.

    Args:
        num_bytes: Of its gradients, on a device.
        layers: They, its owner among them.
    """

    num_bytes: int
    layers: list[int]


def _users_of_tied(problem: PlanningProblem, option: StageOption) -> list[_Users]:
    """Return the users of each tied state that is trained; of sharded stages each layer has gradients of its own."""
    layers = problem.profile.layers
    owners = sorted({owner for layer in layers for owner in layer.shares}) if option.shard == 1 else []
    return [
        _Users(
            -(-layers[problem.profile.index(owner)].gradient_bytes // option.num_devices),
            [i for i, layer in enumerate(layers) if owner in (layer.name, *layer.shares)],
        )
        for owner in owners
    ]


def _found_apart(users: Sequence[_Users], size: int) -> Ints:
    """Return what the second part of a backward of layers i .. j - 1 finds of the tied state with most. [L, L + 1]

    It is the gradients of all layers that use it, and their sum; nothing where less than two do.
    """
    most = np.zeros((size, size + 1), dtype=np.int64)
    for num_bytes, layers in users:
        before = _prefix_sums([i in layers for i in range(size)])
        number = before - before[:-1, None]
        most = np.maximum(most, num_bytes * (number + 1) * (number > 1))
    return most


def _with_owners(problem: PlanningProblem, sizes: Sequence[int]) -> Ints:
    """Return states and gradients of layers i .. j - 1 with their owners elsewhere, by those of each. [L, L + 1]"""
    layers, sums = problem.profile.layers, _prefix_sums(sizes)
    held = np.maximum(sums[None, :] - sums[:-1, None], 0)
    first, end = np.arange(len(layers))[:, None], np.arange(len(layers) + 1)[None, :]
    for owner in {owner for layer in layers for owner in layer.shares}:
        position = problem.profile.index(owner)
        users = np.array([i for i, layer in enumerate(layers) if owner in layer.shares])
        next_user = np.append(users, len(layers))[np.searchsorted(users, first)]
        held += sizes[position] * ((next_user < end) & ((position < first) | (position >= end)))
    return held
