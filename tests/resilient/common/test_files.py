"""Files are replaced by whole ones, or stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient.common.files import replacing, write_whole


def test_a_file_is_replaced_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_whole(path, b"first")
    with replacing(path) as partial:
        partial.write_bytes(b"second")
        assert path.read_bytes() == b"first"
    assert path.read_bytes() == b"second"
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_after_an_error_the_old_file_stays_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"first")

    def interrupted() -> None:
        with replacing(path) as partial:
            partial.write_bytes(b"half of the sec")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"first"
    assert [each.name for each in tmp_path.iterdir()] == ["report.json"]


def test_an_error_before_anything_is_written_is_not_hidden(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*gone/\.a\.json\.\d+'$"):
        write_whole(tmp_path / "gone" / "a.json", b"{}")
