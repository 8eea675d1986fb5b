"""Checkpoints give back what was written, or say what is wrong with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from small import CPU, TiedModel, make_job, make_plan, make_profile
from torch import nn

from resilient import checkpoint
from resilient.errors import CheckpointError
from resilient.manifest import MANIFEST, Manifest, SavedState, folder, read_manifest, write_manifest, writers
from resilient.models.layer import LayerSpec
from resilient.state import LayerState, Layout


def states_of(num_blocks: int = 1, dtype: torch.dtype = torch.float32, frozen: tuple[str, ...] = ("block.0",)) -> dict:
    specs = TiedModel(num_blocks=num_blocks, frozen=frozen).layers
    return {spec.name: LayerState(spec, Layout.of(spec), ("exp_avg", "exp_avg_sq"), dtype, CPU) for spec in specs}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, LayerState]]:
    """A checkpoint in two parts, as two workers write it."""
    states = states_of()
    for i, state in enumerate(states.values()):
        state.buffer.copy_(torch.arange(state.buffer.numel()) + i)
    path = folder(tmp_path, 12)
    parts = checkpoint.save(path, [states["embed"]]) | checkpoint.save(path, [states["block.0"], states["head"]])
    write_manifest(path, Manifest(step=12, digest="d", states=parts))
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
    assert sorted(file.name for file in path.iterdir()) == sorted(
        [MANIFEST, *(f"{name}.safetensors" for name in states)]
    )


def test_layer_without_state_is_saved_and_loaded(tmp_path: Path) -> None:
    spec = LayerSpec(name="relu", unit="chain", build=nn.ReLU, initialize=lambda _: None)
    state = LayerState(spec, Layout.of(spec), ("exp_avg",), torch.float32, CPU)
    write_manifest(tmp_path, Manifest(step=1, digest="", states=checkpoint.save(tmp_path, [state])))
    checkpoint.load(tmp_path, [state])


def test_folder_without_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, states_of().values())
    message = f"{tmp_path} must be a finished checkpoint, got a folder without {MANIFEST}; choose another step-* folder"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(tmp_path, [])


def test_manifest_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"step": "twelve"}')
    message = f"{tmp_path / MANIFEST} cannot be read: Expected `int`, got `str` - at `$.step`"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        read_manifest(tmp_path)


def test_changed_value_is_noticed(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    file = path / "embed.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    message = f"{path}: embed.safetensors is damaged (its checksum differs); use an older checkpoint"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        checkpoint.load(path, states_of().values())


@pytest.mark.parametrize("num_bytes", [0, 4, 200])
def test_file_cut_short_is_noticed(saved: tuple[Path, dict[str, LayerState]], num_bytes: int) -> None:
    path, _ = saved
    file = path / "head.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=f"^{re.escape(str(path))}: "):
        checkpoint.load(path, states_of().values())


def test_file_that_is_gone_is_named(saved: tuple[Path, dict[str, LayerState]]) -> None:
    path, _ = saved
    (path / "head.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"head\.safetensors"):
        checkpoint.load(path, states_of().values())


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
    assert all(rank in holders[name] for name, rank in chosen.items())
    assert set(chosen.values()) == {0, 1, 2}


def test_manifest_keeps_what_it_was_given(tmp_path: Path) -> None:
    manifest = Manifest(step=3, digest="x", states={"a": SavedState(file="a.safetensors", fingerprint="12ab")})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
