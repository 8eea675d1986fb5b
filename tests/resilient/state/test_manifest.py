"""Whose fault it is that a manifest cannot be written: of a node that writes elsewhere, or of the disk."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from resilient.errors import CheckpointError
from resilient.state.manifest import Manifest, SavedState, read_manifest, write_manifest
from tests.resilient.small import make_job


def test_file_that_cannot_be_looked_at_is_the_disks_fault_and_no_nodes(tmp_path: Path) -> None:
    """So the manifest is tried again, and a job that has done all its steps does not end without them."""
    path, aside = tmp_path / "step-00000003", tmp_path / "aside"
    aside.mkdir()
    (aside / "embed.safetensors").write_bytes(b"state")
    digest = hashlib.sha256(b"state").hexdigest()
    saved = SavedState(file="embed.safetensors", sha256=digest, num_bytes=5)
    manifest = Manifest(step=3, recipe=make_job().recipe(), states={"embed": (saved,)})
    path.touch()
    error = f"[Errno 20] Not a directory: '{path / saved.file}'"
    message = f"{path} cannot be written ({error}); make room there, or choose another folder"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$") as raised:
        write_manifest(path, manifest, {saved.file: 7})
    assert raised.value.node is None
    path.unlink()
    aside.rename(path)
    write_manifest(path, manifest, {saved.file: 7})
    assert read_manifest(path) == manifest
