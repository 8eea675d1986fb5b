"""Reads and writes the manifest: written last, it makes a folder of layer states a checkpoint.

    step-00000120/ manifest.json  llm.block.0.8a1f5c27b0e3.safetensors  llm.head.03bd9c44a1f6.safetensors  ...

Any worker can write or read any state, or the intervals of it that it holds, so a checkpoint does not know the plan it
was written under. The coordinator
writes the manifest once all parts are on disk: a folder without one is no checkpoint. Must not import torch; the files
themselves are :mod:`resilient.state.checkpoint`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import msgspec

from resilient.common.files import hash_file, sync, write_whole
from resilient.errors import ArgumentError, CheckpointError
from resilient.state.recipe import Recipe
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Holdings, Plan

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"

FORMAT = 4
"""Of manifests. Format 1 had a weak checksum of each state as it lay in memory, format 2 no digest of the manifest."""

_WHOLE_STATES = 3
"""The format before, which is read as well: it has one file for each state."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """A layer state of a checkpoint, or a piece of one: its file, that file's size, and the SHA-256 of its bytes.

    Args:
        file: Its name in the folder.
        num_bytes: Its size.
        sha256: Of its bytes.
        intervals: Which bytes of the state's canonical buffer it has; None in format 3, which means all.
    """

    file: str
    num_bytes: int
    sha256: str
    intervals: ByteIntervals | None = None


SavedStates = dict[str, tuple[SavedState, ...]]
"""By layer, the files that its state is in."""


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
    states: SavedStates
    skipped: SkippedSteps = NONE_SKIPPED

    @property
    def files(self) -> tuple[SavedState, ...]:
        """All files, state by state."""
        return tuple(chain.from_iterable(self.states.values()))


class _ManifestOfWholeStates(msgspec.Struct, frozen=True, kw_only=True):
    """A :class:`Manifest` of format 3."""

    step: int
    recipe: Recipe
    states: dict[str, SavedState]
    skipped: SkippedSteps = NONE_SKIPPED


class _Format(msgspec.Struct):
    format: int = 1


class _Sealed(msgspec.Struct, kw_only=True):
    """The contents of a manifest's file: the manifest, and the SHA-256 of it as JSON without white space."""

    format: int = FORMAT
    sha256: str
    manifest: msgspec.Raw


class _DamageError(Exception):
    """A checkpoint is not what was written; another one may be."""


def folder(run_directory: str | Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return Path(run_directory) / "checkpoints" / _name(step)


def step_of_folder(path: str | Path) -> int:
    """Return the step that a checkpoint's folder is named after."""
    return int(Path(path).name.removeprefix("step-"))


def is_beside(path: str | Path, other: str | Path) -> bool:
    """Return whether a path is that of the folder of a checkpoint which may lie beside another one."""
    digits = Path(path).name.removeprefix("step-")
    return Path(path).parent == Path(other).parent and digits.isdecimal() and Path(path).name == _name(int(digits))


def _name(step: int) -> str:
    return f"step-{step:08d}"


def writers(plan: Plan, profile: ModelProfile) -> Holdings:
    """Choose the rank that writes each piece of each state: of its holders the one with the fewest bytes so far."""
    load: dict[int, int] = {slot.rank: 0 for slot in plan.slots}
    chosen: dict[str, dict[int, ByteIntervals]] = {}
    for state, pieces in plan.pieces(profile).items():
        written = chosen.setdefault(state, {})
        for piece in pieces:
            rank = min(piece.holders, key=lambda rank: (load[rank], rank))
            load[rank] += piece.intervals.size
            written[rank] = written.get(rank, NO_BYTES) | piece.intervals
    return chosen


def write_manifest(path: str | Path, manifest: Manifest, nodes: Mapping[str, int] | None = None) -> None:
    """Make the folder a checkpoint, and clear it of files that its manifest does not name.

    Args:
        path: The folder.
        manifest: Of files that are all on disk.
        nodes: Who says so, by file.

    Raises:
        CheckpointError: A file is not there, or the manifest cannot be written; the folder is no checkpoint.
    """
    path = Path(path)
    for saved in manifest.files:
        try:
            lacking = _why_unlike(path, saved)
        except OSError as error:  # the disk's, which may be over soon, and no node's: the file is there or it is not
            raise unwritable(path, error) from error
        if lacking:
            fix = "have all nodes write to the same folder, at the same path"
            raise CheckpointError(f"{lacking}; {fix}", node=(nodes or {}).get(saved.file))
    content = msgspec.json.encode(manifest)
    sealed = _Sealed(sha256=_digest(content), manifest=msgspec.Raw(content))
    try:
        for parent in (path, path.parent, path.parent.parent):  # the folders may be as new as the files
            sync(parent)
        write_whole(path / MANIFEST, msgspec.json.format(msgspec.json.encode(sealed)))
    except OSError as error:
        raise unwritable(path, error) from error
    _clear(path, {saved.file for saved in manifest.files})


def _clear(path: Path, named: set[str]) -> None:
    """Remove what writers left that were killed or that the job went on without."""
    with contextlib.suppress(OSError):  # it is in nobody's way
        for file in list(path.iterdir()):
            if file.name not in named and (file.suffix == ".safetensors" or file.name.startswith(".")):
                file.unlink()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def why_unlike(path: str | Path, saved: SavedState, *, with_digest: bool = False) -> str:
    """Return how a file is not what its writer said it is; "" if it is."""
    try:
        return _why_unlike(path, saved, with_digest=with_digest)
    except OSError as error:
        return f"{Path(path) / saved.file} cannot be read ({error})"


def _why_unlike(path: str | Path, saved: SavedState, *, with_digest: bool = False) -> str:
    file = Path(path) / saved.file
    try:
        num_bytes = file.stat().st_size
        if num_bytes != saved.num_bytes:
            return f"{file} must have {saved.num_bytes} bytes, got {num_bytes}"
        if with_digest and hash_file(file, hashlib.sha256()) != saved.sha256:
            return f"{file} is damaged (its SHA-256 differs)"
    except FileNotFoundError:
        return f"{file} must have {saved.num_bytes} bytes, got no such file"
    return ""


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


def resumed_folder(path: str | Path) -> Path:
    """Return the checkpoint that a job is to go on from: the one that is named, or of a run the newest sound one.

    Args:
        path: Of a checkpoint, which is not looked at, or of a run, all bytes of whose newest checkpoint are.

    Raises:
        CheckpointError: The run has no checkpoint that is whole.
    """
    checkpoints = Path(path) / "checkpoints"
    if not checkpoints.is_dir():
        return Path(path)
    sound = newest_sound(checkpoints, "")
    if sound is None:
        raise CheckpointError(f"{checkpoints} holds no checkpoint that is whole; begin without one")
    return sound


def read_resumed(path: str | Path) -> Manifest:
    """Read the manifest of the checkpoint that a job is to go on from.

    Raises:
        ArgumentError: There is no checkpoint.
        CheckpointError: It cannot be read, or a file is not of the size it was written with.
    """
    path = Path(path)
    if not (path / MANIFEST).exists():
        found = f"a folder without {MANIFEST}" if path.is_dir() else "a file" if path.exists() else "nothing there"
        constraint = f"be a finished checkpoint, a folder step-* with {MANIFEST}"
        raise ArgumentError("resume", constraint, f"{path} ({found})", "choose one from the checkpoints/ of a run")
    manifest = read_manifest(path)
    for saved in manifest.files:
        lacking = why_unlike(path, saved)
        if lacking:
            raise damaged(path, lacking)
    return manifest


def read_manifest(path: str | Path) -> Manifest:
    """Read a checkpoint's manifest.

    Raises:
        CheckpointError: There is none, it is damaged or another checkpoint's, or another version wrote it.
    """
    try:
        return _read(Path(path))
    except _DamageError as damage:
        raise damaged(path, str(damage)) from damage


def _read(path: Path) -> Manifest:
    file = path / MANIFEST
    try:
        data = file.read_bytes()
        written = msgspec.json.decode(data, type=_Format).format
        if written not in (_WHOLE_STATES, FORMAT):
            raise CheckpointError(
                f"{file} must be of format {_WHOLE_STATES} or {FORMAT}, got {written}; go on with the version of "
                "resilient that wrote it"
            )
        sealed = msgspec.json.decode(data, type=_Sealed)
        content = msgspec.json.format(bytes(sealed.manifest), indent=-1)
        manifest = _whole_states(content) if written == _WHOLE_STATES else msgspec.json.decode(content, type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        raise _DamageError(f"{file} cannot be read ({error})") from error
    if _digest(content) != sealed.sha256:
        raise _DamageError(f"{file} is damaged (its SHA-256 differs)")
    if path.resolve().name != _name(manifest.step):
        raise _DamageError(f"{path} must be named {_name(manifest.step)}, as its manifest is of step {manifest.step}")
    return manifest


def _whole_states(content: bytes) -> Manifest:
    read = msgspec.json.decode(content, type=_ManifestOfWholeStates)
    states = {name: (saved,) for name, saved in read.states.items()}
    return Manifest(step=read.step, recipe=read.recipe, states=states, skipped=read.skipped)


def damaged(path: str | Path, damage: str) -> CheckpointError:
    """Return the error of a damaged checkpoint, which says what to use instead."""
    path = Path(path).resolve()
    sound = newest_sound(path.parent, path.name)
    fix = f"{path.parent} holds no other checkpoint that is whole, so begin without one"
    error = CheckpointError(f"{damage}; {fix if sound is None else f'use {sound}'}")
    error.damaged, error.sound = str(path), "" if sound is None else str(sound)
    return error


def newest_sound(checkpoints: Path, aside: str) -> Path | None:
    """Return the newest checkpoint in a folder of which all bytes are right; others are told of in the log.

    Args:
        checkpoints: The folder.
        aside: Name of one that is known to be damaged.
    """
    if aside:
        logger.warning("%s is damaged; looking for another checkpoint", checkpoints / aside)
    for path in sorted(checkpoints.glob("step-*"), reverse=True):
        if path.name != aside:
            damage = _damage(path)
            if not damage:
                return path.resolve()
            logger.warning("%s; looking for another checkpoint", damage)
    return None


def _damage(path: Path) -> str:
    """Return what is wrong with any byte of a checkpoint; "" if nothing is."""
    try:
        files = _read(path).files
    except (_DamageError, CheckpointError) as error:
        return str(error)
    return next((damage for saved in files if (damage := why_unlike(path, saved, with_digest=True))), "")
