"""Where sockets listen: at any free port, or in a range that a firewall leaves open."""

from __future__ import annotations

import errno
import socket

from resilient.errors import ArgumentError

_MOST = 65535


class PortsTakenError(OSError):
    """Every port of a range has somebody who listens there."""


def port_range(text: str) -> range:
    """Return the ports that ``FIRST:LAST`` names, both among them; none of "", which leaves the choice to the system.

    Raises:
        ArgumentError: It has another form.
    """
    if not text:
        return range(0)
    numbers = [int(each) for each in text.split(":") if each.isascii() and each.isdigit()]
    if len(numbers) != 2 or text.count(":") != 1 or not 1 <= numbers[0] <= numbers[1] <= _MOST:
        constraint = f"be FIRST:LAST, with 1 <= FIRST <= LAST <= {_MOST}"
        raise ArgumentError("port_range", constraint, repr(text), "give 30000:30100, say")
    return range(numbers[0], numbers[1] + 1)


def listen(host: str, port: int, ports: str, backlog: int) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: Address of this machine.
        port: Where; 0 for one that is free.
        ports: The range to choose of, as :func:`port_range` reads it.
        backlog: Connections that may wait to be accepted.

    Raises:
        PortsTakenError: No port of the range is free.
        OSError: Somebody else listens at the port, or it is no address of this machine.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    for each in port_range(ports) if ports and not port else (port,):
        try:
            return socket.create_server((address[0], each), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port or not ports:
                raise
    raise PortsTakenError(errno.EADDRINUSE, f"all ports of {ports} are taken at {host}; widen --port-range")
