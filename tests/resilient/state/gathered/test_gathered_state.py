"""What devices divide is whole on each of them while a layer uses it, and its gradients are summed into the parts."""

from __future__ import annotations

import pytest
import torch

from resilient.state.gathered.gathered_state import GatheredState
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.inputs.profile import LayerProfile
from tests.mixtures import StateSizes
from tests.resilient.pieced import number, piece_of
from tests.resilient.ranks import as_threads, join

SIZES = [
    StateSizes(trainable=(5, 2), frozen=(3, 4), num_slots=2),
    StateSizes(trainable=(1,), frozen=(), num_slots=1),
    StateSizes(trainable=(), frozen=(7,), num_slots=0),
]


def shares(sizes: StateSizes, degree: int) -> list[ByteIntervals]:
    """What each device has, as plans say."""
    trained, frozen = 8 * sum(sizes.trainable), 8 * sum(sizes.frozen)
    profile = LayerProfile(
        name="layer", costs=(), parameter_bytes=trained + frozen, optimizer_bytes=trained * sizes.num_slots,
        segments=(trained, frozen, *[trained] * sizes.num_slots, 0),
    )  # fmt: skip
    return [profile.share(index, degree) for index in range(degree)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("degree", [2, 3])
def test_parameters_are_whole_while_somebody_uses_them(sizes: StateSizes, degree: int) -> None:
    held = shares(sizes, degree)
    whole = number(piece_of(sizes))
    group = tuple(range(degree))

    def work(rank: int, address: str) -> list[int]:
        comm = join(address, rank, degree)
        gathered = GatheredState(comm, group, held, number(piece_of(sizes, held[rank])))
        taken = [gathered.num_bytes]
        gathered.acquire()
        gathered.acquire()  # another layer shares it
        gathered.wait()
        for _ in range(2):
            taken.append(gathered.num_bytes)
            for name, parameter in gathered.parameters.items():
                torch.testing.assert_close(parameter.detach(), whole.parameters[name].detach(), rtol=0, atol=0)
                assert parameter.requires_grad == whole.parameters[name].requires_grad
            gathered.release()
        return [*taken, gathered.num_bytes]

    num_bytes = 8 * (sum(sizes.trainable) + sum(sizes.frozen))
    assert as_threads(degree, work) == [[0, num_bytes, num_bytes, 0]] * degree


@pytest.mark.parametrize("degree", [2, 3])
def test_gradients_of_all_are_added_to_what_each_has(degree: int) -> None:
    sizes = SIZES[0]
    held, group = shares(sizes, degree), tuple(range(degree))
    expected = torch.arange(7, dtype=torch.float64) * sum(10**rank for rank in range(degree))

    def work(rank: int, address: str) -> list[float]:
        comm = join(address, rank, degree)
        state = piece_of(sizes, held[rank])
        gathered = GatheredState(comm, group, held, state)
        for _ in range(2):
            gathered.acquire()
            gathered.wait()
            sum_up = gathered.catch_gradients()
            weights = torch.arange(7, dtype=torch.float64) * 10**rank
            trained = torch.cat([each.flatten() for each in gathered.parameters.values() if each.requires_grad])
            (trained * weights).sum().backward()
            summed = sum_up()
            gathered.release()
            summed.add()
        assert all(parameter.grad is None for parameter in gathered.parameters.values())
        return state.grad.tolist()

    assert [value for part in as_threads(degree, work) for value in part] == (2 * expected).tolist()
