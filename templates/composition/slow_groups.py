"""Which slow nodes may be in one pipeline, and in what order it is decided on them.

Of few slow nodes any may be. Of more, those that are about equally slow: a pipeline is as fast as its slowest node, so
they are sorted, and each pipeline has some that stand side by side, while any may stand by. Of equally slow ones that
is no restriction. Where that are too many choices, such pipelines are short, and at last have slow nodes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, groupby
from typing import NamedTuple

from resilient.templates.composition.slow_lines import Factors
from resilient.templates.template import TemplateSet

_MOST_OF_ANY = 4
"""The most slow nodes of which any may be in one pipeline; half as many where templates have very many sizes, and more
on few nodes."""

_MANY_SIZES, _MOST_OF_MANY_SIZES = 40, 2
_FEW_NODES, _MOST_OF_FEW_NODES = 16, 7
_MORE_NODES = 7
"""So many nodes more than the smallest have short pipelines."""
_MOST_CELLS = 400_000
"""Of the tables of pipelines with slow nodes, times what each of them may consist of."""


def num_of_any(templates: TemplateSet, num_slow: int) -> int:
    """Return how many slow nodes, the slowest ones, are looked at such that any may be in one pipeline."""
    if templates.sizes[-1] <= _FEW_NODES:
        return min(num_slow, _MOST_OF_FEW_NODES)
    return min(num_slow, _MOST_OF_ANY if len(templates.sizes) <= _MANY_SIZES else _MOST_OF_MANY_SIZES)


class SlowGroups(NamedTuple):
    """The choices of slow nodes for one pipeline.

    Args:
        slow: The factors of all of them, descending.
        smallest: The fewest nodes of a pipeline with slow ones.
        largest: The most nodes of a pipeline with slow ones.
        most_fast: How many of them are not slow, at most.
        are_any: Whether any may be together, or only some that stand side by side.
    """

    slow: Factors
    smallest: int
    largest: int
    most_fast: int
    are_any: bool

    @classmethod
    def of(cls, templates: TemplateSet, num_fast: int, slow: Factors, num_rows: int) -> SlowGroups:
        """Return those that there is time to look at.

        Args:
            templates: The job's templates.
            num_fast: Nodes that are not slow.
            slow: Factors of those that are, descending.
            num_rows: Of the tables, for numbers of pipelines.
        """
        smallest, last = templates.sizes_beside[0], templates.sizes[-1]
        short, are_any = short_pipelines(templates), num_of_any(templates, len(slow)) == len(slow)
        for largest, most_fast in ((last, last - 1), (short, short - 1), (short, 0)):
            found = cls(slow, smallest, largest, min(most_fast, num_fast), are_any)
            if are_any:
                break
            lengths = range(1, min(len(slow), largest) + 1)
            num_kinds = len(slow) * sum(len(found.sizes(length)) for length in lengths)
            if num_kinds * num_rows * found.num_columns(num_fast) <= _MOST_CELLS:
                break
        return found

    def sizes(self, num_slow: int) -> range:
        """Return the nodes that a pipeline with some slow ones may have."""
        return range(max(num_slow, self.smallest), min(num_slow + self.most_fast, self.largest) + 1)

    def num_columns(self, num_fast: int) -> int:
        """Return of how many different numbers of other nodes pipelines with slow nodes may consist."""
        return min(num_fast, len(self.slow) * self.most_fast) + 1

    @property
    def num_choices(self) -> int:
        """How many choices of slow nodes may be left to be decided on, with that of none."""
        return len(self._choices) if self.are_any else len(self.slow) + 1

    def steps(self) -> Iterator[tuple[int, int, Factors, int]]:
        """Yield what may be done with the slowest of the nodes that are left, for each choice of these but none.

        First it stands by, then it is in a pipeline with each group that it may be with. Choices have numbers from 0
        on, those of fewer nodes first.

        Returns:
            The number of the choice, that of the choice without the slowest node, the group (nobody where it stands
            by), and the number of the choice without that.
        """
        if self.are_any:
            yield from self._steps_of_any()
            return
        num_slow, fewest = len(self.slow), 1 if self.most_fast else self.smallest
        for left in range(1, num_slow + 1):
            yield left, left - 1, (), left - 1
            for number in range(fewest, min(left, self.largest) + 1):
                yield left, left - 1, self.slow[num_slow - left : num_slow - left + number], left - number

    @property
    def _choices(self) -> list[Factors]:
        lengths = range(len(self.slow) + 1)
        return list(dict.fromkeys(group for number in lengths for group in combinations(self.slow, number)))

    def _steps_of_any(self) -> Iterator[tuple[int, int, Factors, int]]:
        numbers = {left: number for number, left in enumerate(self._choices)}
        for left, choice in numbers.items():
            if not left:
                continue
            without_first, seen = numbers[left[1:]], set[Factors]()
            yield choice, without_first, (), without_first
            for number in range(len(left)):
                for others in combinations(range(1, len(left)), number):
                    group = tuple(left[index] for index in (0, *others))
                    if group not in seen:
                        seen.add(group)
                        rest = tuple(factor for index, factor in enumerate(left) if index and index not in others)
                        yield choice, without_first, group, numbers[rest]

    def by_number(self) -> Iterator[tuple[int, list[Factors]]]:
        """Yield the numbers of slow nodes of a pipeline, and the choices of so many."""
        every = dict.fromkeys(group for _, _, group, _ in self.steps() if group)
        for number, groups in groupby(sorted(every, key=len), key=len):
            yield number, list(groups)


def short_pipelines(templates: TemplateSet) -> int:
    """Return the most nodes of short pipelines."""
    return min(templates.sizes[-1], templates.sizes_beside[0] + _MORE_NODES)
