"""What is said to the store that ranks meet in: msgpack, in frames."""

from __future__ import annotations

import msgspec

MAX_REQUEST_BYTES = 64 * 2**20
"""Far over what a rank says at once: its address, and 8 bytes for each other rank of a group."""
MAX_ANSWER_BYTES = 2**32 - 1
"""All that a frame holds: what all ranks have said, to one who knows whom it asks."""

CLIENT, HOST = b"client", b"host"
"""Roles of :mod:`resilient.common.handshake`."""


class Set(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep values; the answer is the number of values."""

    values: dict[str, bytes]


class Get(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer the values of these keys, in their order, once all are there."""

    keys: list[str]


class Cut(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """As :class:`Get`; but of the last ``tail`` bytes of each value only those from ``first`` up to ``end``."""

    keys: list[str]
    tail: int
    first: int
    end: int


class Check(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer how many of these keys are there."""

    keys: list[str]


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop the keys of generations before this one, ``g<generation>/...``; answer how many that were."""

    generation: int


Request = Set | Get | Cut | Check | Forget
Answer = int | list[bytes]

decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
