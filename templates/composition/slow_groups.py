"""Which slow nodes may be in one pipeline, and in what order it is decided on them.

Of few slow nodes any may be. Of more, those that are about equally slow: a pipeline is as fast as its slowest node, so
they are sorted, and each pipeline has some that stand side by side, while any may stand by. Of equally slow ones that
is no restriction. Where that are too many choices, such pipelines are short, and at last have slow nodes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby

import numpy as np

from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.composition.slow_lines import Factors
from resilient.templates.template import TemplateSet

_MOST_OF_ANY = 4
"""The most slow nodes of which any may be in one pipeline; half as many where templates have very many sizes, and more
on few nodes."""

_MANY_SIZES, _MOST_OF_MANY_SIZES = 40, 2
_FEW_NODES, _MOST_OF_FEW_NODES = 16, 7
_MORE_NODES = (7, 3, 1)
"""So many nodes more than the smallest have short pipelines, and those of them where some nodes are not slow: all, or
fewer where that are too many choices."""
_MOST_CELLS = 400_000
"""Of the tables of pipelines with slow nodes, times what each of them may consist of."""


def num_of_any(templates: TemplateSet, num_slow: int) -> int:
    """Return how many slow nodes, the slowest ones, are looked at such that any may be in one pipeline."""
    if templates.sizes[-1] <= _FEW_NODES:
        return min(num_slow, _MOST_OF_FEW_NODES)
    return min(num_slow, _MOST_OF_ANY if len(templates.sizes) <= _MANY_SIZES else _MOST_OF_MANY_SIZES)


@dataclass(frozen=True)
class SlowGroups:
    """The choices of slow nodes for one pipeline.

    Args:
        slow: The factors of all of them, descending.
        smallest: The fewest nodes of a pipeline with slow ones.
        largest: The most nodes of a pipeline with slow ones.
        largest_with_fast: The most nodes of one where some are not slow.
        most_fast: How many of them are not slow, at most.
        are_any: Whether any may be together, or only some that stand side by side.
    """

    slow: Factors
    smallest: int
    largest: int
    largest_with_fast: int
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
        mixed = (min(short, smallest + more) for more in _MORE_NODES)
        for largest, with_fast in ((last, last), *((short, each) for each in mixed), (short, 0)):
            found = cls(slow, smallest, largest, with_fast, min(max(0, with_fast - 1), num_fast), are_any)
            if are_any:
                break
            num_kinds = len(slow) * sum(len(found.sizes(length)) for length in found._lengths)
            if num_kinds * num_rows * found.num_columns(num_fast) <= _MOST_CELLS:
                break
        return found

    def sizes(self, num_slow: int) -> range:
        """Return the nodes that a pipeline with some slow ones may have."""
        most = max(num_slow, min(num_slow + self.most_fast, self.largest_with_fast))
        return range(max(num_slow, self.smallest), most + 1)

    def num_columns(self, num_fast: int) -> int:
        """Return of how many different numbers of other nodes pipelines with slow nodes may consist."""
        return min(num_fast, len(self.slow) * self.most_fast) + 1

    @property
    def groups(self) -> list[Floats]:
        """The groups of slow nodes that may be in one pipeline, those of fewer nodes first. [groups, slow nodes]"""
        return self._groups_and_steps[0]

    @property
    def steps(self) -> Ints:
        """What may be done with the slowest of the nodes that are left, for each choice of these but none. [steps, 4]

        First it stands by, then it is in a pipeline with each group that it may be with. Choices have numbers from 0
        on, those of fewer nodes first. Of each step the number of the choice, that of the choice without the slowest
        node, the number of the group (-1 where it stands by), and that of the choice without the group.
        """
        return self._groups_and_steps[1]

    @property
    def num_choices(self) -> int:
        """How many choices of slow nodes may be left to be decided on, with that of none."""
        return int(self.steps[-1, 0]) + 1

    @property
    def _lengths(self) -> range:
        """How many slow nodes a pipeline with some of them may have."""
        return range(max(1, self.smallest - self.most_fast), min(len(self.slow), self.largest) + 1)

    @cached_property
    def _groups_and_steps(self) -> tuple[list[Floats], Ints]:
        return self._of_any() if self.are_any else self._side_by_side()

    def _side_by_side(self) -> tuple[list[Floats], Ints]:
        slow, num_slow = np.array(self.slow), len(self.slow)
        left = np.arange(1, num_slow + 1)
        groups, num_groups = list[Floats](), 0
        steps = [np.array((left, left - 1, np.full(num_slow, -1), left - 1))]
        for number in self._lengths:
            # Those begin with the slowest node that is left; they are as slow as those of one node less, or are not.
            first, which = num_slow - left[number - 1 :], left[number - 1 :]
            is_new = np.append(True, slow[first[1:]] != slow[first[:-1] + number - 1])
            steps.append(np.array((which, which - 1, num_groups - 1 + is_new.cumsum(), which - number)))
            groups.append(slow[first[is_new][:, None] + np.arange(number)])
            num_groups += len(groups[-1])
        every = np.concatenate(steps, axis=1)
        return groups, every[:, np.argsort(every[0], kind="stable")].T.copy()

    def _of_any(self) -> tuple[list[Floats], Ints]:
        every = (group for number in range(len(self.slow) + 1) for group in combinations(self.slow, number))
        numbers = {left: number for number, left in enumerate(dict.fromkeys(every))}
        groups = [left for left in numbers if len(left) in self._lengths]
        of_groups = {group: number for number, group in enumerate(groups)}
        steps = list[tuple[int, int, int, int]]()
        for left, choice in numbers.items():
            if not left:
                continue
            without_first, seen = numbers[left[1:]], set[Factors]()
            steps.append((choice, without_first, -1, without_first))
            for number in self._lengths[: len(left)]:
                for others in combinations(range(1, len(left)), number - 1):
                    group = tuple(left[index] for index in (0, *others))
                    if group not in seen:
                        seen.add(group)
                        rest = tuple(factor for index, factor in enumerate(left) if index and index not in others)
                        steps.append((choice, without_first, of_groups[group], numbers[rest]))
        return [np.array(list(of)) for _, of in groupby(groups, key=len)], np.array(steps, dtype=np.int64)


def short_pipelines(templates: TemplateSet) -> int:
    """Return the most nodes of short pipelines."""
    return min(templates.sizes[-1], templates.sizes_beside[0] + _MORE_NODES[0])
