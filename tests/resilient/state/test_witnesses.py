"""Copies that differ are decided by independent witnesses: what one memory has damaged never wins."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilient.state.witnesses import (
    SEVERAL,
    Difference,
    find_differences,
    joint_origin,
    why_undecided,
    witness,
    worker_of,
)


def odd_of(contents: str, origins: tuple[int, ...] | None = None) -> tuple[int, ...] | None:
    """Return who is odd of holders 0, 1, ... of these contents; None where nobody differs."""
    copies = dict(enumerate(origins or range(1, len(contents) + 1)))
    found = find_differences({"layer": copies}, lambda _, one, other: contents[one] == contents[other])
    assert [(difference.state, difference.copies) for difference in found] in ([], [("layer", copies)])
    return found[0].odd if found else None


@pytest.mark.parametrize(
    ("contents", "odd"),
    [
        ("aaa", None),
        ("aab", (2,)),
        ("baa", (0,)),
        ("ab", ()),
        ("abc", ()),
        ("aabb", ()),
        ("aaabb", (3, 4)),
        ("aabbc", ()),
        ("aabca", (2, 3)),
    ],
)
def test_most_holders_decide_where_none_was_copied(contents: str, odd: tuple[int, ...] | None) -> None:
    assert odd_of(contents) == odd


@pytest.mark.parametrize(
    ("contents", "origins", "odd"),
    [
        ("bba", (1, 1, 3), ()),  # a damaged copy, one made of it, and one witness against it
        ("bbaa", (1, 1, 3, 4), (0, 1)),
        ("baa", (9, 2, 3), (0,)),  # the damaged node is gone, its copy is left
        ("bbaa", (9, 9, 3, 4), (0, 1)),
        ("bba", (1, SEVERAL, 3), ()),
        ("aab", (1, 2, SEVERAL), (2,)),
        ("aab", (1, 2, 1), (2,)),  # damaged after it was copied
        ("aba", (1, 1, 3), (1,)),
        ("baa", (1, 1, 3), (0,)),  # the copy was made before the damage
        ("ab", (1, 1), ()),
        ("aab", (1, 1, 1), ()),  # one witness says nothing about itself
        ("ab", (SEVERAL, SEVERAL), ()),
        ("aaa", (1, 1, SEVERAL), None),
    ],
)
def test_copies_made_of_one_another_are_one_witness(
    contents: str, origins: tuple[int, ...], odd: tuple[int, ...] | None
) -> None:
    assert odd_of(contents, origins) == odd


Origins = st.lists(st.sampled_from((SEVERAL, 1, 2, 3, 4)), min_size=1, max_size=6)


def most_witnesses(origins: list[int]) -> int:
    """Return the size of the largest choice of copies that are pairwise of different witnesses, tried one by one."""
    known = [origin for origin in origins if origin != SEVERAL]
    choices = (choice for size in range(len(known) + 1) for choice in combinations(known, size))
    return max(1, *(len(choice) for choice in choices if len(set(choice)) == len(choice)))


@given(
    Origins.flatmap(
        lambda origins: st.tuples(st.just(origins), st.text("abc", min_size=len(origins), max_size=len(origins)))
    )
)
@example(([1, 1, 2], "bba"))
def test_a_content_is_right_if_it_has_more_witnesses_than_all_others_together(drawn: tuple[list[int], str]) -> None:
    origins, contents = drawn
    right = [
        content
        for content in set(contents)
        if most_witnesses([origin for origin, other in zip(origins, contents, strict=True) if other == content])
        > most_witnesses([origin for origin, other in zip(origins, contents, strict=True) if other != content])
    ]
    expected = None
    if len(set(contents)) > 1:
        assert len(right) <= 1
        expected = tuple(holder for holder, content in enumerate(contents) if right and content != right[0])
    assert odd_of(contents, tuple(origins)) == expected


class Memories:
    """Copies of a state, of two pieces, in the memories of nodes: the truth, and the origins that are told."""

    def __init__(self, num_nodes: int) -> None:
        self.contents = {node: ["good", "good"] for node in range(1, num_nodes + 1)}
        self.origins = {node: node for node in self.contents}

    def copy(self, target: int, first: int, second: int) -> None:
        """Make a new copy of a piece each of two others."""
        if target not in self.contents and {first, second} <= self.contents.keys():
            self.contents[target] = [self.contents[first][0], self.contents[second][1]]
            self.origins[target] = joint_origin([self.origins[first], self.origins[second]])

    def lose(self, node: int) -> None:
        if len(self.contents) > 1:
            self.contents.pop(node, None)
            self.origins.pop(node, None)

    def damage(self, node: int, piece: int) -> None:
        if node in self.contents:
            self.contents[node][piece] = "bad"


Nodes = st.integers(1, 6)
Changes = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), Nodes, Nodes, Nodes),
        st.tuples(st.just("lose"), Nodes),
    ),
    max_size=8,
)


@given(st.integers(2, 5), Changes, st.tuples(st.just("damage"), Nodes, st.integers(0, 1)), Changes)
@example(2, [], ("damage", 1, 0), [("copy", 3, 1, 2)])
@example(4, [("lose", 4)], ("damage", 1, 0), [("copy", 4, 1, 1), ("lose", 1), ("copy", 5, 4, 2)])
def test_one_damage_is_healed_by_two_sound_witnesses_and_never_wins(
    num_nodes: int, before: list[tuple[str, int]], damage: tuple[str, int, int], after: list[tuple[str, int]]
) -> None:
    memories = Memories(num_nodes)
    for change, *arguments in (*before, damage, *after):
        getattr(memories, change)(*arguments)
    contents = memories.contents
    found = find_differences({"layer": memories.origins}, lambda _, one, other: contents[one] == contents[other])
    bad = tuple(node for node, content in contents.items() if "bad" in content)
    sound = {memories.origins[node] for node in contents if node not in bad} - {SEVERAL}
    if not bad or len(bad) == len(contents):
        return
    (difference,) = found
    assert difference.odd == (bad if len(sound) > 1 else ())


def test_message_names_nodes_and_what_their_copies_were_made_of() -> None:
    copies = {witness(7, 1): witness(7, 1), witness(2, 0): witness(9, 3), witness(4, 0): SEVERAL}
    differences = [Difference(state=f"layer.{i}", copies=copies, odd=()) for i in range(5)]
    nodes = "nodes 2 (made of node 9's), 4 (made of several others'), 7"
    assert why_undecided(differences, 12) == (
        f"all copies of a layer's state must be equal, got different ones after step 12 (layer.0 on {nodes}; layer.1 "
        f"on {nodes}; layer.2 on {nodes}; 2 more layers) and no majority to tell which is right; check the memory of "
        "these nodes, and keep three copies (max_failures=2) or more for most to decide"
    )


@given(st.integers(0, 1 << 40), st.integers(0, 255))
def test_worker_is_known_by_its_number_as_a_witness(node: int, local_rank: int) -> None:
    number = witness(node, local_rank)
    assert worker_of(number) == (node, local_rank)
    assert number not in (SEVERAL, witness(node + 1, local_rank), witness(node, local_rank + 1))
