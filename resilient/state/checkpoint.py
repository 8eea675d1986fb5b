"""The files of a checkpoint: one safetensors file per layer state, or per piece of one that workers hold in pieces.

Files hold the parameters by name and the optimizer's slots as ``optimizer/<slot>/<parameter>``. Of a tensor that is cut
each interval is flat, by its elements: ``weight[24:48]`` (see :mod:`resilient.state.manifest`). Their names hold their
digests: a worker that the job goes on without, and that writes late, changes no file that a manifest names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from resilient.common.files import hash_file, partial_file, put, sync
from resilient.errors import CheckpointError
from resilient.state.layer_state import LayerState
from resilient.state.manifest import SavedState, SavedStates, damaged, read_manifest, unwritable, why_unlike
from resilient.templates.common.byte_intervals import ByteIntervals

_DIGITS = 12
"""Of a file's digest in its name."""


HeldPart = tuple[LayerState, ByteIntervals]
"""Bytes of the canonical buffer that a state holds."""


def save(path: Path, parts: Iterable[HeldPart]) -> SavedStates:
    """Write parts of states into a checkpoint's folder, down to the disk; return what the manifest must say of them.

    Args:
        path: The folder.
        parts: One of each layer.

    Raises:
        CheckpointError: They cannot be written.
    """
    saved: SavedStates = {}
    try:
        path.mkdir(parents=True, exist_ok=True)
        for state, part in parts:
            name = state.spec.name
            tensors = {key: tensor.contiguous().cpu() for key, tensor in state.tensors(part).items()}
            with partial_file(path / name) as partial:
                save_file(tensors, partial)
                sha256 = hash_file(partial, hashlib.sha256())
                file = f"{name}.{sha256[:_DIGITS]}.safetensors"
                num_bytes = partial.stat().st_size
                saved[name] = (SavedState(file=file, num_bytes=num_bytes, sha256=sha256, intervals=part),)
                put(partial, path / file)
        sync(path)
    except (OSError, SafetensorError) as error:
        raise unwritable(path, error) from error
    return saved


def load(path: str | Path, states: Iterable[LayerState]) -> None:
    """Fill states from a checkpoint; no value of a file counts before all of the file is verified.

    Raises:
        CheckpointError: A state is missing, damaged or of another shape.
    """
    manifest = read_manifest(path)
    for state in states:
        name = state.spec.name
        if not state.held:
            continue
        if name not in manifest.states:
            raise CheckpointError(f"{path} holds no state {name!r}; the checkpoint belongs to another model")
        lacking = state.held
        for saved in manifest.states[name]:
            part = state.whole if saved.intervals is None else saved.intervals
            if part & state.held:
                _load_part(Path(path), state, saved, part)
                lacking -= part
        if lacking:
            raise CheckpointError(f"{path} holds not all of state {name!r}; the checkpoint belongs to another model")


def _load_part(path: Path, state: LayerState, saved: SavedState, part: ByteIntervals) -> None:
    damage = why_unlike(path, saved, with_digest=True)
    if damage:
        raise damaged(path, damage)
    try:
        state.load(load_file(path / saved.file), part)
    except (ValueError, OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
