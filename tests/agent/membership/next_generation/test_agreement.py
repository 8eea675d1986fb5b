"""The agreement on the version to go on from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient.agent.membership.next_generation.agreement import (
    NOTHING,
    HeldStates,
    agree,
    compared_pieces,
    share_out,
    uncovered,
)
from resilient.protocol.messages import WorkerProgress
from resilient.state.skipped import SkippedSteps
from resilient.templates.common.byte_intervals import ByteIntervals
from tests.agent.membership.simulated import PROFILE, STATES, outcome


def at(
    version: int,
    *,
    complete: bool = False,
    begun: bool = False,
    passed: bool = False,
    current: tuple[str, ...] = ("a",),
) -> WorkerProgress:
    return WorkerProgress(
        version=version,
        complete=complete,
        begun=begun,
        passed=outcome(version) if passed else None,
        current=current,
        retained=("kept",),
    )


def test_nobody_passed_keeps_the_version_even_when_all_are_complete() -> None:
    agreement = agree({(0, 0): at(3, complete=True), (1, 0): at(3, complete=True)}, outcome(3), 0)
    assert (agreement.version, agreement.roll_forward) == (3, None)
    assert agreement.held == {(0, 0): {"a": None, "kept": None}, (1, 0): {"a": None, "kept": None}}


def test_one_who_passed_takes_the_others_along() -> None:
    agreement = agree({(0, 0): at(4, passed=True), (1, 0): at(3, complete=True), (2, 0): NOTHING}, None, 0)
    assert (agreement.version, agreement.roll_forward) == (4, outcome(4))
    # what was kept cannot be rolled forward
    assert agreement.held == {(0, 0): {"a": None, "kept": None}, (1, 0): {"a": None}}


def test_skipped_steps_are_those_of_the_newest_outcome_or_of_the_beginning() -> None:
    before = SkippedSteps(total=7)
    assert agree({(0, 0): at(3, complete=True)}, None, 3, before).skipped == before
    assert agree({(0, 0): at(3, complete=True)}, outcome(4, (4,)), 3, before).skipped == SkippedSteps(
        total=1, in_a_row=1
    )


def test_step_is_lost_where_somebody_at_the_agreed_version_has_begun_it() -> None:
    behind, ahead = at(3, complete=True, begun=True), at(4, passed=True)
    assert agree({(0, 0): behind}, None, 0).begun
    assert not agree({(0, 0): behind, (1, 0): ahead}, None, 0).begun  # what it had begun is committed
    assert agree({(0, 0): behind, (1, 0): at(4, passed=True, begun=True)}, None, 0).begun


def test_incomplete_worker_behind_holds_nothing() -> None:
    agreement = agree({(0, 0): at(4, passed=True), (1, 0): at(3)}, None, 0)
    assert (agreement.version, agreement.roll_forward) == (4, None)
    assert (1, 0) not in agreement.held


def test_outcome_seen_from_the_dead_counts() -> None:
    agreement = agree({(0, 0): at(3, complete=True)}, outcome(4), 0)
    assert (agreement.version, agreement.roll_forward) == (4, outcome(4))


def test_nobody_goes_back_behind_the_generation() -> None:
    assert agree({(0, 0): NOTHING}, None, 5).version == 5


@given(st.dictionaries(st.tuples(st.integers(0, 5), st.just(0)), st.sets(st.sampled_from(STATES))))
def test_every_held_state_is_saved_exactly_once(held: dict[tuple[int, int], set[str]]) -> None:
    shares = share_out({worker: dict.fromkeys(names) for worker, names in held.items()}, PROFILE)
    assert shares.keys() == {worker for worker, names in held.items() if names}
    saved = [name for names in shares.values() for name in names]
    assert sorted(saved) == sorted(set().union(*held.values()))
    assert all(set(names) <= held[worker] for worker, names in shares.items())


def test_saving_is_spread_evenly() -> None:
    everything = dict.fromkeys(STATES)
    assert [len(names) for names in share_out({(0, 0): everything, (1, 0): everything}, PROFILE).values()] == [2, 2]


def test_parts_are_saved_by_their_holders_each_byte_once() -> None:
    whole = PROFILE.layers[0].whole
    half, rest = whole.first(whole.size // 2), whole - whole.first(whole.size // 2)
    held: dict[tuple[int, int], HeldStates] = {
        (0, 0): {"layer.0": half},
        (0, 1): {"layer.0": rest},
        (1, 0): {"layer.0": None},
    }
    assert compared_pieces(held, PROFILE) == {"layer.0": (half, rest)}
    shares = [share["layer.0"] for share in share_out(held, PROFILE).values() if share]
    assert sorted(shares, key=str) == sorted([half, rest], key=str)
    assert compared_pieces({(1, 0): {"layer.0": None}}, PROFILE) == {}


def test_what_a_worker_keeps_of_a_state_is_held_beside_what_it_trains_of_it() -> None:
    half, rest = ByteIntervals.of(0, 16), ByteIntervals.of(16, 24)
    of_two_plans = WorkerProgress(
        version=3, complete=True, current=("a",), retained=("a",),
        current_parts={"a": half}, retained_parts={"a": rest},
    )  # fmt: skip
    assert agree({(0, 0): of_two_plans}, None, 0).held == {(0, 0): {"a": half | rest}}
    assert agree({(0, 0): of_two_plans}, outcome(4), 0).held == {(0, 0): {"a": half}}


def test_uncovered_states_come_in_layer_order() -> None:
    assert uncovered(PROFILE, [{STATES[1]: None}]) == (STATES[0], *STATES[2:])
    whole = PROFILE.layers[1].whole
    half, rest = whole.first(whole.size // 2), whole - whole.first(whole.size // 2)
    assert STATES[1] in uncovered(PROFILE, [{STATES[1]: half}])
    assert STATES[1] not in uncovered(PROFILE, [{STATES[1]: half}, {STATES[1]: rest}])
