"""Sums gradients over all holders of each layer state, while the last backwards of a step still run.

Owns when a sum starts and in which order: pipelines cut the model at different layers, so every holder must issue
the sums in the same order, from the last layer to the first, and of a layer from its first piece to its last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from resilient.comm import Communicator, Group, Pending
from resilient.state.layer_state import LayerState
from resilient.templates.common.byte_intervals import Piece


@dataclass(frozen=True, kw_only=True)
class _Share:
    """Gradients of a state that the same ranks hold: they are summed at once.

    Args:
        index: Of the state.
        group: The ranks.
        parts: Views of the gradients here.
    """

    index: int
    group: Group
    parts: list[Tensor]


class GradientSync:
    """Sums the gradients of one worker's states, layer by layer, in one generation.

    Each step: ``begin``, any number of backwards, ``arm`` before the last one of each state, then ``wait`` per state.

    Args:
        comm: The generation's groups.
        states: State index -> state, for the states this worker trains (each has trainable parameters).
        pieces: State index -> its pieces; one that a single rank holds needs no sum.
        arrivals: State index -> how often :meth:`arrived` is called in a backward, for states whose gradients come from
            elsewhere than autograd.

    Attributes:
        squares: Sum of the squared gradients waited for in this step that this rank counts: those of pieces of which
            it is the first holder, so that the sum over all ranks counts each gradient once.
    """

    def __init__(
        self,
        comm: Communicator,
        states: Mapping[int, LayerState],
        pieces: Mapping[int, Sequence[Piece]],
        arrivals: Mapping[int, int] | None = None,
    ) -> None:
        self._comm = comm
        self._states = states
        self._shares = {
            index: [
                _Share(index=index, group=piece.holders, parts=parts)
                for piece in pieces[index]
                if (parts := states[index].gradients(piece.intervals))
            ]
            for index in sorted(states, reverse=True)
        }
        self.squares = torch.zeros((), dtype=torch.float64)
        self._order = [share for shares in self._shares.values() for share in shares if len(share.group) > 1]
        self._missing: dict[int, int] = {}
        self._num_started = 0
        self._pending: dict[int, list[tuple[_Share, Tensor, Pending]]] = {}
        self._arrivals = {
            index: sum(parameter.requires_grad for parameter in state.parameters.values())
            for index, state in states.items()
        }
        self._arrivals.update(arrivals or {})
        summed = dict.fromkeys(share.index for share in self._order if share.index not in (arrivals or {}))
        self._handles = [handle for index in summed for handle in self._watch(index, states[index])]

    def _watch(self, index: int, state: LayerState) -> Sequence[RemovableHandle]:
        def accumulated(_: Tensor) -> None:
            self.arrived(index)

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
            self._missing[index] = self._arrivals[index]

    def arrived(self, index: int) -> None:
        """Take note that some of what a backward adds to a state's gradients has been added."""
        if index in self._missing:
            self._missing[index] -= 1
            self._start_ready()

    def wait(self, index: int) -> None:
        """Wait for the sums of one state; all backwards of the step must be done."""
        while self._num_started < len(self._order):
            self._start_next()
        for share, total, pending in self._pending.pop(index, ()):
            pending.wait()
            if len(share.parts) > 1:
                for part, summed in zip(share.parts, total.split([len(part) for part in share.parts]), strict=True):
                    part.copy_(summed)
        for share in self._shares[index]:
            if share.group[0] == self._comm.rank:
                for part in share.parts:
                    self.squares = self.squares + torch.linalg.vector_norm(part).double() ** 2

    def last_nonfinite(self) -> int | None:
        """Return the last state of this worker whose gradient, or its norm, is not finite, once all were waited for."""
        norms = {index: torch.linalg.vector_norm(state.grad) for index, state in self._states.items()}
        return max((index for index, norm in norms.items() if not norm.isfinite()), default=None)

    def close(self) -> None:
        """Stop watching the parameters."""
        for handle in self._handles:
            handle.remove()

    def _start_ready(self) -> None:
        while self._num_started < len(self._order) and self._missing.get(self._order[self._num_started].index, 1) <= 0:
            self._start_next()

    def _start_next(self) -> None:
        share = self._order[self._num_started]
        self._num_started += 1
        total = share.parts[0] if len(share.parts) == 1 else torch.cat(share.parts)
        pending = self._comm.all_reduce(total, share.group)
        self._pending.setdefault(share.index, []).append((share, total, pending))
