"""Gradient sums start while the last backward still runs, and in one order on all ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from resilient.comm import DONE, Communicator, Group, Pending
from resilient.data.dataset import stack
from resilient.models.layer import Activations, WholeModel
from resilient.pipeline.gradient_sync import GradientSync
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import Piece, common_pieces
from tests.mixtures import SIZES, Held, StateSizes, holders
from tests.resilient.pieced import piece_of
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import CPU, TiedModel, Tokens


class RecordingCommunicator:
    """Doubles what it is to sum, as a peer with equal gradients would, once it is waited for."""

    rank, size, on_devices = 0, 2, False

    def __init__(self, events: list[str], names: dict[int, str]) -> None:
        self.events = events
        self.names = names
        self.groups: dict[str, Group] = {}

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        name = self.names[tensor.data_ptr()]
        self.events.append(f"sum {name}")
        self.groups[name] = group
        return _Doubling(tensor)

    def send(self, tensor: Tensor, target: int, tag: int) -> Pending:
        return DONE

    def recv(self, tensor: Tensor, source: int, tag: int) -> Pending:
        return DONE

    def all_gather(self, parts: Sequence[Tensor], group: Group) -> Pending:
        return DONE

    def reduce_scatter(self, parts: Sequence[Tensor], group: Group) -> Pending:
        return DONE

    def check(self) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Doubling:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> None:
        self._tensor.mul_(2)


class Setup:
    """The small model on one rank; ``groups`` as given or a pair for every state."""

    def __init__(self, model: TiedModel, groups: dict[str, Group] | None = None) -> None:
        self.states = {
            spec.name: LayerState(spec, BufferLayout.of(spec), (), torch.float64, CPU) for spec in model.layers
        }
        for state in self.states.values():
            state.initialize(0)
        modules = {spec.name: bind(spec, self.states, CPU) for spec in model.layers}
        self.whole = WholeModel(model, modules)
        self.events: list[str] = []
        self.comm = RecordingCommunicator(self.events, {s.grad.data_ptr(): n for n, s in self.states.items()})
        index = {spec.name: i for i, spec in enumerate(model.layers)}
        trained = {name: state for name, state in self.states.items() if state.layout.num_trainable}
        self.trained = [index[name] for name in trained]
        self.sync = GradientSync(
            self.comm,
            {index[name]: state for name, state in trained.items()},
            {index[name]: [Piece((groups or {}).get(name, (0, 1)), state.held)] for name, state in trained.items()},
        )
        for name, module in modules.items():
            module.register_forward_hook(lambda _, __, activations, name=name: self._watch(activations, name))

    def _watch(self, activations: Activations, name: str) -> None:
        for tensor in activations.values():
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self.events.append(f"backward {name}"))

    def backward(self, index: int) -> None:
        self.whole.loss(stack([Tokens()[index]])).backward()


def test_sums_start_inside_the_last_backward_and_only_there() -> None:
    setup = Setup(TiedModel(num_blocks=2))
    setup.sync.begin()
    setup.backward(0)
    assert not any(event.startswith("sum") for event in setup.events)
    setup.events.clear()
    setup.sync.arm(setup.trained)
    setup.backward(1)
    assert [event for event in setup.events if event != "backward embed"] == [
        "backward head", "sum head", "backward block.1", "sum block.1", "backward block.0", "sum block.0", "sum embed",
    ]  # fmt: skip


def test_states_are_armed_apart_and_summed_in_order() -> None:
    """Stages of one worker have their last backwards at different times."""
    setup = Setup(TiedModel(num_blocks=2))
    setup.sync.begin()
    setup.sync.arm([1, 3])
    setup.backward(0)
    assert [event for event in setup.events if event.startswith("sum")] == ["sum head"]
    setup.sync.arm([2, 0])
    setup.backward(1)
    assert [event for event in setup.events if event.startswith("sum")] == [
        "sum head", "sum block.1", "sum block.0", "sum embed",
    ]  # fmt: skip


def test_waiting_gives_the_sum_of_all_backwards_over_the_holders() -> None:
    setup, alone = Setup(TiedModel(num_blocks=2)), Setup(TiedModel(num_blocks=2))
    for step in (1, 2):  # the second step shows that nothing of the first is left
        for each in (setup, alone):
            each.sync.begin()
            each.backward(step)
        setup.sync.arm(setup.trained)
        for each in (setup, alone):
            each.backward(0)
        for index in (3, 2, 1, 0):
            setup.sync.wait(index)
        for name, state in setup.states.items():
            torch.testing.assert_close(state.grad, 2 * alone.states[name].grad)


def test_parameters_without_gradient_hold_up_the_order_until_the_wait() -> None:
    setup = Setup(TiedModel(num_blocks=2))
    setup.sync.begin()
    setup.sync.arm(setup.trained)
    hidden = setup.whole.layer("block.0")({"hidden": torch.ones(1, 2, 6, dtype=torch.float64)}, {})["hidden"]
    hidden.sum().backward()  # neither head nor block.1 took part
    assert setup.events[-1] == "backward block.0"
    setup.sync.wait(3)
    assert setup.events[-4:] == ["sum head", "sum block.1", "sum block.0", "sum embed"]


def test_state_with_one_holder_and_frozen_state_are_not_summed() -> None:
    setup = Setup(TiedModel(num_blocks=2, frozen=["block.0"]), groups={"head": (0,), "embed": (0, 3)})
    setup.sync.begin()
    setup.sync.arm(setup.trained)
    setup.backward(0)
    for index in (3, 2, 0):
        setup.sync.wait(index)
    assert setup.comm.groups == {"block.1": (0, 1), "embed": (0, 3)}


def test_closed_sync_starts_nothing() -> None:
    setup = Setup(TiedModel(num_blocks=2))
    setup.sync.begin()
    setup.sync.arm(setup.trained)
    setup.sync.close()
    setup.backward(0)
    assert not any(event.startswith("sum") for event in setup.events)


def test_squares_count_each_state_on_the_first_of_its_holders() -> None:
    setup = Setup(TiedModel(), {"head": (1, 2)})
    setup.sync.begin()
    for state in setup.states.values():
        state.grad.fill_(2.0)
    for index in range(len(setup.states)):
        if setup.states[list(setup.states)[index]].layout.num_trainable:
            setup.sync.wait(index)
    counted = [state for name, state in setup.states.items() if name != "head"]
    assert setup.sync.squares.item() == 16.0 * sum(state.grad.numel() for state in counted), "after the sum"
    setup.sync.begin()
    assert setup.sync.squares.item() == 0.0


class Exchange:
    """What ranks bring to their sums: noted in a first round, added up in the second."""

    def __init__(self) -> None:
        self.brought: dict[tuple[Group, int], dict[int, Tensor]] = {}
        self.is_noted = False


class ExchangingCommunicator(RecordingCommunicator):
    """A rank whose sums are those of an exchange."""

    def __init__(self, rank: int, exchange: Exchange) -> None:
        self.rank = rank
        self.exchange = exchange
        self.numbers: Counter[Group] = Counter()

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        assert tensor.numel(), "what is not trained is in no sum"
        brought = self.exchange.brought.setdefault((group, self.numbers[group]), {})
        self.numbers[group] += 1
        if self.exchange.is_noted:
            assert tuple(sorted(brought)) == group, "all holders ask for the same sums, in the same order"
            tensor.copy_(torch.stack(list(brought.values())).sum(0))
        else:
            assert self.rank not in brought
            brought[self.rank] = tensor.clone()
        return DONE


def whole_numbers(numel: int, seed: int) -> Tensor:
    """What adds up to the same in any order."""
    return torch.randint(-9, 9, (numel,), generator=torch.Generator().manual_seed(seed)).double()


def reduced(sizes: Sequence[StateSizes], held: Sequence[Held], rank: int, comm: Communicator) -> GradientSync:
    """Sum what rank's backwards left in the gradients of the states that it holds, one after the other."""
    states = {index: piece_of(sizes[index], of[rank]) for index, of in enumerate(held)}
    sync = GradientSync(comm, states, {index: common_pieces(of) for index, of in enumerate(held)})
    sync.begin()
    for index, state in states.items():
        state.grad.copy_(whole_numbers(state.grad.numel(), 100 * index + rank))
    for index in sorted(states, reverse=True):
        sync.wait(index)
    return sync


def sums_by_element(sizes: StateSizes, held: Held, index: int) -> tuple[dict[int, float], dict[int, list[int]]]:
    """The sum of the gradients of each element, by its place in the canonical buffer; what each rank has, in order."""
    elements = {
        rank: [e for e in range(sum(sizes.trainable)) if any(start <= 8 * e < end for start, end in intervals)]
        for rank, intervals in held.items()
    }
    total: dict[int, float] = defaultdict(float)
    for rank, own in elements.items():
        for element, value in zip(own, whole_numbers(len(own), 100 * index + rank).tolist(), strict=True):
            total[element] += value
    return total, elements


def check_sums(sizes: Sequence[StateSizes], held: Sequence[Held], syncs: Mapping[int, GradientSync]) -> None:
    squares = 0.0
    for index, of in enumerate(held):
        total, elements = sums_by_element(sizes[index], of, index)
        squares += sum(value**2 for value in total.values())
        for rank, sync in syncs.items():
            assert sync._states[index].grad.tolist() == [total[element] for element in elements[rank]]
    assert sum(sync.squares.item() for sync in syncs.values()) == pytest.approx(squares, abs=1e-9)


@given(st.data(), st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 8))
def test_gradients_of_any_mixture_are_summed_and_counted_once(
    data: st.DataObject, drawn: list[StateSizes], num_ranks: int
) -> None:
    sizes = [replace(each, itemsize=8) for each in drawn]
    held = [data.draw(holders(each, num_ranks)) for each in sizes]
    exchange = Exchange()

    def run() -> dict[int, GradientSync]:
        return {rank: reduced(sizes, held, rank, ExchangingCommunicator(rank, exchange)) for rank in range(num_ranks)}

    run()
    exchange.is_noted = True
    check_sums(sizes, held, run())
    for rank in range(num_ranks):
        asked = sum(rank in brought for brought in exchange.brought.values())
        most = sum(len({piece.holders for piece in common_pieces(of)}) for of in held)
        assert asked <= most, "one sum for each set of holders of a state"


def test_gradients_of_pieces_are_summed_between_real_ranks() -> None:
    """One whole state, one in halves, one in uneven parts; norms that are not cut are held by both halves."""
    sizes = StateSizes(trainable=(6, 5), num_slots=1, itemsize=8)
    halves = [sizes.cut(0, 3) | sizes.cut(6, 11), sizes.cut(3, 11)]
    of_ranks = [sizes.cut(0, 11), *halves, sizes.cut(0, 2), sizes.cut(2, 9), sizes.cut(9, 11)]
    held = [dict(enumerate(of_ranks)), dict(enumerate(reversed(of_ranks)))]
    groups = [piece.holders for of in held for piece in common_pieces(of)]
    assert len(groups) > 4

    def work(rank: int, address: str) -> GradientSync:
        return reduced([sizes, sizes], held, rank, join(address, rank, 6, list(dict.fromkeys(groups))))

    check_sums([sizes, sizes], held, dict(enumerate(as_threads(6, work))))
