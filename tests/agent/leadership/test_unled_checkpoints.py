"""Checkpoints of which all parts are there get their manifest, whoever leads the job."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from resilient.agent.leadership.unled_checkpoints import UnledCheckpoints
from resilient.protocol.messages import Ready, Saved
from resilient.state.manifest import MANIFEST, SavedState, folder, read_manifest
from tests.agent.membership.simulated import STATES, job_spec

STEP = 3


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder(tmp_path, STEP).mkdir(parents=True)
    return tmp_path


def agent(run: Path, node: int) -> UnledCheckpoints:
    checkpoints = UnledCheckpoints(node, str(run))
    checkpoints.hear(0, Ready(job=job_spec(), store_address="h:1", pid=5, device="cpu"))
    return checkpoints


def saved(run: Path, *states: str, generation: int = 1) -> Saved:
    """Return what a worker says that has written these states."""
    files: dict[str, tuple[SavedState, ...]] = {}
    for state in states:
        (folder(run, STEP) / f"{state}.safetensors").write_bytes(b"x")
        sha256 = hashlib.sha256(b"x").hexdigest()
        files[state] = (SavedState(file=f"{state}.safetensors", num_bytes=1, sha256=sha256),)
    return Saved(generation=generation, step=STEP, states=files)


def test_last_part_makes_a_checkpoint_whole(run: Path) -> None:
    first, last = agent(run, 0), agent(run, 1)
    first.hear(0, saved(run, *STATES[:2]))  # the coordinator may have heard that, or not
    for each in (first, last):
        each.note_led(is_led=False)
    assert not (folder(run, STEP) / MANIFEST).exists()
    last.hear(0, saved(run, *STATES[2:]))
    manifest = read_manifest(folder(run, STEP))
    assert (manifest.step, manifest.states.keys()) == (STEP, set(STATES))
    assert sorted(path.name for path in folder(run, STEP).iterdir()) == sorted(
        [MANIFEST, *(f"{state}.safetensors" for state in STATES)]
    )


def test_parts_of_two_generations_make_no_checkpoint(run: Path) -> None:
    first, last = agent(run, 0), agent(run, 1)
    for each in (first, last):
        each.note_led(is_led=False)
    first.hear(0, saved(run, *STATES[:2], generation=1))
    last.hear(0, saved(run, *STATES[2:], generation=2))
    assert not (folder(run, STEP) / MANIFEST).exists()


def test_what_a_coordinator_hears_is_left_to_it(run: Path) -> None:
    checkpoints = agent(run, 0)
    checkpoints.note_led(is_led=False)
    checkpoints.note_led(is_led=True)
    checkpoints.hear(0, saved(run, *STATES))
    assert not (folder(run, STEP) / MANIFEST).exists()


def test_folder_that_is_not_there_is_no_end_of_the_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = agent(tmp_path, 0)
    checkpoints.note_led(is_led=False)
    checkpoints.hear(0, Saved(generation=1, step=STEP, states={}))
    assert "node 0: the checkpoint of step 3 is not whole: " in caplog.text
