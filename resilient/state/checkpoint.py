"""The files of a checkpoint: one safetensors file per layer state (see :mod:`resilient.state.manifest`).

Files hold the parameters by name and the optimizer's slots as ``optimizer/<slot>/<parameter>``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from resilient.common.files import hash_file, replacing
from resilient.errors import CheckpointError
from resilient.state.layer_state import LayerState
from resilient.state.manifest import SavedState, read_manifest, unwritable


def save(path: Path, states: Iterable[LayerState]) -> dict[str, SavedState]:
    """Write these states into a checkpoint's folder; return what the manifest must say of them.

    Raises:
        CheckpointError: They cannot be written.
    """
    saved: dict[str, SavedState] = {}
    try:
        path.mkdir(parents=True, exist_ok=True)
        for state in states:
            file = f"{state.spec.name}.safetensors"
            tensors = {key: tensor.contiguous().cpu() for key, tensor in state.tensors().items()}
            with replacing(path / file) as partial:
                save_file(tensors, partial)
                saved[state.spec.name] = SavedState(file=file, sha256=hash_file(partial, hashlib.sha256()))
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
        file = Path(path) / saved.file
        try:
            if hash_file(file, hashlib.sha256()) != saved.sha256:
                raise CheckpointError(f"{path}: {saved.file} is damaged (its SHA-256 differs); use an older checkpoint")
            state.load(load_file(file))
        except (ValueError, OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
