"""Sockets that listen in a range of ports, as long as there is room."""

from __future__ import annotations

import errno
import random
import re
import socket

import pytest

from resilient.common.network.ports import PortsTakenError, listen, port_range

HOST = "127.0.0.1"


def free_range(count: int) -> str:
    """Return a range of ports at which nobody listens, below those that the system hands out itself."""
    while True:
        first = random.randrange(20_000, 32_000 - count)
        try:
            for port in range(first, first + count):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return f"{first}:{first + count - 1}"


def test_range_is_filled_and_then_refused() -> None:
    ports = free_range(3)
    held = [listen(HOST, 0, ports, 1) for _ in range(3)]
    assert [each.getsockname()[1] for each in held] == list(port_range(ports))
    told = f"all ports of {ports} are taken at {HOST}; widen --port-range"
    with pytest.raises(PortsTakenError, match=re.escape(told)) as raised:
        listen(HOST, 0, ports, 1)
    assert raised.value.errno == errno.EADDRINUSE
    held[1].close()
    again = listen(HOST, 0, ports, 1)
    assert again.getsockname()[1] == port_range(ports)[1]
    for each in (held[0], held[2], again):
        each.close()


def test_port_that_is_named_counts_for_itself() -> None:
    with listen(HOST, 0, "", 1) as chosen:
        port = chosen.getsockname()[1]
        with pytest.raises(OSError, match=r"Address already in use") as raised:
            listen(HOST, port, free_range(2), 1)
        assert not isinstance(raised.value, PortsTakenError)
    with listen(HOST, port, free_range(2), 1) as there:
        assert there.getsockname()[1] == port


def test_address_of_another_machine_is_no_range_that_is_taken() -> None:
    with pytest.raises(OSError, match=r"Cannot assign requested address") as raised:
        listen("192.0.2.1", 0, free_range(2), 1)
    assert not isinstance(raised.value, PortsTakenError)


@pytest.mark.parametrize("text", ["30000", "30000:", ":3", "0:5", "5:4", "1:65536", "1:2:3", "a:b", "-1:4", "1-5"])
def test_other_words_are_refused(text: str) -> None:
    told = f"port_range must be FIRST:LAST, with 1 <= FIRST <= LAST <= 65535, got {text!r}; give 30000:30100, say"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        port_range(text)


def test_range_of_one_port_is_one() -> None:
    assert (list(port_range("7:7")), list(port_range(""))) == ([7], [])
