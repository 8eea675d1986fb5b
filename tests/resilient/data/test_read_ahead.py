"""What is read ahead of time: in the order of need, not more than fits, and only what is still wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resilient.data.read_ahead import ReadAhead
from resilient.data.reader import Cell, Reads

Key = tuple[int, Cell]

FORGOTTEN: Key = (0, Cell("", ()))


class Asked:
    """Takes down what is asked of processes, and how much of it waits."""

    def __init__(self, num_processes: int, room: int = 1000) -> None:
        self.asked: list[Key] = []
        self.waiting = 0
        self._num_processes = num_processes
        self._room = room

    def __len__(self) -> int:
        return self._num_processes

    @property
    def has_room(self) -> bool:
        return self.waiting < self._room

    def ask(self, step: int, cell: Cell, reads: Reads) -> int:
        self.asked.append((step, cell))
        self.waiting += 1
        return len(self.asked) - 1

    def take(self, ticket: int) -> Key:
        self.waiting -= 1
        return self.asked[ticket]

    def forget(self) -> None:
        self.asked.append(FORGOTTEN)
        self.waiting = 0


def entered(
    asked: Asked,
    cells_of: Callable[[int], Sequence[Cell] | None],
    num_steps: int = 3,
    reads: Reads = None,
    steps_ahead: int = 1,
) -> ReadAhead:
    ahead = ReadAhead(asked, num_steps, steps_ahead)  # pyright: ignore[reportArgumentType]
    ahead.enter(cells_of, reads)
    asked.asked.clear()
    return ahead


def chain(*positions: int) -> list[Cell]:
    return [Cell.of_chain(position, 2) for position in positions]


def test_a_whole_step_is_asked_for_ahead_of_time() -> None:
    asked, cells = Asked(2), chain(2, 3, 9, 4, 7)
    ahead = entered(asked, lambda step: cells)
    steps = [(step, cell) for step in (1, 2, 3) for cell in cells]
    for number, key in enumerate(steps):
        assert ahead.take(*key) == key
        assert asked.asked == steps[: number + 6], "this one and five more, up to the end of the job"
    ahead.enter(lambda step: cells, None)
    assert ahead.take(3, cells[0]) == (3, cells[0]), "again, after a failure"
    ahead.enter(lambda step: chain(0, 1), frozenset({"input"}))
    assert asked.asked[-1] == FORGOTTEN, "of another place, nothing is wanted any more"


def test_several_steps_are_asked_for_ahead_of_time() -> None:
    asked, cells = Asked(2), chain(2, 3, 9, 4, 7)
    ahead = entered(asked, lambda step: cells, num_steps=5, steps_ahead=3)
    steps = [(step, cell) for step in range(1, 6) for cell in cells]
    for number, key in enumerate(steps):
        assert ahead.take(*key) == key
        assert asked.asked == steps[: number + 16]


def test_what_is_still_wanted_is_not_asked_for_again() -> None:
    asked, cells = Asked(2), chain(2, 3)
    ahead = entered(asked, lambda step: cells)
    ahead.take(1, cells[0])
    before = list(asked.asked)
    ahead.enter(lambda step: chain(2, 3), None)
    ahead.take(1, cells[1])
    assert asked.asked[: len(before)] == before
    assert FORGOTTEN not in asked.asked


def test_not_more_is_asked_for_than_fits() -> None:
    asked, cells = Asked(1, room=33), chain(*range(1000))
    ahead = entered(asked, lambda step: cells, num_steps=2)
    ahead.take(1, cells[0])
    assert (len(asked.asked), asked.waiting) == (33, 32)


def test_what_is_needed_now_is_asked_for_even_if_there_is_no_room() -> None:
    asked, cells = Asked(1, room=0), chain(0, 1)
    ahead = entered(asked, lambda step: cells)
    assert [ahead.take(1, cell) for cell in cells] == [(1, cell) for cell in cells]
    assert asked.asked == [(1, cell) for cell in cells]


def test_not_more_is_asked_for_than_fits_when_a_step_is_read_once_more() -> None:
    asked, cells = Asked(1, room=33), chain(*range(1000))
    ahead = entered(asked, lambda step: cells, num_steps=2)
    for cell in cells[:400]:
        ahead.take(1, cell)
    ahead.enter(lambda step: cells, None)
    assert ahead.take(1, cells[0]) == (1, cells[0])
    forgotten = len(asked.asked) - 1 - asked.asked[::-1].index(FORGOTTEN)
    assert asked.asked[forgotten + 1 :] == [(1, cell) for cell in cells[:33]]


STEPS: dict[int, list[Cell]] = {
    1: [Cell("vision", (3, 1)), Cell("llm", (0, 1)), Cell("vision", ()), Cell("llm", (2, 3))],
    2: [Cell("llm", (5,))],
    3: [],
    4: [Cell("vision", (2,), 1), Cell("llm", (2, 0))],
}
"""Cells differ from step to step; where there are none, or none of samples, nothing is read."""

NEEDED: list[Key] = [(step, cell) for step, cells in STEPS.items() for cell in cells if cell.samples]


def test_cells_of_units_are_asked_for_in_the_order_of_need_as_far_as_they_are_known() -> None:
    asked, known = Asked(1), {1: STEPS[1], 2: STEPS[2]}
    ahead = entered(asked, known.get, num_steps=9)
    ahead.take(*NEEDED[0])
    assert asked.asked == NEEDED[:4]
    known.update(STEPS)
    ahead.take(*NEEDED[1])
    assert asked.asked == NEEDED
    assert [ahead.take(*key) for key in NEEDED[2:]] == NEEDED[2:]
    assert asked.asked == NEEDED, "nothing is known of step 5"


def test_a_step_that_is_redone_with_another_assignment_reads_that() -> None:
    asked = Asked(1)
    ahead = entered(asked, dict(STEPS).get, num_steps=9)
    ahead.take(*NEEDED[0])
    other = {**STEPS, 1: [Cell("vision", (3,)), *STEPS[1][1:]]}
    ahead.enter(other.get, None)
    needed = [(1, other[1][0]), *NEEDED[1:]]
    assert [ahead.take(*key) for key in needed] == needed
    assert asked.asked[asked.asked.index(FORGOTTEN) + 1 :] == needed


def test_a_coming_step_that_is_assigned_anew_is_asked_for_anew() -> None:
    asked, known = Asked(1), dict(STEPS)
    ahead = entered(asked, known.get, num_steps=9)
    ahead.take(*NEEDED[0])
    known[2] = [Cell("llm", (7, 8))]
    ahead.enter(known.get, None)
    needed = [NEEDED[1], NEEDED[2], (2, known[2][0]), *NEEDED[4:]]
    assert [ahead.take(*key) for key in needed] == needed
    assert asked.asked[asked.asked.index(FORGOTTEN) + 1 :] == needed
