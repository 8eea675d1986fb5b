"""Sums gradients over all holders of each layer state, while the last backwards of a step still run.

Owns when a sum starts and in which order: pipelines cut the model at different layers, so every holder must issue
the sums in the same order, from the last layer to the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from resilient.comm import Communicator, Group, Pending
from resilient.state.layer_state import LayerState


class GradientSync:
    """Sums the gradients of one worker's states, layer by layer, in one generation.

    Each step: ``begin``, any number of backwards, ``arm`` before the last one of each state, then ``wait`` per state.

    Args:
        comm: The generation's groups.
        states: State index -> state, for the states this worker trains (each has trainable parameters).
        groups: State index -> the ranks that hold it; a state with one holder needs no sum.

    Attributes:
        squares: Sum of the squared gradients of the states waited for in this step that this rank counts: it is the
            first of their holders, so that the sum over all ranks counts each state once.
    """

    def __init__(self, comm: Communicator, states: Mapping[int, LayerState], groups: Mapping[int, Group]) -> None:
        self._comm = comm
        self._states = states
        self._groups = groups
        self.squares = torch.zeros((), dtype=torch.float64)
        self._order = [index for index in sorted(states, reverse=True) if len(groups[index]) > 1]
        self._missing: dict[int, int] = {}
        self._num_started = 0
        self._pending: dict[int, Pending] = {}
        self._handles = [handle for index in self._order for handle in self._watch(index, states[index])]

    def _watch(self, index: int, state: LayerState) -> Sequence[RemovableHandle]:
        def accumulated(_: Tensor) -> None:
            if index in self._missing:
                self._missing[index] -= 1
                self._start_ready()

        trainable = [parameter for parameter in state.parameters.values() if parameter.requires_grad]
        return [parameter.register_post_accumulate_grad_hook(accumulated) for parameter in trainable]

    def begin(self) -> None:
        """Zero the gradients for a new step."""
        for state in self._states.values():
            state.grad.zero_()
        self.squares = torch.zeros((), dtype=torch.float64)
        self._missing.clear()
        self._num_started = 0
        self._pending.clear()

    def arm(self, indices: Iterable[int]) -> None:
        """Have the next backward, the last for these states, start each sum as soon as its gradients are final."""
        for index in indices:
            parameters = self._states[index].parameters.values()
            self._missing[index] = sum(parameter.requires_grad for parameter in parameters)

    def wait(self, index: int) -> None:
        """Wait for the sum of one state; all backwards of the step must be done."""
        while self._num_started < len(self._order):
            self._start_next()
        pending = self._pending.pop(index, None)
        if pending is not None:
            pending.wait()
        if self._groups[index][0] == self._comm.rank:
            self.squares = self.squares + torch.linalg.vector_norm(self._states[index].grad).double() ** 2

    def last_nonfinite(self) -> int | None:
        """Return the last state of this worker whose gradient, or its norm, is not finite, once all were waited for."""
        norms = {index: torch.linalg.vector_norm(state.grad) for index, state in self._states.items()}
        return max((index for index, norm in norms.items() if not norm.isfinite()), default=None)

    def close(self) -> None:
        """Stop watching the parameters."""
        for handle in self._handles:
            handle.remove()

    def _start_ready(self) -> None:
        while self._num_started < len(self._order) and self._missing.get(self._order[self._num_started], 1) <= 0:
            self._start_next()

    def _start_next(self) -> None:
        index = self._order[self._num_started]
        self._num_started += 1
        self._pending[index] = self._comm.all_reduce(self._states[index].grad, self._groups[index])
