"""The best template where what all stages have in flight grows with their number: branch and bound over that number.

The zero-bubble schedules are such. Templates of a number of stages are among those whose stages hold what fewer have in
flight. So the least sums of these, by number of stages, bound those of all numbers from there on: numbers that cannot
be better than what was found are never searched.

Import it where it is needed: it loads numba.
"""

from __future__ import annotations

from collections.abc import Callable

from resilient.templates.search.bounded_search import COUNT, NEVER, BoundedSearch, Found
from resilient.templates.search.stage_cost_model import STAGE_BITS


def least_sum_of_depths(
    search_of: Callable[[int, BoundedSearch | None], BoundedSearch],
    depths: range,
    most_total: int,
    *,
    bound: int,
    impossible: dict[int, int],
) -> Found | None:
    """Return the best template; None if there is none of use.

    Args:
        search_of: Returns the search for stages that hold what so many stages have in flight, like another.
        depths: The numbers of stages there can be.
        most_total: The greatest sum that is of use, in nanoseconds.
        bound: Of the searches: the most that a stage may take, in nanoseconds.
        impossible: By number of stages, the greatest bound under which no template of as many devices is known to be
            so deep. What is found out is added.
    """
    searches: dict[int, BoundedSearch] = {}

    def search(depth: int) -> BoundedSearch:
        if depth not in searches:
            searches[depth] = search_of(depth, next(iter(searches.values()), None))
        return searches[depth]

    best = useful = min(most_total << STAGE_BITS | COUNT, NEVER - 1)
    # Depths, and labels of templates that include theirs, by rising number of stages.
    ranges = [(depths.start, depths.stop, [0])]
    while ranges:
        first, stop, labels = ranges.pop()
        first = max(first, next((label & COUNT for label in labels if label <= best), stop))
        while first < stop and impossible.get(first, -1) >= bound:
            first += 1
        if first >= stop or search(first).least > best:
            continue
        if search(first).is_exact and search(first).least & COUNT <= first:
            best = search(first).least
            continue
        fewest = search(first).fewest()
        if fewest > first:
            impossible |= {depth: max(bound, impossible.get(depth, bound)) for depth in range(first, fewest)}
            ranges.append((fewest, stop, [0]))
            continue
        labels = search(first).labels()
        best = min([best, *(label for label in labels if label & COUNT <= first)])
        deeper = [label for label in labels if label & COUNT > first]
        middle = (first + 1 + stop) // 2
        ranges += [(first + 1, middle, deeper), (middle, stop, deeper)]
    return None if best == useful else search(best & COUNT).best(best & COUNT)
