"""The address from which packets leave, as the kernel's routes have it."""

from __future__ import annotations

import socket

from resilient.common.network.routes import address_towards


def test_address_is_the_one_a_connection_has() -> None:
    with socket.create_server(("127.0.0.5", 0)) as there:
        host, port = there.getsockname()
        with socket.create_connection((host, port)) as connection:
            assert address_towards(host, port) == connection.getsockname()[0]


def test_name_that_nobody_knows_has_none() -> None:
    assert address_towards("no-such-host.invalid", 1) == "here"
