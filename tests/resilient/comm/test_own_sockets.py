"""Where gloo listens, nobody comes in any more once the ranks have met; who came before goes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from resilient.comm import GlooCommunicator
from resilient.comm.own_sockets import let_nobody_else_in, listeners
from tests.resilient.ranks import HOST, as_threads, join


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server((HOST, 0)) as listener:
        host, port = listener.getsockname()
        yield listener, f"{host}:{port}"


def knock(address: str, timeout_s: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def test_nobody_comes_in_and_who_was_told_nothing_goes() -> None:
    with listening() as (listener, address), listening() as (other, others), knock(address, 60) as stranger:
        to_stranger, _ = listener.accept()
        with knock(address, 60) as rank, to_stranger:
            to_rank, _ = listener.accept()
            with to_rank:
                to_rank.sendall(b"a proof")
                stranger.sendall(b"garbage")
                let_nobody_else_in(address)
                with pytest.raises(TimeoutError):
                    knock(address, 0.5)
                assert to_stranger.recv(9) + to_stranger.recv(9) == b"garbage", "it has ended"
                assert stranger.recv(1) == b""
                assert rank.recv(9) == b"a proof"
                rank.sendall(b"another")
                assert to_rank.recv(9) == b"another"
        assert address in listeners()
        knock(others, 60).close()
        other.accept()[0].close()


def test_ranks_that_have_met_take_no_further_connection_where_they_listen() -> None:
    def work(rank: int, address: str) -> float:
        comm = join(address, rank, 2)
        assert isinstance(comm, GlooCommunicator)
        comm.all_reduce(torch.ones(1), (0, 1)).wait()  # the other one has met this one, too
        (where,) = comm.peers
        with pytest.raises(TimeoutError):
            knock(where, 0.5)
        value = torch.ones(1)
        comm.all_reduce(value, (0, 1)).wait()
        return value.item()

    assert as_threads(2, work) == [2.0, 2.0]
