from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.templates.composition.compose import Compositions, compositions
from resilient.templates.inputs.cluster import Link
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.replan import first_plan, replan, replan_candidates, templates_for
from resilient.templates.replan.replan_candidate import Situation
from resilient.templates.replan.way import ReplanCandidate, Way, WayCost, likely_ways, soon_known_ms
from resilient.templates.search.template_sizes import usable_nodes
from resilient.templates.template import TemplateSet
from tests.templates.jobs import cut, enough_nodes, layout, plan_of, problems, profile, template_set


def situation(
    templates: TemplateSet,
    composition: Sequence[int],
    plan: Plan,
    live: Sequence[int],
    num_microbatches: int = 12,
    slowdowns: Mapping[int, float] | None = None,
) -> Situation:
    num_layers = templates.layouts[0][0].stages[-1].end_layer
    problem = PlanningProblem(profile=profile([1.0] * num_layers), num_microbatches=num_microbatches)
    best = Compositions(tuple(composition), tuple(composition))
    return Situation(problem, templates, lambda _: best, plan, live, {}, slowdowns or {})


def plans(of: Situation) -> list[Plan]:
    return [candidate.plan for candidate in placed(of)]


def placed(of: Situation) -> list[ReplanCandidate]:
    return [candidate for way in of.ways() if (candidate := way.candidate())]


def test_layouts_suit_the_split() -> None:
    # 5.3 ms for the first microbatch and 4 ms for each more, or 6 ms and 3 ms.
    even, uneven = cut(3, 6), cut(2, 6)
    short = replace(uneven, stages=(replace(uneven.stages[0], forward_ms=0.0), uneven.stages[1]))
    few, many = (situation(template_set((short, even)), (2, 2), plan_of(), range(4), count) for count in (2, 40))
    assert [[pipeline.template for pipeline in plan.pipelines] for plan in plans(few)] == [[short, short]]
    assert [[pipeline.template for pipeline in plan.pipelines] for plan in plans(many)] == [[even, even]]


def test_pipelines_that_shrink_keep_their_own_nodes() -> None:
    templates = template_set(cut(2, 6), cut(2, 4, 6))
    before = plan_of((cut(2, 4, 6), (5, 6, 7)), (cut(2, 4, 6), (0, 1, 2)))
    simple = placed(situation(templates, (2, 2), before, [0, 1, 5, 6]))[0]
    assert simple.kind == "simple"
    assert [pipeline.nodes for pipeline in simple.plan.pipelines] == [(5, 6), (0, 1)]


def test_candidates_that_differ_in_the_order_of_pipelines_alone_are_one() -> None:
    two, three = cut(3, 6), cut(2, 4, 6)
    before = plan_of((two, (0, 1)), (three, (2, 3, 4)))
    found = placed(situation(template_set(two, three), (3, 2), before, range(5)))
    assert [candidate.kind for candidate in found] == ["keep"]


def test_only_repairs_that_use_as_many_nodes_as_can_be_used_are_candidates() -> None:
    one, two = cut(6), cut(3, 6)
    before = plan_of((one, (0,)), (one, (1,)))
    # With one microbatch for each of two pipelines there can be no third; the fifth node has no place.
    found = placed(situation(template_set(one, two), (2, 2), before, range(5), num_microbatches=2))
    assert [(candidate.kind, len(candidate.plan.nodes)) for candidate in found] == [("join", 4), ("composed", 4)]
    found = placed(situation(template_set(one, two), (2, 1), before, range(5), num_microbatches=2))
    assert [(candidate.kind, len(candidate.plan.nodes)) for candidate in found] == [("composed", 3)]


def test_steps_take_as_long_as_slow_nodes_make_them() -> None:
    two = cut(3, 6)
    before = plan_of((two, (0, 1)), (two, (2, 3)))
    slow = placed(situation(template_set(two), (2, 2), before, range(4), slowdowns={1: 4.0}))[0]
    # 3 + 2 x 12 = 27 and 3 + 10 x 3 = 33, against 3 + 3 x 12 = 39.
    assert (layout(slow.plan), slow.step_ms) == ([((0, 1), 2), ((2, 3), 10)], 33.0)


def cost_of(candidate: ReplanCandidate) -> WayCost:
    return WayCost(candidate.step_ms, candidate.copy_ms, candidate.copied_bytes, candidate.lacking_domains)


def test_of_equally_good_candidates_the_one_that_copies_less_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the busiest node copies may be the same."""
    equal = [
        ReplanCandidate(
            kind="composed", plan=plan_of(), copied_bytes=num_bytes, copy_ms=1.0, step_ms=2.0, lacking_domains=0
        )
        for num_bytes in (200, 100)
    ]
    copied: list[int] = []

    def place(candidate: ReplanCandidate) -> WayCost:
        copied.append(candidate.copied_bytes)
        return cost_of(candidate)

    ways = [
        Way(
            least_step_ms=each.step_ms,
            is_met=True,
            num_nodes=4,
            placed_step_ms=None,
            copy_bounds=[lambda each=each: (each.copy_ms, each.copied_bytes - 1)],
            cost=lambda each=each: place(each),
            candidate=lambda each=each: each,
        )
        for each in equal
    ]
    monkeypatch.setattr(Situation, "ways", lambda _: iter(ways))
    problem = PlanningProblem(profile=profile([1.0] * 6), num_microbatches=12)
    found = replan_candidates(problem, plan_of(), range(4))
    assert next(found) == equal[1]
    assert copied == [100]  # the other copies more wherever its nodes are
    assert list(found) == equal[:1]


def test_a_way_whose_step_is_known_to_be_longer_is_no_candidate_before_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bound was lower, and its nodes were placed to learn which step is the shortest."""
    asked: list[float] = []

    def way(least_step_ms: float, step_ms: float) -> Way:
        found = ReplanCandidate(
            kind="composed", plan=plan_of(), copied_bytes=0, copy_ms=0.0, step_ms=step_ms, lacking_domains=0
        )

        def cost() -> WayCost:
            asked.append(step_ms)
            return cost_of(found)

        return Way(
            least_step_ms=least_step_ms,
            is_met=False,
            num_nodes=4,
            placed_step_ms=lambda: step_ms,
            copy_bounds=[lambda: (0.0, 0)],
            cost=cost,
            candidate=lambda: found,
        )

    ways = [way(1.0, 4.0), way(1.0, 3.0), way(2.0, 2.0)]
    monkeypatch.setattr(Situation, "ways", lambda _: iter(ways))
    problem = PlanningProblem(profile=profile([1.0] * 6), num_microbatches=12)
    found = replan_candidates(problem, plan_of(), range(4))
    assert (next(found).step_ms, asked) == (2.0, [2.0])
    assert [each.step_ms for each in found] == [3.0, 4.0]


def test_of_pipelines_that_stay_it_is_known_what_their_slow_nodes_do() -> None:
    """Before anything is in its place; of others, that one has the slowest node that must be in use."""
    two = cut(3, 6)
    before = plan_of((two, (0, 1)), (two, (2, 3)))
    keep = next(situation(template_set(two), (2, 2), before, range(4), 24, {1: 4.0, 3: 1.5}).ways())
    assert keep.least_step_ms == keep.step_ms

    # Two that are lost are replaced. 3 + 3 x 4 ms for the first microbatch where the layer of 3 ms is on the slow node.
    anew = situation(template_set(two), (2, 2), before, [1, 3, 4, 5], 2, {1: 4.0, 3: 4.0})
    least = [way.least_step_ms for way in anew.ways() if way.num_nodes == 4]
    assert least == pytest.approx([15.0] * len(least), abs=1e-5)
    assert least


def test_of_many_nodes_slow_ones_are_taken_to_stay_in_pipelines_that_go_on() -> None:
    """Where they do, that is what a step takes; a bound that held wherever they come would be as if none were slow."""
    two, three = cut(3, 6), cut(2, 4, 6)
    before = plan_of(*((two, (2 * each, 2 * each + 1)) for each in range(40)))
    templates, composition = template_set(two, three), [2] * 40
    slow = dict.fromkeys(range(0, 80, 2), 3.0)
    keep = next(situation(templates, composition, before, range(80), 80, slow).ways())
    assert (keep.is_met, keep.is_known) == (True, False)
    assert keep.least_step_ms == pytest.approx(12 + 2 * 9 - 9)
    assert keep.least_step_ms == keep.step_ms

    # One more node for each of them: what was slow is slow somewhere, at 2 ms for each microbatch.
    join = next(situation(templates, [3] * 40, before, range(120), 80, slow).ways())
    assert (join.is_met, join.least_step_ms >= 2 * 6.0, join.least_step_ms <= join.step_ms) == (False, True, True)


def test_what_asks_for_luck_is_left_out_unless_it_is_known() -> None:
    def way(least_step_ms: float, *, is_met: bool, is_known: bool = False) -> Way:
        found = Way(
            least_step_ms=least_step_ms,
            is_met=is_met,
            num_nodes=1,
            placed_step_ms=lambda: 2 * least_step_ms,
            copy_bounds=[],
            cost=lambda: None,
            candidate=lambda: None,
        )
        assert not is_known or found.step_ms
        return found

    met, lucky, longer = way(4.0, is_met=True), way(3.0, is_met=False), way(5.0, is_met=False)
    placed = way(1.0, is_met=False, is_known=True)
    assert likely_ways([met, lucky, longer, placed]) == [met, longer, placed]
    assert likely_ways([lucky, longer]) == [lucky, longer]
    assert soon_known_ms([met, lucky, longer]) == 4.0
    assert soon_known_ms([met, placed]) == 2.0
    assert (lucky.is_known, soon_known_ms([lucky, longer], 2.0), lucky.is_known) == (False, inf, False)
    assert soon_known_ms([lucky, longer]) == 6.0


@settings(max_examples=60)
@given(problems(), st.data())
def test_no_way_takes_less_than_it_takes_at_least(problem: PlanningProblem, data: st.DataObject) -> None:
    """Its step with slow nodes, what the busiest of them receives, and what all do."""
    fewest = enough_nodes(problem)
    before = first_plan(problem, range(data.draw(st.integers(fewest, fewest + 6))))
    live = data.draw(st.lists(st.integers(0, fewest + 8), min_size=fewest, max_size=fewest + 6, unique=True))
    factors = st.sampled_from([1.0, 1.3, 2.0, 4.0])
    slowdowns = data.draw(st.dictionaries(st.sampled_from(live), factors, max_size=len(live)))
    domains = {node: str(node % 2) for node in live} if data.draw(st.booleans()) else {}
    templates = templates_for(problem, len(live))

    def best(num_nodes: int) -> Compositions:
        usable = usable_nodes(problem, templates, num_nodes)
        return compositions(templates, usable, problem.num_microbatches, problem.max_failures + 1)

    for way in Situation(problem, templates, best, before, sorted(live), domains, slowdowns).ways():
        assert way.least_step_ms <= way.step_ms
        assert not way.is_met or way.least_step_ms == way.step_ms
        candidate = way.candidate()
        if candidate is not None:
            assert candidate.step_ms == way.step_ms
            assert all(bound() <= (candidate.copy_ms, candidate.copied_bytes) for bound in way.copy_bounds)


@settings(max_examples=40)
@given(st.data(), problems())
def test_only_pipelines_beside_others_pay_for_sums_of_gradients(data: st.DataObject, problem: PlanningProblem) -> None:
    """What has one pipeline is as fast as the best layout without sums, however many nodes the templates are for."""
    link = Link(bytes_per_s=data.draw(st.sampled_from([1e3, 1e6, 1e9])))
    problem = replace(problem, max_failures=0, cluster=replace(problem.cluster, inter_node=link))
    plan = first_plan(problem, range(enough_nodes(problem) + data.draw(st.integers(0, 4))))
    for _ in range(3):
        least = templates_for(problem, len(plan.nodes)).sizes[0]
        live = range(data.draw(st.integers(least, least + 4)))
        templates, before = templates_for(problem, len(live)), plan
        usable = usable_nodes(problem, templates, len(live))
        for candidate in replan_candidates(problem, before, live):
            pipelines = candidate.plan.pipelines
            alone = len(pipelines) == 1
            times = [p.template.line_ms() for p in pipelines]
            steps = [
                fill - (p.template.sync_ms if alone else 0.0) + p.template.num_rounds(p.num_microbatches) * slowest
                for p, (fill, slowest) in zip(pipelines, times, strict=True)
            ]
            assert candidate.step_ms == pytest.approx(max(steps), abs=1e-5)
        plan = first_plan(problem, live)
        if usable in templates.sizes:
            lone = templates.best(usable, problem.num_microbatches, alone=True)
            assert max(plan.finish_ms) <= lone.iteration_ms(problem.num_microbatches, alone=True) + 1e-5


@settings(max_examples=100)
@given(st.data(), problems())
def test_equal_plans_go_on_in_equal_ways(data: st.DataObject, problem: PlanningProblem) -> None:
    nodes = range(enough_nodes(problem) + data.draw(st.integers(0, 6)))
    plan = first_plan(problem, nodes)
    least = (problem.max_failures + 1) * templates_for(problem, len(nodes)).sizes[0]
    for _ in range(3):
        live = sorted(data.draw(st.sets(st.sampled_from(range(len(nodes) + 6)), min_size=least)))
        read = msgspec.json.decode(msgspec.json.encode(plan), type=Plan)
        assert read == plan
        found, of_read = (list(replan_candidates(problem, before, live)) for before in (plan, read))
        assert found == of_read
        plan = found[0].plan


@settings(max_examples=60)
@given(st.data(), problems())
def test_plans_do_not_depend_on_what_nodes_are_called(data: st.DataObject, problem: PlanningProblem) -> None:
    """Of the plans before and after, only where nodes are counts; of those that come, also which comes first."""
    num_nodes = data.draw(st.integers(enough_nodes(problem), enough_nodes(problem) + 10))
    plan = first_plan(problem, range(num_nodes))
    left = data.draw(st.lists(st.sampled_from(plan.nodes), unique=True))
    least = max(0, enough_nodes(problem) - len(left))
    live = [*left, *range(num_nodes, num_nodes + data.draw(st.integers(least, least + 4)))]
    names = dict(zip(plan.nodes, data.draw(st.permutations(plan.nodes)), strict=True))

    def renamed(plan: Plan) -> Plan:
        return replace(
            plan,
            pipelines=tuple(
                replace(pipeline, nodes=tuple(names.get(node, node) for node in pipeline.nodes))
                for pipeline in plan.pipelines
            ),
        )

    assert replan(problem, renamed(plan), [names.get(node, node) for node in live]) == renamed(
        replan(problem, plan, live)
    )
