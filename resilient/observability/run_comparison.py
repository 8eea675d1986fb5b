"""Compares two runs of a job: did failures and joins change the losses or the final parameters?

Reads ``events.jsonl`` and the final checkpoints. Must not import torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

from resilient.errors import CheckpointError
from resilient.observability.event_log import loss_of, read_events, steps_of, was_skipped
from resilient.state.manifest import MANIFEST, SavedState, read_manifest

NOT_COMPARED: dict[str, Any] = dict.fromkeys(
    ("max_param_abs_diff", "max_param_rel_diff", "max_loss_abs_diff", "same_steps_and_samples")
)
"""What a report says of a run that has no reference."""

_NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I32": "<i4", "I16": "<i2", "I8": "i1", "BOOL": "?"}
"""Of all others the bytes are compared."""

_INTERVAL = re.compile(r"(?P<name>.*)\[(?P<first>\d+):\d+\]")
"""A part of a tensor, in the files of states that several workers held together."""


def compare_runs(run_dir: Path | str, reference_dir: Path | str) -> dict[str, Any]:
    """Compare a run with the failure-free run of the same job.

    Returns:
        A dict of four. ``max_param_abs_diff``: largest difference of any parameter in the final checkpoints;
        ``max_param_rel_diff``: the same relative to the largest absolute value of the parameter's tensor in the
        reference, largest over all tensors; ``max_loss_abs_diff``: largest difference of any step's loss
        that is a number; ``same_steps_and_samples``: both runs committed the same steps with as many samples in each,
        and skipped the same.

    Raises:
        CheckpointError: If a run has no final checkpoint, or the two do not hold the same tensors.
    """
    steps = steps_of(read_events(Path(run_dir) / "events.jsonl"))
    reference = steps_of(read_events(Path(reference_dir) / "events.jsonl"))
    pairs = [(loss_of(steps[number]), loss_of(reference[number])) for number in steps.keys() & reference.keys()]
    losses = [abs(ours - theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
    absolute, relative = compare_parameters(run_dir, reference_dir)
    samples = [
        {number: (step["num_samples"], was_skipped(step)) for number, step in run.items()} for run in (steps, reference)
    ]
    return {
        "max_param_abs_diff": absolute,
        "max_param_rel_diff": relative,
        "max_loss_abs_diff": _worst(losses) if losses else None,
        "same_steps_and_samples": samples[0] == samples[1],
    }


def final_checkpoint(run_dir: Path | str) -> Path:
    """Return the newest complete checkpoint folder of a run."""
    manifests = sorted(Path(run_dir).glob(f"checkpoints/step-*/{MANIFEST}"))
    if not manifests:
        raise CheckpointError(f"{run_dir} must hold a checkpoint to compare, got none; let the run finish first")
    return manifests[-1].parent


def compare_parameters(run_dir: Path | str, reference_dir: Path | str) -> tuple[float, float]:
    """Return ``max_param_abs_diff`` and ``max_param_rel_diff`` of :func:`compare_runs`, which need no events.

    Raises:
        CheckpointError: If a run has no final checkpoint, or the two do not hold the same tensors.
    """
    folder, reference_folder = final_checkpoint(run_dir), final_checkpoint(reference_dir)
    states = read_manifest(folder).states
    reference_states = read_manifest(reference_folder).states
    _must_match(folder, reference_folder, states.keys(), reference_states.keys())
    absolute, relative = [0.0], [0.0]
    for name, files in states.items():
        tensors = _parameters(folder, files)
        reference = _parameters(reference_folder, reference_states[name])
        _order_alike(tensors, reference)
        _order_alike(reference, tensors)
        _must_match(folder, reference_folder, tensors.keys(), reference.keys())
        for key, expected in reference.items():
            if expected.size:
                difference = float(np.abs(tensors[key].ravel() - expected.ravel()).max())
                scale = float(np.abs(expected).max())
                absolute.append(difference)
                relative.append(difference / scale if scale else (0.0 if difference == 0 else float("inf")))
    return _worst(absolute), _worst(relative)


def _must_match(folder: Path, reference_folder: Path, found: Iterable[str], expected: Iterable[str]) -> None:
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise CheckpointError(
            f"{folder} and {reference_folder} must hold the same states and tensors, got {odd} in one only"
        )


def _parameters(folder: Path, files: Iterable[SavedState]) -> dict[str, np.ndarray]:
    """Load a state's parameters as float64 (the numpy loader of safetensors has no bfloat16); those in parts flat."""
    parts: dict[str, dict[int, np.ndarray]] = {}
    for saved in files:
        for key, tensor in deserialize((folder / saved.file).read_bytes()):
            if key.startswith("optimizer/"):
                continue
            if tensor["dtype"] == "BF16":
                bits = np.frombuffer(tensor["data"], dtype="<u2").astype(np.uint32) << 16
                values = bits.view(np.float32)
            else:
                values = np.frombuffer(tensor["data"], dtype=_NUMPY_TYPES.get(tensor["dtype"], "u1"))
            part = _INTERVAL.fullmatch(key)
            name, first = (part["name"], int(part["first"])) if part else (key, 0)
            is_whole = part is None and values.size == math.prod(tensor["shape"])
            shaped = values.reshape(tensor["shape"]) if is_whole else values
            parts.setdefault(name, {})[first] = shaped.astype(np.float64)
    return {
        name: np.concatenate([of[first] for first in sorted(of)]) if len(of) > 1 else next(iter(of.values()))
        for name, of in parts.items()
    }


def _order_alike(tensors: dict[str, np.ndarray], others: Mapping[str, np.ndarray]) -> None:
    """Bring tensors into the order of others that were in parts, with another dimension first."""
    for key in others.keys() - tensors.keys():
        name, _, dimension = key.rpartition("@")
        if name in tensors and dimension.isdecimal() and int(dimension) < tensors[name].ndim:
            tensors[key] = np.moveaxis(tensors.pop(name), int(dimension), 0)


def _worst(values: Sequence[float]) -> float:
    """The largest value, NaN if there is one: a difference that cannot be told is not a small one."""
    return float(np.max(values))
