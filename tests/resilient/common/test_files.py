"""Files are replaced by whole ones, or stay as they are."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from resilient.common.files import hash_file, replacing, write_whole


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
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '.*gone/\.a\.json\.[0-9a-f]{8}'$"):
        write_whole(tmp_path / "gone" / "a.json", b"{}")


@pytest.mark.parametrize("num_bytes", [0, 1, (4 << 20) - 1, (4 << 20) + 1, 9 << 20])
def test_digest_is_of_all_bytes_in_whatever_pieces_they_are_read(num_bytes: int, tmp_path: Path) -> None:
    data = bytes(position * 37 % 251 for position in range(1000)) * (num_bytes // 1000 + 1)
    path = tmp_path / "weights"
    path.write_bytes(data[:num_bytes])
    assert hash_file(path, hashlib.sha256()) == hashlib.sha256(data[:num_bytes]).hexdigest()
