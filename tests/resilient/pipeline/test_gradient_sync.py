"""Gradient sums start while the last backward still runs, and in one order on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from resilient.comm import DONE, Group, Pending
from resilient.data.dataset import stack
from resilient.models.layer import Activations, WholeModel
from resilient.pipeline.gradient_sync import GradientSync
from resilient.state.layer_state import BufferLayout, LayerState, bind
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
            {index[name]: (groups or {}).get(name, (0, 1)) for name in trained},
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
