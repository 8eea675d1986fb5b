"""Finds the folders of runs, and the address and token by which a command reaches a live one.

Must not import torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from resilient.cli.shared.errors import usage_error


def new_run_directory() -> Path:
    """Return the folder of a run that begins now, ``runs/<time>-<random>``."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


class Listening(msgspec.Struct):
    """The address of a live run and the token that opens it, as in its ``job.json``."""

    address: str
    token: str


def given_token(token_file: Path | None) -> str:
    """Return the token of a file, else of ``RESILIENT_TOKEN``, else ""."""
    if token_file is None:
        return os.environ.get("RESILIENT_TOKEN", "")
    try:
        token = token_file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise usage_error(f"--token-file must be readable text, got {token_file} ({error}); give another") from None
    if not token:
        raise usage_error(f"--token-file must hold a token, got the empty file {token_file}; write one into it")
    return token


def run_folder(run_dir: Path | None, fix: str = "name the folder of the run with --run") -> Path:
    """Return the folder of a run: the one that is named, else that in ``./runs`` where something happened last.

    Args:
        run_dir: Folder that is named.
        fix: What to do where none is named, and none is there.
    """
    if run_dir is None:
        found = sorted(Path("runs").glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise usage_error(f"no run in ./runs; {fix}")
        return found[-1].parent
    if not run_dir.is_dir():
        raise usage_error(f"--run must be the folder of a run, got {run_dir}; choose one from ./runs")
    return run_dir


def newest_run(beside: Path) -> Path:
    """Return the run that wrote the newest checkpoint, of those in the folder where this one's is or will be.

    Args:
        beside: Folder of a run.
    """
    found = [(path.stat().st_mtime, path) for path in beside.parent.glob("*/checkpoints/step-*/manifest.json")]
    if not found:
        raise usage_error(
            f"--resume latest must find a checkpoint, got none in the runs of {beside.parent}; name one, or begin "
            f"without --resume"
        )
    return max(found)[1].parents[2]


def read_job(run_dir: Path) -> Listening:
    """Read where the run of a folder listens."""
    try:
        return msgspec.json.decode((run_dir / "job.json").read_bytes(), type=Listening)
    except (OSError, msgspec.DecodeError) as error:
        raise usage_error(
            f"--run must be the folder of a run on this machine, got {run_dir} ({error}); choose one from ./runs"
        ) from None


def how_it_ended(run: Path) -> str:
    """Return how the job of a run ended, as its last event tells; "" if it goes on, or was cut off."""
    last: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        last = json.loads(run.joinpath("events.jsonl").read_bytes().splitlines()[-1])
    return f"exit code {last['exit_code']}, {last['reason']}" if last.get("kind") == "stopped" else ""
