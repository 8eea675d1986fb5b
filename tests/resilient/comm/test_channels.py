"""Messages between ranks that connect when they first have one: in any order, until one leaves or is a stranger."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from resilient.comm import channel_peer
from resilient.comm.channel_peer import ChannelPeer
from resilient.comm.channels import Channels
from resilient.common.network.ports import PortsTakenError, port_range
from resilient.errors import CommunicationError
from tests.resilient.common.network.test_ports import free_range
from tests.resilient.ranks import HOST

LONG = 1 << 20
"""Numbers: more than are sent before somebody waits for them."""


class Ranks:
    """Some of one process, which may all send each other messages."""

    def __init__(self, count: int, timeout_s: float = 60.0) -> None:
        self.channels = [Channels(rank, HOST, timeout_s) for rank in range(count)]
        for each in self.channels:
            each.meet({other.rank: other.told for other in self.channels if other is not each})


@pytest.fixture
def pair() -> Iterator[list[Channels]]:
    channels = Ranks(2).channels
    yield channels
    for each in channels:
        each.close()


def test_they_listen_in_the_range_that_is_given() -> None:
    ports = free_range(1)
    listening = Channels(0, HOST, 60.0, ports)
    assert listening.told.startswith(f"{HOST}:{port_range(ports)[0]}/")
    with pytest.raises(PortsTakenError):
        Channels(1, HOST, 60.0, ports)
    listening.close()


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "channels":
            thread.join(timeout=60)
            assert not thread.is_alive()


@pytest.mark.parametrize("size", [0, 1, 3, LONG])
@pytest.mark.parametrize("sender", [0, 1])
@pytest.mark.parametrize("is_wanted_first", [False, True])
def test_messages_of_any_size_go_both_ways(pair: list[Channels], size: int, sender: int, is_wanted_first: bool) -> None:
    sent, received = torch.arange(size).bfloat16(), torch.zeros(size, dtype=torch.bfloat16)
    ends = [
        lambda: pair[1 - sender].recv(received, sender, 1 << 40),
        lambda: pair[sender].send(sent, 1 - sender, 1 << 40),
    ]
    for message in [start() for start in (ends if is_wanted_first else ends[::-1])]:
        message.wait()
    assert torch.equal(received, sent)


def test_messages_arrive_by_tag_and_those_of_one_tag_in_their_order(pair: list[Channels]) -> None:
    one, other = pair
    sends = [one.send(torch.full((size,), value), 1, tag) for size, tag, value in
             [(1, 7, 1), (LONG, 7, 2), (1, 8, 3), (1, 7, 4), (LONG, 9, 5)]]  # fmt: skip
    received = {(size, tag): torch.zeros(size, dtype=torch.int64) for size in (1, LONG) for tag in (7, 8, 9)}
    for size, tag, value in [(LONG, 9, 5), (1, 8, 3), (1, 7, 1), (LONG, 7, 2), (1, 7, 4)]:
        other.recv(received[size, tag], 0, tag).wait()
        assert received[size, tag].eq(value).all()
    for send in sends:
        send.wait()


def test_ranks_that_all_begin_at_once_have_one_connection_for_each_two() -> None:
    ranks = Ranks(5)
    together = threading.Barrier(5, timeout=60)
    received = [torch.full((5,), float(rank)) for rank in range(5)]

    def work(channels: Channels) -> None:
        peers = [rank for rank in range(5) if rank != channels.rank]
        together.wait()
        messages = [channels.send(torch.full((1,), float(channels.rank)), peer, 1) for peer in peers]
        messages += [channels.recv(received[channels.rank][peer : peer + 1], peer, 1) for peer in peers]
        for message in messages:
            message.wait()

    threads = [threading.Thread(target=work, args=(channels,)) for channels in ranks.channels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.tolist() for each in received] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 5
    connected = [[peer for peer in each._carrier._peers.values() if peer._connection] for each in ranks.channels]
    assert [len(each) for each in connected] == [4] * 5
    for each in ranks.channels:
        each.close()
    wait_for_threads()


@pytest.mark.parametrize("leaver", [0, 1])
def test_message_of_which_a_part_has_come_fails_at_both_ends_when_one_leaves(
    pair: list[Channels], leaver: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo forgets it: then its receiver, and all that its group has, would stay until the timeout."""
    size = 64 * LONG  # far over what the kernel holds
    is_coming, goes_on = threading.Event(), threading.Event()
    expect = ChannelPeer._expect

    def expect_and_hold(self: ChannelPeer, space: memoryview, landed: Callable[[], None]) -> None:
        expect(self, space, landed)
        if len(space) == size:
            is_coming.set()
            assert goes_on.wait(60)

    monkeypatch.setattr(ChannelPeer, "_expect", expect_and_hold)
    monkeypatch.setattr(channel_peer, "_READS_AT_ONCE", 1)
    received = torch.zeros(size, dtype=torch.uint8)
    messages = [pair[0].send(torch.ones(size, dtype=torch.uint8), 1, 2), pair[1].recv(received, 0, 2)]
    assert is_coming.wait(60)
    pair[leaver].abort()
    if leaver == 0:
        assert pair[leaver]._carrier.is_done.wait(60)
    goes_on.set()
    told = []
    for message in messages:
        with pytest.raises(CommunicationError) as error:
            message.wait()
        told.append((error.value.peer, str(error.value)))
    assert told[leaver] == (None, "the generation was aborted")
    peer, text = told[1 - leaver]
    assert peer == leaver
    assert text.startswith(f"connection to rank {leaver}: ")
    with pytest.raises(CommunicationError, match=r"^the generation was aborted$"):
        pair[leaver].send(torch.ones(1), 1 - leaver, 3).wait()
    with pytest.raises(CommunicationError, match=f"^connection to rank {leaver}: "):
        pair[1 - leaver].send(torch.ones(1), leaver, 3).wait()


def test_what_was_sent_counts_though_the_sender_has_left(pair: list[Channels]) -> None:
    one, other = pair
    first, second = torch.zeros(1), torch.zeros(1)
    waiting = other.recv(first, 0, 1)
    for tag in (2, 1):
        one.send(torch.full((1,), float(tag)), 1, tag).wait()
    waiting.wait()
    one.close()
    broken = other.recv(torch.zeros(1), 0, 3)
    with pytest.raises(CommunicationError):
        broken.wait()
    other.recv(second, 0, 2).wait()
    assert (first.item(), second.item()) == (1.0, 2.0)


def test_message_without_another_end_fails_when_its_time_is_over_and_accuses_nobody() -> None:
    channels = Ranks(2, timeout_s=0.1).channels
    for each in channels:
        what = rf"^Timed out after 0\.1 s of receiving from rank {1 - each.rank}$"
        with pytest.raises(CommunicationError, match=what) as error:
            each.recv(torch.zeros(1), 1 - each.rank, 1).wait()
        assert error.value.peer is None
    for each in channels:
        each.close()
    wait_for_threads()


@pytest.mark.parametrize("sizes", [(1, 2), (LONG, LONG + 1)])
def test_sizes_that_differ_end_the_connection(pair: list[Channels], sizes: tuple[int, int]) -> None:
    one, other = pair
    message = other.recv(torch.zeros(sizes[1], dtype=torch.uint8), 0, 1)
    one.send(torch.zeros(sizes[0], dtype=torch.uint8), 1, 1)
    expected = f"^connection to rank 0: it sent {sizes[0]} bytes where {sizes[1]} were expected$"
    with pytest.raises(CommunicationError, match=expected):
        message.wait()


def test_rank_that_is_gone_or_somebody_else_is_an_error() -> None:
    one, other, stranger = Ranks(3).channels
    other.close()
    wait = one.recv(torch.zeros(1), 1, 1)
    with pytest.raises(CommunicationError, match=r"^connection to rank 1: .*Connect call failed"):
        wait.wait()
    one.meet({2: f"{stranger.told.partition('/')[0]}/{'00' * 32}"})
    with pytest.raises(CommunicationError, match=r"^connection to rank 2: Connection closed by peer$"):
        one.send(torch.zeros(1), 2, 1).wait()
    for each in (one, stranger):
        each.close()
    wait_for_threads()


def test_strangers_get_nothing_and_are_in_nobodys_way(pair: list[Channels]) -> None:
    one, other = pair
    host, _, port = other.told.partition("/")[0].rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
    for each in strangers:
        each.sendall(b"\xff" * 100)
    received = torch.zeros(1)
    sent, waiting = one.send(torch.ones(1), 1, 1), other.recv(received, 0, 1)
    sent.wait()
    waiting.wait()
    assert received.item() == 1.0
    for each in strangers:
        each.close()
