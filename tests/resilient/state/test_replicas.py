"""All ranks come to the same conclusion about copies that differ: whose is odd, or that nobody can tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from resilient.comm import SingleProcessCommunicator
from resilient.errors import ReplicaError
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.replicas import OddCopiesError, Replicas
from resilient.state.witnesses import witness
from resilient.templates.common.byte_intervals import Piece, common_pieces
from resilient.templates.plan import Plan
from tests.mixtures import StateSizes
from tests.resilient.pieced import number, piece_of
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import CPU, TiedModel, make_job, make_plan, make_profile

SPECS = {spec.name: spec for spec in TiedModel(frozen=("block.1",)).layers}
SLOTS = ("exp_avg", "exp_avg_sq")
FOUR = make_plan(((0, 6), 2), ((0, 6), 2), ((0, 6), 2), ((0, 6), 2))
THREE = make_plan(((0, 6), 2), ((0, 6), 2), ((0, 6), 4))
TWO = make_plan(((0, 6), 4), ((0, 6), 4))


def state_of(name: str, dtype: torch.dtype) -> LayerState:
    spec = SPECS[name]
    state = LayerState(spec, BufferLayout.of(spec), SLOTS, dtype, CPU)
    state.buffer.copy_(torch.linspace(-1, 2, state.buffer.numel()))
    return state


def flip(state: LayerState, position: int, bit: int = 0) -> None:
    integers = {4: torch.int32, 8: torch.int64}[state.buffer.itemsize]
    state.buffer.view(integers)[position] ^= 1 << bit


def told(
    plan: Plan,
    flips: Sequence[tuple[int, str, int, int]],
    *,
    made_of: Mapping[int, int] | None = None,
    step: int = 5,
    every: int = 1,
    devices: Sequence[str] = (),
    dtype: torch.dtype = torch.float64,
) -> list[object]:
    """Return what each rank is told: nothing, what it has to drop, or why it has to stop.

    Args:
        plan: Of the generation.
        flips: Rank, layer, position in its buffer, bit.
        made_of: The node whose copies a rank's were made of since the last comparison, if they were.
        step: In which copies are compared.
        every: As the job says.
        devices: Kinds, by rank; all equal by default.
        dtype: Of the states.
    """
    pieces = plan.pieces(make_profile(make_job()))

    def work(rank: int, address: str) -> object:
        states = {name: state_of(name, dtype) for name, (piece,) in pieces.items() if rank in piece.holders}
        for state in states.values():
            state.origin = witness((made_of or {}).get(rank, plan.slots[rank].node), 0)
        for at, name, position, bit in flips:
            if at == rank:
                flip(states[name], position, bit)
        comm = join(address, rank, len(plan.slots))
        device_name = devices[rank] if devices else "abacus"
        replicas = Replicas(comm=comm, plan=plan, pieces=pieces, states=states, device_name=device_name, every=every)
        try:
            replicas.check_in_step(step)
        except OddCopiesError as found:
            return found.own
        except ReplicaError as error:
            return str(error)
        return None

    return as_threads(len(plan.slots), work)


def places(name: str) -> dict[str, int]:
    """Return a position of each part of a layer's buffer."""
    layout = BufferLayout.of(SPECS[name])
    whole = layout.numel(len(SLOTS))
    return {"first": 0, "frozen": layout.num_trainable, "slot": whole - 1 if layout.num_trainable else 0}


def test_equal_copies_are_nothing_to_tell() -> None:
    assert told(THREE, []) == [None] * 3


@pytest.mark.parametrize("name", ["embed", "block.1", "head"])
@pytest.mark.parametrize("part", ["first", "frozen", "slot"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_flipped_bit_is_found_and_its_holder_drops_the_copy(name: str, part: str, rank: int) -> None:
    position = min(places(name)[part], BufferLayout.of(SPECS[name]).numel(len(SLOTS)) - 1)
    expected: list[object] = [(), (), ()]
    expected[rank] = (name,)
    assert told(THREE, [(rank, name, position, 0)]) == expected


def test_several_ranks_drop_each_its_own() -> None:
    flips = [(0, "embed", 3, 5), (2, "block.0", 0, 62), (2, "head", 1, 1)]
    assert told(THREE, flips) == [("embed",), (), ("block.0", "head")]


def test_two_copies_do_not_tell_which_is_right() -> None:
    message = (
        "all copies of a layer's state must be equal, got different ones after step 4 (block.2 on nodes 0, 1) and no "
        "majority to tell which is right; check the memory of these nodes, and keep three copies (max_failures=2) or "
        "more for most to decide"
    )
    assert told(TWO, [(1, "block.2", 7, 9)]) == [message] * 2


def test_many_layers_are_counted() -> None:
    flips = [(1, name, 0, 0) for name in SPECS]
    places = "embed on nodes 0, 1; block.0 on nodes 0, 1; block.1 on nodes 0, 1; 3 more layers"
    first, second = told(TWO, flips)
    assert f"after step 4 ({places}) and no majority" in str(first)
    assert first == second


def test_only_holders_are_compared_and_everybody_hears_of_it() -> None:
    """Ranks 0 and 2 hold the first layers, 1 and 2 the last ones."""
    plan = make_plan(((0, 3, 6), 4), ((0, 6), 4))
    first, second, third = told(plan, [(1, "head", 0, 3)])
    assert "after step 4 (head on nodes 1, 2) and no majority" in str(first)
    assert first == second == third


@pytest.mark.parametrize(
    ("steps", "every", "compared"),
    [((7, 8, 9), 1, [7, 8, 9]), ((7, 8, 9, 10, 11, 12), 4, [7, 8, 12]), ((7, 8, 9), 0, [7]), ((8, 9), 4, [8])],
)
def test_copies_are_compared_in_the_first_step_and_in_every_nth(
    steps: tuple[int, ...], every: int, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = Replicas(
        comm=SingleProcessCommunicator(), plan=TWO, pieces={}, states={}, device_name="abacus", every=every
    )
    versions: list[int] = []
    monkeypatch.setattr(replicas, "check", versions.append)
    for step in steps:
        replicas.check_in_step(step)
    assert versions == [step - 1 for step in compared]


KINDS = ("abacus", "loom", "abacus")


def test_last_bits_may_differ_between_kinds_of_devices() -> None:
    assert told(THREE, [(1, "block.0", 2, 0)], devices=KINDS) == [None] * 3


def test_last_bits_may_not_differ_between_devices_of_one_kind() -> None:
    """The loom's copy is close to both others': it cannot tell which of them is right."""
    first, second, third = told(THREE, [(2, "block.0", 2, 0)], devices=KINDS)
    assert str(first).startswith(
        "all copies of a layer's state must be equal, got different ones after step 4 (block.0"
    )
    assert first == second == third


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_difference_between_kinds_of_devices_is_found(dtype: torch.dtype) -> None:
    bit = 30 if dtype is torch.float32 else 62
    assert told(THREE, [(1, "block.0", 2, bit)], devices=KINDS, dtype=dtype) == [(), ("block.0",), ()]


def test_before_the_first_step_is_committed_all_kinds_of_devices_hold_the_same() -> None:
    assert told(THREE, [(1, "block.0", 2, 0)], devices=KINDS, step=1) == [(), ("block.0",), ()]


def test_damaged_copy_wins_nothing_by_being_copied() -> None:
    flips = [(0, "embed", 3, 0), (1, "embed", 3, 0)]
    message = (
        "all copies of a layer's state must be equal, got different ones after step 4 (embed on nodes 0 (made of node "
        "1's), 1, 2) and no majority to tell which is right; check the memory of these nodes, and keep three copies "
        "(max_failures=2) or more for most to decide"
    )
    assert told(THREE, flips, made_of={0: 1}) == [message] * 3
    assert told(THREE, flips) == [(), (), ("embed",)]


def test_two_nodes_that_bear_witness_heal_a_damaged_copy_and_what_was_made_of_it() -> None:
    flips = [(0, "embed", 3, 0), (1, "embed", 3, 0)]
    assert told(FOUR, flips, made_of={0: 1}) == [("embed",), ("embed",), (), ()]


def test_copies_found_equal_bear_witness_from_then_on() -> None:
    def work(rank: int, address: str) -> object:
        states = {"embed": state_of("embed", torch.float64)}
        states["embed"].origin = witness(1, 0)
        replicas = Replicas(
            comm=join(address, rank, 3),
            plan=THREE,
            pieces={"embed": [Piece((0, 1, 2), states["embed"].held)]},
            states=states,
            device_name="abacus",
            every=1,
        )
        replicas.check(4)
        if rank < 2:
            flip(states["embed"], 3)
        try:
            replicas.check(5)
        except OddCopiesError as found:
            return found.own
        return None

    assert as_threads(3, work) == [(), (), ("embed",)]


SIZES = StateSizes(trainable=(6, 5), frozen=(3,), num_slots=1, itemsize=8)
PIECES = [SIZES.cut(0, 14), SIZES.cut(0, 8), SIZES.cut(3, 14), SIZES.cut(0, 14)]


def dropped(rank: int, elements: Sequence[int]) -> list[tuple[str, ...]]:
    """What each rank has to drop when one has a flipped bit in some elements."""
    held = dict(enumerate(PIECES))

    def work(own: int, address: str) -> tuple[str, ...]:
        state = number(piece_of(SIZES, held[own]))
        state.origin = witness(own, 0)
        for element in elements if own == rank else ():
            state.window(8 * element, 8 * element + 8).bitwise_xor_(1)
        replicas = Replicas(
            comm=join(address, own, 4), plan=FOUR, pieces={"layer": common_pieces(held)}, states={"layer": state},
            device_name="abacus", every=1,
        )  # fmt: skip
        with pytest.raises(OddCopiesError) as found:
            replicas.check(4)
        return found.value.own

    return as_threads(4, work)


@pytest.mark.parametrize(
    ("rank", "elements"),
    [(0, [0]), (1, [2]), (1, [3]), (2, [7]), (2, [8]), (3, [13]), (1, [14]), (2, [19]), (0, [1, 5, 9, 20])],
    ids=str,
)
def test_pieces_are_compared_among_their_holders(rank: int, elements: list[int]) -> None:
    """Elements 0 to 2 and 8 to 13, and their slots, are held by three ranks, 3 to 7 by all four."""
    assert dropped(rank, elements) == [("layer",) if own == rank else () for own in range(4)]
