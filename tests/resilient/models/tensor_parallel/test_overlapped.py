"""Products whose tokens are exchanged meanwhile: what is frozen, what backwards leave for later, what a death ends.

That they are the products of one device is what the tests of layers and of whole stages show.
"""

from __future__ import annotations

import gc
import signal
import time
import weakref
from multiprocessing.connection import Connection
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from resilient.comm import StoreHost
from resilient.errors import CommunicationError
from resilient.models.tensor_parallel.devices import Exchange, TensorDevices, TokenPieces
from resilient.models.tensor_parallel.linears import ColumnLinear, RowLinear
from resilient.models.tensor_parallel.overlapped import gathered_products, summed_product
from resilient.pipeline.backward_split import differentiate_inputs
from tests.resilient.models.tensor_parallel.test_exchanges import close, drawn, on_devices
from tests.resilient.ranks import HOST, SECRET, join, processes

SAMPLES, TOKENS, WIDTH, INNER = 2, 5, 4, 6


def layers_of(devices: TensorDevices) -> tuple[ColumnLinear, ColumnLinear, RowLinear]:
    """Two layers that the same tokens enter and one that sums, of values that all degrees draw alike."""
    first, second = (ColumnLinear(WIDTH, devices.own_size(INNER)).double() for _ in range(2))
    last = RowLinear(nn.Linear(INNER, WIDTH, bias=False), devices).double()
    own = devices.own(INNER)
    for number, layer in enumerate((first, second)):
        layer.weight.data = drawn(INNER, WIDTH, seed=number)[own].clone()
        layer.bias.data = drawn(INNER, seed=2 + number)[own].clone()
    last.weight.data = drawn(WIDTH, INNER, seed=4)[:, own].clone()
    return first, second, last


def through(part: Tensor, layers: tuple[ColumnLinear, ColumnLinear, RowLinear], devices: TensorDevices) -> Tensor:
    first, second, last = layers
    _, (one, other) = gathered_products(part, (first, second), devices, TOKENS)
    return summed_product(torch.tanh(one) * other, last.weight, devices)


def in_one_piece(*frozen: str) -> dict[str, Tensor]:
    """Return the gradients of one device."""
    hidden = drawn(SAMPLES, TOKENS, WIDTH, seed=9).requires_grad_()
    values = {
        "first": drawn(INNER, WIDTH), "second": drawn(INNER, WIDTH, seed=1), "last": drawn(WIDTH, INNER, seed=4),
        "bias": drawn(INNER, seed=2), "other bias": drawn(INNER, seed=3),
    }  # fmt: skip
    for value in values.values():
        value.requires_grad_()
    linear = nn.functional.linear
    one, other = linear(hidden, values["first"], values["bias"]), linear(hidden, values["second"], values["other bias"])
    (linear(torch.tanh(one) * other, values["last"]) ** 2).sum().backward()
    found = {"hidden": hidden.grad, **{name: value.grad for name, value in values.items()}}
    return {name: grad for name, grad in found.items() if grad is not None and name not in frozen}


@pytest.mark.parametrize("frozen", [(), ("hidden",), ("first", "bias"), ("last",)])
def test_gradients_of_what_is_not_frozen_also_by_halves(frozen: tuple[str, ...]) -> None:
    """The second half of a backward, that of parameters, exchanges nothing: devices may do it at different times."""
    expected = in_one_piece(*frozen)

    def work(devices: TensorDevices) -> None:
        first, second, last = layers = layers_of(devices)
        tokens, inner = devices.own(TOKENS), devices.own(INNER)
        part = drawn(SAMPLES, TOKENS, WIDTH, seed=9)[:, tokens].clone()
        leaves = {
            "hidden": (part, (slice(None), tokens)), "first": (first.weight, inner), "second": (second.weight, inner),
            "last": (last.weight, (slice(None), inner)), "bias": (first.bias, inner),
            "other bias": (second.bias, inner),
        }  # fmt: skip
        for name, (leaf, _) in leaves.items():
            leaf.requires_grad_(name not in frozen)
        made = through(part, layers, devices)
        trained = [leaf for name, (leaf, _) in leaves.items() if name != "hidden" and leaf.requires_grad]
        inputs = [part] if part.requires_grad else []
        found, rest = differentiate_inputs([made], [2 * made.detach()], inputs, trained)
        if inputs:  # else all of it is in the second half
            (part.grad,) = found
            devices.start_gather = devices.start_sum = Mock(side_effect=AssertionError)
        rest.accumulate()
        for name, (leaf, place) in leaves.items():
            if name not in frozen:
                assert leaf.grad is not None, name
                close(leaf.grad, expected[name][place])

    on_devices(2, work, num_chunks=2)


class Watched:
    """An exchange of which is known whether somebody waits for it, and whether its tensor is still there."""

    def __init__(self, exchange: Exchange, total: Tensor, *, fails: bool) -> None:
        self.is_waited_for, self.total, self._fails = False, weakref.ref(total), fails
        self._exchanges = [exchange]

    def wait(self) -> None:
        self.is_waited_for = True
        if self._fails:
            raise CommunicationError("a device is gone")
        self.end()

    def end(self) -> None:
        self._exchanges.pop().wait()


def watch_sums(devices: TensorDevices, fails_at: int | None = None) -> list[Watched]:
    """Return the sums that are started; one may fail."""
    start, begun = devices.start_sum, list[Watched]()

    def watched(total: Tensor, pieces: TokenPieces) -> Exchange:
        begun.append(Watched(start(total, pieces), total, fails=len(begun) == fails_at))
        return begun[-1]

    devices.start_sum = watched
    return begun


def test_what_runs_again_waits_for_all_that_it_starts_and_is_freed() -> None:
    def work(devices: TensorDevices) -> None:
        layers, begun = layers_of(devices), watch_sums(devices)
        part = drawn(SAMPLES, TOKENS, WIDTH, seed=9)[:, devices.own(TOKENS)].clone().requires_grad_()
        checkpoint(through, part, layers, devices, use_reentrant=False).sum().backward()
        assert len(begun) == 2 * 2 + 2, "of the product, twice, and of the gradients of what entered"
        assert [each.is_waited_for for each in begun] == [True] * len(begun)
        assert [each.total() for each in begun] == [None] * len(begun)

    on_devices(2, work, num_chunks=2)


def test_what_is_given_up_between_two_chunks_is_freed() -> None:
    def work(devices: TensorDevices) -> None:
        layers, begun = layers_of(devices), watch_sums(devices, fails_at=0)
        part = drawn(SAMPLES, TOKENS, WIDTH, seed=9)[:, devices.own(TOKENS)].clone().requires_grad_()
        with pytest.raises(CommunicationError):
            through(part, layers, devices)
        assert [each.is_waited_for for each in begun] == [True, False]
        for each in begun:
            each.end()
        gc.collect()  # the error knows its frames
        assert [each.total() for each in begun] == [None, None]

    on_devices(2, work, num_chunks=2)


def survivor(rank: int, parent: Connection, victim: int) -> None:
    """Go forward and back for ever; tell when that ended, and whom it is blamed on."""
    host = StoreHost(HOST, SECRET)
    parent.send(host.address)
    comm = join(parent.recv(), rank, 3)
    devices, num_done = TensorDevices(comm, (0, 1, 2), num_chunks=2), 0
    column, row = ColumnLinear(64, 64), RowLinear(nn.Linear(192, 64), devices)
    try:
        while True:
            part = torch.ones(1, devices.own_size(1000), 64, requires_grad=True)
            _, (inner,) = gathered_products(part, [column], devices, 1000)
            row(inner).sum().backward()
            num_done += 1
            if num_done == 3:
                parent.send("runs")
                if rank == victim:
                    signal.pause()
    except CommunicationError as error:
        parent.send((time.monotonic(), error.peer))
    parent.recv()


def test_death_of_a_device_ends_the_chunks_of_the_others_who_name_it() -> None:
    victim = 1
    with processes(survivor, 3, victim) as started:
        addresses = [connection.recv() for _, connection in started]
        for _, connection in started:
            connection.send(addresses[0])
        assert [connection.recv() for _, connection in started] == ["runs"] * 3
        killed_at = time.monotonic()
        started[victim][0].kill()
        told = [connection.recv() for rank, (_, connection) in enumerate(started) if rank != victim]
    assert [peer for _, peer in told] == [victim] * 2
    assert max(at for at, _ in told) - killed_at < 5.0, "not the group's timeout"
