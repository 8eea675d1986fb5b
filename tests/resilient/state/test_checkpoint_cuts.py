"""A writer that is killed at any moment leaves a checkpoint that is whole, or none: never a mixture of two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.errors import ArgumentError, CheckpointError
from resilient.state import checkpoint
from resilient.state.manifest import MANIFEST, folder, read_resumed, resumed_folder
from tests.resilient.state.cut_writer import states_at, write


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("cuts")
    command = [sys.executable, "-m", "tests.resilient.state.cut_writer", str(root)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[3], env={**os.environ, "OMP_NUM_THREADS": "1"})
    return sorted(root.iterdir())


def test_what_is_found_after_any_cut_is_one_step_whole(runs: list[Path]) -> None:
    found: dict[str, int] = {}
    for run in runs:
        path = resumed_folder(run)
        step = found[run.name] = read_resumed(path).step
        assert path == folder(run, step)
        loaded, expected = states_at(3), states_at(step)
        checkpoint.load(path, loaded.values())
        assert all(loaded[name].buffer.equal(expected[name].buffer) for name in expected), run.name
    assert len(runs) > 30
    assert set(found.values()) == {1, 2}
    assert all(step == 1 for name, step in found.items() if name.startswith("byte"))


def test_a_checkpoint_that_was_cut_is_none_until_it_is_written_again(runs: list[Path]) -> None:
    cut = [run for run in runs if folder(run, 2).exists() and resumed_folder(run) == folder(run, 1)]
    assert len(cut) > 20
    for run in cut:
        with pytest.raises((ArgumentError, CheckpointError)):
            read_resumed(folder(run, 2))
        write(run, 2)
        files = {file.name for file in folder(run, 2).iterdir()}
        assert read_resumed(resumed_folder(run)).step == 2
        assert files == {MANIFEST, *(saved.file for saved in read_resumed(folder(run, 2)).files)}, run.name


def test_all_that_a_manifest_names_is_on_the_disk_before_it_and_so_is_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For power that is cut: what was not waited for may be lost, in any order."""
    done: list[tuple[str, int]] = []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(("synced", os.fstat(descriptor).st_ino))

    def noted_replace(self: Path, target: Path) -> Path:
        done.append((target.name, self.stat().st_ino))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write(tmp_path, 1)
    path = folder(tmp_path, 1)
    is_folder = ("synced", path.stat().st_ino)
    names = [name for name, _ in done]
    sealed = names.index(MANIFEST)
    for number, (name, of) in enumerate(done):
        if name != "synced":
            assert ("synced", of) in done[:number], f"{name} has its name before its contents are on the disk"
            assert is_folder in done[number:], f"{name} may lose its name"
            assert name == MANIFEST or is_folder in done[number:sealed], f"the manifest may be there before {name}"
    assert ("synced", path.parent.stat().st_ino) in done[:sealed]
