"""A node is introduced to others before it gets work: it and they must reach each other at the addresses they tell.

The coordinator asks with :class:`Introduce`, after an agent's ``Hello`` and before anything else is said, and hears
what came of it (:class:`Introduced`). A peer is asked where there is one: it is what the workers will talk to, over the
network that they will use. For the first node the coordinator rings itself. Must not import torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from resilient.agent.network.doorbell import RING_S, Doorbell, can_ring, joined

INTRODUCTION_S = 6 * RING_S
"""How long one may take."""

Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
"""Of any other number a connection cannot even be tried."""

_NUM_PEERS = 3
"""So many are asked, and one that is reached will do: others may be about to be lost themselves."""


class Introduce(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Listen, and ring at some others' doors.

    Args:
        peers: Where their doorbells are, host:port.
        ports: The range that the job's sockets listen in, "" for any port.
    """

    peers: tuple[str, ...]
    ports: str


class Introduced(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What came of it.

    Args:
        port: Where this node's doorbell is, at the address that it told.
        failures: What does not work, for each peer that was asked until one was reached; empty where one was.
        error: Why there is no doorbell; "" where there is one.
    """

    port: Port = 0
    failures: tuple[str, ...] = ()
    error: str = ""


decode_introduced = msgspec.msgpack.Decoder(Introduced).decode


def chosen_peers(bells: Sequence[str]) -> tuple[str, ...]:
    """Return some of the doorbells there are, of early and of late nodes."""
    last = len(bells) - 1
    return tuple(bells[index] for index in sorted({0, last // 2, last})[:_NUM_PEERS]) if bells else ()


async def introduce_oneself(wanted: Introduce, doorbell: Doorbell, host: str) -> Introduced:
    """Do what is asked for."""
    try:
        await doorbell.open(host, wanted.ports)
    except OSError as error:
        return Introduced(error=error.strerror or str(error))
    rings = [asyncio.create_task(doorbell.ring(peer)) for peer in wanted.peers]
    failures: list[str] = []
    try:
        for ended in asyncio.as_completed(rings):
            failure = await ended
            if not failure:
                return Introduced(port=doorbell.port)
            failures.append(failure)
    finally:
        for each in rings:
            each.cancel()
        await asyncio.gather(*rings, return_exceptions=True)
    return Introduced(port=doorbell.port, failures=tuple(failures))


async def why_refused(asked: Introduce, told: Introduced, host: str, token: str, *, is_chosen: bool) -> str:
    """Return why a node is to have no part in the job, "" if it may.

    Args:
        asked: What it was asked to do.
        told: What came of it.
        host: The address at which it says that it is reached.
        token: The job's.
        is_chosen: The address was chosen for it: without peers it is taken as it is, for it may be of a network that
            the coordinator has no part in.
    """
    if told.error:
        return f"a node must listen for others at {host}, got: {told.error}"
    failures = told.failures
    bell = joined(host, told.port)
    if not asked.peers and not is_chosen and (why := await can_ring(bell, token)):
        failures = (f"the coordinator cannot connect to {bell} ({why})",)
    if not failures:
        return ""
    ports = f"ports {asked.ports}" if asked.ports else "all ports (or those of `resilient run --port-range`)"
    return (
        f"a node and the others must reach each other, got {'; '.join(failures)}; open {ports} between the job's "
        f"machines, both ways, or give another address of {host}'s machine with `resilient agent --interface`"
    )
