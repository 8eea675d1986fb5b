"""Whatever the numbers of devices, each token goes from the one that has it to the one that wants it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from resilient.models.tensor_parallel.devices import part_bounds
from resilient.pipeline.p2p import Downstream, Signature, Upstream, signature
from resilient.pipeline.token_borders import SplitDownstream, SplitUpstream, TokenCuts
from tests.resilient.ranks import as_threads, join

CPU = torch.device("cpu")


def cuts(index: int, degree: int, other_degree: int) -> TokenCuts:
    return TokenCuts(
        index=index, degree=degree, other_degree=other_degree,
        tokens=lambda shapes: dict.fromkeys(("hidden", "odd"), shapes["tokens"][1]),
    )  # fmt: skip


def common(index: int, degree: int, other_degree: int, shapes: Signature) -> dict[int, slice]:
    """Return which tokens one device has in common with each of the other stage."""
    found, divided = cuts(index, degree, other_degree).of(shapes, [])
    assert divided == {"hidden", "odd"}
    return {other: own["hidden"] for other, own in found.items()}


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 9])
@pytest.mark.parametrize(("degree", "other"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 3), (4, 8)])
def test_both_ends_know_who_has_what_in_common(degree: int, other: int, num_tokens: int) -> None:
    shapes = signature({"tokens": torch.zeros(2, num_tokens)})
    sent = {(i, j): own for i in range(degree) for j, own in common(i, degree, other, shapes).items()}
    wanted = {(i, j): own for j in range(other) for i, own in common(j, other, degree, shapes).items()}
    assert sent.keys() == wanted.keys()
    assert {i for i, _ in sent} == set(range(degree)), "who has no token sends none"
    assert {j for _, j in sent} == set(range(other))
    before, after = part_bounds(num_tokens, degree), part_bounds(num_tokens, other)
    for (i, j), own in sent.items():
        tokens = range(before[i] + own.start, before[i] + own.stop)
        assert list(tokens) == list(range(after[j] + wanted[i, j].start, after[j] + wanted[i, j].stop)) or not tokens
    assert sum(own.stop - own.start for own in sent.values()) == num_tokens


@pytest.mark.parametrize(("degree", "other"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 3), (4, 8)])
def test_each_device_gets_what_all_have_whole_from_one(degree: int, other: int) -> None:
    sent = {(i, j) for i in range(degree) for j in cuts(i, degree, other).targets}
    assert sent == {(cuts(j, other, degree).source, j) for j in range(other)}


def test_features_are_whole_on_all_devices_of_both_stages() -> None:
    assert cuts(1, 2, 4).of(7, [2, 3]) == ({2: {}, 3: {}}, frozenset())


@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (3, 2)])
def test_tokens_and_their_gradients_arrive(before: int, after: int, num_tokens: int) -> None:
    whole = torch.arange(2.0 * num_tokens * 3).view(2, num_tokens, 3)
    shapes = signature({"tokens": torch.zeros(2, num_tokens)})
    sources, targets = range(before), range(before, before + after)

    def send(rank: int, address: str) -> list[Tensor]:
        comm = join(address, rank, before + after)
        first, end = part_bounds(num_tokens, before)[rank : rank + 2]
        border = SplitDownstream([Downstream(comm, each) for each in targets], cuts(rank, before, after))
        found: list[Tensor] = []
        for microbatch in range(2):  # the second one without a header
            sent = {
                "features": torch.ones(3).requires_grad_(),
                "hidden": (whole[:, first:end] + microbatch).requires_grad_(),
                "odd": whole[:, first:end].long(),
            }
            pending = border.send(sent, microbatch, shapes)
            received = border.receive(microbatch)
            assert list(received) == ["features", "hidden"]
            found += [received["hidden"], received["features"]]
            for each in pending:
                each.wait()
        return found

    def receive(rank: int, address: str) -> list[Tensor]:
        comm = join(address, rank, before + after)
        border = SplitUpstream([Upstream(comm, each, CPU) for each in sources], cuts(rank - before, after, before))
        found: list[Tensor] = []
        for microbatch in range(2):
            border.post(microbatch, shapes)
            received = border.receive(microbatch, shapes)
            assert received["hidden"].requires_grad
            assert not received["odd"].requires_grad
            assert received["features"].tolist() == [1.0] * 3
            found += [received["hidden"].detach(), received["features"].detach()]
            gradients = {name: 10 * received[name].detach() for name in ("hidden", "features")}
            for each in border.send(gradients, microbatch):
                each.wait()
        return found

    def work(rank: int, address: str) -> list[Tensor]:
        return send(rank, address) if rank in sources else receive(rank, address)

    results = as_threads(before + after, work)
    for microbatch in range(2):
        gradients = torch.cat([results[rank][2 * microbatch] for rank in sources], dim=1)
        arrived = torch.cat([results[rank][2 * microbatch] for rank in targets], dim=1)
        of_features = torch.stack([results[rank][2 * microbatch + 1] for rank in sources]).sum(0)
        assert of_features.tolist() == [10.0 * after] * 3, "the sum is what counts"
        assert torch.equal(arrived, whole + microbatch)
        assert torch.equal(gradients, 10 * (whole + microbatch))
