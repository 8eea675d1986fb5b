"""DHP as a planner: places on any replicas, memory, splitting, and what does not fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilient.planners.costs.correction import UNCORRECTED, Factor
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.packing.balance import longest_first
from resilient.planners.planner import Assignment, Configuration, Parallelism, Replica, Setting
from resilient.planners.published.dhp.planner import DHP, dhp_across_nodes, ranks_of, sequences_of
from resilient.planners.stages.degraded_replicas import degraded_replicas
from tests.resilient.planners.jobs_of_planners import after_failures, check_places, learnt, setting, table, unit
from tests.resilient.planners.published.dhp.group_times import group_ms

MEMORY = 2_500_000


CONFIGURATION = Configuration(
    units={
        "vision": Parallelism(dp=1, pp=1, cp=6, stage_layers=(4,)),
        "llm": Parallelism(dp=1, pp=2, cp=6, stage_layers=(4, 4)),
    },
    num_microbatches=3,
)
RANKS = CONFIGURATION.units[LLM].cp


def check_groups(job: Setting, configuration: Configuration, batch: SampleTable, assignment: Assignment) -> None:
    """Groups are of one degree, hold their samples, and have ranks enough together."""
    place = assignment.units[LLM]
    assert place.group is not None
    assert place.degree is not None
    kept = sequences_of(job, configuration, batch).kept
    for replica, microbatch in sorted(set(zip(place.replica.tolist(), place.microbatch.tolist(), strict=True))):
        chosen = assignment.members(LLM, replica, microbatch)
        total = 0
        for group in np.unique(place.group[chosen]):
            inside = chosen[place.group[chosen] == group]
            degree = int(place.degree[inside[0]])
            assert (place.degree[inside] == degree).all()
            assert kept[inside].sum() <= degree * (1 + 1e-9)
            total += degree
        assert total <= configuration.units[LLM].cp


def slowest_ms(job: Setting, batch: SampleTable, assignment: Assignment, chosen: npt.NDArray[np.intp]) -> float:
    """The slowest group of a microbatch."""
    place = assignment.units[LLM]
    assert place.group is not None
    assert place.degree is not None
    if not len(chosen):
        return 0.0
    sequences, ranks = sequences_of(job, CONFIGURATION, batch), ranks_of(job, CONFIGURATION, RANKS)
    groups, first, inside = np.unique(place.group[chosen], return_index=True, return_inverse=True)
    times = group_ms(sequences[chosen], inside.ravel(), len(groups), ranks)
    return float(times[np.arange(len(groups)), place.degree[chosen][first] - 1].max())


def static_ms(job: Setting, batch: SampleTable, chosen: npt.NDArray[np.intp]) -> float:
    """The slowest of groups of one degree, the best of 1, 2 and 4 ranks."""
    sequences, ranks = sequences_of(job, CONFIGURATION, batch)[chosen], ranks_of(job, CONFIGURATION, RANKS)
    found = np.inf
    for degree in (1, 2, 4):
        groups = len(ranks) // degree
        bins = longest_first(sequences.work_ms, np.ones(groups))
        times = group_ms(sequences, bins, groups, ranks)[np.unique(bins), degree - 1]
        found = min(found, times.max(initial=0.0))
    return float(found)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(0, 60), replicas=after_failures(), seed=st.integers(0, 9))
def test_every_sample_has_one_place_after_failures(count: int, replicas: list[Replica], seed: int) -> None:
    job, batch = setting(), table(count, seed)
    assignment = DHP().assign(job, CONFIGURATION, batch, replicas)
    check_places(assignment, DHP().assign(job, CONFIGURATION, batch, replicas), count, replicas)
    check_groups(job, CONFIGURATION, batch, assignment)
    for replica, each in enumerate(replicas):
        for microbatch in range(each.num_microbatches):
            chosen = assignment.members(LLM, replica, microbatch)
            found, static = slowest_ms(job, batch, assignment, chosen), static_ms(job, batch, chosen)
            assert found <= static * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(
    # of fewer than three, stages hold fewer at a time than configured, and have more room for each
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda counts: max(counts) >= 3),
    speed=st.floats(0.2, 1),
    count=st.integers(1, 150),
    seed=st.integers(0, 9),
)
@example(counts=[1, 3], speed=0.25, count=48, seed=0)  # by speed, the first has more than one microbatch holds
def test_memory_is_held_when_there_is_some_to_spare(counts: list[int], speed: float, count: int, seed: int) -> None:
    job, batch = setting(MEMORY), table(count, seed)
    replicas = [Replica(num_microbatches=each, speed=speed if i else 1.0) for i, each in enumerate(counts)]
    kept = sequences_of(job, CONFIGURATION, batch).kept
    if kept.max() > 6:
        with pytest.raises(ValueError, match=r"^samples must fit into 6 ranks, "):
            DHP().assign(job, CONFIGURATION, batch, replicas)
        return
    if kept.sum() > 0.4 * 6 * sum(counts):
        return  # it may not fit, however little is wasted
    assignment, again = (DHP().assign(job, CONFIGURATION, batch, replicas) for _ in range(2))
    for index, each in enumerate(replicas):
        place = assignment.units[LLM]
        own = place.replica == index
        if kept[own].sum() > 0.4 * 6 * each.num_microbatches:
            number = max(each.num_microbatches, int(place.microbatch[own].max()) + 1)
            replicas[index] = replace(each, num_microbatches=number)
    check_places(assignment, again, count, replicas)
    check_groups(job, CONFIGURATION, batch, assignment)


@pytest.mark.parametrize("memory", [600_000, 800_000, 1_400_000])
def test_devices_that_are_left_after_losses_hold_what_they_are_given(memory: int) -> None:
    job, half = setting(memory), Replica(num_microbatches=12, devices=0.5)
    refused: list[str] = []
    for seed in range(5):
        batch = table(60, seed)
        try:
            found = DHP().assign(job, CONFIGURATION, batch, [half])
        except ValueError as error:
            refused.append(str(error))
        else:
            assert evaluate(job, CONFIGURATION, found, batch, [half]).peak_bytes <= memory
    # Only batches with a sample that is too long for all ranks that are left: others have more microbatches.
    assert all(message.startswith("samples must fit into 3 ranks, the most of a group, got ") for message in refused)
    assert len(refused) == {600_000: 3, 800_000: 1, 1_400_000: 0}[memory]


def test_a_microbatch_too_large_for_its_ranks_is_split() -> None:
    """Into as few as hold it, on the same replica, however much room the other has."""
    job, batch = setting(MEMORY), table(400)
    kept = sequences_of(job, CONFIGURATION, batch).kept
    replicas = [Replica(num_microbatches=2), Replica(num_microbatches=2, speed=0.01)]
    assignment = DHP().assign(job, CONFIGURATION, batch, replicas)
    check_groups(job, CONFIGURATION, batch, assignment)
    place = assignment.units[LLM]
    needed = kept[place.replica == 0].sum() / RANKS
    assert 2 < needed <= place.microbatch[place.replica == 0].max() + 1 < 1.3 * needed
    assert place.microbatch[place.replica == 1].max() == 1


def test_a_sample_goes_to_a_replica_that_has_ranks_for_it() -> None:
    job, batch = setting(420_000), table(40)
    kept = sequences_of(job, CONFIGURATION, batch).kept
    long = np.repeat(kept.argmax(), 6)  # each of them more than three ranks, after the loss
    batch = batch[np.concatenate((long, np.arange(40)))]
    replicas = [Replica(num_microbatches=3, speed=0.01), Replica(num_microbatches=3, devices=0.5)]
    assert 3 < sequences_of(job, CONFIGURATION, batch, replicas).kept.max() <= 6
    place = DHP().assign(job, CONFIGURATION, batch, replicas).units[LLM]
    assert not place.replica[:6].any()
    assert place.replica[6:].any()


@settings(max_examples=15, deadline=None)
@given(
    who=st.sampled_from([DHP(), dhp_across_nodes()]),
    lost=st.integers(0, 6),
    memory=st.integers(1_600_000, 3_000_000),
    seed=st.integers(0, 9),
)
def test_no_batch_is_refused_that_nodes_that_are_left_have_room_for(
    who: DHP, lost: int, memory: int, seed: int
) -> None:
    job, known = setting(memory), table(100, seed)
    found = who.configure(job, known)
    replicas = degraded_replicas(job, found, lost)
    for count in (1, 32, 300):
        batch = known[np.arange(count) % len(known)]
        if sequences_of(job, found, batch, replicas).kept.max() > min(16 - 2 * lost, found.units[LLM].cp):
            return  # a sample is too long for the ranks that are left
        assignment = who.assign(job, found, batch, replicas)
        assert evaluate(job, found, assignment, batch, replicas).peak_bytes <= memory


def test_a_batch_that_needs_more_microbatches_than_there_are_has_more() -> None:
    job, batch, replicas = setting(MEMORY), table(2000), [Replica(num_microbatches=1, speed=0.5, devices=0.5)]
    found = DHP().assign(job, CONFIGURATION, batch, replicas)
    assert found.units[LLM].microbatch.max() > 10
    assert evaluate(job, CONFIGURATION, found, batch, replicas).peak_bytes <= MEMORY


def test_encoders_that_come_first_hold_a_batch_in_more_microbatches_or_in_none() -> None:
    """As static context parallelism has them: what they keep of all microbatches has to fit, what the others do not."""
    units = {
        name: replace(each, pp=1, stage_layers=(sum(each.stage_layers),)) for name, each in CONFIGURATION.units.items()
    }
    configuration = replace(CONFIGURATION, units=units, colocated=True)
    batch, replicas = table(300), [Replica(num_microbatches=3)]
    held = DHP().assign(setting(8_000_000), configuration, batch, replicas)
    assert held.units[LLM].microbatch.max() > 3
    assert evaluate(setting(8_000_000), configuration, held, batch, replicas).peak_bytes <= 8_000_000
    with pytest.raises(ValueError, match=r"^samples must fit into 6 ranks, the most of a group, got sample 185 that "):
        DHP().assign(setting(2_000_000), configuration, batch, replicas)


def test_no_group_is_formed_of_ranks_that_are_gone() -> None:
    job, batch = setting(), table(60)
    for devices, left in ((0.5, 3), (0.3, 1), (0.1, 1)):
        replicas = [Replica(num_microbatches=3, speed=devices, devices=devices)]
        place = DHP().assign(job, CONFIGURATION, batch, replicas).units[LLM]
        assert place.group is not None
        assert place.degree is not None
        for microbatch in range(3):
            groups = {
                int(group): int(degree)
                for group, degree in zip(
                    place.group[place.microbatch == microbatch],
                    place.degree[place.microbatch == microbatch],
                    strict=True,
                )
            }
            assert sum(groups.values()) <= left
    whole = DHP().assign(job, CONFIGURATION, batch, [Replica(num_microbatches=3)])
    with pytest.raises(ValueError, match=r"^groups in 'llm' must be of the 3 ranks that are there, got 6 ranks in"):
        evaluate(job, CONFIGURATION, whole, batch, [Replica(num_microbatches=3, speed=0.5, devices=0.5)])


def test_a_sample_too_long_for_all_ranks_is_named() -> None:
    job = setting(MEMORY)
    units = {name: lengths.of(lengths.tokens * 10**6) for name, lengths in table(3).units.items()}
    batch = SampleTable(units=units, names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"^samples must fit into \d+ ranks, the most of a group, got '[abc]' that "):
        DHP().assign(job, CONFIGURATION, batch, [Replica(num_microbatches=4)])


def test_the_ring_is_what_curves_have_beside_their_share() -> None:
    job = setting()
    ranks = ranks_of(job, CONFIGURATION, RANKS)
    # 8 layers of 0.1 * 0.002 ms a token, forward; fixed times of 0.05 ms a layer and rank
    np.testing.assert_allclose(ranks.ring_ms[1:], 8 * 0.1 * 0.002)
    np.testing.assert_allclose(ranks.start_ms[:4], [0, 0.4, 1.2, 1.2])
    assert len(ranks) == CONFIGURATION.units[LLM].cp


def test_groups_that_go_by_work_into_no_microbatch_are_packed() -> None:
    spread = Parallelism(dp=1, pp=1, cp=6, stage_layers=(4,))
    units = {"vision": spread, "llm": replace(spread, stage_layers=(8,))}
    configuration = Configuration(units=units, num_microbatches=1)
    # Room for 1250 tokens per rank, so three ranks each for the first two and two for the others; two microbatches of
    # six ranks hold them if the first two are together, but by work they are not.
    job = setting(8 * (8000 + 8000 // 6) + 1_000_000)
    lengths = {"vision": np.zeros(5, dtype=np.int64), "llm": np.array([3500, 3500, 2400, 2400, 2400])}
    batch = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    assignment = DHP().assign(job, configuration, batch, [Replica(num_microbatches=1)])
    check_groups(job, configuration, batch, assignment)
    assert assignment.units[LLM].microbatch.tolist() == [0, 0, 1, 1, 1]


def test_measured_times_make_steps_faster_where_costs_are_wrong() -> None:
    job = setting()
    costs = CostModel(units=(unit("vision", 4, 0.0005, 1e-6), unit("llm", 8, 0.002, 3e-5)))
    truth = replace(job, costs=costs)
    alone = {name: replace(spread, cp=1) for name, spread in CONFIGURATION.units.items()}
    corrected = learnt(job, costs, replace(CONFIGURATION, units=alone))
    replicas = [Replica(num_microbatches=3), Replica(num_microbatches=2, speed=0.8)]
    before, after = list[float](), list[float]()
    for seed in range(10):
        batch = table(60, seed)
        for times, known in ((before, job), (after, corrected)):
            assignment = DHP().assign(known, CONFIGURATION, batch, replicas)
            times.append(
                max(
                    sum(
                        slowest_ms(truth, batch, assignment, assignment.members(LLM, replica, microbatch))
                        for microbatch in range(each.num_microbatches)
                    )
                    / each.speed
                    for replica, each in enumerate(replicas)
                )
            )
    assert np.mean(after) < 0.97 * np.mean(before)
    assert max(np.array(after) / np.array(before)) < 1.01


def test_without_measured_times_nothing_changes() -> None:
    batch, replicas = table(60), [Replica(num_microbatches=3)]
    even = replace(setting(), correction=replace(UNCORRECTED, factors={(LLM, 1, 3): Factor(value=1.0, num_steps=1)}))
    one, other = (DHP().assign(job, CONFIGURATION, batch, replicas).units[LLM] for job in (setting(), even))
    np.testing.assert_array_equal(one.microbatch, other.microbatch)
    np.testing.assert_array_equal(one.group, other.group)
