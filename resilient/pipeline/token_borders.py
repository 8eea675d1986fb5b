"""The border between stages of different numbers of tensor-parallel devices, as one device sees it.

Of what crosses it the devices of both stages divide the tokens, and each sends each of the other stage those that both
of them have. Who has none takes part all the same, with one message of none: it learns what there would be. What all
devices have whole comes from one of them, and its gradient goes back there: the sum over all is what counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from resilient.comm import Pending
from resilient.models.layer import Activations, Shapes
from resilient.models.tensor_parallel.devices import part_bounds
from resilient.pipeline.p2p import Downstream, Signature, Upstream

_Cuts = dict[int, dict[str, slice]]
"""Device of the other stage -> which of this one's tokens of which activations it has, too."""


@dataclass(frozen=True, kw_only=True)
class TokenCuts:
    """What one device has in common with those of the stage at the other side.

    Args:
        index: Of this device in its stage.
        degree: Devices of its stage.
        other_degree: Devices of the other stage.
        tokens: As for :class:`resilient.models.layer.TensorParallel`.
    """

    index: int
    degree: int
    other_degree: int
    tokens: Callable[[Shapes], Mapping[str, int]]

    def of(self, shapes: Signature, whole: Sequence[int]) -> tuple[_Cuts, frozenset[str]]:
        """Return what is in common, and the names of all activations whose tokens are divided.

        Args:
            shapes: Of the microbatch, or the number of rows that one unit makes for another.
            whole: Devices of the other stage with which those are exchanged that are not.
        """
        counts: Mapping[str, int] = {}
        if not isinstance(shapes, int):  # of features all of whoever made them have all rows
            counts = self.tokens({name: shape for name, shape, _ in shapes})
        found: _Cuts = {other: {} for other in whole}
        for name, num_tokens in counts.items():
            for other, own in _common(self.index, self.degree, self.other_degree, num_tokens):
                found.setdefault(other, {})[name] = own
        return dict(sorted(found.items())), frozenset(counts)

    @property
    def source(self) -> int:
        """The device of the stage before that sends this one what all have whole."""
        return self.index * self.other_degree // self.degree

    @property
    def targets(self) -> list[int]:
        """The devices of the stage after that this one sends what all have whole."""
        return [other for other in range(self.other_degree) if other * self.degree // self.other_degree == self.index]


@cache
def _common(index: int, degree: int, other_degree: int, num_tokens: int) -> list[tuple[int, slice]]:
    own, others = part_bounds(num_tokens, degree), part_bounds(num_tokens, other_degree)
    first, end = own[index : index + 2]
    found: list[tuple[int, slice]] = []
    for other in range(other_degree):
        start, stop = max(first, others[other]), min(end, others[other + 1])
        has_none = others[other] == others[other + 1] and other * degree // other_degree == index
        lacks_all = first == end and index * other_degree // degree == other
        if start < stop or has_none or lacks_all:
            start = min(max(start, first), end)
            found.append((other, slice(start - first, max(start, stop) - first)))
    return found


class SplitUpstream:
    """The border to the stage before, of another number of devices; see :class:`resilient.pipeline.p2p.Upstream`.

    Args:
        parts: The borders to each of its devices.
        cuts: What this device has in common with them.
    """

    def __init__(self, parts: Sequence[Upstream], cuts: TokenCuts) -> None:
        self._parts = parts
        self._cuts = cuts
        self._received: dict[int, tuple[_Cuts, dict[int, list[str]]]] = {}

    def forget(self) -> None:
        """Have headers come again."""
        self._received.clear()
        for part in self._parts:
            part.forget()

    def post(self, microbatch: int, shapes: Signature) -> None:
        """Get ready for activations before they are needed."""
        for other in self._cuts.of(shapes, [self._cuts.source])[0]:
            self._parts[other].post(microbatch, shapes)

    def receive(self, microbatch: int, shapes: Signature) -> Activations:
        """Return a microbatch's activations, of those that are divided this device's tokens."""
        cuts, divided = self._cuts.of(shapes, [self._cuts.source])
        received = {other: self._parts[other].receive(microbatch, shapes) for other in cuts}
        self._received[microbatch] = cuts, {other: list(each) for other, each in received.items()}
        activations: Activations = {}
        for name in dict.fromkeys(name for each in received.values() for name in each):
            found = [each[name] for each in received.values() if name in each]
            if name in divided:
                joined = torch.cat([each.detach() for each in found], dim=1)
                activations[name] = joined.requires_grad_(found[0].requires_grad)
            else:
                (activations[name],) = found
        return activations

    def send(self, gradients: dict[str, Tensor], microbatch: int) -> list[Pending]:
        """Send the gradients of received activations back, to each device those of what it sent."""
        cuts, names = self._received.pop(microbatch)
        pending: list[Pending] = []
        for other, own in cuts.items():
            there = {
                name: gradients[name][:, own[name]] if name in own else gradients[name]
                for name in names[other]
                if name in gradients
            }
            pending += self._parts[other].send(there, microbatch)
        return pending


class SplitDownstream:
    """The border to the stage after, of another number of devices; see :class:`resilient.pipeline.p2p.Downstream`.

    Args:
        parts: The borders to each of its devices.
        cuts: What this device has in common with them.
    """

    def __init__(self, parts: Sequence[Downstream], cuts: TokenCuts) -> None:
        self._parts = parts
        self._cuts = cuts
        self._sent: dict[int, tuple[_Cuts, frozenset[str], Activations]] = {}

    def forget(self) -> None:
        """Send headers again."""
        self._sent.clear()
        for part in self._parts:
            part.forget()

    def send(self, activations: Activations, microbatch: int, shapes: Signature) -> list[Pending]:
        """Send activations, to each device what it is to have, and get ready for their gradients."""
        targets = self._cuts.targets
        cuts, divided = self._cuts.of(shapes, targets)
        self._sent[microbatch] = cuts, divided, activations
        pending: list[Pending] = []
        for other, own in cuts.items():
            there = {
                name: tensor[:, own[name]] if name in own else tensor
                for name, tensor in activations.items()
                if name in own or (name not in divided and other in targets)
            }
            pending += self._parts[other].send(there, microbatch, shapes)
        return pending

    def receive(self, microbatch: int) -> dict[str, Tensor]:
        """Wait for the gradients of those sent tensors that want one, and return them by name."""
        cuts, divided, activations = self._sent.pop(microbatch)
        received = [self._parts[other].receive(microbatch) for other in cuts]
        gradients: dict[str, Tensor] = {}
        for name, tensor in activations.items():
            found = [each[name] for each in received if name in each]
            if tensor.requires_grad and name in divided:
                gradients[name] = torch.cat(found, dim=1)
            elif tensor.requires_grad:  # of what nobody took from here there is none
                gradients[name] = torch.stack(found).sum(0) if found else torch.zeros_like(tensor)
        return gradients
