"""A sample is a function of seed, epoch and index, or refused by name; what no layer reads is not loaded."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from resilient.data import IGNORED_LABEL, Lazy, Sample, StepSampler, collate_multimodal, collate_of, stack
from resilient.data.reader import Cell, MicrobatchReader
from resilient.data.seeding import draw, generators_kept, seed_generators
from resilient.errors import SampleError

FIRST, SECOND, ALL = Cell.of_chain(0, 3), Cell.of_chain(1, 3), Cell.of_chain(0, 6)

GENERATORS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.random()),
    "torch": lambda: float(torch.rand(())),
}
FIX = (
    "have __getitem__ depend on the index and on what it draws from the global generators of random, numpy and torch "
    "alone, not on generators of its own, the time or the order of a set"
)


class Drawn:
    """Six samples with a number drawn from a generator."""

    def __init__(self, generator: Callable[[], float]) -> None:
        self._generator = generator

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Sample:
        return {"input": torch.tensor([index, self._generator()], dtype=torch.float64), "target": torch.tensor(index)}


def reader(dataset: Any, *, declared: frozenset[str] = frozenset(), seed: int = 5) -> MicrobatchReader:
    sampler = StepSampler(num_samples=len(dataset), global_batch=len(dataset), seed=seed)
    return MicrobatchReader(
        dataset,
        lambda sample, name: None,
        lambda index, sample, name: None,
        sampler,
        collate_of(dataset),
        declared,
    )


def drawn_numbers(dataset: Any, step: int, microbatch: int = 3, **changes: Any) -> dict[int, float]:
    """Return index -> number, of a step, which is an epoch here."""
    read = reader(dataset, **changes)
    cells = [Cell.of_chain(position, microbatch) for position in range(6 // microbatch)]
    rows = [read.read(step, cell, None).batch["input"] for cell in cells]
    return {int(index): number for index, number in torch.cat(rows).tolist()}


@pytest.mark.parametrize("name", GENERATORS)
def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone(name: str) -> None:
    dataset = Drawn(GENERATORS[name])
    first = drawn_numbers(dataset, 1)
    assert len(set(first.values())) == 6
    assert drawn_numbers(dataset, 1, microbatch=2) == first, "however the step is cut"
    assert set(drawn_numbers(dataset, 2).values()).isdisjoint(first.values()), "another epoch"
    assert set(drawn_numbers(dataset, 1, seed=6).values()).isdisjoint(first.values()), "another seed"


def test_generators_do_not_draw_the_same() -> None:
    drawn = [value for generator in GENERATORS.values() for value in drawn_numbers(Drawn(generator), 1).values()]
    assert len({round(value, 5) for value in drawn}) == 18


def test_the_processs_own_generators_stay_as_they_were() -> None:
    seed_generators(1)
    expected = draw()
    seed_generators(1)
    reader(Drawn(random.random)).read(1, FIRST, None)
    assert draw() == expected


def test_a_step_that_crosses_epochs_reads_each_sample_in_its_own() -> None:
    sampler = StepSampler(num_samples=6, global_batch=4, seed=5)
    dataset = Drawn(random.random)
    crossing = (
        MicrobatchReader(dataset, lambda sample, name: None, lambda index, sample, name: None, sampler, stack)
        .read(2, Cell.of_chain(0, 4), None)
        .batch["input"]
        .tolist()
    )
    assert sampler.epochs(2).tolist() == [0, 0, 1, 1]
    first, second = drawn_numbers(dataset, 1), drawn_numbers(dataset, 2)
    assert [number for _, number in crossing] == [
        (first if place < 2 else second)[int(index)] for place, (index, _) in enumerate(crossing)
    ]


class Seldom(Drawn):
    """Draws for one of its samples alone, and refuses to read it where the generators are not seeded for it."""

    last = int(StepSampler(num_samples=24, global_batch=24, seed=5).indices(1)[-1])

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Sample:
        number = 0.0
        if index == self.last:
            number = self._generator()
            if number not in self.expected:
                raise SampleError(f"got {number}, want one of {self.expected}")
        return {"input": torch.tensor([index, number], dtype=torch.float64), "target": torch.tensor(index)}

    @property
    def expected(self) -> list[float]:
        """What it may draw, in epochs 0 and 1."""
        return [seeded(self._generator, 5, epoch, self.last) for epoch in (0, 1)]


def seeded(generator: Callable[[], float], *key: int) -> float:
    with generators_kept():
        seed_generators(*key)
        return generator()


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("microbatch", [2, 6, 12, 24])
def test_generators_are_seeded_for_a_sample_that_draws_after_others_that_do_not(name: str, microbatch: int) -> None:
    dataset = Seldom(GENERATORS[name])
    checked: dict[float, float] = {}

    def check(sample: Mapping[str, Any], name: str) -> None:
        checked.update([sample["input"].tolist()])

    sampler = StepSampler(num_samples=24, global_batch=24, seed=5)
    read = MicrobatchReader(dataset, check, lambda index, sample, name: None, sampler, stack)
    for step in (1, 2):
        cells = [Cell.of_chain(position, microbatch) for position in range(24 // microbatch)]
        rows = torch.cat([read.read(step, cell, None).batch["input"] for cell in cells]).tolist()
        assert dict(rows) == {float(i): dataset.expected[step - 1] if i == dataset.last else 0.0 for i in range(24)}
    of_first_step = {float(i): dataset.expected[0] if i == dataset.last else 0.0 for i in range(24)}
    assert checked == of_first_step, "what is checked last is what is trained on"


class Hidden(Drawn):
    """Depends on generators that it leaves as they were, or has drawn once and for all."""

    def __init__(self, way: str) -> None:
        super().__init__(random.random)
        self._way, self._drawn = way, dict[int, float]()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Sample:
        if self._way == "restored":
            before = random.getstate()
            number = random.random()
            random.setstate(before)
        elif self._way == "derived":
            state: Any = np.random.get_state()
            number = float(np.random.default_rng(state[1][:4]).random())
        else:
            number = self._drawn.setdefault(index, random.random())
        return {"input": torch.tensor([index, number], dtype=torch.float64), "target": torch.tensor(index)}


@pytest.mark.parametrize("way", ["restored", "derived", "cached"])
def test_what_depends_on_a_generator_unseen_depends_on_index_and_seed(way: str) -> None:
    found: list[dict[float, float]] = []
    for microbatch in (24, 8, 6, 2):
        read = reader(Hidden(way))
        rows = [read.read(1, Cell.of_chain(at, microbatch), None).batch["input"] for at in range(24 // microbatch)]
        found.append(dict(torch.cat(rows).tolist()))
    assert len(set(found[0].values())) == 24
    assert all(numbers == found[0] for numbers in found)


def test_a_generator_of_the_data_sets_own_is_refused() -> None:
    own = np.random.default_rng(0)
    index = int(StepSampler(num_samples=6, global_batch=6, seed=5).indices(1)[0])
    message = (
        f"sample {index} of Drawn: 'input' must be the same whenever it is read, got another the second time; {FIX}"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        reader(Drawn(lambda: own.random())).read(1, FIRST, None)


@pytest.mark.parametrize("name", GENERATORS)
def test_random_numbers_in_collate_are_refused(name: str) -> None:
    class Jittered(Drawn):
        def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
            return {**stack(samples), "jitter": torch.tensor(GENERATORS[name]())}

    message = (
        "collate of Jittered must draw no random numbers, got some; draw them in __getitem__, for after a failure "
        "other samples may be collated together"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        reader(Jittered(lambda: 0.0)).read(1, FIRST, None)


class Pictures:
    """Six texts with a picture of different size each, loaded on demand."""

    def __init__(self, shape: tuple[int, ...] | None = None) -> None:
        self.loaded: list[int] = []
        self._shape = shape

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Sample:
        def load() -> Tensor:
            self.loaded.append(index)
            return torch.rand(3, 4, 4 + index)

        ids = torch.arange(index + 1)
        return {
            "input_ids": ids,
            "labels": ids,
            "vision.pixels": [Lazy(load, self._shape or (3, 4, 4 + index), torch.float32)],
        }

    collate = staticmethod(collate_multimodal)


PICTURES = frozenset({"input_ids", "labels", "vision.pixels", "vision.sizes"})


def test_a_lazy_entry_is_loaded_only_where_it_is_read_and_has_its_shape_everywhere() -> None:
    full, labels = (Pictures(), Pictures())
    read = reader(full, declared=PICTURES).read(1, FIRST, None)
    unread = reader(labels, declared=PICTURES).read(1, FIRST, frozenset({"labels"}))
    assert (len(full.loaded), labels.loaded) == (4, []), "three pictures, the first of them twice"
    assert {entry: tensor.is_meta for entry, tensor in unread.batch.items()} == {
        "input_ids": True, "labels": False, "lengths": True, "vision.pixels": True, "vision.sizes": True,
    }  # fmt: skip
    for entry, tensor in read.batch.items():
        other = unread.batch[entry]
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
    assert torch.equal(read.batch["labels"], unread.batch["labels"])
    assert (read.batch["labels"] == IGNORED_LABEL).any(), "texts differ in length"
    assert unread.reading.batch == {"labels": read.reading.batch["labels"]}
    assert [set(each) for each in unread.reading.samples] == [{"labels"}] * 3


def test_a_lazy_entry_that_no_layer_speaks_of_is_loaded() -> None:
    pictures = Pictures()
    reader(pictures, declared=frozenset({"labels"})).read(1, FIRST, frozenset({"labels"}))
    assert len(pictures.loaded) == 4, "collate may make of it what a layer reads"


def test_an_entry_that_is_lazy_in_some_samples_is_left_out_of_all() -> None:
    class Mixed(Pictures):
        def __getitem__(self, index: int) -> Sample:
            sample = super().__getitem__(index)
            return sample if index % 2 else {**sample, "vision.pixels": torch.ones(3, 4, 4)}

    batch = reader(Mixed(), declared=PICTURES).read(1, ALL, frozenset({"labels"})).batch
    assert (batch["vision.pixels"].is_meta, list(batch["vision.pixels"].shape)) == (True, [6, 3, 4, 9])


def test_an_entry_that_is_lazy_in_some_samples_may_be_missing_in_others() -> None:
    class Some(Pictures):
        def __getitem__(self, index: int) -> Sample:
            sample = super().__getitem__(index)
            return sample if index % 2 else {**sample, "vision.pixels": None}

        def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
            pictures = [sample for sample in samples if sample["vision.pixels"] is not None]
            return {"labels": stack([{"count": len(sample["labels"])} for sample in samples])["count"],
                    "vision.pixels": collate_multimodal(pictures)["vision.pixels"]}  # fmt: skip

    batch = reader(Some(), declared=PICTURES).read(1, ALL, frozenset({"labels"})).batch
    assert (batch["vision.pixels"].is_meta, list(batch["vision.pixels"].shape)) == (True, [3, 3, 4, 9])


def test_a_lazy_entry_of_another_shape_than_declared_is_refused() -> None:
    index = int(StepSampler(num_samples=6, global_batch=6, seed=5).indices(1)[0])
    message = (
        f"sample {index} of Pictures: 'vision.pixels'[0] must be torch.float32 of shape [3, 1, 1] as declared, got "
        f"torch.float32 of shape [3, 4, {4 + index}]; declare what is loaded"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        reader(Pictures((3, 1, 1))).read(1, FIRST, None)


def test_what_a_lazy_entry_draws_does_not_depend_on_what_else_is_read() -> None:
    def pixels(dataset: Any, reads: frozenset[str] | None) -> Tensor:
        return reader(dataset, declared=PICTURES).read(1, FIRST, reads).batch["vision.pixels"]

    assert torch.equal(pixels(Pictures(), None), pixels(Pictures(), frozenset({"vision.pixels"})))


def test_a_sample_is_checked_once() -> None:
    checked: list[str] = []

    def check(sample: Mapping[str, Any], name: str) -> None:
        checked.append(name)

    sampler = StepSampler(num_samples=6, global_batch=6, seed=5)
    read = MicrobatchReader(Drawn(random.random), check, lambda index, sample, name: None, sampler, stack)
    read.read(1, ALL, None)
    read.read(2, ALL, None)
    assert sorted(checked) == [f"sample {index} of Drawn" for index in range(6)]


def test_a_sample_that_is_none_in_a_later_epoch_is_refused() -> None:
    class Fading(Drawn):
        num_read = 0

        def __getitem__(self, index: int) -> Any:
            self.num_read += 1
            return super().__getitem__(index) if self.num_read < 8 else None

    dataset = Fading(random.random)
    read = reader(dataset)
    for cell in (FIRST, SECOND):
        read.read(1, cell, None)
    index = int(StepSampler(num_samples=6, global_batch=6, seed=5).indices(2)[0])
    message = (
        f"sample {index} of Fading: must map names to tensors, got None; return a dict such as {{'input': ..., "
        "'target': ...}"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        read.read(2, FIRST, None)
