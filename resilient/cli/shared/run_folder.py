"""Finds the folders of runs, and the address and token by which a command reaches a live one.

Must not import torch.
"""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

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
        raise usage_error(f"--token-file must hold a token, got an empty {token_file}; write one into it")
    return token


def run_folder(run_dir: Path | None) -> Path:
    """Return the folder of a run: the one that is named, else the newest in ``./runs``."""
    if run_dir is None:
        found = sorted(Path("runs").glob("*/events.jsonl"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise usage_error("no run in ./runs; name the folder of the run with --run")
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


def read_job(run_dir: Path | None) -> Listening:
    """Read where a run listens; the newest run that left this behind when none is named."""
    if run_dir is None:
        found = sorted(Path("runs").glob("*/job.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise usage_error("no run in ./runs; name the folder of the run with --run")
        run_dir = found[-1].parent
    try:
        return msgspec.json.decode((run_dir / "job.json").read_bytes(), type=Listening)
    except (OSError, msgspec.DecodeError) as error:
        raise usage_error(
            f"--run must be the folder of a run on this machine, got {run_dir} ({error}); choose one from ./runs"
        ) from None
