"""Machines that are network namespaces of this one, joined by a bridge; their links can be cut and joined again."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest


def _why_not() -> str:
    if shutil.which("ip") is None:
        return "no ip command on this machine: apt-get install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    linked = subprocess.run(["ip", "link", "add", f"p{os.getpid()}", "type", "bridge"], capture_output=True, text=True)
    with suppress(subprocess.CalledProcessError):
        _ip("netns", "del", name)
        _ip("link", "del", f"p{os.getpid()}")
    return f"no bridges here: {linked.stderr.strip()}" if linked.returncode else ""


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


_WHY_NOT = _why_not()

needs_namespaces = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)


class Network:
    """So many machines beside this one.

    Args:
        count: How many.

    Attributes:
        own_address: Of this one, as they see it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._bridge = f"b{os.getpid()}"
        self._subnet = f"10.231.{os.getpid() % 250}"
        self._halves = (f"{self._subnet}.0/25", f"{self._subnet}.128/25")
        self.own_address = f"{self._subnet}.1"

    def address(self, machine: int) -> str:
        """Return a machine's address."""
        return f"{self._subnet}.{11 + machine}"

    def on(self, machine: int, line: list[str]) -> list[str]:
        """Return the command line that runs another on a machine."""
        return ["ip", "netns", "exec", self._name(machine), *line]

    def cut(self, machine: int) -> None:
        """Cut a machine's link, both ways."""
        _ip("link", "set", self._link(machine), "down")

    def join(self, machine: int) -> None:
        """Mend it, whatever was done to it."""
        _ip("link", "set", self._link(machine), "up")
        for words in (
            *(("-n", self._name(machine), "route", "del", "blackhole", half) for half in self._halves),
            ("-n", self._name(machine), "route", "del", "blackhole", f"{self.own_address}/32"),
            ("route", "del", "blackhole", f"{self.address(machine)}/32"),
        ):
            with suppress(subprocess.CalledProcessError):
                _ip(*words)

    def silence(self, machine: int) -> None:
        """Have nothing of what a machine sends arrive; it hears the others."""
        for half in self._halves:
            _ip("-n", self._name(machine), "route", "replace", "blackhole", half)

    def deafen(self, machine: int) -> None:
        """Have nothing of what the coordinator sends to a machine arrive; it is heard."""
        _ip("route", "replace", "blackhole", f"{self.address(machine)}/32")

    def mute(self, machine: int) -> None:
        """Have nothing of what a machine sends to the coordinator arrive; it hears it, and the others hear both."""
        _ip("-n", self._name(machine), "route", "replace", "blackhole", f"{self.own_address}/32")

    def part(self, machine: int, other: int) -> None:
        """Have nothing of what a machine sends to another arrive there; all else does."""
        _ip("-n", self._name(machine), "route", "replace", "blackhole", f"{self.address(other)}/32")

    def shield(self, machine: int, ports: str) -> None:
        """Have no connection be made to ports of a machine, ``FIRST-LAST``; it connects to others, as it did."""
        _ip("-n", self._name(machine), "rule", "add", "ipproto", "tcp", "sport", ports, "blackhole")

    def unshield(self, machine: int, ports: str) -> None:
        """Open them again."""
        _ip("-n", self._name(machine), "rule", "del", "ipproto", "tcp", "sport", ports, "blackhole")

    def give_address(self, machine: int, address: str) -> None:
        """Give a machine another address, to which no other has a way."""
        _ip("-n", self._name(machine), "addr", "add", f"{address}/32", "dev", "lo")

    def start(self) -> None:
        """Make it."""
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.own_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for machine in range(self._count):
            name = self._name(machine)
            _ip("netns", "add", name)
            _ip("link", "add", self._link(machine), "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", self._link(machine), "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """Take it down, as far as it is there."""
        for machine in range(self._count):
            for words in (
                ("route", "del", "blackhole", f"{self.address(machine)}/32"),
                ("link", "del", self._link(machine)),
                ("netns", "del", self._name(machine)),
            ):
                with suppress(subprocess.CalledProcessError):
                    _ip(*words)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def _name(self, machine: int) -> str:
        return f"m{machine}-{os.getpid()}"

    def _link(self, machine: int) -> str:
        return f"v{machine}-{os.getpid()}"


@contextmanager
def machines(count: int) -> Iterator[Network]:
    """Join so many machines for a test."""
    network = Network(count)
    try:
        network.start()
        yield network
    finally:
        network.close()
