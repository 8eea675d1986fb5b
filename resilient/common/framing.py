"""How messages follow each other on a stream: each after its length, four bytes, big-endian."""

from __future__ import annotations

from resilient.errors import ControlError

HEADER_BYTES = 4


def frame(payload: bytes, most_bytes: int) -> bytes:
    """Prefix a message with its length.

    Raises:
        ControlError: It is longer than that.
    """
    if len(payload) > most_bytes:
        raise ControlError(f"a message must be at most {most_bytes} bytes, got {len(payload)}; send less at once")
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


def frame_size(header: bytes, most_bytes: int) -> int:
    """Return the length a header announces.

    Raises:
        ControlError: It is over that; close the connection.
    """
    size = int.from_bytes(header, "big")
    if size > most_bytes:
        raise ControlError(f"a message must be at most {most_bytes} bytes, got {size}; close the connection")
    return size
