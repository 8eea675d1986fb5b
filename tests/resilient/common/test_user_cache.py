"""Caches lie where users expect them, and one process at a time fills a place."""

from __future__ import annotations

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
