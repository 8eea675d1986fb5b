"""Carries and gradients between neighbouring stages: a fixed-size header that describes the tensors, then the tensors.

Shapes vary from microbatch to microbatch (packed samples, images of any size), so they travel with the data.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from resilient.comm import Communicator, Pending
from resilient.models.layer import Carry

HEADER_BYTES = 1024
_MAX_TENSORS = 32
_HEADER, _FORWARD, _BACKWARD = range(3)


class _Described(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    wants_gradient: bool


_decode = msgspec.msgpack.Decoder(tuple[_Described, ...]).decode


def _tag(microbatch: int, kind: int, position: int = 0) -> int:
    return (microbatch * 3 + kind) * _MAX_TENSORS + position


def send_carry(comm: Communicator, carry: Carry, target: int, microbatch: int) -> list[Pending]:
    """Send a carry to the next stage.

    Raises:
        ValueError: The carry has more or longer-named tensors than a header holds.
    """
    described = tuple(
        _Described(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.requires_grad)
        for name, tensor in carry.items()
    )
    text = msgspec.msgpack.encode(described)
    if len(carry) > _MAX_TENSORS or len(text) > HEADER_BYTES:
        raise ValueError(
            f"a carry must hold at most {_MAX_TENSORS} tensors described in {HEADER_BYTES} bytes, got "
            f"{len(carry)} tensors in {len(text)} bytes; carry fewer tensors between layers"
        )
    header = torch.frombuffer(bytearray(text.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)
    pending = [comm.send(header, target, _tag(microbatch, _HEADER))]
    for position, tensor in enumerate(carry.values()):
        pending.append(comm.send(tensor.detach().contiguous(), target, _tag(microbatch, _FORWARD, position)))
    return pending


def recv_carry(comm: Communicator, source: int, microbatch: int, device: torch.device) -> Carry:
    """Receive a carry from the stage before; its tensors are leaves that require a gradient where it is wanted."""
    header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
    comm.recv(header, source, _tag(microbatch, _HEADER)).wait()
    described = _decode(header.numpy().tobytes().rstrip(b"\0"))  # the text ends with a bool, never with a zero byte
    carry: Carry = {}
    pending: list[Pending] = []
    for position, item in enumerate(described):
        tensor = torch.empty(item.shape, dtype=getattr(torch, item.dtype), device=device)
        pending.append(comm.recv(tensor, source, _tag(microbatch, _FORWARD, position)))
        carry[item.name] = tensor
    for work in pending:
        work.wait()
    for item in described:
        carry[item.name].requires_grad_(item.wants_gradient)
    return carry


def send_gradients(comm: Communicator, gradients: dict[str, Tensor], target: int, microbatch: int) -> list[Pending]:
    """Send the gradients of a received carry back to the stage it came from."""
    return [
        comm.send(tensor.contiguous(), target, _tag(microbatch, _BACKWARD, position))
        for position, tensor in enumerate(gradients.values())
    ]


def recv_gradients(comm: Communicator, carry: Carry, source: int, microbatch: int) -> dict[str, Tensor]:
    """Receive the gradients of the tensors of a sent carry that want one."""
    gradients = {
        name: torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for name, tensor in carry.items()
        if tensor.requires_grad
    }
    pending = [
        comm.recv(tensor, source, _tag(microbatch, _BACKWARD, position))
        for position, tensor in enumerate(gradients.values())
    ]
    for work in pending:
        work.wait()
    return gradients
