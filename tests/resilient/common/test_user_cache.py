"""Caches lie where users expect them, and one process at a time fills a place."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from pathlib import Path

import pytest

from resilient.common.user_cache import cache_folder, one_at_a_time


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/resilient/profiles"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/resilient/profiles"),
    ],
)
def test_folder_is_where_caches_belong(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(cache_folder("profiles")) == expected


def test_second_maker_of_a_file_waits_for_the_first(tmp_path: Path) -> None:
    file, order = tmp_path / "new" / "a.json", list[str]()
    with one_at_a_time(file):
        other = threading.Thread(target=lambda: _make(file, order))  # a lock is its open file's
        other.start()
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def _make(file: Path, order: list[str]) -> None:
    with one_at_a_time(file):
        order.append("second")


def test_folder_that_cannot_be_made_is_no_obstacle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    file = tmp_path / "file" / "a.json"
    with one_at_a_time(file):
        pass
    assert caplog.messages == [
        f"{file} is made without a lock, perhaps by several workers at once: [Errno 17] File exists: '{file.parent}'"
    ]


def test_without_a_home_it_is_the_users_own_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = cache_folder("profiles").parents[1]
    assert folder == tmp_path / f"resilient-cache-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert cache_folder("profiles").parents[1] == folder


@pytest.mark.parametrize("trap", ["link", "file", "open to all"])
def test_a_folder_that_somebody_else_has_made_is_not_used(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"resilient-cache-{os.getuid()}"
    if trap == "link":
        (tmp_path / "theirs").mkdir()
        folder.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        folder.touch()
    else:
        folder.mkdir()
        folder.chmod(0o777)
    assert not str(cache_folder("profiles")).startswith(str(tmp_path))
    assert caplog.messages == [f"nothing is kept for later runs: HOME is not set, and {folder} is not this user's own"]
    with one_at_a_time(cache_folder("profiles") / "a.json"):
        pass
