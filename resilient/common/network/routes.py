"""Which of this machine's addresses leads where."""

from __future__ import annotations

import socket


def address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which packets go to another; "here" where there is no way. Sends none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as asking:
            asking.connect(address)
            return asking.getsockname()[0]
    except (OSError, UnicodeError):
        return "here"
