"""Activations cross the border of two stages in any shape; a header goes along once for each shape."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from resilient.comm import DONE, Group, Pending
from resilient.models.layer import Activations, Batch
from resilient.pipeline.p2p import Downstream, Upstream, signature


class Loopback:
    """Both ends of a border in one thread: a message waits under its tag until it is received."""

    rank, size, on_devices = 0, 2, False

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self._waiting: dict[int, deque[Tensor]] = defaultdict(deque)

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        self.sent.append(tensor)
        self._waiting[tag].append(tensor.clone())
        return DONE

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        return DONE

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        return DONE

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        return _Receipt(self._waiting[tag], tensor)

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        raise AssertionError("a border sums nothing")

    def check(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Receipt:
    def __init__(self, waiting: deque[Tensor], tensor: Tensor) -> None:
        self._waiting, self._tensor = waiting, tensor

    def wait(self) -> None:
        self._tensor.copy_(self._waiting.popleft())


def border() -> tuple[Loopback, Downstream, Upstream]:
    comm = Loopback()
    return comm, Downstream(comm, 1), Upstream(comm, 0, torch.device("cpu"))


def microbatch(length: int) -> Batch:
    return {"tokens": torch.zeros(2, length, dtype=torch.int64)}


def activations_of(length: int, value: float) -> Activations:
    return {
        "hidden": torch.full((2, length, 3), value, requires_grad=True),
        "frozen": torch.full((length,), value, dtype=torch.bfloat16),
        "ids": torch.arange(length),
    }


def test_activations_arrive_with_its_types_and_wants_gradients_where_it_did() -> None:
    _, down, up = border()
    shapes = signature(microbatch(4))
    sent = activations_of(4, 1.5)
    down.send(sent, 0, shapes)
    received = up.receive(0, shapes)
    assert list(received) == ["hidden", "frozen", "ids"]
    for name, tensor in sent.items():
        assert received[name].dtype is tensor.dtype
        assert received[name].requires_grad is tensor.requires_grad
        assert torch.equal(received[name], tensor)
    assert received["hidden"].is_leaf


def test_gradients_go_back_for_what_wants_them_alone() -> None:
    comm, down, up = border()
    shapes = signature(microbatch(4))
    down.send(activations_of(4, 1.0), 5, shapes)
    up.receive(5, shapes)
    num_sent = len(comm.sent)
    gradient = torch.rand(3, 4, 2).permute(2, 1, 0)
    up.send({"hidden": gradient}, 5)
    assert len(comm.sent) == num_sent + 1
    back = down.receive(5)
    assert list(back) == ["hidden"]
    assert torch.equal(back["hidden"], gradient)


def test_header_goes_along_once_for_each_shape_and_later_receipts_can_be_posted_early() -> None:
    comm, down, up = border()
    lengths = [4, 6, 4, 6, 6]
    messages = []
    for index, length in enumerate(lengths):
        before = len(comm.sent)
        down.send(activations_of(length, float(index)), index, signature(microbatch(length)))
        messages.append(len(comm.sent) - before)
    assert messages == [4, 4, 3, 3, 3]
    for index, length in enumerate(lengths):
        received = up.receive(index, signature(microbatch(length)))
        assert received["hidden"].shape == (2, length, 3)
        assert received["hidden"].eq(index).all()
        for following, length_of_it in enumerate(lengths[index + 1 : index + 3], start=index + 1):
            up.post(following, signature(microbatch(length_of_it)))


def test_header_goes_again_when_both_ends_have_forgotten() -> None:
    comm, down, up = border()
    shapes = signature(microbatch(4))
    for index in range(3):
        before = len(comm.sent)
        down.send(activations_of(4, float(index)), index, shapes)
        assert up.receive(index, shapes)["hidden"].eq(index).all()
        assert len(comm.sent) - before == (3 if index == 1 else 4)
        if index == 1:
            down.forget()
            up.forget()


def test_shapes_that_depend_on_values_are_refused() -> None:
    _, down, _ = border()
    shapes = signature(microbatch(4))
    down.send({"hidden": torch.zeros(4)}, 0, shapes)
    message = (
        "shapes of activations must depend on the shapes of the microbatch alone, got "
        "(_Described(name='hidden', dtype='float32', shape=(5,), wants_gradient=False),) after "
        "(_Described(name='hidden', dtype='float32', shape=(4,), wants_gradient=False),) for microbatches of equal "
        "shapes; pad to a size that follows from the inputs' shapes"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        down.send({"hidden": torch.zeros(5)}, 1, shapes)


@pytest.mark.parametrize(
    ("activations", "got"),
    [
        ({f"t{i}": torch.zeros(1) for i in range(33)}, "33 tensors in 521 bytes"),
        ({"x" * 1100: torch.zeros(1)}, "1 tensors in 1116 bytes"),
    ],
)
def test_activations_too_large_to_describe_is_refused(activations: Activations, got: str) -> None:
    _, down, _ = border()
    message = (
        f"activations must be at most 32 tensors described in 1024 bytes, got {got}; pass fewer tensors between layers"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        down.send(activations, 0, signature(microbatch(4)))


def test_signature_tells_name_shape_and_type() -> None:
    one = signature({"a": torch.zeros(2, 3)})
    others = [{"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3).int()}]
    assert one == signature({"a": torch.ones(2, 3)})
    assert all(signature(other) != one for other in others)
