"""The files of a checkpoint: one safetensors file per layer state (see :mod:`resilient.state.manifest`).

Files hold the parameters by name and the optimizer's slots as ``optimizer/<slot>/<parameter>``. Their names hold their
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
from resilient.state.manifest import SavedState, damaged, read_manifest, unwritable, why_unlike

_DIGITS = 12
"""Of a file's digest in its name."""


def save(path: Path, states: Iterable[LayerState]) -> dict[str, SavedState]:
    """Write these states into a checkpoint's folder, down to the disk; return what the manifest must say of them.

    Raises:
        CheckpointError: They cannot be written.
    """
    saved: dict[str, SavedState] = {}
    try:
        path.mkdir(parents=True, exist_ok=True)
        for state in states:
            name = state.spec.name
            tensors = {key: tensor.contiguous().cpu() for key, tensor in state.tensors().items()}
            with partial_file(path / name) as partial:
                save_file(tensors, partial)
                sha256 = hash_file(partial, hashlib.sha256())
                file = f"{name}.{sha256[:_DIGITS]}.safetensors"
                saved[name] = SavedState(file=file, num_bytes=partial.stat().st_size, sha256=sha256)
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
        if not state.buffer.numel():
            continue
        saved = manifest.states.get(name)
        if saved is None:
            raise CheckpointError(f"{path} holds no state {name!r}; the checkpoint belongs to another model")
        damage = why_unlike(path, saved, with_digest=True)
        if damage:
            raise damaged(path, damage)
        try:
            state.load(load_file(Path(path) / saved.file))
        except (ValueError, OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
