"""A forked process reads files at its own place, whatever kind of file they are."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from resilient.common.processes import allow_many_files, command_for, open_files_anew


def in_a_fork(act: Callable[[], bytes]) -> bytes:
    """Return what a forked process does once it has its own open files."""
    mine, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        open_files_anew()
        os.write(theirs, act())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(mine, "rb") as answer:
        told = answer.read()
    os.waitpid(pid, 0)
    return told


def test_a_file_without_a_name_is_read_from_where_it_was_and_moved_for_nobody_else() -> None:
    with tempfile.TemporaryFile(buffering=0) as file:
        file.write(b"abcdef")
        file.seek(2)
        assert in_a_fork(lambda: file.read(3)) == b"cde"
        assert file.tell() == 2


def test_a_file_that_is_only_written_stays_shared_so_that_lines_follow_one_another(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb", buffering=0) as file:
        file.write(b"parent ")
        assert in_a_fork(lambda: str(file.write(b"child ")).encode()) == b"6"
        file.write(b"parent")
    assert (tmp_path / "log").read_bytes() == b"parent child parent"


def test_pipes_and_sockets_stay_as_they_are() -> None:
    mine, theirs = os.pipe()
    os.write(theirs, b"once")
    assert in_a_fork(lambda: os.read(mine, 4)) == b"once"
    os.close(mine)
    os.close(theirs)


def test_limit_of_open_files_is_raised_as_far_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert allow_many_files() == min(hard, 1 << 16) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_modules_of_the_working_folder_are_not_taken_for_others(tmp_path: Path) -> None:
    """Which may be one that others can write to."""
    (tmp_path / "argparse.py").write_text("raise SystemExit('somebody else was here')")
    command = command_for("resilient.protocol.forkserver", "--help")
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert "--preload" in told.stdout
