"""Who sends which bytes of which layer state to whom.

Each rank holds whole states. Ranks of the plan come first; those after them have no place in it and only send: workers
of nodes that leave or stand by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from resilient.errors import ArgumentError
from resilient.templates.plan import Plan, PlanningProblem

# Up to this many bytes a state comes from one holder; larger ones are split over several, at page boundaries.
_MAX_WHOLE_BYTES = 4 * 2**20
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes ``first_byte .. end_byte - 1`` of a state's flat buffer go from one rank to another."""

    state: str
    source: int
    target: int
    first_byte: int
    end_byte: int


def plan_transfers(
    problem: PlanningProblem, plan: Plan, held: Mapping[str, Sequence[int]], num_sources: int = 0
) -> tuple[tuple[Transfer, ...], tuple[str, ...]]:
    """Plan the copies that bring every rank of a plan to the states it needs.

    All ranks walk the list in order and start a non-blocking send or receive, tagged with its position, for each entry
    of theirs before they wait for any: no order of arrival can then block.

    Args:
        problem: The job.
        plan: The plan to bring about.
        held: Per state name, the ranks that hold it at the agreed version, whether or not the plan places it there.
            States not named are held by none.
        num_sources: Ranks after those of the plan: they send, and receive nothing. Of equally loaded holders, ranks
            of the plan come first.

    Returns:
        The transfers, by state, target and first byte; and the states, in layer order, that some rank needs and none
        holds. There are no transfers of those: they must come from a checkpoint. States without bytes need neither.

    Raises:
        ValueError: ``held`` names a state or rank that does not exist, or a stage of the plan is sharded.
    """
    num_ranks = len(plan.slots) + num_sources
    _check_whole(plan)
    _check_held(problem, num_ranks, held)
    missing = [
        _Missing(state, state_bytes, target, sorted(set(held.get(state, ()))))
        for state, state_bytes, target in _needed(problem, plan)
        if target not in held.get(state, ())
    ]
    lost = tuple(dict.fromkeys(want.state for want in missing if not want.holders))
    load = [0] * num_ranks
    transfers: dict[tuple[str, int], list[Transfer]] = {}
    # Those with the least choice of senders first, then the largest: what is left evens the loads out.
    for want in sorted(missing, key=lambda want: (len(want.holders), -want.state_bytes)):
        if want.holders:
            transfers[want.state, want.target] = _split(want, load)
    ordered = [transfer for want in missing for transfer in transfers.get((want.state, want.target), ())]
    return tuple(ordered), lost


@dataclass(frozen=True, slots=True)
class _Missing:
    state: str
    state_bytes: int
    target: int
    holders: list[int]


def _needed(problem: PlanningProblem, plan: Plan) -> Iterator[tuple[str, int, int]]:
    """Yield (state, bytes, rank) for everything that the plan places somewhere, in layer and rank order."""
    holders = plan.holders(problem.profile)
    for layer in problem.profile.layers:
        if layer.state_bytes:
            for rank in holders[layer.name]:
                yield layer.name, layer.state_bytes, rank


def _split(want: _Missing, load: list[int]) -> list[Transfer]:
    """Split a state over its least loaded holders such that their loads become as equal as can be, and add to them."""
    max_parts = -(-want.state_bytes // _MAX_WHOLE_BYTES)
    sources = sorted(want.holders, key=lambda rank: (load[rank], rank))[:max_parts]
    level = _fill_level([load[source] for source in sources], want.state_bytes)
    transfers: list[Transfer] = []
    first = 0
    for source in sources:
        share = -(-max(0, level - load[source]) // _PAGE_BYTES) * _PAGE_BYTES
        end = want.state_bytes if source == sources[-1] else min(want.state_bytes, first + share)
        if end > first:
            load[source] += end - first
            transfers.append(
                Transfer(state=want.state, source=source, target=want.target, first_byte=first, end_byte=end)
            )
        first = end
    return transfers


def _fill_level(loads: Sequence[int], amount: int) -> int:
    """Return the level, rounded up, that the lowest of ``loads`` (ascending) reach when ``amount`` is poured in."""
    return min(-(-(amount + total) // count) for count, total in enumerate(accumulate(loads), start=1))


def _check_whole(plan: Plan) -> None:
    degree = max(stage.num_devices for pipeline in plan.pipelines for stage in pipeline.template.stages)
    if degree > 1:
        raise ValueError(
            f"num_devices of every stage must be 1 in a plan that is executed, got {degree}; sharded stages are "
            f"planned and simulated only: train with a profile of tp_degrees (1,)"
        )


def _check_held(problem: PlanningProblem, num_ranks: int, held: Mapping[str, Sequence[int]]) -> None:
    names = {layer.name for layer in problem.profile.layers}
    for state, ranks in held.items():
        if state not in names:
            raise ArgumentError("held", "name layers of the profile", repr(state), "use the same profile everywhere")
        if not all(0 <= rank < num_ranks for rank in ranks):
            raise ValueError(
                f"holders of {state!r} must be ranks 0 to {num_ranks - 1} (the new plan's, then sources), "
                f"got {list(ranks)}; leave out workers that take no part"
            )
