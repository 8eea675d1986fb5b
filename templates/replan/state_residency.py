"""What the nodes of a plan hold, what the places of another need, and what a node must receive to take a place.

A :data:`.Part` says what one node of a template runs; nodes with equal parts hold the same bytes on the same devices.
Everything here is computed once per distinct part, of which there are few however many nodes there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from math import lcm

import numpy as np

from resilient.templates.common.arrays import Flags, Ints, distinct
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.template import Part, PipelineTemplate

EMPTY = 0
"""Number of the part of a node that holds nothing."""

INTRA_NODE_SPEEDUP = 16
"""A byte from another node costs as much as this many from other devices of the same node."""


class StateResidency:
    """Numbers the distinct parts of templates and knows what each holds.

    Args:
        profile: The model's layers.
    """

    def __init__(self, profile: ModelProfile) -> None:
        self.state_bytes, self._used_before = _states_of(profile)
        self._parts: list[Part] = [((((0, 0),), 0, 1),)]
        self._numbers: dict[Part, int] = {(): EMPTY}
        self._numbered: dict[int, tuple[PipelineTemplate, Ints]] = {}
        self._known_rows: dict[bytes, _Rows] = {}
        self._states: Flags = np.zeros((0, len(profile.layers)), dtype=np.bool_)
        self.cells = 1
        """Equal parts of a byte in which :meth:`prices` are counted: a multiple of the degrees of all rows so far."""

    def number(self, template: PipelineTemplate) -> Ints:
        """Return the number of each node's part. [nodes]"""
        # By identity first: hashing a template takes longer than all else that is done with it here.
        if id(template) not in self._numbered:
            numbers: list[int] = []
            for part in template.parts:
                if part not in self._numbers:
                    self._numbers[part] = len(self._parts)
                    self._parts.append(part)
                    self.cells = lcm(self.cells, *(degree for _, _, degree in part))
                numbers.append(self._numbers[part])
            self._numbered[id(template)] = template, np.array(numbers)
        return self._numbered[id(template)][1]

    @property
    def num_parts(self) -> int:
        """How many parts have a number, from 0 on."""
        return len(self._parts)

    def states(self, numbers: Ints) -> Flags:
        """Return which states the parts with these numbers hold. [parts, layers]"""
        unknown = self._parts[len(self._states) :]
        if unknown:
            rows = _Rows(unknown)
            found = np.logical_or.reduceat(self._row_states(rows), rows.starts)
            self._states = np.concatenate((self._states, found))
        return self._states[numbers]

    def received(self, needed: Ints, held: Ints) -> Ints:
        """Return the bytes that nodes with the held parts lack of the needed ones. [needed, held]"""
        # As floats, whole numbers too: those are multiplied many times faster.
        need = self.states(needed) * self.state_bytes.astype(np.float64)
        return (need @ (~self.states(held)).T.astype(np.float64)).astype(np.int64)

    def prices(self, needed: Ints, held: Ints) -> Ints:
        """Return what nodes with the held parts must receive to take places with the needed ones. [needed, held]

        That is the bytes of states that no device of the node holds, plus 1/:data:`INTRA_NODE_SPEEDUP` of those that
        its devices have to hand each other; device k of a row of degree d holds the k-th 1/d of each of its states.
        The unit is such that all prices are whole numbers.
        """
        needed, needed_row = distinct(needed)
        held, held_row = distinct(held)
        need = self.states(needed) * self.state_bytes.astype(np.float64)
        from_nodes = need.sum(axis=1, keepdims=True) - need @ self.states(held).T.astype(np.float64)

        wants, has = self._rows_of(needed), self._rows_of(held)
        need = self._row_states(wants) * self.state_bytes.astype(np.float64)
        kept = (need @ self._row_states(has).T.astype(np.float64)) * _common_cells(wants, has, self.cells)
        kept = np.add.reduceat(np.add.reduceat(kept, wants.starts, axis=0), has.starts, axis=1)
        to_devices = self.cells * np.add.reduceat(need.sum(axis=1, keepdims=True), wants.starts) - kept

        prices = (INTRA_NODE_SPEEDUP - 1) * self.cells * from_nodes + to_devices
        return prices.astype(np.int64)[needed_row].take(held_row, axis=1)

    def _rows_of(self, numbers: Ints) -> _Rows:
        """Return the rows of parts, once for those that are held: what they are compared with are more and more."""
        key = numbers.tobytes()
        if key not in self._known_rows:
            self._known_rows[key] = _Rows([self._parts[number] for number in numbers.tolist()])
        return self._known_rows[key]

    def _row_states(self, rows: _Rows) -> Flags:
        by_stage = self._used_before[rows.ends] > self._used_before[rows.firsts]
        return by_stage if len(rows.stages) == len(by_stage) else np.logical_or.reduceat(by_stage, rows.stages)


@lru_cache(maxsize=32)
def _states_of(profile: ModelProfile) -> tuple[Ints, Ints]:
    """Return the bytes of each state, and how often it is used by the layers before each, and by all."""
    uses = np.eye(len(profile.layers), dtype=np.int64)
    for index, layer in enumerate(profile.layers):
        uses[index, [profile.index(owner) for owner in layer.shares]] = 1
    state_bytes = np.array([layer.state_bytes for layer in profile.layers], dtype=np.int64)
    return state_bytes, np.concatenate((np.zeros_like(uses[:1]), uses.cumsum(axis=0)))


class _Rows:
    """The rows of some parts, one after the other.

    Those of the i-th part begin at ``starts[i]``, and the stages of the i-th row at ``stages[i]``.
    """

    def __init__(self, of: Sequence[Part]) -> None:
        rows = list(chain.from_iterable(of))
        self.starts: Ints = np.cumsum([0, *map(len, of)])[:-1]
        self.stages: Ints = np.cumsum([0, *(len(layers) for layers, _, _ in rows)])[:-1]
        self.firsts, self.ends = np.array([each for layers, _, _ in rows for each in layers], dtype=np.int64).T
        self.first_devices, self.degrees = np.array([devices for _, *devices in rows], dtype=np.int64).T


def _common_cells(wants: _Rows, has: _Rows, cells: int) -> Ints:
    """Return how many of a state's ``cells`` equal cells lie on the same device in both rows. [wants, has]"""
    num_devices = int(max(np.max(each.first_devices + each.degrees) for each in (wants, has)))
    (first_wanted, end_wanted), (first, end) = (_intervals(each, cells, num_devices) for each in (wants, has))
    common = np.zeros((len(first_wanted), len(first)), dtype=np.int64)
    for device in range(num_devices):
        upper = np.minimum(end_wanted[:, device, None], end[:, device])
        lower = np.maximum(first_wanted[:, device, None], first[:, device])
        common += np.maximum(upper - lower, 0)
    return common


def _intervals(rows: _Rows, cells: int, num_devices: int) -> tuple[Ints, Ints]:
    """Return the first and end cell that each device holds of each row's states. [rows, devices]"""
    shards = np.arange(num_devices) - rows.first_devices[:, None]
    width = (cells // rows.degrees)[:, None]
    inside = (shards >= 0) & (shards < rows.degrees[:, None])
    return np.where(inside, shards * width, 0), np.where(inside, (shards + 1) * width, 0)
