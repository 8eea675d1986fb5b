"""The replay: what is done, lost and waited for, in cases that can be counted by hand. Times are in ms."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from resilient.simulation.availability.traces import AvailabilityChange, AvailabilityTrace
from resilient.simulation.replay.costs import ChangeCosts
from resilient.simulation.replay.engine import LiveNodes, When, replay
from resilient.simulation.replay.job import Response, SteadyWork, Stretch

MS = 1_000_000


class Script:
    """Answers what it is told to, in order, and remembers what it was asked."""

    name = "script"

    def __init__(self, whens: Sequence[When], responses: Sequence[Response]) -> None:
        self._whens, self._responses = list(whens), list(responses)
        self.asked: list[LiveNodes] = []

    def when(self, change: LiveNodes) -> When:
        return self._whens.pop(0)

    def respond(self, change: LiveNodes) -> Response:
        self.asked.append(change)
        return self._responses.pop(0)

    @property
    def is_done(self) -> bool:
        return not self._whens and not self._responses


def trace(*changes: tuple[int, Sequence[int], Sequence[int]], end: int) -> AvailabilityTrace:
    return AvailabilityTrace(
        name="t",
        changes=tuple(
            AvailabilityChange(time_ms=time, joined=tuple(joined), lost=tuple(lost)) for time, joined, lost in changes
        ),
        end_ms=end,
    )


def work(step: int, nodes: int, save_after: int | None = None, save: int = 0, redundant: int = 0) -> SteadyWork:
    return SteadyWork(
        step_ns=step * MS,
        num_nodes=nodes,
        redundant_ns=redundant * MS,
        checkpoint_steps=save_after,
        checkpoint_ns=save * MS,
    )


def after(milliseconds: int, work: SteadyWork | None, **kwargs: bool) -> Response:
    return Response(work=work, pause_ns=milliseconds * MS, **kwargs)


def rows(stretches: Sequence[Stretch]) -> list[tuple[int, ...]]:
    """start, end, live, working, steps, training, redone, recovery, checkpointing, stopped."""
    return [
        (
            s.start_ns // MS, s.end_ns // MS, s.live, s.working, s.steps,
            *(t // MS for t in (s.training_ns, s.redone_ns, s.recovery_ns, s.checkpointing_ns, s.stopped_ns)),
        )
        for s in stretches
    ]  # fmt: skip


def test_steps_and_checkpoints_repeat_until_the_end() -> None:
    policy = Script([], [after(5, work(10, 2, save_after=3, save=4))])
    # 5 pause, then (30 + 4) x 2 = 68, 30, half of the third checkpoint.
    assert rows(replay(trace((7, [0, 1, 2], []), end=112), policy)) == [(7, 112, 3, 2, 9, 90, 0, 5, 10, 0)]
    assert policy.is_done


def test_a_loss_answered_at_once_costs_the_step_under_way() -> None:
    policy = Script([When.NOW], [after(0, work(10, 3)), after(7, work(20, 2))])
    run = replay(trace((0, [0, 1, 2], []), (25, [], [1]), end=100), policy)
    assert rows(run) == [(0, 25, 3, 3, 2, 20, 5, 0, 0, 0), (25, 100, 2, 2, 3, 68, 0, 7, 0, 0)]
    assert policy.asked == [
        LiveNodes(live=(0, 1, 2), joined=(0, 1, 2), lost=(), announced=False),
        LiveNodes(live=(0, 2), joined=(), lost=(1,), announced=False),
    ]


def test_rolling_back_loses_what_was_done_since_the_last_checkpoint_across_changes() -> None:
    policy = Script(
        [When.STEP, When.NOW],
        [
            after(0, work(10, 1, save_after=4, save=2)),
            after(1, work(5, 2, save_after=4, save=2)),
            after(3, work(10, 1, save_after=4, save=2), rolls_back=True),
        ],
    )
    run = replay(trace((0, [0], []), (56, [1], []), (74, [], [0]), end=100), policy)
    assert rows(run) == [
        # 4 steps and a checkpoint until 42; the step from 52 on is finished before the join counts, at 62.
        (0, 56, 1, 1, 4, 40, 14, 0, 2, 0),
        (56, 62, 2, 1, 0, 0, 6, 0, 0, 0),
        # Two of four steps were done since the checkpoint; two more until 73, then half of a checkpoint.
        (62, 74, 2, 2, 0, 0, 10, 1, 1, 0),
        (74, 100, 1, 1, 2, 23, 0, 3, 0, 0),
    ]


def test_going_on_from_the_last_step_keeps_the_count_to_the_next_checkpoint() -> None:
    policy = Script(
        [When.NOW], [after(0, work(10, 2, save_after=4, save=5)), after(0, work(10, 1, save_after=4, save=5))]
    )
    run = replay(trace((0, [0, 1], []), (25, [], [1]), end=60), policy)
    assert rows(run) == [(0, 25, 2, 2, 2, 20, 5, 0, 0, 0), (25, 60, 1, 1, 3, 30, 0, 0, 5, 0)]


def test_an_interrupted_checkpoint_is_saved_again() -> None:
    policy = Script(
        [When.NOW], [after(0, work(10, 2, save_after=2, save=5)), after(1, work(10, 1, save_after=2, save=5))]
    )
    run = replay(trace((0, [0, 1], []), (23, [], [1]), end=40), policy)
    assert rows(run) == [(0, 23, 2, 2, 2, 20, 0, 0, 3, 0), (23, 40, 1, 1, 1, 11, 0, 1, 5, 0)]


def test_a_checkpoint_that_takes_no_time_is_safe_at_once() -> None:
    policy = Script(
        [When.NOW], [after(0, work(10, 2, save_after=3)), after(0, work(10, 1, save_after=3), rolls_back=True)]
    )
    run = replay(trace((0, [0, 1], []), (30, [], [1]), end=40), policy)
    assert rows(run) == [(0, 30, 2, 2, 3, 30, 0, 0, 0, 0), (30, 40, 1, 1, 1, 10, 0, 0, 0, 0)]


def test_joins_wait_for_the_checkpoint_and_are_answered_together() -> None:
    policy = Script(
        [When.CHECKPOINT, When.CHECKPOINT],
        [after(0, work(10, 1, save_after=3, save=4)), after(2, work(4, 3, save_after=3, save=4), rolls_back=True)],
    )
    run = replay(trace((0, [0], []), (12, [1], []), (31, [2], []), end=40), policy)
    assert rows(run) == [
        (0, 12, 1, 1, 1, 12, 0, 0, 0, 0),
        (12, 31, 2, 1, 2, 18, 0, 0, 1, 0),
        (31, 34, 3, 1, 0, 0, 0, 0, 3, 0),
        (34, 40, 3, 3, 1, 4, 0, 2, 0, 0),
    ]
    assert policy.asked[1].joined == (1, 2)


def test_a_change_that_takes_itself_back_is_not_answered() -> None:
    policy = Script([When.STEP], [after(0, work(10, 1))])
    run = replay(trace((0, [0], []), (12, [1], []), (15, [], [1]), end=40), policy)
    assert [row[:6] for row in rows(run)] == [
        (0, 12, 1, 1, 1, 12),
        (12, 15, 2, 1, 0, 3),
        (15, 40, 1, 1, 3, 25),
    ]
    assert policy.is_done


def test_changes_that_do_not_matter_change_nothing() -> None:
    policy = Script([When.NEVER, When.NOW], [after(0, work(10, 1)), after(0, work(10, 1))])
    run = replay(trace((0, [0, 1], []), (12, [2], [1]), (25, [], [0]), end=30), policy)
    assert [row[:7] for row in rows(run)] == [(0, 12, 2, 1, 1, 12, 0), (12, 25, 2, 1, 1, 8, 5), (25, 30, 1, 1, 0, 5, 0)]
    assert policy.asked[1] == LiveNodes(live=(2,), joined=(), lost=(0,), announced=False)


def test_announced_losses_wait_for_the_end_of_the_step() -> None:
    policy = Script([When.NOW], [after(0, work(10, 2)), after(3, work(20, 1))])
    run = replay(trace((0, [0, 1], []), (25, [], [1]), end=60), policy, announced=True)
    assert rows(run) == [
        (0, 25, 2, 2, 2, 25, 0, 0, 0, 0),
        (25, 30, 2, 2, 1, 5, 0, 0, 0, 0),
        (30, 60, 1, 1, 1, 27, 0, 3, 0, 0),
    ]
    assert policy.asked[1] == LiveNodes(live=(0,), joined=(), lost=(1,), announced=True)


def test_a_job_that_stands_still_is_asked_at_once() -> None:
    policy = Script(
        [When.NOW],
        [after(0, None), after(0, work(10, 2)), after(0, None, rolls_back=True), after(4, work(10, 2))],
    )
    run = replay(trace((0, [0], []), (6, [1], []), (21, [], [0]), (30, [2], []), end=50), policy)
    assert rows(run) == [
        (0, 6, 1, 0, 0, 0, 0, 0, 0, 6),
        (6, 21, 2, 2, 0, 0, 15, 0, 0, 0),
        (21, 30, 1, 0, 0, 0, 0, 0, 0, 9),
        (30, 50, 2, 2, 1, 16, 0, 4, 0, 0),
    ]


def test_a_change_during_a_pause_waits_for_its_end_or_begins_another() -> None:
    whens = [When.NOW, When.STEP, When.NOW]
    policy = Script(whens, [after(0, work(10, 9)), after(8, work(10, 3)), after(8, work(10, 4)), after(2, work(10, 3))])
    run = replay(trace((0, [0, 1, 2, 3], []), (10, [], [0]), (12, [4], []), (20, [], [1]), end=33), policy)
    assert [(*row[:5], row[7]) for row in rows(run)] == [
        (0, 10, 4, 9, 1, 0),
        (10, 12, 3, 3, 0, 2),
        (12, 18, 4, 3, 0, 6),
        (18, 20, 4, 4, 0, 2),
        (20, 33, 3, 3, 1, 2),
    ]


def test_a_kept_step_goes_on_at_the_new_pace_and_the_policy_is_asked_when_it_is_finished() -> None:
    policy = Script(
        [When.NOW],
        [after(0, work(10, 2)), after(1, work(20, 1, redundant=5), keeps_step=True, again=True), after(3, work(12, 1))],
    )
    run = replay(trace((0, [0, 1], []), (14, [], [1]), end=48), policy)
    assert rows(run) == [
        (0, 14, 2, 2, 1, 14, 0, 0, 0, 0),
        # 6/10 of the step are left: 12 of 20.
        (14, 27, 1, 1, 1, 12, 0, 1, 0, 0),
        (27, 48, 1, 1, 1, 18, 0, 3, 0, 0),
    ]
    assert [stretch.redundant_ns for stretch in run] == [0, 3 * MS, 0]
    assert policy.asked[2] == LiveNodes(live=(0,), joined=(), lost=(), announced=False)


def test_losing_a_kept_step_loses_the_time_it_took() -> None:
    policy = Script(
        [When.NOW, When.NOW],
        [after(0, work(10, 3)), after(0, work(20, 2), keeps_step=True), after(0, work(30, 1))],
    )
    run = replay(trace((0, [0, 1, 2], []), (15, [], [1]), (20, [], [2]), end=50), policy)
    assert [row[4:7] for row in rows(run)] == [(1, 10, 5), (0, 0, 5), (1, 30, 0)]


class AtRandom:
    """Answers at random, but losses at once; stands still only without nodes."""

    name = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def when(self, change: LiveNodes) -> When:
        return When.NOW if change.lost else self._rng.choice([When.NOW, When.STEP, When.CHECKPOINT])

    def respond(self, change: LiveNodes) -> Response:
        rng = self._rng
        if not change.live:
            return Response(work=None, rolls_back=rng.random() < 0.5)
        return Response(
            work=SteadyWork(
                step_ns=rng.randint(1, 30 * MS),
                num_nodes=rng.randint(1, len(change.live)),
                checkpoint_steps=rng.choice([None, 1, 3]),
                checkpoint_ns=rng.choice([0, 2 * MS + 1]),
            ),
            pause_ns=rng.randint(0, 20 * MS),
            rolls_back=rng.random() < 0.5,
            keeps_step=rng.random() < 0.5,
            again=rng.random() < 0.3,
        )


def random_trace(rng: random.Random) -> AvailabilityTrace:
    time_ms = rng.randint(0, 9)
    changes = [AvailabilityChange(time_ms=time_ms, joined=(0, 1))]
    live = [0, 1]
    for index in range(rng.randint(1, 12)):
        time_ms += rng.randint(1, 60)
        lost = rng.sample(live, rng.randint(0, len(live)))
        joined = range(10 * index + 10, 10 * index + 10 + rng.randint(0, 3))
        live = [node for node in live if node not in lost] + list(joined)
        changes.append(AvailabilityChange(time_ms=time_ms, joined=tuple(joined), lost=tuple(lost)))
    return AvailabilityTrace(name="r", changes=tuple(changes), end_ms=time_ms + rng.randint(1, 200))


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_time_is_accounted_for_without_gaps(seed: int, announced: bool) -> None:
    rng = random.Random(seed)
    trace = random_trace(rng)
    stretches = replay(trace, AtRandom(rng), announced=announced)
    assert stretches[0].start_ns == trace.changes[0].time_ms * MS
    assert stretches[-1].end_ns == trace.end_ms * MS
    for one, other in pairwise(stretches):
        assert one.end_ns == other.start_ns
    for s in stretches:
        parts = (s.training_ns, s.redone_ns, s.recovery_ns, s.checkpointing_ns, s.stopped_ns)
        assert min(parts) >= 0
        assert sum(parts) == s.end_ns - s.start_ns
        assert s.steps >= 0
        assert s.working <= s.live
        assert bool(s.stopped_ns) == (not s.working)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"restart_s": -1.0}, "restart_s must be 0 to 1e+09, got -1.0; 0 means none"),
        ({"step_factor": 0.0}, "step_factor must be 1e-09 to 1e+09, got 0.0; 1 means as planned"),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be >= 1, got 0; give a number of steps"),
        ({"insurance_steps": 0}, "insurance_steps must be >= 1, got 0; None means no checkpoints"),
        ({"risk_s": 0.0}, "risk_s must be > 0, got 0.0; give the seconds between such losses"),
    ],
)
def test_bad_costs_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ChangeCosts(**arguments)
