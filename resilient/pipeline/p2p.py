"""Sends and receives activations and gradients between neighbouring stages.

Owns what is sent and when its receipt is posted. Shapes vary from microbatch to microbatch, but depend on the shapes
of the microbatch's tensors alone (see :class:`resilient.models.layer.Layer`), and every stage knows those. So a header
that describes the tensors travels only with the first microbatch of its shapes; later ones can be received ahead of
time, which takes the latency of the transport out of the step. Of features that one unit makes for another only the
number of rows varies, which both ends know; as they need not arrive in the order in which they are sent, a border's
header goes ahead of whatever is sent first. What is known is forgotten now and then, by both ends at once (``forget``):
packed cells are hardly ever of equal shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from resilient.comm import Communicator, Pending
from resilient.models.layer import Activations, Batch

_HEADER_BYTES = 1024
_MAX_TENSORS = 32
_HEADER, _FORWARD, _BACKWARD = range(3)

Signature = tuple[tuple[str, tuple[int, ...], torch.dtype], ...] | int
"""What the shapes of activations follow from: the shapes of the microbatch's tensors, or the number of rows."""


class _Described(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    wants_gradient: bool


_Description = tuple[_Described, ...]
_ANY_NUMBER: Signature = -1
_decode = msgspec.msgpack.Decoder(_Description).decode


@dataclass(frozen=True)
class _Posted:
    description: _Description
    activations: Activations
    pending: tuple[Pending, ...]


def signature(batch: Batch) -> Signature:
    """Return the shapes of a microbatch: what the shapes of all activations depend on."""
    return tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items())


@dataclass(frozen=True)
class Channel:
    """Tells the messages of one border from those of others: workers that run several stages each share more than one.

    Args:
        index: Which one.
        count: Of how many.
    """

    index: int = 0
    count: int = 1

    def tag(self, microbatch: int, kind: int, position: int = 0) -> int:
        """Return what tells a message from all others of the step."""
        return ((microbatch * self.count + self.index) * 3 + kind) * _MAX_TENSORS + position


def _key(shapes: Signature) -> Signature:
    """Return under which a description is known: whatever their number, rows are alike."""
    return _ANY_NUMBER if isinstance(shapes, int) else shapes


def _of_header(microbatch: int, shapes: Signature) -> int:
    """Return the number of the message that a header belongs to; that of features does to none in particular."""
    return 0 if isinstance(shapes, int) else microbatch


def _with_rows(description: _Description, shapes: Signature) -> _Description:
    """Return the description of as many rows as there are."""
    if not isinstance(shapes, int):
        return description
    return tuple(msgspec.structs.replace(item, shape=(shapes, *item.shape[1:])) for item in description)


class Upstream:
    """The border to the stage before: activations come in, their gradients go out.

    Args:
        comm: The generation's groups.
        rank: Rank of the stage before.
        device: Where received tensors go.
        channel: The border.
    """

    def __init__(self, comm: Communicator, rank: int, device: torch.device, channel: Channel = Channel()) -> None:
        self._comm = comm
        self._rank = rank
        self._device = device
        self._tag = channel.tag
        self._known: dict[Signature, _Description] = {}
        self._posted: dict[int, _Posted] = {}

    def forget(self) -> None:
        """Have a header come again with the first microbatch of its shapes; the other end does so before that."""
        self._known.clear()

    def post(self, microbatch: int, shapes: Signature) -> None:
        """Get ready for activations before they are needed, if their shapes are known."""
        known = self._known.get(_key(shapes))
        if known is not None and microbatch not in self._posted:
            self._post(microbatch, _with_rows(known, shapes))

    def receive(self, microbatch: int, shapes: Signature) -> Activations:
        """Return a microbatch's activations; the tensors are leaves that require a gradient where one is wanted."""
        if _key(shapes) not in self._known:
            header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
            self._comm.recv(header, self._rank, self._tag(_of_header(microbatch, shapes), _HEADER)).wait()
            description = _decode(header.numpy().tobytes().rstrip(b"\0"))  # ends with a bool, never with a zero
            self._known[_key(shapes)] = description
        self.post(microbatch, shapes)
        posted = self._posted.pop(microbatch)
        for work in posted.pending:
            work.wait()
        for item in posted.description:
            posted.activations[item.name].requires_grad_(item.wants_gradient)
        return posted.activations

    def send(self, gradients: dict[str, Tensor], microbatch: int) -> list[Pending]:
        """Send the gradients of received activations back."""
        return [
            self._comm.send(tensor.contiguous(), self._rank, self._tag(microbatch, _BACKWARD, position))
            for position, tensor in enumerate(gradients.values())
        ]

    def _post(self, microbatch: int, description: _Description) -> None:
        activations = {
            item.name: torch.empty(item.shape, dtype=getattr(torch, item.dtype), device=self._device)
            for item in description
        }
        pending = tuple(
            self._comm.recv(tensor, self._rank, self._tag(microbatch, _FORWARD, position))
            for position, tensor in enumerate(activations.values())
        )
        self._posted[microbatch] = _Posted(description, activations, pending)


class Downstream:
    """The border to the stage after: activations go out, their gradients come in.

    Args:
        comm: The generation's groups.
        rank: Rank of the stage after.
        channel: The border.
    """

    def __init__(self, comm: Communicator, rank: int, channel: Channel = Channel()) -> None:
        self._comm = comm
        self._rank = rank
        self._tag = channel.tag
        self._known: dict[Signature, _Description] = {}
        self._posted: dict[int, tuple[dict[str, Tensor], list[Pending]]] = {}

    def forget(self) -> None:
        """Send a header again with the first microbatch of its shapes; the other end is to expect that."""
        self._known.clear()

    def send(self, activations: Activations, microbatch: int, shapes: Signature) -> list[Pending]:
        """Send activations, and get ready for their gradients.

        Raises:
            ValueError: They are too large to describe, or their shapes do not follow from the microbatch's.
        """
        description = tuple(
            _Described(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.requires_grad)
            for name, tensor in activations.items()
        )
        pending: list[Pending] = []
        if not self._is_known(shapes, description):
            pending.append(self._send_header(description, _of_header(microbatch, shapes)))
        for position, tensor in enumerate(activations.values()):
            data = tensor.detach().contiguous()
            pending.append(self._comm.send(data, self._rank, self._tag(microbatch, _FORWARD, position)))
        self._posted[microbatch] = self._post(activations, microbatch)
        return pending

    def receive(self, microbatch: int) -> dict[str, Tensor]:
        """Wait for the gradients of those sent tensors that want one, and return them by name."""
        gradients, pending = self._posted.pop(microbatch)
        for work in pending:
            work.wait()
        return gradients

    def _is_known(self, shapes: Signature, description: _Description) -> bool:
        first = self._known.setdefault(_key(shapes), description)
        if isinstance(shapes, int) and _with_rows(first, shapes) != description:
            raise ValueError(
                f"features of a unit must differ in the number of rows alone, got {description} for {shapes} rows "
                f"after {first}; make a row of each feature, of one width and type"
            )
        if _with_rows(first, shapes) != description:
            raise ValueError(
                f"shapes of activations must depend on the shapes of the microbatch alone, got {description} after "
                f"{first} for microbatches of equal shapes; pad to a size that follows from the inputs' shapes"
            )
        return first is not description

    def _send_header(self, description: _Description, microbatch: int) -> Pending:
        text = msgspec.msgpack.encode(description)
        if len(description) > _MAX_TENSORS or len(text) > _HEADER_BYTES:
            raise ValueError(
                f"activations must be at most {_MAX_TENSORS} tensors described in {_HEADER_BYTES} bytes, got "
                f"{len(description)} tensors in {len(text)} bytes; pass fewer tensors between layers"
            )
        header = torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8)
        return self._comm.send(header, self._rank, self._tag(microbatch, _HEADER))

    def _post(self, activations: Activations, microbatch: int) -> tuple[dict[str, Tensor], list[Pending]]:
        gradients = {
            name: torch.empty_like(tensor, requires_grad=False, memory_format=torch.contiguous_format)
            for name, tensor in activations.items()
            if tensor.requires_grad
        }
        pending = [
            self._comm.recv(tensor, self._rank, self._tag(microbatch, _BACKWARD, position))
            for position, tensor in enumerate(gradients.values())
        ]
        return gradients, pending
