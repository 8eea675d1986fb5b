"""Copies layer states between the ranks of a generation, and verifies them before they count.

A copy has the origin of what it was made of (:mod:`resilient.state.witnesses`), which the sender tells. Where workers
share a GPU, or their messages go by way of the hosts, a piece is staged once at each end, for the wire and for the
fingerprint, and damaged bytes never come to the device.
"""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from resilient.comm import Communicator, Pending
from resilient.errors import CommunicationError
from resilient.state.fingerprint import fingerprint
from resilient.state.layer_state import LayerState
from resilient.state.witnesses import joint_origin
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals
from resilient.templates.replan.transfer import Transfer

CHUNK_BYTES = 4 << 20
"""Copies go in pieces of this size, so that one is verified while the next is under way."""
STAGED_BYTES = 16 * CHUNK_BYTES
"""Under way at once between devices, by way of the hosts: memory that is used again has its pages already."""

_FIRST_TAG = 1 << 24


def copy_states(
    comm: Communicator,
    transfers: Sequence[Transfer],
    held: Mapping[str, LayerState],
    missing: Mapping[str, LayerState],
    on_copy: Callable[[], None] = lambda: None,
) -> int:
    """Send and receive what the transfers say for this rank; all ranks have their copies in one order.

    Args:
        comm: The generation's groups.
        transfers: Byte ranges from rank to rank, at least those that this rank sends or receives.
        held: The states this rank has, by name: it sends from them.
        missing: Those it is to have, and receives into; what it has of them already is taken from ``held``.
        on_copy: Called for each piece that has come, before it is verified.

    Returns:
        Bytes received.

    Raises:
        CommunicationError: A peer is gone, or bytes arrived damaged.
    """
    copies = _Copies(comm, held, missing, on_copy)
    own = [(tag, piece) for tag, piece in _tagged(_pieces(transfers)) if comm.rank in (piece.source, piece.target)]
    most_bytes = STAGED_BYTES if _are_staged(comm, [*held.values(), *missing.values()]) else math.inf
    if most_bytes == math.inf:
        own.sort(key=lambda each: each[1].target != comm.rank)  # all that comes is awaited before anything is sent
    for tag, piece in own:
        # the earliest piece that is not done is the next one of both its ends: nobody waits in a circle
        while copies.bytes_under_way >= most_bytes:
            copies.finish_next()
        copies.start(tag, piece)
    received = received_by(comm.rank, transfers)
    for name in missing.keys() & held.keys():
        if missing[name].take(held[name], missing[name].held - received.get(name, NO_BYTES)):
            copies.origins.setdefault(name, set()).add(held[name].origin)
    copies.finish()
    for state, found in copies.origins.items():
        missing[state].origin = joint_origin(found)
    return copies.bytes_received


def _are_staged(comm: Communicator, states: Sequence[LayerState]) -> bool:
    """Return whether copies pass through the memory of the hosts, of which there is less than of what is copied."""
    return not comm.on_devices and any(state.bytes.device.type != "cpu" for state in states)


@dataclass(frozen=True)
class _Moving:
    """A piece under way; ``window`` is None at the rank that sends it.

    Args:
        piece: Which.
        staged: Its bytes, where they are sent from or come to: ``window`` itself where nothing is staged.
        proof: Fingerprint, origin and name of the piece.
        window: Where it belongs.
        pending: Bytes and proof.
    """

    piece: Transfer
    staged: Tensor
    proof: Tensor
    window: Tensor | None
    pending: tuple[Pending, Pending]


class _Copies:
    """The pieces that a rank sends and receives; they are finished in the order in which they are started."""

    def __init__(
        self,
        comm: Communicator,
        held: Mapping[str, LayerState],
        missing: Mapping[str, LayerState],
        on_copy: Callable[[], None],
    ) -> None:
        self._comm = comm
        self._held = held
        self._missing = missing
        self._on_copy = on_copy
        self._under_way: deque[_Moving] = deque()
        self.bytes_under_way = 0
        self.bytes_received = 0
        self.origins: dict[str, set[int]] = {}
        """Of what has come, by state."""

    def start(self, tag: int, piece: Transfer) -> None:
        comm, tags = self._comm, (2 * tag, 2 * tag + 1)
        window: Tensor | None
        if piece.target == comm.rank:
            window = self._missing[piece.state].window(piece.first_byte, piece.end_byte)
            staged = window if comm.on_devices else _on_host(window)
            proof = torch.zeros(3, dtype=torch.int64)
            pending = comm.recv(staged, piece.source, tags[0]), comm.recv(proof, piece.source, tags[1])
        else:
            state, window = self._held[piece.state], None
            staged = state.window(piece.first_byte, piece.end_byte)
            staged = staged if comm.on_devices else staged.cpu()  # once, for the wire and for the fingerprint
            sent = comm.send(staged, piece.target, tags[0])
            proof = torch.tensor([fingerprint(staged), state.origin, _name(piece)])
            pending = sent, comm.send(proof, piece.target, tags[1])
        self._under_way.append(_Moving(piece, staged, proof, window, pending))
        self.bytes_under_way += staged.numel()

    def finish_next(self) -> None:
        moving = self._under_way.popleft()
        for pending in moving.pending:
            pending.wait()
        self.bytes_under_way -= moving.staged.numel()
        if moving.window is not None:
            self._take(moving, moving.window)

    def finish(self) -> None:
        while self._under_way:
            self.finish_next()

    def _take(self, moving: _Moving, window: Tensor) -> None:
        self._on_copy()
        piece = moving.piece
        proven, origin, name = moving.proof.tolist()
        if name != _name(piece):
            other = f"another piece than {piece.state!r} from byte {piece.first_byte} arrived from rank {piece.source}"
            raise CommunicationError(other, peer=piece.source)
        if fingerprint(moving.staged) != proven:
            damaged = f"state {piece.state!r} arrived damaged from rank {piece.source}"
            raise CommunicationError(damaged, peer=piece.source)
        if moving.staged is not window:
            window.copy_(moving.staged)
        self.origins.setdefault(piece.state, set()).add(origin)
        self.bytes_received += window.numel()


def _on_host(window: Tensor) -> Tensor:
    return window if window.device.type == "cpu" else torch.empty_like(window, device="cpu")


def received_by(rank: int, transfers: Sequence[Transfer]) -> dict[str, ByteIntervals]:
    """Return what a rank receives of each state."""
    received: dict[str, ByteIntervals] = {}
    for transfer in transfers:
        if transfer.target == rank:
            part = ByteIntervals.of(transfer.first_byte, transfer.end_byte)
            received[transfer.state] = received.get(transfer.state, NO_BYTES) | part
    return received


def _tagged(pieces: Sequence[Transfer]) -> list[tuple[int, Transfer]]:
    """Return pieces with their tags, counted by pair of ranks: a rank knows of no other pair's copies."""
    numbers: dict[tuple[int, int], count[int]] = {}
    return [(next(numbers.setdefault((piece.source, piece.target), count(_FIRST_TAG))), piece) for piece in pieces]


def _name(piece: Transfer) -> int:
    """Return a number that tells pieces apart: equal layers' states differ in nothing else than their values."""
    return zlib.crc32(f"{piece.state} {piece.first_byte} {piece.end_byte}".encode())


def _pieces(transfers: Sequence[Transfer]) -> list[Transfer]:
    return [
        Transfer(
            state=transfer.state,
            source=transfer.source,
            target=transfer.target,
            first_byte=start,
            end_byte=min(start + CHUNK_BYTES, transfer.end_byte),
        )
        for transfer in transfers
        for start in range(transfer.first_byte, transfer.end_byte, CHUNK_BYTES)
    ]
