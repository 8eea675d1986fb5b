"""Which node takes which place of the new pipelines: few bytes are copied, and no domain is the only one with a state.

A node that holds exactly what a place needs is put there first. What a node must receive for a place is a distance (a
set difference), so moving it elsewhere can never save more than it costs: the assignment is left with what changes.

Copying takes as long as the node that receives most. Where that is much more than another placement asks of any node,
all are placed anew, such that none receives much more than the least that can be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from resilient.templates.common.arrays import Flags, Floats, Ints, distinct, ranges
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.assigning.assignment import FORBIDDEN, AmountBounds, assign
from resilient.templates.replan.repair import NEW
from resilient.templates.replan.state_residency import EMPTY, StateResidency
from resilient.templates.replan.topology_spread import FailureDomains, Kinds
from resilient.templates.template import PipelineTemplate

_FREE = -1
_NONE = -2
_UNKNOWN = -3

_NEAR = 1.05
"""The most that one node receives may be this many times the least that can be, where that copies less in all; and
copies may take this many times as long, where it is no more than that only then."""
_NOBODY: Ints = np.empty(0, dtype=np.int64)


class Targets(NamedTuple):
    """Pipelines to be made.

    Args:
        layouts: The layouts there are.
        numbers: Which of them each pipeline has.
        continues: Of each the index of the pipeline of the old plan that it goes on from, :data:`NEW` for none: nodes
            of that which hold what their position needs keep it. No two continue the same.
    """

    layouts: Sequence[PipelineTemplate]
    numbers: Ints
    continues: Ints


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Nodes in their places.

    Args:
        nodes: Of each target, in the order of its template.
        copied_bytes: What nodes have to receive from other nodes, all in all.
        busiest_bytes: The most that one node receives, or sends where the holders of a state send equal parts of it.
        lacking_domains: In how many more failure domains states should be held, summed over the states.
    """

    nodes: tuple[tuple[int, ...], ...]
    copied_bytes: int
    busiest_bytes: int
    lacking_domains: int


class _Needs(NamedTuple):
    """What the places need.

    Args:
        sizes: The number of places of each target.
        parts: The different parts that are needed.
        kinds: The index of each place's part among them. [places]
        received: The bytes that nodes lack of each part, by the kind of the node. [parts, kinds of nodes]
    """

    sizes: Ints
    parts: Ints
    kinds: Ints
    received: Ints


class Seats(NamedTuple):
    """Nodes in their places, before it is known what that takes.

    Args:
        nodes: Of each place the index of its node among the live ones, one target after the other. [places]
        needs: What they need.
        lacking_domains: As of a :class:`Placement`.
    """

    nodes: Ints
    needs: _Needs
    lacking_domains: int

    @property
    def sizes(self) -> Ints:
        """The number of places of each target."""
        return self.needs.sizes


class Placer:
    """Puts nodes into the places of new pipelines.

    Args:
        problem: The job.
        plan: What the nodes hold; without pipelines where they hold nothing.
        nodes: The live nodes. Of equally good ones earlier ones are taken first.
        domains: Their failure domains.
    """

    def __init__(self, problem: PlanningProblem, plan: Plan, nodes: Sequence[int], domains: FailureDomains) -> None:
        self._nodes: Ints = np.array(nodes, dtype=np.int64)
        self._holdings = StateResidency(problem.profile)
        layouts = [self._holdings.number(pipeline.template) for pipeline in plan.pipelines]
        self._old_sizes: Ints = np.array(list(map(len, layouts)), dtype=np.int64)
        self._old_firsts = self._old_sizes.cumsum() - self._old_sizes
        index_of = self._index_of = dict(zip(nodes, range(len(nodes)), strict=True))
        # Of all places of the old plan, one after the other: the node that is still there, and its pipeline.
        self._old: Ints = np.array([index_of.get(node, _FREE) for node in plan.nodes], dtype=np.int64)
        pipelines = np.repeat(np.arange(len(layouts)), self._old_sizes)
        there = self._old != _FREE
        self._held = np.full(len(nodes), EMPTY)
        self._held[self._old[there]] = np.concatenate(layouts or [_NOBODY])[there]
        self._has, self._node_kinds = distinct(self._held)
        self._pipeline_of = np.full(len(nodes), _NONE)
        self._pipeline_of[self._old[there]] = pipelines[there]
        lost = np.bincount(pipelines[~there], minlength=len(layouts))
        # A number for each of the old plan's layouts, which are few, and which of them those of targets have.
        self._same_as = _NOBODY
        self._same: dict[bytes, int] = {}
        same = [self._same.setdefault(layout.tobytes(), len(self._same)) for layout in layouts]
        self._most_complete_first = np.argsort(lost, kind="stable")
        self._same_first = np.array(same, dtype=np.int64)[self._most_complete_first]
        self._domains = domains
        self._bounds = AmountBounds()
        self._known_needs: dict[int, tuple[Targets, _Needs]] = {}
        self._known_received: Ints = np.empty((0, len(self._has)), dtype=np.int64)
        # In so many cells of a byte.
        self._known_prices, self._cells = self._known_received, self._holdings.cells

    def left(self, without: Collection[int]) -> Ints:
        """Return how many nodes of each pipeline of the old plan are there but for some. [pipelines]"""
        there = self._pipeline_of.copy()
        there[self._indices(without)] = _NONE
        return np.bincount(there[there != _NONE], minlength=len(self._old_sizes))

    def continuing(self, targets: Targets) -> Targets:
        """Let targets that continue nothing go on from a pipeline with their layout that nothing else continues.

        Of several that are left, the one that has lost fewest nodes goes first.
        """
        # All parts get their numbers here: which of equally good placements is taken does not depend on what is placed.
        unknown = np.full(len(targets.layouts) - len(self._same_as), _UNKNOWN)
        self._same_as = np.concatenate((self._same_as, unknown))
        numbers = targets.numbers[self._same_as[targets.numbers] == _UNKNOWN]
        for number in dict.fromkeys(numbers.tolist()):
            parts = self._holdings.number(targets.layouts[number])
            self._same_as[number] = self._same.get(parts.tobytes(), _NONE)
        if not (targets.continues == NEW).any():
            return targets
        # Imported late: it loads numba, and most processes that import the planner never place a node.
        from resilient.templates.replan.repair_loops import go_on

        same = self._same_as[targets.numbers]
        continues = go_on(targets.continues, same, self._most_complete_first, self._same_first, len(self._same))
        return targets._replace(continues=continues)

    def volume(self, seats: Seats) -> tuple[int, int]:
        """Return :attr:`Placement.copied_bytes` and :attr:`Placement.busiest_bytes` of nodes in their places."""
        return self._volume(seats.nodes, seats.needs)

    def placement(self, seats: Seats) -> Placement:
        """Return which nodes are where, and what that takes."""
        copied, busiest = self.volume(seats)
        names = self._nodes[seats.nodes].tolist()
        ends = accumulate(seats.sizes.tolist(), initial=0)
        return Placement(
            nodes=tuple(tuple(names[first:end]) for first, end in pairwise(ends)),
            copied_bytes=copied,
            busiest_bytes=busiest,
            lacking_domains=seats.lacking_domains,
        )

    def seats(
        self,
        targets: Targets,
        pinned: Mapping[int, int] | None = None,
        without: Collection[int] = (),
        *,
        keeps_whole: bool = False,
    ) -> Seats:
        """Place nodes; there must be enough of them.

        Of all placements one is taken whose copies are cheapest (:meth:`StateResidency.prices`); of places where a node
        costs the same, it stays with the pipeline that continues its own. If a node then receives more than
        :data:`_NEAR` times what the most must be, it is the cheapest of those placements in which none does, unless
        senders make that take more than :data:`_NEAR` times as long. Where placements hold a state in fewer than f + 1
        failure domains, nodes exchange places until no exchange improves that, at whatever price
        (:func:`.spread_domains`): like f + 1 pipelines, it is what makes failures survivable.

        Args:
            targets: The pipelines to be made.
            pinned: Nodes that take a particular place, by its index among those of all targets, one after the other.
            without: Nodes that stand by. Only where failure domains ask for it do they take a place nevertheless, as
                pinned ones leave theirs.
            keeps_whole: Whether those that receive nothing in the cheapest placement stay as they are there.
        """
        needs, continued = self._needs(targets), targets.continues
        needed, sizes = needs.parts[needs.kinds], needs.sizes
        chosen = np.full(len(needed), _FREE)
        for place, node in (pinned or {}).items():
            chosen[place] = self._index_of[node]
        barred = self._indices(without)
        self._keep(chosen, barred, continued, sizes, needed)
        self._keep_equal(chosen, barred, needed)
        self._fill(chosen, barred, needs, np.repeat(continued, sizes))
        settled = self._whole(chosen, needs, sizes) if keeps_whole else np.zeros(len(needed), dtype=np.bool_)
        settled[list(pinned or ())] = True
        if not self._lacking(chosen, needs.parts, needs.kinds):  # exchanges between domains would not keep it
            chosen = self._balanced(chosen, barred, needs, np.repeat(continued, sizes), settled)
        if self._lacking(chosen, needs.parts, needs.kinds):
            chosen = self._spread(chosen, needs)
        return Seats(chosen, needs, self._lacking(chosen, needs.parts, needs.kinds))

    def copy_bounds(self, targets: Targets, without: Collection[int] = ()) -> tuple[Callable[[], tuple[int, int]], ...]:
        """Return bounds of what the busiest node and all nodes receive at least where :meth:`seats` has them.

        Returns:
            What tells them, from what is soon told to the highest.
        """
        if self._is_held_by_few:  # copies that spread it come on top
            return ()
        if self._domains.wanted:
            without = ()  # nodes that stand by may take a place
        asked, bounds = cache(lambda: self._asked(targets, without)), self._bounds
        return tuple(lambda of=of: of(*asked()) for of in (bounds.asked, bounds.learnt, bounds.least))

    @cached_property
    def _is_held_by_few(self) -> bool:
        """Whether a state is held in fewer domains than it should be, as nodes are."""
        return self._lacking(np.arange(len(self._held)), self._has, self._node_kinds) > 0

    def _asked(self, targets: Targets, without: Collection[int]) -> tuple[Ints, Ints, Ints]:
        """Return what nodes receive in places, by the kinds of both, and how many of each kind there are."""
        needs = self._needs(targets)
        num_nodes = np.bincount(self._node_kinds)
        num_nodes -= np.bincount(self._node_kinds[self._indices(without)], minlength=len(num_nodes))
        return needs.received, np.bincount(needs.kinds), num_nodes

    def _needs(self, targets: Targets) -> _Needs:
        """Return what the places need, which is asked several times of the same targets."""
        if id(targets) not in self._known_needs:
            layouts, layout = distinct(targets.numbers)
            parts_of = [self._holdings.number(targets.layouts[number]) for number in layouts.tolist()]
            num_parts = np.array(list(map(len, parts_of)))
            sizes, firsts = num_parts[layout], (num_parts.cumsum() - num_parts)[layout]
            parts, kinds = distinct(np.concatenate(parts_of)[ranges(firsts, sizes)])
            needs = _Needs(sizes, parts, kinds, self._received_by(parts))
            self._known_needs[id(targets)] = targets, needs
        return self._known_needs[id(targets)][1]

    def _received_by(self, parts: Ints) -> Ints:
        """Return the bytes that nodes of each kind lack of some parts. [parts, kinds of nodes]"""
        known = len(self._known_received)
        if known < self._holdings.num_parts:
            more = self._holdings.received(np.arange(known, self._holdings.num_parts), self._has)
            self._known_received = np.concatenate((self._known_received, more))
        return self._known_received[parts]

    def _indices(self, nodes: Collection[int]) -> Ints:
        return np.array([self._index_of[node] for node in nodes], dtype=np.int64)

    def _keep(self, chosen: Ints, barred: Ints, continued: Ints, sizes: Ints, needed: Ints) -> None:
        """Fill places with the nodes that keep their position in what is continued."""
        going_on = continued != NEW
        old = continued[going_on]
        both = np.minimum(self._old_sizes[old], sizes[going_on])
        places = ranges((sizes.cumsum() - sizes)[going_on], both)
        nodes = self._old[ranges(self._old_firsts[old], both)]
        free = np.zeros(len(self._held), dtype=np.bool_)
        free[self._left(chosen, barred)] = True
        same = (nodes != _FREE) & (self._held[nodes] == needed[places]) & free[nodes] & (chosen[places] == _FREE)
        chosen[places[same]] = nodes[same]

    def _keep_equal(self, chosen: Ints, barred: Ints, needed: Ints) -> None:
        """Fill places with nodes that hold exactly what these need; the first place with the first node."""
        left, places = self._left(chosen, barred), np.flatnonzero(chosen == _FREE)
        left = left[np.argsort(self._held[left], kind="stable")]
        places = places[np.argsort(needed[places], kind="stable")]
        held, wanted = self._held[left], needed[places]
        first, end = (np.searchsorted(held, wanted, side=side) for side in ("left", "right"))
        node = first + np.arange(len(wanted)) - np.searchsorted(wanted, wanted)
        enough = node < end
        chosen[places[enough]] = left[node[enough]]

    def _fill(self, chosen: Ints, barred: Ints, needs: _Needs, continued: Ints) -> None:
        """Fill all places that are left, as cheaply as can be."""
        places, left = np.flatnonzero(chosen == _FREE), self._left(chosen, barred)
        if not len(places) or (self._held[left] == EMPTY).all():
            chosen[places] = left[: len(places)]
            return
        found = self._assigned(places, left, needs, continued)
        assert found is not None
        chosen[places] = left[found]

    def _assigned(
        self, places: Ints, nodes: Ints, needs: _Needs, continued: Ints, most_bytes: int | None = None
    ) -> Ints | None:
        """Return which of the nodes is in each of the places; None where one would receive more than ``most_bytes``."""
        wants, place_kinds = distinct(needs.kinds[places])
        has, node_kinds = distinct(self._node_kinds[nodes])
        prices = self._prices(needs.parts[wants])[:, has]
        if most_bytes is not None:
            prices[needs.received[wants[:, None], has] > most_bytes] = FORBIDDEN
        return assign(prices, place_kinds, node_kinds, continued[places], self._pipeline_of[nodes])

    def _prices(self, parts: Ints) -> Ints:
        """Return what nodes of each kind must receive (:meth:`StateResidency.prices`). [parts, kinds of nodes]"""
        if self._cells != self._holdings.cells:
            self._known_prices = self._known_prices * (self._holdings.cells // self._cells)
            self._cells = self._holdings.cells
        known = len(self._known_prices)
        if known < self._holdings.num_parts:
            more = self._holdings.prices(np.arange(known, self._holdings.num_parts), self._has)
            self._known_prices = np.concatenate((self._known_prices, more))
        return self._known_prices[parts]

    def _whole(self, chosen: Ints, needs: _Needs, sizes: Ints) -> Flags:
        """Return which places are of pipelines that receive nothing."""
        owner = np.repeat(np.arange(len(sizes)), sizes)
        return (np.bincount(owner, self._received(chosen, needs), len(sizes)) == 0)[owner]

    def _balanced(self, chosen: Ints, barred: Ints, needs: _Needs, continued: Ints, settled: Flags) -> Ints:
        """Return a placement in which the node that receives most does not receive much more than it must."""
        worst = int(self._received(chosen, needs)[~settled].max(initial=0))
        if not worst:
            return chosen
        places, nodes = np.flatnonzero(~settled), self._left(np.where(settled, chosen, _FREE), barred)
        wants, place_kinds = distinct(needs.kinds[places])
        num_nodes = np.bincount(self._node_kinds[nodes], minlength=len(self._has))
        least = self._bounds.bottleneck(needs.received[wants], np.bincount(place_kinds), num_nodes, int(worst / _NEAR))
        if least is None:
            return chosen
        found = self._assigned(places, nodes, needs, continued, int(least * _NEAR))
        assert found is not None
        balanced = chosen.copy()
        balanced[places] = nodes[found]
        # What one receives less others send and receive more: that may take longer in all.
        busiest, before = (self._volume(each, needs)[1] for each in (balanced, chosen))
        return balanced if busiest <= _NEAR * before else chosen

    def _left(self, chosen: Ints, barred: Ints) -> Ints:
        """Return the nodes that have no place and may take one."""
        free = np.ones(len(self._held), dtype=np.bool_)
        free[chosen[chosen != _FREE]] = False
        free[barred] = False
        return np.flatnonzero(free)

    def _lacking(self, chosen: Ints, parts: Ints, kinds: Ints) -> int:
        """Return :meth:`FailureDomains.lacking` of places with these nodes that need these kinds of parts."""
        return self._domains.lacking(self._states(parts), kinds, chosen) if self._domains.wanted else 0

    def _spread(self, chosen: Ints, needed: _Needs) -> Ints:
        """Return the placement after exchanges between domains."""
        # Places that need nothing stand for the nodes that are left out.
        left_out = self._left(chosen, _NOBODY)
        of_parts = self._states(needed.parts), self._prices(needed.parts)
        needs, prices = (np.pad(each, ((0, 1), (0, 0))) for each in of_parts)
        place_kinds = np.append(needed.kinds, np.full(len(left_out), len(needed.parts)))
        kinds = Kinds(needs, prices, place_kinds, self._node_kinds)
        return self._domains.spread(kinds, np.append(chosen, left_out))[: len(chosen)]

    def _states(self, parts: Ints) -> Flags:
        """Return which states there are in parts. [parts, states]"""
        return self._holdings.states(parts)[:, self._holdings.state_bytes > 0]

    def _volume(self, chosen: Ints, needs: _Needs) -> tuple[int, int]:
        """Return what is copied between nodes: all of it, and the most that one node receives or sends."""
        num_parts, num_kinds = needs.received.shape
        pairs = np.bincount(needs.kinds * num_kinds + self._node_kinds[chosen], minlength=needs.received.size)
        pairs = pairs.reshape(num_parts, num_kinds)
        need, (hold, num_holders) = self._holdings.states(needs.parts), self._held_states
        missing = (need * (pairs.sum(axis=1, keepdims=True) - pairs @ hold)).sum(axis=0).astype(np.int64)
        shares = -(-missing * self._holdings.state_bytes // num_holders)
        most = max(int(needs.received[pairs > 0].max()), int((hold @ shares.astype(np.float64)).max()))
        return int((needs.received * pairs).sum()), most

    @cached_property
    def _held_states(self) -> tuple[Floats, Ints]:
        """What nodes of each kind hold, 1 or 0, and of each state how many nodes hold it, 1 where nobody does."""
        hold = self._holdings.states(self._has).astype(np.float64)
        return hold, np.maximum((np.bincount(self._node_kinds) @ hold).astype(np.int64), 1)

    def _received(self, chosen: Ints, needs: _Needs) -> Ints:
        """Return what the node in each place receives from other nodes."""
        return needs.received[needs.kinds, self._node_kinds[chosen]]
