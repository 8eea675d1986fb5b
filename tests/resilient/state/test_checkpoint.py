"""Checkpoints give back what was written, or say what is wrong with them."""

from __future__ import annotations

import hashlib
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from resilient.common.files import hash_file
from resilient.errors import ArgumentError, CheckpointError
from resilient.models.layer import LayerSpec
from resilient.state import checkpoint
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.manifest import (
    MANIFEST,
    Manifest,
    folder,
    read_manifest,
    read_resumed,
    resumed_folder,
    write_manifest,
    writers,
)
from tests.resilient.small import CPU, TiedModel, all_of, make_job, make_plan, make_profile

RECIPE = make_job().recipe()


def states_of(num_blocks: int = 1, dtype: torch.dtype = torch.float32, frozen: tuple[str, ...] = ("block.0",)) -> dict:
    specs = TiedModel(num_blocks=num_blocks, frozen=frozen).layers
    return {spec.name: LayerState(spec, BufferLayout.of(spec), ("exp_avg", "exp_avg_sq"), dtype, CPU) for spec in specs}


NO_OTHER = "holds no other checkpoint that is whole, so begin without one"


def file_of(path: Path, name: str) -> Path:
    """Return the file of a state in a checkpoint."""
    (file,) = path.glob(f"{name}.*.safetensors")
    return file


def flip(file: Path) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, LayerState]]:
    """A checkpoint in two parts, as two workers write it."""
    states = states_of()
    for i, state in enumerate(states.values()):
        state.buffer.copy_(torch.arange(state.buffer.numel()) + i)
    path = folder(tmp_path, 12)
    parts = checkpoint.save(path, all_of([states["embed"]])) | checkpoint.save(
        path, all_of([states["block.0"], states["head"]])
    )
    write_manifest(path, Manifest(step=12, recipe=RECIPE, states=parts))
    return path, states


def test_folder_is_named_after_the_step() -> None:
    assert folder("runs/a", 120) == Path("runs/a/checkpoints/step-00000120")


def test_states_come_back_as_they_were(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, states = saved
    loaded = states_of()
    checkpoint.load(path, loaded.values())
    for name, state in loaded.items():
        assert torch.equal(state.buffer, states[name].buffer)
    assert read_manifest(path).step == 12
    files = {saved.file: saved.sha256 for saved in read_manifest(path).files}
    assert sorted(file.name for file in path.iterdir()) == sorted([MANIFEST, *files])
    assert set(files) == {
        f"{name}.{hash_file(file_of(path, name), hashlib.sha256())[:12]}.safetensors" for name in states
    }


def test_layer_without_state_is_saved_and_loaded(tmp_path: Path) -> None:
    spec = LayerSpec(name="relu", unit="chain", build=nn.ReLU, initialize=lambda _: None)
    state = LayerState(spec, BufferLayout.of(spec), ("exp_avg",), torch.float32, CPU)
    path = folder(tmp_path, 1)
    write_manifest(path, Manifest(step=1, recipe=RECIPE, states=checkpoint.save(path, all_of([state]))))
    checkpoint.load(path, [state])
    assert (list(read_manifest(path).states), state.buffer.numel()) == (["relu"], 0)


def test_full_disk_is_told_and_leaves_no_half_written_file(tmp_path: Path) -> None:
    """A limit of file sizes stands for the disk."""
    states = states_of()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(CheckpointError) as raised:
            checkpoint.save(tmp_path, all_of(states.values()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path} cannot be written (")
    assert "File too large" in message
    assert message.endswith("); make room there, or choose another folder")
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_manifest_that_cannot_be_written_leaves_no_checkpoint(tmp_path: Path) -> None:
    manifest = Manifest(step=1, recipe=RECIPE, states=checkpoint.save(tmp_path, all_of(states_of().values())))
    (tmp_path / MANIFEST).mkdir()
    with pytest.raises(CheckpointError) as raised:
        write_manifest(tmp_path, manifest)
    message = str(raised.value)
    assert message.startswith(f"{tmp_path} cannot be written ([Errno 21] Is a directory: ")
    assert message.endswith("); make room there, or choose another folder")
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, all_of(states_of().values()))
    (tmp_path / "file").touch()
    found = {
        tmp_path: f"a folder without {MANIFEST}",
        tmp_path / "file": "a file",
        tmp_path / "nowhere": "nothing there",
    }
    for path, what in ((tmp_path / name, what) for name, what in found.items()):
        message = (
            f"resume must be a finished checkpoint, a folder step-* with {MANIFEST}, got {path} ({what}); choose one "
            f"from the checkpoints/ of a run"
        )
        with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
            read_resumed(path)
        with pytest.raises(CheckpointError, match=f"^{re.escape(str(path / MANIFEST))} cannot be read "):
            checkpoint.load(path, [])


def test_manifest_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"format": 4, "sha256": "0", "manifest": {"step": "twelve"}}')
    message = (
        f"{tmp_path / MANIFEST} cannot be read (Expected `int`, got `str` - at `$.step`); {tmp_path.parent} holds no "
        "other checkpoint that is whole, so begin without one"
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("text", "written"), [('{"step": 3}', 1), ('{"format": 2, "step": 3}', 2), ('{"format": 7}', 7)]
)
def test_manifest_of_another_version_is_refused_by_name(tmp_path: Path, text: str, written: int) -> None:
    (tmp_path / MANIFEST).write_text(text)
    message = (
        f"{tmp_path / MANIFEST} must be of format 3 or 4, got {written}; "
        "go on with the version of resilient that wrote it"
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        read_manifest(tmp_path)


def test_any_changed_byte_is_noticed_before_a_value_counts(saved: tuple[Path, dict[str, LayerState]]) -> None:
    """In the header, too: names and shapes are read from there."""
    path, _ = saved
    file = file_of(path, "embed")
    whole = file.read_bytes()
    for position in (0, 12, len(whole) // 2, len(whole) - 1):
        data = bytearray(whole)
        data[position] ^= 1
        file.write_bytes(data)
        loaded = states_of()
        with pytest.raises(CheckpointError, match=rf"^{re.escape(str(file))} is damaged \(its SHA-256 differs\); "):
            checkpoint.load(path, loaded.values())
        assert not loaded["embed"].buffer.any()


def test_changed_value_is_noticed(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    file = file_of(path, "embed")
    flip(file)
    message = f"{file} is damaged (its SHA-256 differs); {path.parent} {NO_OTHER}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(path, states_of().values())


@pytest.mark.parametrize("num_bytes", [0, 4, 200])
def test_file_cut_short_is_noticed(saved: tuple[Path, dict[str, LayerState]], num_bytes: int) -> None:
    path, _ = saved
    file = file_of(path, "head")
    whole = file.read_bytes()
    file.write_bytes(whole[:num_bytes])
    message = f"{file} must have {len(whole)} bytes, got {num_bytes}; {path.parent} {NO_OTHER}"
    for read in (read_resumed, lambda path: checkpoint.load(path, states_of().values())):
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
            read(path)


def test_file_that_is_gone_is_named(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    file = file_of(path, "head")
    num_bytes = file.stat().st_size
    file.unlink()
    message = f"{file} must have {num_bytes} bytes, got no such file; {path.parent} {NO_OTHER}"
    for read in (read_resumed, lambda path: checkpoint.load(path, states_of().values())):
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
            read(path)


def test_state_of_another_model_is_missing(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    message = f"{path} holds no state 'block.1'; the checkpoint belongs to another model"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(path, states_of(num_blocks=2).values())


def test_other_precision_is_not_called_damage(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    message = (
        f"{path}: 'weight' of layer 'embed' must be torch.float64 of shape (11, 6), got torch.float32 of shape (11, 6)"
        "; the checkpoint belongs to another model, optimizer or precision"
    )
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(path, states_of(dtype=torch.float64).values())


def test_each_state_has_one_writer_among_its_holders_and_the_load_is_spread() -> None:
    job = make_job()
    profile = make_profile(job)
    plan = make_plan(((0, 3, 6), 4), ((0, 6), 4))
    chosen = writers(plan, profile)
    holders = plan.holders(profile)
    assert set(chosen) == set(holders)
    for layer in profile.layers:
        ((rank, part),) = chosen[layer.name].items()
        assert part == holders[layer.name][rank] == layer.whole
    assert {rank for written in chosen.values() for rank in written} == {0, 1, 2}


def test_manifest_keeps_what_it_was_given(tmp_path: Path) -> None:
    path = folder(tmp_path, 3)
    manifest = Manifest(step=3, recipe=RECIPE, states=checkpoint.save(path, all_of(states_of().values())))
    write_manifest(path, manifest)
    assert read_manifest(path) == manifest


def test_manifest_is_not_written_of_files_that_are_not_there(tmp_path: Path) -> None:
    """A node without the shared folder writes its files somewhere else."""
    here, elsewhere = folder(tmp_path / "here", 3), folder(tmp_path / "elsewhere", 3)
    states = states_of()
    parts = checkpoint.save(here, all_of([states["embed"], states["block.0"]])) | checkpoint.save(
        elsewhere, all_of([states["head"]])
    )
    nodes = {saved.file: 7 if name == "head" else 1 for name, (saved,) in parts.items()}
    (head,) = parts["head"]
    lacking, num_bytes = here / head.file, head.num_bytes
    fix = "have all nodes write to the same folder, at the same path (node 7)"
    for found in ("no such file", "2"):
        message = f"{lacking} must have {num_bytes} bytes, got {found}; {fix}"
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$") as raised:
            write_manifest(here, Manifest(step=3, recipe=RECIPE, states=parts), nodes)
        assert raised.value.node == 7
        assert not (here / MANIFEST).exists()
        lacking.write_bytes(b"no")


def test_manifest_changed_by_hand_is_refused(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    file = path / MANIFEST
    text = file.read_text()
    for old, new in (('"step": 12', '"step": 11'), ('"seed": 3', '"seed": 4'), ('"total": 0', '"total": 0, "n": 1')):
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))
        message = f"{file} is damaged (its SHA-256 differs); {path.parent} {NO_OTHER}"
        with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
            read_resumed(path)
    file.write_text(text.replace("  ", "\t"))
    assert read_resumed(path).step == 12


def test_folder_of_another_step_is_refused(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    other = path.rename(path.with_name("step-00000011"))
    message = f"{other} must be named {path.name}, as its manifest is of step 12; {path.parent} {NO_OTHER}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        read_resumed(other)
    link = other.with_name("newest")
    link.symlink_to(other.rename(path))
    assert read_resumed(link).step == 12


def test_swapped_files_are_refused(tmp_path: Path) -> None:
    """Two blocks alike: sizes and shapes are the same."""
    states = states_of(num_blocks=2, frozen=())
    for i, state in enumerate(states.values()):
        state.buffer.fill_(i)
    path = folder(tmp_path, 1)
    write_manifest(path, Manifest(step=1, recipe=RECIPE, states=checkpoint.save(path, all_of(states.values()))))
    one, other = file_of(path, "block.0"), file_of(path, "block.1")
    first, second = one.read_bytes(), other.read_bytes()
    assert len(first) == len(second)
    one.write_bytes(second)
    other.write_bytes(first)
    message = f"{one} is damaged (its SHA-256 differs); {path.parent} {NO_OTHER}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(path, states_of(num_blocks=2, frozen=()).values())


def test_newest_sound_checkpoint_is_offered_for_a_damaged_one(tmp_path: Path) -> None:
    """Of which every byte is looked at: step 5 has a flipped bit, 4 lacks a file, 3 its manifest."""
    for step in range(1, 7):
        path = folder(tmp_path, step)
        write_manifest(
            path, Manifest(step=step, recipe=RECIPE, states=checkpoint.save(path, all_of(states_of().values())))
        )
    damaged = folder(tmp_path, 6)
    file = file_of(damaged, "head")
    file.write_bytes(b"")
    flip(file_of(folder(tmp_path, 5), "head"))
    file_of(folder(tmp_path, 4), "embed").unlink()
    (folder(tmp_path, 3) / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=rf"got 0; use {re.escape(str(folder(tmp_path, 2)))}$") as raised:
        read_resumed(damaged)
    assert (raised.value.damaged, raised.value.sound) == (str(damaged), str(folder(tmp_path, 2)))


def test_newest_sound_checkpoint_of_a_run_is_resumed_and_the_damaged_ones_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(1, 5):
        path = folder(tmp_path, step)
        write_manifest(
            path, Manifest(step=step, recipe=RECIPE, states=checkpoint.save(path, all_of(states_of().values())))
        )
    assert resumed_folder(tmp_path) == folder(tmp_path, 4)
    assert caplog.messages == []
    flip(file_of(folder(tmp_path, 4), "head"))
    (folder(tmp_path, 3) / MANIFEST).write_text("{")
    assert resumed_folder(tmp_path) == folder(tmp_path, 2)
    assert caplog.messages[0] == (
        f"{file_of(folder(tmp_path, 4), 'head')} is damaged (its SHA-256 differs); looking for another checkpoint"
    )
    assert caplog.messages[1].startswith(f"{folder(tmp_path, 3) / MANIFEST} cannot be read (")
    for step in (1, 2):
        (folder(tmp_path, step) / MANIFEST).unlink()
    message = f"{tmp_path / 'checkpoints'} holds no checkpoint that is whole; begin without one"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        resumed_folder(tmp_path)
    assert resumed_folder(folder(tmp_path, 4)) == folder(tmp_path, 4), "a checkpoint that is named is the one"


def test_late_writer_changes_no_file_that_a_manifest_names(saved: tuple[Path, dict[str, LayerState]]) -> None:
    """A worker that the job went on without has other values, as sums of another order come out."""
    path, states = saved
    late = states_of()
    late["head"].buffer.fill_(0.5)
    checkpoint.save(path, all_of([late["head"], states["embed"]]))
    loaded = states_of()
    checkpoint.load(path, loaded.values())
    assert all(torch.equal(loaded[name].buffer, state.buffer) for name, state in states.items())


def test_manifest_clears_its_folder_of_what_killed_writers_left(tmp_path: Path) -> None:
    path = folder(tmp_path, 3)
    states = states_of()
    checkpoint.save(path, all_of([states["head"]]))
    states["head"].buffer.fill_(0.5)
    for name in (".tmpAbC", ".head.1a2b3c4d"):
        (path / name).write_bytes(b"half")
    (path / "notes.txt").write_text("the user's")
    parts = checkpoint.save(path, all_of(states.values()))
    write_manifest(path, Manifest(step=3, recipe=RECIPE, states=parts))
    named = [saved.file for (saved,) in parts.values()]
    assert sorted(file.name for file in path.iterdir()) == sorted([MANIFEST, "notes.txt", *named])


def test_all_is_on_the_disk_before_the_manifest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel was told to write down, in its order; the files themselves are looked at as it is told."""
    told: list[str] = []

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        finished = (folder(tmp_path, 3) / MANIFEST).exists()
        told.append(f"{file.relative_to(tmp_path).name or 'run'}{' finished' if finished else ''}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    path = folder(tmp_path, 3)
    parts = checkpoint.save(path, all_of([states_of()["embed"]]))
    write_manifest(path, Manifest(step=3, recipe=RECIPE, states=parts))
    step = path.name
    assert [re.sub(r"\.[0-9a-f]{8}$", "", name) for name in told] == [
        ".embed", step, step, "checkpoints", "run", ".manifest.json", f"{step} finished",
    ]  # fmt: skip
