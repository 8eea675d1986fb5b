"""Reads and writes the manifest: written last, it makes a folder of layer states a checkpoint.

    step-00000120/ manifest.json  llm.block.0.safetensors  llm.head.safetensors  ...

Any worker can write or read any state, so a checkpoint does not know the plan it was written under. The coordinator
writes the manifest once all parts are on disk: a folder without one is no checkpoint. Must not import torch; the files
themselves are :mod:`resilient.state.checkpoint`'s.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient.common.files import write_whole
from resilient.errors import ArgumentError, CheckpointError
from resilient.state.recipe import Recipe
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan

MANIFEST = "manifest.json"

FORMAT = 2
"""Of manifests. Those of format 1 do not say it, and have a weak checksum of each state as it lay in memory."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """One layer state of a checkpoint: its file, and the SHA-256 of the file's bytes."""

    file: str
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint holds.

    Args:
        step: Committed steps.
        recipe: Of the job.
        states: By layer.
        skipped: Those of the steps that updated nothing.
    """

    step: int
    recipe: Recipe
    states: dict[str, SavedState]
    skipped: SkippedSteps = NONE_SKIPPED
    format: int = FORMAT


class _Format(msgspec.Struct):
    format: int = 1


def folder(run_directory: str | Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return Path(run_directory) / "checkpoints" / f"step-{step:08d}"


def writers(plan: Plan, profile: ModelProfile) -> dict[str, int]:
    """Choose the rank that writes each state: of its holders the one with the fewest bytes so far."""
    load: dict[int, int] = {slot.rank: 0 for slot in plan.slots}
    chosen: dict[str, int] = {}
    for state, ranks in plan.holders(profile).items():
        chosen[state] = min(ranks, key=lambda rank: (load[rank], rank))
        load[chosen[state]] += profile.layers[profile.index(state)].state_bytes
    return chosen


def write_manifest(path: str | Path, manifest: Manifest) -> None:
    """Make the folder a checkpoint: all files the manifest names are on disk.

    Raises:
        CheckpointError: It cannot be written; the folder is no checkpoint.
    """
    try:
        write_whole(Path(path) / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: str | Path, error: Exception) -> CheckpointError:
    """Return the error of a checkpoint that cannot be written."""
    return CheckpointError(f"{path} cannot be written ({error}); make room there, or choose another folder")


def check_recipe(path: str | Path, manifest: Manifest, recipe: Recipe) -> None:
    """Refuse a checkpoint that another job wrote.

    Args:
        path: Of the checkpoint.
        manifest: Its manifest.
        recipe: Of the job that is to go on from it.

    Raises:
        CheckpointError: They differ; the message says in what.
    """
    differences = manifest.recipe.differences(recipe)
    if differences:
        raise CheckpointError(
            f"resume must be a checkpoint of this job, got {path}, written with {'; '.join(differences)}; use the "
            "script and the arguments that wrote it, or begin without a checkpoint"
        )


def read_resumed(path: str | Path) -> Manifest:
    """Read the manifest of the checkpoint that a job is to go on from.

    Raises:
        ArgumentError: There is no checkpoint.
        CheckpointError: It cannot be read.
    """
    path = Path(path)
    if not (path / MANIFEST).exists():
        found = f"a folder without {MANIFEST}" if path.is_dir() else "a file" if path.exists() else "nothing there"
        constraint = f"be a finished checkpoint, a folder step-* with {MANIFEST}"
        raise ArgumentError("resume", constraint, f"{path} ({found})", "choose one from the checkpoints/ of a run")
    return read_manifest(path)


def read_manifest(path: str | Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, it cannot be read, or another version wrote it.
    """
    file = Path(path) / MANIFEST
    try:
        data = file.read_bytes()
        written = msgspec.json.decode(data, type=_Format).format
        if written != FORMAT:
            raise CheckpointError(
                f"{file} must be of format {FORMAT}, got {written}; go on with the version of resilient that wrote it"
            )
        return msgspec.json.decode(data, type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); use another checkpoint") from error
