"""What is said to the store that ranks meet in, and how: a length of four bytes, big-endian, then msgpack."""

from __future__ import annotations

import msgspec

HEADER_BYTES = 4
MAX_FRAME_BYTES = 64 * 2**20
"""Gloo's addresses of 1,024 ranks are 200 KB a rank."""

CLIENT, HOST = b"client", b"host"
"""Roles of :mod:`resilient.common.handshake`."""


class Set(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep values; the answer is the number of values."""

    values: dict[str, bytes]


class Get(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer the values of these keys, in their order, once all are there."""

    keys: list[str]


class Check(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answer how many of these keys are there."""

    keys: list[str]


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Drop the keys of generations before this one, ``g<generation>/...``; answer how many that were."""

    generation: int


Request = Set | Get | Check | Forget
Answer = int | list[bytes]

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(payload: bytes) -> bytes:
    """Prefix a message with its length."""
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def frame_size(header: bytes) -> int:
    """Return the length that a header announces.

    Raises:
        ValueError: It is over ``MAX_FRAME_BYTES``.
    """
    size = int.from_bytes(header, "big")
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a message to the store must be at most {MAX_FRAME_BYTES} bytes, got {size}")
    return size
