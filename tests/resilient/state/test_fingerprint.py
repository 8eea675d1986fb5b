"""Fingerprints miss no flip, no move and no shift of the bytes they are of, on either kind of device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from resilient.state import fingerprint as module
from resilient.state.fingerprint import fingerprint, mixing_sum

WAYS = (fingerprint, mixing_sum)
"""What the CPU uses; what other devices use, which runs on the CPU as well."""

ways = pytest.mark.parametrize("way", WAYS)
NUM_WORDS = 200
GROUP_WORDS = 512 // 8


def words_of(kind: str) -> Tensor:
    """Return words that a weak sum would mistake for one another: equal ones, small ones, or drawn ones."""
    if kind == "zero":
        return torch.zeros(NUM_WORDS, dtype=torch.int64)
    if kind == "counted":
        return torch.arange(NUM_WORDS)
    return torch.randn(NUM_WORDS, generator=torch.Generator().manual_seed(0), dtype=torch.float64).view(torch.int64)


kinds = st.sampled_from(("zero", "counted", "drawn"))
places = st.integers(0, NUM_WORDS - 1)
bits = st.integers(0, 63)


def flipped(words: Tensor, *flips: tuple[int, int]) -> Tensor:
    changed = words.clone()
    for place, bit in flips:
        changed[place] ^= 1 << bit if bit < 63 else -(1 << 63)
    return changed


def as_bytes(words: Tensor) -> Tensor:
    return words.view(torch.uint8)


@ways
@given(kind=kinds, place=places, bit=bits)
def test_a_flipped_bit_shows(way: Callable[[Tensor], int], kind: str, place: int, bit: int) -> None:
    words = words_of(kind)
    assert way(as_bytes(flipped(words, (place, bit)))) != way(as_bytes(words))


@ways
@given(kind=kinds, place=places, distance=st.integers(1, NUM_WORDS - 1), bit=bits)
def test_two_flips_of_one_bit_column_show(
    way: Callable[[Tensor], int], kind: str, place: int, distance: int, bit: int
) -> None:
    words = words_of(kind)
    other = (place + distance) % NUM_WORDS
    assert way(as_bytes(flipped(words, (place, bit), (other, bit)))) != way(as_bytes(words))


@ways
@given(kind=kinds, flips=st.lists(st.tuples(places, bits), min_size=2, max_size=2, unique=True))
def test_any_two_flips_show(way: Callable[[Tensor], int], kind: str, flips: list[tuple[int, int]]) -> None:
    words = words_of(kind)
    assert way(as_bytes(flipped(words, *flips))) != way(as_bytes(words))


@ways
@given(kind=st.sampled_from(("counted", "drawn")), order=st.permutations(range(NUM_WORDS)))
def test_any_other_order_shows(way: Callable[[Tensor], int], kind: str, order: list[int]) -> None:
    words = words_of(kind)
    is_same = order == sorted(order)
    assert (way(as_bytes(words[torch.tensor(order)])) == way(as_bytes(words))) == is_same


@ways
def test_any_two_words_swapped_within_512_bytes_show(way: Callable[[Tensor], int]) -> None:
    words = torch.arange(GROUP_WORDS)
    seen = {way(as_bytes(words))}
    for left in range(GROUP_WORDS):
        for right in range(left):
            order = torch.arange(GROUP_WORDS)
            order[left], order[right] = right, left
            seen.add(way(as_bytes(words[order])))
    assert len(seen) == 1 + GROUP_WORDS * (GROUP_WORDS - 1) // 2


@ways
@given(kind=st.sampled_from(("counted", "drawn")), distance=st.integers(1, NUM_WORDS - 1))
def test_rotated_data_show(way: Callable[[Tensor], int], kind: str, distance: int) -> None:
    words = words_of(kind)
    assert way(as_bytes(words.roll(distance))) != way(as_bytes(words))


@ways
def test_length_counts_even_where_all_bytes_are_zero(way: Callable[[Tensor], int]) -> None:
    assert len({way(torch.zeros(length, dtype=torch.uint8)) for length in range(70)}) == 70


@ways
@given(length=st.integers(1, 40), data=st.data())
def test_every_byte_counts_behind_the_last_whole_word_too(
    way: Callable[[Tensor], int], length: int, data: st.DataObject
) -> None:
    values = torch.arange(length, dtype=torch.uint8)
    changed = values.clone()
    changed[data.draw(st.integers(0, length - 1))] ^= data.draw(st.integers(1, 255))
    assert way(changed) != way(values)


@ways
def test_it_is_a_function_of_the_bytes_and_fits_a_tensor(way: Callable[[Tensor], int]) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    found = way(values.view(torch.uint8))
    assert found == way(values.clone().view(torch.uint8))
    assert torch.tensor([found]).item() == found


def test_mixing_sum_does_not_depend_on_how_much_is_mixed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data = as_bytes(words_of("drawn"))[: 8 * NUM_WORDS - 3]
    at_once = mixing_sum(data)
    monkeypatch.setattr(module, "_CHUNK_WORDS", 7)
    assert mixing_sum(data) == at_once


def test_mixing_sum_stays_what_it_is() -> None:
    """Nodes with other versions of torch must find the same: computed with Python's whole numbers."""
    modulus = 1 << 64

    def mix(word: int, position: int) -> int:
        mixed = (position + 1) * 0x9E3779B97F4A7C15 % modulus ^ word
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % modulus
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % modulus
        return mixed ^ mixed >> 31

    words = words_of("drawn")
    total = sum(mix(word % modulus, position) for position, word in enumerate(words.tolist())) % modulus
    assert mixing_sum(as_bytes(words)) % modulus == mix(total, 8 * NUM_WORDS)


def test_piece_that_begins_within_a_word_has_the_fingerprint_of_its_bytes() -> None:
    data = torch.arange(40, dtype=torch.uint8)
    assert mixing_sum(data[4:]) == mixing_sum(data[4:].clone())
