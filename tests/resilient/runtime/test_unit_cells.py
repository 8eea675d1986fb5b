"""A unit's cell is what the model packs of its samples, wherever it is read, and loads nothing that others need."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import ViTConfig

from resilient.data import Lazy, Sample
from resilient.data.lengths import LengthSums
from resilient.data.processes import DataProcesses
from resilient.data.read_ahead import data_processes
from resilient.data.reader import REPEATABLE, Cell, Microbatch, Reads
from resilient.data.sampler import StepSampler
from resilient.data.seeding import sample_key
from resilient.errors import DataProcessError, SampleError
from resilient.models.multimodal.encoder import EncoderModule
from resilient.models.multimodal.module import MultimodalModule
from resilient.runtime.batches import Batches, reader_of, reads_of
from resilient.runtime.job import Job
from tests.resilient.models.test_multimodal import LANGUAGE_MODELS, VISION
from tests.resilient.small import make_job

STEPS, FLOATS = range(1, 4), torch.float32
NUM_IMAGES = (0, 1, 3, 0, 2, 1, 0, 2)
CELLS = [
    Cell("vision", (4, 1, 7)),
    Cell("vision", (2,), 1),
    Cell("llm", (0, 7, 1)),
    Cell("depth", ()),
    Cell("llm", (6,)),
    Cell("llm", (3, 5, 2, 4)),
    Cell("vision", (5, 0)),
]
"""Of eight samples, some of which are text only."""


def cells_of(step: int) -> list[Cell]:
    """Return cells that differ from step to step."""
    return CELLS[: len(CELLS) - step]


class Album:
    """Eight texts with up to three pictures each, loaded on demand; writes down which were."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __len__(self) -> int:
        return len(NUM_IMAGES)

    def __getitem__(self, index: int) -> Sample:
        pictures = [self._picture(index, 1 + number, 2) for number in range(NUM_IMAGES[index])]
        patches = sum(2 * (1 + number) for number in range(NUM_IMAGES[index]))
        words = torch.randint(5, 20, (2 + index,))
        ids = torch.cat((torch.full((patches,), 3), words))
        labels = torch.cat((torch.full((patches,), -100), words.roll(-1)))
        return {"input_ids": ids, "labels": labels, **({"vision.pixels": pictures} if pictures else {})}

    def _picture(self, index: int, rows: int, cols: int) -> Lazy:
        def load() -> Tensor:
            with self._log.open("a") as file:
                file.write(f"{index}\n")
            return torch.rand(1, 4 * rows, 4 * cols)

        return Lazy(load, (1, 4 * rows, 4 * cols), FLOATS)

    def lengths(self, index: int) -> dict[str, list[int]]:
        patches = [2 * (1 + number) for number in range(NUM_IMAGES[index])]
        return {"vision": patches, "llm": [sum(patches) + 2 + index]}

    def num_targets(self, index: int) -> int:
        return 2 + index

    def loaded(self) -> set[int]:
        return set(map(int, self._log.read_text().split())) if self._log.exists() else set()


def model() -> MultimodalModule:
    encoders = {
        "vision": EncoderModule(ViTConfig(**VISION), placeholder_id=3),
        "depth": EncoderModule(ViTConfig(**VISION), placeholder_id=4),
    }
    return MultimodalModule(encoders=encoders, language_model=LANGUAGE_MODELS["llama"][1], labels="shifted")


def make(tmp_path: Path, dataset: type[Album] = Album) -> Job:
    return make_job(model=model(), dataset=dataset(tmp_path / "log"), global_batch=8, microbatch=2, num_steps=3)


def order_of(job: Job, step: int) -> list[int]:
    return StepSampler(num_samples=8, global_batch=8, seed=job.seed).indices(step).tolist()


def direct(job: Job, step: int, cell: Cell) -> dict[str, Tensor]:
    """Return what the model packs of samples that were read as a chain reads them, with all their entries."""
    read = Batches(job).samples(step, Cell("", cell.samples))
    keys = [sample_key(job.seed, step, each.index) for each in read]
    assert isinstance(job.model, MultimodalModule)
    batch = job.model.collate_unit(cell.unit, [each.sample for each in read], keys)
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


def check_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name], value), name


@contextmanager
def batches_with(job: Job, num_processes: int) -> Iterator[Batches]:
    with data_processes(reader_of(job).read, num_processes, CELLS[0]) as processes:
        batches = Batches(job, processes)
        batches.enter(cells_of, None)
        yield batches


@pytest.mark.parametrize("num_processes", [0, 2])
def test_cells_of_units_are_what_the_model_packs_of_their_samples(num_processes: int, tmp_path: Path) -> None:
    job = make(tmp_path)
    with batches_with(job, num_processes) as batches:
        for step in STEPS:
            for cell in cells_of(step):
                check_equal(batches.batch(step, cell), direct(job, step, cell))
            assert list(batches.readings(step)) == [cell for cell in cells_of(step) if cell.samples]
            assert batches.readings(step + 1) == {}, "what is of an earlier step is compared with nobody's"


def test_what_is_read_of_a_cell_is_the_same_in_every_process(tmp_path: Path) -> None:
    job = make(tmp_path)
    with batches_with(job, 0) as here, batches_with(job, 1) as there:
        for cell in CELLS[:3]:
            here.batch(2, cell)
            there.batch(2, cell)
        for cell, reading in here.readings(2).items():
            other = there.readings(2)[cell]
            assert (reading.indices, reading.samples) == (other.indices, other.samples)
            assert (reading.batch, reading.lengths) == (other.batch, other.lengths)


def reads(job: Job, *parts: str) -> Reads:
    return reads_of(tuple(layer for layer in job.model.layers if layer.name in parts))


def test_no_picture_is_loaded_for_the_language_model(tmp_path: Path) -> None:
    job = make(tmp_path)
    assert isinstance(job.dataset, Album)
    batches = Batches(job)
    batches.enter(lambda step: CELLS, None)
    for cell in CELLS:
        if cell.unit == "llm":
            batches.batch(1, cell)
    assert job.dataset.loaded() == set(), "even where the worker reads pictures in another cell"
    batches.batch(1, CELLS[0])
    chosen = [order_of(job, 1)[place] for place in (4, 1, 7)]
    assert job.dataset.loaded() == {index for index in chosen if NUM_IMAGES[index]}


def test_a_lane_without_pictures_loads_none(tmp_path: Path) -> None:
    job = make(tmp_path)
    assert isinstance(job.dataset, Album)
    batches = Batches(job)
    batches.enter(lambda step: CELLS, reads(job, "depth.embed", "llm.embed"))
    for unit in ("depth", "llm"):
        batches.batch(1, Cell(unit, (0, 1, 2, 3, 4, 5, 6, 7)))
    assert job.dataset.loaded() == set()


def test_later_stages_of_an_encoder_know_the_shapes_of_what_they_do_not_load(tmp_path: Path) -> None:
    job = make(tmp_path)
    assert isinstance(job.dataset, Album)
    batches = Batches(job)
    batches.enter(lambda step: CELLS, reads(job, "vision.block.0", "llm.block.0"))
    found = batches.batch(1, CELLS[0])
    assert job.dataset.loaded() == set()
    expected = direct(job, 1, CELLS[0])
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == {
        name: (each.shape, each.dtype) for name, each in expected.items()
    }
    here = {name for name, each in found.items() if not each.is_meta}
    assert here == {"vision.keys", "vision.segments"}
    for name in here:
        assert torch.equal(found[name], expected[name])


def test_a_sample_of_other_lengths_than_were_said_is_named(tmp_path: Path) -> None:
    class Wrong(Album):
        def lengths(self, index: int) -> dict[str, list[int]]:
            return {**super().lengths(index), "vision": [2] * NUM_IMAGES[index]}

    job = make(tmp_path, Wrong)
    index = NUM_IMAGES.index(3)
    order = order_of(job, 1)
    fix = f"have Wrong.lengths return {{'llm': [{14 + index}], 'vision': [2, 4, 6]}} for it"
    message = (
        f"sample {index} of Wrong: lengths({index}) must be {{'llm': [{14 + index}], 'vision': [2, 4, 6]}}, those of "
        f"the sample, got {{'llm': [{14 + index}], 'vision': [2, 2, 2]}}; {fix}"
    )
    for num_processes in (0, 1):
        cell = Cell("llm", (order.index(index),))
        with data_processes(reader_of(job).read, num_processes, cell) as processes:
            batches = Batches(job, processes)
            batches.enter(lambda step, cell=cell: [cell], None)
            with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
                batches.batch(1, cell)


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_sample_of_other_lengths_than_its_step_was_planned_by_is_named(num_processes: int, tmp_path: Path) -> None:
    job = make(tmp_path)
    index = NUM_IMAGES.index(3)
    cell = Cell("vision", (order_of(job, 1).index(index),))

    def planned(step: int, cell: Cell) -> list[LengthSums]:
        return [LengthSums(12 + step, 56) for _ in cell.samples]

    message = f"sample {index} of Album: must have 13 tokens for vision (squares: 56), by which its step was planned"
    with data_processes(reader_of(job).read, num_processes, cell) as processes:
        batches = Batches(job, processes)
        batches.enter(lambda step: [cell], None, planned)
        with pytest.raises(SampleError, match=rf"^{re.escape(message)}, got \[2, 4, 6\]; "):
            batches.batch(1, cell)


def test_every_unit_looks_whether_what_it_reads_is_the_same_the_second_time(tmp_path: Path) -> None:
    class Noisy(Album):
        def _picture(self, index: int, rows: int, cols: int) -> Lazy:
            noise = random.Random()
            return Lazy(lambda: torch.full((1, 4 * rows, 4 * cols), noise.random()), (1, 4 * rows, 4 * cols), FLOATS)

    job = make(tmp_path, Noisy)
    places = {int(index): place for place, index in enumerate(order_of(job, 1))}
    index = NUM_IMAGES.index(3)
    batches = Batches(job)
    batches.batch(1, Cell("llm", (places[index],)))
    message = (
        f"sample {index} of Noisy: 'vision.pixels' must be the same whenever it is read, got another the second time; "
        f"{REPEATABLE}"
    )
    with pytest.raises(SampleError, match=f"^{re.escape(message)}$"):
        batches.batch(1, Cell("vision", (places[index],)))


def test_a_process_that_is_killed_while_cells_are_asked_of_it_is_named(tmp_path: Path) -> None:
    job = make(tmp_path)

    def read(step: int, cell: Cell, wanted: Reads) -> Microbatch:
        if step == 2:  # it is asked for that ahead of time
            os.kill(os.getpid(), signal.SIGKILL)
        return reader_of(job).read(step, cell, wanted)

    message = (
        r"data process 1 \(pid \d+\), which reads samples, must live as long as its worker, got killed by SIGKILL; if "
        r"memory ran out, lower num_workers or the microbatch, else see the worker's log"
    )
    processes = DataProcesses(read, 1)
    try:
        batches = Batches(job, processes)
        batches.enter(lambda step: CELLS, None)
        check_equal(batches.batch(1, CELLS[0]), direct(job, 1, CELLS[0]))
        rest = [*((1, cell) for cell in CELLS[1:]), (2, CELLS[0])]
        with pytest.raises(DataProcessError, match=f"^{message}$"):
            [batches.batch(step, cell) for step, cell in rest]
    finally:
        processes.close()


def test_samples_of_a_cell_are_told_by_their_numbers_in_the_data_set(tmp_path: Path) -> None:
    job = make(tmp_path)
    chosen = [order_of(job, 2)[place] for place in (4, 1, 7)]
    assert Batches(job).told(2, CELLS[0]) == f"samples {chosen} of Album"
