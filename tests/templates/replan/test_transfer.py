from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from itertools import islice, product
from operator import or_

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, common_pieces
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Holdings, Plan, PlanningProblem, Sharding
from resilient.templates.replan import transfer as planning
from resilient.templates.replan.replan import first_plan, replan, replan_candidates, templates_for
from resilient.templates.replan.transfer import Transfer, plan_transfers, transfers_between
from tests.mixtures import SIZES, StateSizes, holders
from tests.templates.jobs import MIB, cut, enough_nodes, plan_of, problems, profile, survivors, template, whole_states


def job(num_layers: int = 3, state_bytes: int = MIB, num_nodes: int = 3) -> tuple[PlanningProblem, Plan]:
    """One pipeline per node, each with all layers: rank r is node r."""
    problem = PlanningProblem(profile=profile([1.0] * num_layers, state_bytes), num_microbatches=6)
    return problem, first_plan(problem, range(num_nodes))


@given(st.data(), problems(max_degree=1))
def test_every_missing_byte_comes_once_from_a_rank_that_holds_it(data: st.DataObject, problem: PlanningProblem) -> None:
    plan = first_plan(problem, range(enough_nodes(problem) + data.draw(st.integers(0, 3))))
    num_sources = data.draw(st.integers(0, 3))
    ranks = range(len(plan.slots) + num_sources)
    held = whole_states(
        problem,
        {layer.name: data.draw(st.sets(st.sampled_from(ranks), max_size=4)) for layer in problem.profile.layers},
    )
    transfers, lost = plan_transfers(problem, plan, held, num_sources)

    by_need: dict[tuple[str, int], list[Transfer]] = {}
    for transfer in transfers:
        assert transfer.source in held[transfer.state]
        assert transfer.source != transfer.target
        by_need.setdefault((transfer.state, transfer.target), []).append(transfer)
    sizes = {layer.name: layer.state_bytes for layer in problem.profile.layers}
    missing = {
        (state, rank)
        for state, needed_by in plan.holders(problem.profile).items()
        for rank in needed_by
        if rank not in held[state] and sizes[state]
    }
    assert set(by_need) == {(state, rank) for state, rank in missing if held[state]}
    assert set(lost) == {state for state, _ in missing if not held[state]}
    for (state, _), parts in by_need.items():
        bounds = [0, *(part.end_byte for part in parts)]
        assert [part.first_byte for part in parts] == bounds[:-1]
        assert bounds[-1] == sizes[state]
        assert all(bound % 4096 == 0 for bound in bounds[:-1])
        assert all(part.first_byte < part.end_byte for part in parts)
    assert plan_transfers(problem, plan, held, num_sources) == (transfers, lost)


@given(st.data(), st.lists(SIZES, min_size=1, max_size=3), st.integers(1, 9))
def test_between_any_mixtures_every_byte_arrives_exactly_where_it_lacks_from_a_rank_that_holds_it(
    data: st.DataObject, sizes: list[StateSizes], num_ranks: int
) -> None:
    held, needed = (
        {f"l{i}": data.draw(holders(each, num_ranks)) for i, each in enumerate(sizes)} for _ in ("held", "needed")
    )
    with pytest.MonkeyPatch.context() as patch:  # states of a few bytes are split as large ones are
        patch.setattr(planning, "_PAGE_BYTES", 2)
        patch.setattr(planning, "_MAX_WHOLE_BYTES", 4)
        transfers, lost = transfers_between(needed, held)
        assert transfers_between(needed, held) == (transfers, lost)

    def has(holdings: Holdings, state: str, rank: int, byte: int) -> bool:
        return any(start <= byte < end for start, end in holdings[state][rank])

    expected_lost: set[str] = set()
    expected: Counter[tuple[str, int, int]] = Counter()
    for state, each in zip(held, sizes, strict=True):
        for rank, byte in product(range(num_ranks), range(each.num_bytes)):
            if has(needed, state, rank, byte) and not has(held, state, rank, byte):
                expected[state, rank, byte] += 1
                if not any(has(held, state, other, byte) for other in range(num_ranks)):
                    expected_lost.add(state)
    assert list(lost) == sorted(expected_lost)
    received = [(each, byte) for each in transfers for byte in range(each.first_byte, each.end_byte)]
    assert all(has(held, each.state, each.source, byte) for each, byte in received)
    assert Counter((each.state, each.target, byte) for each, byte in received) == Counter(
        {key: count for key, count in expected.items() if key[0] not in expected_lost}
    )
    order = {state: list(ranks) for state, ranks in needed.items()}
    places = [(each.state, order[each.state].index(each.target), each.first_byte) for each in transfers]
    assert places == sorted(places)


def fewest_nodes(problem: PlanningProblem, plan: Plan, held: Holdings) -> int:
    """Return on how many nodes the byte of a state is that is on the fewest, counted stretch by stretch."""
    counts = [len(plan.nodes)]
    for layer in problem.profile.layers:
        bounds = {bound for intervals in held[layer.name].values() for bound in intervals.bounds}
        for byte in sorted({0, *bounds} - {layer.state_bytes}) if layer.state_bytes else ():
            holding = [rank for rank, has in held[layer.name].items() if any(first <= byte < end for first, end in has)]
            counts.append(len({plan.slots[rank].node for rank in holding}))
    return min(counts)


def check_divided(problem: PlanningProblem, plan: Plan) -> None:
    """Together the devices of each row have the states of its stages exactly once."""
    for row in plan.rows:
        of_devices = [slot.intervals(problem.profile) for slot in row]
        for state in of_devices[0]:
            whole = problem.profile.layers[problem.profile.index(state)].whole
            assert sum(device[state].size for device in of_devices) == whole.size
            assert reduce(or_, (device[state] for device in of_devices)) == whole


def scattered(held: Mapping[int, ByteIntervals]) -> dict[int, ByteIntervals]:
    """Leave each piece of a state to one of its holders, no two in a row to the same if there are others."""
    left: dict[int, ByteIntervals] = {}
    for index, piece in enumerate(common_pieces(held)):
        rank = piece.holders[index % len(piece.holders)]
        left[rank] = left.get(rank, NO_BYTES) | piece.intervals
    return left


def mixed(data: st.DataObject, problem: PlanningProblem, plan: Plan) -> Plan:
    """Return a plan on the same nodes, whose pipelines are each of some degree, or sharded."""
    degrees = problem.profile.tp_degrees
    roomy = replace(problem, cluster=replace(problem.cluster, memory_bytes=None), sharding=Sharding.OFF)
    ways = [replace(roomy, profile=problem.profile.at_degree(degree)) for degree in degrees]
    if problem.cluster.devices_per_node > 1 and degrees[0] == 1:
        ways.append(replace(ways[0], sharding=Sharding.ON))
    templates = [templates_for(way, len(plan.nodes)) for way in ways]
    layouts = {
        size: [each.of(size)[0] for each in templates if size in each.sizes]
        for size in {len(pipeline.nodes) for pipeline in plan.pipelines}
    }
    pipelines = [
        replace(pipeline, template=data.draw(st.sampled_from([pipeline.template, *layouts[len(pipeline.nodes)]])))
        for pipeline in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


@given(st.data(), problems(), st.integers(0, 2))
def test_any_degrees_fit_together_and_hold_every_byte_on_enough_nodes(
    data: st.DataObject, problem: PlanningProblem, more: int
) -> None:
    nodes = range(enough_nodes(problem) + problem.max_failures + more)
    before = mixed(data, problem, first_plan(problem, nodes))
    dead = data.draw(st.sets(st.sampled_from(nodes), max_size=problem.max_failures))
    is_scattered = data.draw(st.booleans())
    candidates = replan_candidates(problem, before, sorted(set(nodes) - dead))
    plans = [candidate.plan for candidate in islice(candidates, 2)]
    plans.append(mixed(data, problem, plans[0]))
    for plan in (before, *plans):
        check_divided(problem, plan)
        fewest = fewest_nodes(problem, plan, plan.holders(problem.profile))
        assert problem.max_failures < fewest == plan.redundancy(problem.profile)
    for after in plans:
        held = survivors(problem, before, after)
        if is_scattered:
            held = {state: scattered(ranks) for state, ranks in held.items()}
        needed = after.holders(problem.profile)
        transfers, lost = transfers_between(needed, held)
        assert lost == ()
        here = {state: {rank: held[state].get(rank, NO_BYTES) for rank in ranks} for state, ranks in needed.items()}
        for each in transfers:
            part = ByteIntervals.of(each.first_byte, each.end_byte)
            assert part & held[each.state][each.source] == part
            assert part & here[each.state][each.target] == NO_BYTES
            here[each.state][each.target] |= part
        for state, ranks in needed.items():
            assert all(here[state][rank] & intervals == intervals for rank, intervals in ranks.items())
        assert fewest_nodes(problem, after, here) > problem.max_failures


@given(st.data(), problems(max_degree=1))
def test_nothing_is_lost_with_up_to_f_failures_and_any_joins(data: st.DataObject, problem: PlanningProblem) -> None:
    nodes = range(enough_nodes(problem) + data.draw(st.integers(problem.max_failures, 4)))
    joiners = range(100, 100 + data.draw(st.integers(0, 8)))
    before = first_plan(problem, nodes)
    dead = data.draw(st.sets(st.sampled_from(nodes), max_size=problem.max_failures))
    after = replan(problem, before, [*sorted(set(nodes) - dead), *joiners])
    _, lost = plan_transfers(problem, after, survivors(problem, before, after))
    assert lost == ()


def test_nothing_moves_where_everything_is_held() -> None:
    problem, plan = job()
    assert plan_transfers(problem, plan, plan.holders(problem.profile)) == ((), ())


def test_senders_carry_equal_loads() -> None:
    problem, plan = job(num_layers=6)
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, {f"l{i}": [0, 1] for i in range(6)}))
    assert Counter(transfer.source for transfer in transfers) == {0: 3, 1: 3}


def test_the_largest_states_are_given_out_first() -> None:
    problem, plan = job()
    layers = [
        replace(layer, parameter_bytes=size * MIB, optimizer_bytes=0)
        for layer, size in zip(problem.profile.layers, (1, 1, 2), strict=True)
    ]
    problem = replace(problem, profile=replace(problem.profile, layers=tuple(layers)))
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, {f"l{i}": [0, 1] for i in range(3)}))
    assert {transfer.state: transfer.source for transfer in transfers} == {"l2": 0, "l0": 1, "l1": 1}


def test_states_with_one_holder_are_counted_before_the_choice_is_made() -> None:
    problem, plan = job(num_layers=2)
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, {"l0": [0, 1], "l1": [0]}))
    sources = {(transfer.state, transfer.target): transfer.source for transfer in transfers}
    assert sources == {("l0", 2): 1, ("l1", 1): 0, ("l1", 2): 0}


def test_large_state_is_split_evenly_over_its_holders() -> None:
    problem, plan = job(num_layers=1, state_bytes=10 * MIB + 100)
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, {"l0": [0, 1]}))
    half = 5 * MIB + 4096
    assert transfers == (
        Transfer(state="l0", source=0, target=2, first_byte=0, end_byte=half),
        Transfer(state="l0", source=1, target=2, first_byte=half, end_byte=10 * MIB + 100),
    )


@pytest.mark.parametrize(("num_wanting", "num_senders"), [(1, 16), (10, 16), (20, 8), (60, 8)])
def test_state_that_many_want_comes_to_each_from_few_of_its_holders(num_wanting: int, num_senders: int) -> None:
    size = 1 << 30
    whole = ByteIntervals.of(0, size)
    held = dict.fromkeys(range(20), whole)
    needed = dict.fromkeys(range(20, 20 + num_wanting), whole)
    transfers, _ = transfers_between({"l0": needed}, {"l0": held})
    sent = Counter[int]()
    for transfer in transfers:
        sent[transfer.source] += transfer.end_byte - transfer.first_byte
    senders_of = {rank: {each.source for each in transfers if each.target == rank} for rank in needed}
    assert max(map(len, senders_of.values())) <= num_senders
    if num_wanting > 1:
        assert max(sent.values()) <= 1.05 * num_wanting * size / len(held), "loads are even all the same"


@pytest.mark.parametrize(("num_states", "num_senders"), [(1, 8), (3, 3), (8, 1), (40, 1)])
def test_rank_receives_from_few_where_nobody_sends_half_as_much_as_it_receives(
    num_states: int, num_senders: int
) -> None:
    whole = ByteIntervals.of(0, 1 << 30)
    held = {f"l{i}": dict.fromkeys(range(30), whole) for i in range(num_states)}
    needed = {state: dict.fromkeys(range(30, 32), whole) for state in held}
    transfers, _ = transfers_between(needed, held)
    senders_of = Counter((each.state, each.target) for each in transfers)
    assert set(senders_of.values()) == {num_senders}
    sent = Counter[int]()
    for transfer in transfers:
        sent[transfer.source] += transfer.end_byte - transfer.first_byte
    assert 2 * max(sent.values()) <= num_states << 30


def test_state_of_four_mib_stays_whole() -> None:
    problem, plan = job(num_layers=1, state_bytes=4 * MIB)
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, {"l0": [0, 1]}))
    assert transfers == (Transfer(state="l0", source=0, target=2, first_byte=0, end_byte=4 * MIB),)


def test_holder_without_a_place_for_the_state_is_a_source() -> None:
    problem = PlanningProblem(profile=profile([1.0, 1.0]), num_microbatches=2, max_failures=0, min_pipeline_nodes=2)
    plan = first_plan(problem, [0, 1])  # rank 0 has l0, rank 1 has l1
    transfers, lost = plan_transfers(problem, plan, whole_states(problem, {"l0": [1], "l1": [1]}))
    assert transfers == (Transfer(state="l0", source=1, target=0, first_byte=0, end_byte=MIB),)
    assert lost == ()


def test_state_of_which_two_nodes_have_a_shard_each_is_put_together_at_any_degree() -> None:
    """Of two MiB in rows and four that are not: tensor-parallel devices have all of these."""
    of_state = replace(
        profile([1.0], 6 * MIB).layers[0], segments=(2 * MIB, 4 * MIB), rows=((2 * MIB, 8), (4 * MIB, 0))
    )
    sharded, parallel = template(1.0, shard=2), cut(1, degree=2, devices=2)
    plan = plan_of((parallel, [0]), (sharded, [1]), (cut(1), [2]))
    held = {"l0": {0: of_state.share(0, 2), 3: of_state.share(1, 2)}}
    transfers, lost = transfers_between(plan.holders(ModelProfile(layers=(of_state,))), held)
    assert lost == ()
    received: dict[int, list[tuple[int, int, int]]] = {}
    for each in transfers:
        received.setdefault(each.target, []).append((each.first_byte // MIB, each.end_byte // MIB, each.source))
    assert received == {
        0: [(4, 6, 3)],
        1: [(1, 2, 3), (2, 4, 0), (4, 6, 3)],
        2: [(0, 1, 0), (2, 4, 0)],
        4: [(0, 1, 0), (1, 2, 3), (2, 4, 0), (4, 6, 3)],
    }


def test_sharing_layer_receives_the_owners_state() -> None:
    problem = PlanningProblem(
        profile=profile([1.0, 1.0], shares={1: (0,)}), num_microbatches=2, max_failures=0, min_pipeline_nodes=2
    )
    plan = first_plan(problem, [0, 1])
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, {"l0": [0], "l1": [1]}))
    assert transfers == (Transfer(state="l0", source=0, target=1, first_byte=0, end_byte=MIB),)


def test_lost_states_are_named_in_layer_order() -> None:
    problem, plan = job()
    transfers, lost = plan_transfers(problem, plan, whole_states(problem, {"l1": [0, 1, 2]}))
    assert transfers == ()
    assert lost == ("l0", "l2")


def test_unknown_state_is_refused() -> None:
    problem, plan = job()
    with pytest.raises(ValueError, match=r"^held must name layers of the profile, got 'l9'; use the same profile"):
        plan_transfers(problem, plan, {"l9": {}})


def test_rank_that_takes_no_part_is_refused() -> None:
    problem, plan = job()
    message = r"^holders of 'l0' must be ranks 0 to 3 \(the new plan's, then sources\), got \[0, 4\]; leave out workers"
    with pytest.raises(ValueError, match=message):
        plan_transfers(problem, plan, whole_states(problem, {"l0": [0, 4]}), num_sources=1)


def test_source_without_a_place_gives_what_only_it_holds() -> None:
    problem, plan = job(num_layers=2, num_nodes=2)
    transfers, lost = plan_transfers(problem, plan, whole_states(problem, {"l0": [0, 1], "l1": [2]}), num_sources=1)
    assert lost == ()
    assert transfers == tuple(
        Transfer(state="l1", source=2, target=target, first_byte=0, end_byte=MIB) for target in (0, 1)
    )


def test_source_without_a_place_takes_a_share_of_the_load_but_not_the_first() -> None:
    problem, plan = job(num_layers=3, num_nodes=2)
    everything = {state: [0, 2] for state in ("l0", "l1", "l2")}
    transfers, _ = plan_transfers(problem, plan, whole_states(problem, everything), num_sources=1)
    assert [(transfer.state, transfer.source) for transfer in transfers] == [("l0", 0), ("l1", 2), ("l2", 0)]
