"""The sockets of this process, those that gloo has made among them, which tells nobody of them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator
from typing import Any

_SO_ATTACH_FILTER = 26
_PROGRAM = struct.Struct("HP")
"""Linux's ``struct sock_fprog``: how many instructions, and where they are."""
_LET_NOTHING_IN = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
"""An instruction of BPF: return with no byte of the packet."""

_SENT = struct.Struct("=156xI")
"""``tcpi_data_segs_out`` of Linux's ``struct tcp_info``."""


def listeners() -> set[str]:
    """Return the addresses this process listens on, as ``ip:port``."""
    return {_text(each.getsockname()) for each in _tcp_sockets() if _listens(each)}


def shut_down_connections(own: str, peers: Collection[str]) -> None:
    """Shut down connections accepted on ``own`` or made to ``peers``; never a listener: that kills gloo."""
    for each in _tcp_sockets():
        with contextlib.suppress(OSError):  # not connected (any more)
            if not _listens(each) and (_text(each.getsockname()) == own or _text(each.getpeername()) in peers):
                each.shutdown(socket.SHUT_RDWR)


def let_nobody_else_in(own: str) -> None:
    """Take no more connections where this process listens, and hang up on those who were told nothing there so far.

    The listener stays, as far as gloo knows, which ends the process when there are no descriptors for strangers left.

    Args:
        own: Address of the listener.
    """
    program = _PROGRAM.pack(1, ctypes.addressof(_LET_NOTHING_IN))
    for each in _tcp_sockets():
        with contextlib.suppress(OSError):  # gone, or the kernel has no filters: then it is as it was
            if _text(each.getsockname()) != own:
                continue
            if _listens(each):
                each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
            elif not _SENT.unpack(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SENT.size))[0]:
                each.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Give a duplicate of every socket of TCP that this process has, each until the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            each = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # closed since the listing
        with each:
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                yield each


def _listens(each: socket.socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _text(address: tuple[Any, ...]) -> str:
    return f"{address[0]}:{address[1]}"
