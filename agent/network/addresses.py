"""Checks that the address a coordinator is to listen at is one that other machines can use."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable

import psutil

from resilient.errors import ArgumentError


def addresses_of(host: str) -> list[str]:
    """Return the addresses of a name, those to listen at first.

    Raises:
        OSError: There are none.
        UnicodeError: It cannot be a name.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys(str(address[4][0]) for address in found))


def own_addresses() -> list[str]:
    """Return the addresses of this machine at which others may reach it, without those of one link only."""
    found = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses]
    return [address for address in found if _is_routed(address)]


def address_of(interface: str, like: str = "") -> str:
    """Return the address of this machine that an interface has.

    Args:
        interface: Its name, or the address itself.
        like: An address; of an interface that has several, one of the same family is taken, if there is one.

    Raises:
        ArgumentError: This machine has no such interface, or it has no address at which others may reach it.
    """
    known = {
        name: [each.address for each in addresses if _is_address(each.address) and not _is_of_link(each.address)]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if interface in {address for addresses in known.values() for address in addresses}:
        return interface
    if found := known.get(interface):
        return min(found, key=lambda address: (":" in address) != (":" in like))
    choice = ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in known.items() if addresses)
    raise ArgumentError(
        "interface", "be an interface of this machine, or its address", repr(interface), f"choose of {choice}"
    )


def check_host(
    host: str, resolve: Callable[[str], list[str]] = addresses_of, own: Callable[[], Iterable[str]] = own_addresses
) -> None:
    """Check that a name is not one that means another machine on every machine.

    An address is taken as it is: 127.0.0.1, the default, says that nobody else is to join.

    Args:
        host: Name or address.
        resolve: From name to addresses.
        own: This machine's addresses, to choose from.

    Raises:
        ArgumentError: Nobody knows the name, or it is this machine's loopback: the message says what to give instead.
    """
    if _is_address(host):
        return
    try:
        addresses = resolve(host)
        got = next((f"{host!r}, which is {each} here" for each in addresses if _is_loopback(each)), "")
    except (OSError, UnicodeError) as error:
        got = f"{host!r}, which cannot be resolved ({getattr(error, 'strerror', None) or error})"
    if got:
        choice = " or ".join(own()) or "one that others can reach"
        raise ArgumentError(
            "host",
            "be an address at which other machines reach this one",
            got,
            f"give {choice}, or leave {{host}} out for a job on this machine alone",
        )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _is_routed(text: str) -> bool:
    return _is_address(text) and not (_is_loopback(text) or _is_of_link(text))


def _is_of_link(address: str) -> bool:
    return ipaddress.ip_address(address).is_link_local
