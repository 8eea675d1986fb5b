"""Copies layer states between the ranks of a generation, and verifies them before they count.

A copy has the origin of what it was made of (:mod:`resilient.state.witnesses`), which the sender tells.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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

_FIRST_TAG = 1 << 24


def copy_states(
    comm: Communicator,
    transfers: Sequence[Transfer],
    held: Mapping[str, LayerState],
    missing: Mapping[str, LayerState],
    on_copy: Callable[[], None] = lambda: None,
) -> int:
    """Send and receive what the transfers say for this rank; both ends of a copy have their copies in the same order.

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
    pieces = _tagged(_pieces(transfers))
    origins: dict[str, set[int]] = {}
    incoming: deque[tuple[Transfer, Tensor, Tensor, Pending, Pending]] = deque()
    for tag, piece in pieces:
        if piece.target == comm.rank:
            window = missing[piece.state].window(piece.first_byte, piece.end_byte)
            expected = torch.zeros(3, dtype=torch.int64)
            data = comm.recv(window, piece.source, 2 * tag)
            proof = comm.recv(expected, piece.source, 2 * tag + 1)
            incoming.append((piece, window, expected, data, proof))
    outgoing: list[Pending] = []
    for tag, piece in pieces:
        if piece.source == comm.rank:
            window = held[piece.state].window(piece.first_byte, piece.end_byte)
            outgoing.append(comm.send(window, piece.target, 2 * tag))
            sent = torch.tensor([_fingerprint(comm, window), held[piece.state].origin, _name(piece)])
            outgoing.append(comm.send(sent, piece.target, 2 * tag + 1))
    received = received_by(comm.rank, transfers)
    for name in missing.keys() & held.keys():
        if missing[name].take(held[name], missing[name].held - received.get(name, NO_BYTES)):
            origins[name] = {held[name].origin}
    num_bytes = 0
    while incoming:
        piece, window, expected, data, proof = incoming.popleft()
        data.wait()
        proof.wait()
        on_copy()
        proven, origin, name = expected.tolist()
        if name != _name(piece):
            other = f"another piece than {piece.state!r} from byte {piece.first_byte} arrived from rank {piece.source}"
            raise CommunicationError(other, peer=piece.source)
        if _fingerprint(comm, window) != proven:
            damaged = f"state {piece.state!r} arrived damaged from rank {piece.source}"
            raise CommunicationError(damaged, peer=piece.source)
        origins.setdefault(piece.state, set()).add(origin)
        num_bytes += window.numel()
    for state, found in origins.items():
        missing[state].origin = joint_origin(found)
    for work in outgoing:
        work.wait()
    return num_bytes


def received_by(rank: int, transfers: Sequence[Transfer]) -> dict[str, ByteIntervals]:
    """Return what a rank receives of each state."""
    received: dict[str, ByteIntervals] = {}
    for transfer in transfers:
        if transfer.target == rank:
            part = ByteIntervals.of(transfer.first_byte, transfer.end_byte)
            received[transfer.state] = received.get(transfer.state, NO_BYTES) | part
    return received


def _fingerprint(comm: Communicator, window: Tensor) -> int:
    """Return the fingerprint that both ends find: where hosts talk, one of them may have no GPU."""
    return fingerprint(window if comm.on_devices else window.cpu())


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
