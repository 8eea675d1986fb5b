"""A checkpoint knows no degrees: what some wrote in pieces, any others read, and what older versions wrote."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from resilient.errors import CheckpointError
from resilient.models.layer import LayerSpec
from resilient.observability.run_comparison import compare_parameters
from resilient.state import checkpoint
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.manifest import MANIFEST, Manifest, SavedStates, folder, read_manifest, write_manifest, writers
from resilient.templates.common.byte_intervals import ByteIntervals, common_pieces
from resilient.templates.inputs.profile import LayerCost, LayerProfile
from tests.mixtures import SIZES, Held, StateSizes, devices, holders
from tests.resilient.pieced import number, piece_of
from tests.resilient.small import CPU, all_of, draw, make_job
from tests.resilient.state.test_checkpoint import states_of
from tests.templates.jobs import cut, plan_of, profile

RECIPE = make_job().recipe()


def write(run: Path, sizes: StateSizes, held: Held, step: int = 1, offset: int = 0) -> SavedStates:
    """Write a state's checkpoint: of each piece the first of its holders writes what it holds of it."""
    path, files = folder(run, step), []
    for piece in common_pieces(held):
        state = number(piece_of(sizes, held[piece.holders[0]]), offset)
        files += checkpoint.save(path, [(state, piece.intervals)])["layer"]
    states: SavedStates = {"layer": tuple(reversed(files))}
    write_manifest(path, Manifest(step=step, recipe=RECIPE, states=states))
    return states


@given(st.data(), SIZES.map(lambda sizes: replace(sizes, itemsize=8)), st.integers(1, 6))
def test_what_one_mixture_wrote_any_other_reads(data: st.DataObject, sizes: StateSizes, num_ranks: int) -> None:
    held = data.draw(holders(sizes, num_ranks, idle=0))
    with TemporaryDirectory() as run:
        write(Path(run), sizes, held)
        for intervals in data.draw(devices(sizes)):
            state = piece_of(sizes, intervals)
            checkpoint.load(folder(run, 1), [state])
            assert torch.equal(state.buffer, number(piece_of(sizes, intervals)).buffer)


SPLIT = StateSizes(trainable=(6, 4), frozen=(3,), num_slots=1, itemsize=8)
HALVES = {0: SPLIT.cut(0, 2) | SPLIT.cut(6, 13), 1: SPLIT.cut(2, 6)}


def test_pieces_are_named_by_their_elements(tmp_path: Path) -> None:
    second, first = write(tmp_path, SPLIT, HALVES)["layer"]
    path = folder(tmp_path, 1)
    assert (first.intervals, second.intervals) == (HALVES[0], HALVES[1])
    assert {name: tensor.tolist() for name, tensor in load_file(path / first.file).items()} == {
        "trained0[0:2]": [0, 1], "trained1": [6, 7, 8, 9], "frozen0": [10, 11, 12],
        "optimizer/slot0/trained0[0:2]": [13, 14], "optimizer/slot0/trained1": [19, 20, 21, 22],
    }  # fmt: skip
    assert {name: tensor.tolist() for name, tensor in load_file(path / second.file).items()} == {
        "trained0[2:6]": [2, 3, 4, 5], "optimizer/slot0/trained0[2:6]": [15, 16, 17, 18],
    }  # fmt: skip


def test_only_files_with_what_is_needed_are_read(tmp_path: Path) -> None:
    second, first = write(tmp_path, SPLIT, HALVES)["layer"]
    path = folder(tmp_path, 1)
    (path / second.file).write_bytes(b"")
    checkpoint.load(path, [piece_of(SPLIT, HALVES[0])])
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path / second.file))} must have "):
        checkpoint.load(path, [piece_of(SPLIT)])
    assert (path / first.file).exists()


def test_bytes_that_no_file_has_are_told(tmp_path: Path) -> None:
    write(tmp_path, SPLIT, {0: HALVES[0]})
    path = folder(tmp_path, 1)
    message = f"{path} holds not all of state 'layer'; the checkpoint belongs to another model"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(path, [piece_of(SPLIT)])


def test_piece_of_another_shape_is_refused(tmp_path: Path) -> None:
    write(tmp_path, SPLIT, HALVES)
    other = replace(SPLIT, trainable=(5, 5))
    message = (
        f"{folder(tmp_path, 1)}: 'trained0[2:5]' of layer 'layer' must be torch.float64 of shape (3,), got nothing; "
        "the checkpoint belongs to another model, optimizer or precision"
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(folder(tmp_path, 1), [piece_of(other)])


def test_runs_of_different_degrees_are_compared(tmp_path: Path) -> None:
    whole = {0: ByteIntervals.of(0, SPLIT.num_bytes)}
    write(tmp_path / "pieces", SPLIT, HALVES)
    write(tmp_path / "whole", SPLIT, whole)
    write(tmp_path / "other", SPLIT, whole, offset=3)
    assert compare_parameters(tmp_path / "pieces", tmp_path / "whole") == (0.0, 0.0)
    assert compare_parameters(tmp_path / "pieces", tmp_path / "other") == (3.0, 3 / 8)


def test_runs_are_compared_whatever_dimension_is_stored_first(tmp_path: Path) -> None:
    spec = LayerSpec(name="layer", unit="llm", build=lambda: nn.Linear(4, 3), initialize=draw, cut={"weight": 1})
    layout = BufferLayout.of(spec)
    sizes = LayerProfile(name="layer", costs=(LayerCost(forward_ms=0.0),), parameter_bytes=120, rows=layout.rows(0, 8))
    held = {"whole": [sizes.whole], "halves": [sizes.part(index, 2) for index in range(2)]}
    for name, parts in held.items():
        path, files = folder(tmp_path / name, 1), []
        for piece in common_pieces(dict(enumerate(parts))):
            state = LayerState(spec, layout, (), torch.float64, CPU, parts[piece.holders[0]])
            state.initialize(seed=3)
            files += checkpoint.save(path, [(state, piece.intervals)])["layer"]
        write_manifest(path, Manifest(step=1, recipe=RECIPE, states={"layer": tuple(files)}))
    assert compare_parameters(tmp_path / "halves", tmp_path / "whole") == (0.0, 0.0)
    assert compare_parameters(tmp_path / "whole", tmp_path / "halves") == (0.0, 0.0)


FORMAT_3 = Path(__file__).parent / "format_3" / "step-00000012"
"""A checkpoint of :func:`states_of`, each value the position in its buffer plus the number of its layer."""


def test_checkpoint_of_format_3_is_read() -> None:
    states = states_of()
    checkpoint.load(FORMAT_3, states.values())
    for index, state in enumerate(states.values()):
        assert state.buffer.tolist() == [position + index for position in range(state.buffer.numel())]
    manifest = read_manifest(FORMAT_3)
    assert (manifest.step, manifest.recipe) == (12, RECIPE)
    assert [saved.intervals for saved in manifest.files] == [None] * 3


def test_files_of_whole_states_are_those_of_format_3(tmp_path: Path) -> None:
    states = states_of()
    checkpoint.load(FORMAT_3, states.values())
    path = folder(tmp_path, 12)
    saved = checkpoint.save(path, all_of(states.values()))
    write_manifest(path, Manifest(step=12, recipe=RECIPE, states=saved))
    assert sorted(file.name for file in path.iterdir()) == sorted(file.name for file in FORMAT_3.iterdir())
    for file in path.glob("*.safetensors"):
        assert file.read_bytes() == (FORMAT_3 / file.name).read_bytes()
    assert [each.intervals for each in read_manifest(path).files] == [state.whole for state in states.values()]


def test_damaged_checkpoint_of_format_3_is_told(tmp_path: Path) -> None:
    path = folder(tmp_path, 12)
    shutil.copytree(FORMAT_3, path)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"step": 12', '"step": 13'))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(its SHA-256 differs\)"):
        read_manifest(path)


def test_every_byte_is_written_by_one_of_its_holders_and_the_load_is_spread() -> None:
    """By pipelines of two and of three devices beside each other."""
    layers, degrees = profile([1.0] * 4, state_bytes=96), (2, 3)
    plan = plan_of(*((cut(4, degree=degree, devices=degree), [degree]) for degree in degrees))
    holders, chosen = plan.holders(layers), writers(plan, layers)
    for layer in layers.layers:
        parts = chosen[layer.name].values()
        written = Counter(byte for part in parts for start, end in part for byte in range(start, end))
        assert written == Counter(range(layer.state_bytes))
        assert all(not part - holders[layer.name][rank] for rank, part in chosen[layer.name].items())
    loads = [sum(of[rank].size for of in chosen.values() if rank in of) for rank in range(5)]
    assert sum(loads) == 4 * 96
    assert max(loads) < 2 * min(loads)
