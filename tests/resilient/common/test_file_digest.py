"""A file's contents are read once, and again when the file may be another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resilient.common import file_digest as module
from resilient.common.file_digest import file_digest
from resilient.common.files import Hash, hash_file

LONG_AGO_NS = 10**18


@pytest.fixture
def read(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose contents were read."""
    files: list[Path] = []

    def noted(path: Path, digest: Hash) -> str:
        files.append(path)
        return hash_file(path, digest)

    monkeypatch.setattr(module, "hash_file", noted)
    return files


def write(path: Path, data: bytes, mtime_ns: int = LONG_AGO_NS) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))
    return path


def kept(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "resilient" / "digests").glob("*.json")
    return file


def test_contents_are_read_once_and_a_link_to_them_not_at_all(tmp_path: Path, read: list[Path]) -> None:
    path, link = write(tmp_path / "weights", bytes(5_000_000)), tmp_path / "link"
    link.symlink_to(path)
    assert file_digest(path) == file_digest(path) == file_digest(link)
    assert read == [path]


def test_equal_contents_have_equal_digests_and_others_of_equal_size_do_not(tmp_path: Path, read: list[Path]) -> None:
    one, same, other = (write(tmp_path / name, data) for name, data in (("1", b"ab"), ("2", b"ab"), ("3", b"ba")))
    assert file_digest(one) == file_digest(same) != file_digest(other)


def test_file_written_anew_is_read_again(tmp_path: Path, read: list[Path]) -> None:
    path = write(tmp_path / "weights", b"first")
    first = file_digest(path)
    write(path, b"again", LONG_AGO_NS + 1)
    assert file_digest(path) != first
    assert len(read) == 2


def test_file_put_in_its_place_is_read_again_even_if_it_is_as_old_and_as_long(tmp_path: Path, read: list[Path]) -> None:
    path = write(tmp_path / "weights", b"first")
    first = file_digest(path)
    write(tmp_path / "other", b"again").replace(path)
    assert file_digest(path) != first


def test_file_that_was_written_a_moment_ago_may_change_once_more(tmp_path: Path, read: list[Path]) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    assert file_digest(path) == file_digest(path)
    assert read == [path, path]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"digest": 1}', b"[]"])
def test_damaged_cache_is_made_again(
    content: bytes, tmp_path: Path, read: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "weights", b"first")
    first = file_digest(path)
    kept(tmp_path).write_bytes(content)
    assert file_digest(path) == first
    assert caplog.messages[0].startswith(f"{kept(tmp_path)} cannot be read and is made again: ")
    assert file_digest(path) == first
    assert read == [path, path]


def test_cache_of_another_file_does_not_count(tmp_path: Path, read: list[Path]) -> None:
    path = write(tmp_path / "weights", b"first")
    file_digest(path)
    known = kept(tmp_path).read_bytes()
    other = file_digest(write(tmp_path / "other", b"other"))
    for file in (tmp_path / "cache" / "resilient" / "digests").glob("*.json"):
        file.write_bytes(known)
    assert file_digest(tmp_path / "other") == other


def test_file_that_is_gone_is_an_error(tmp_path: Path, read: list[Path]) -> None:
    with pytest.raises(FileNotFoundError, match=r"gone"):
        file_digest(tmp_path / "gone")
