"""Logs that grow, and whoever shows them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from resilient.observability.worker_logs import GrowingFile, Screen, WorkerLogs


def write(folder: Path, name: str, text: bytes) -> None:
    path = folder / "logs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(text)


def test_line_that_is_not_whole_is_left_until_it_is_or_nothing_follows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    file = GrowingFile(path)
    assert list(file.new()) == []
    path.write_bytes(b"one\ntw")
    assert list(file.new()) == ["one"]
    path.write_bytes(b"one\ntwo\n\nthr")
    assert list(file.new()) == ["two", ""]
    assert list(file.new(is_whole=True)) == ["thr"]
    assert list(file.new(is_whole=True)) == []


def test_streams_that_are_apart_are_chosen_apart(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path, f"node-10/worker-{rank}.log", f"err {rank}\n".encode())
        write(tmp_path, f"node-10/worker-{rank}.stdout.log", f"out {rank}\n".encode())
        write(tmp_path, f"node-10/worker-{rank}.error.json", b"{}\n")
    write(tmp_path, "agents.log", b"no worker\n")
    wanted = {0: (False, False), 1: (False, True), 2: (True, False), 3: (True, True)}
    logs = WorkerLogs(tmp_path, lambda node, rank: wanted[rank] if node == 10 else (False, False), None)
    assert list(logs.new_lines()) == [(10, 1, "out 1"), (10, 2, "err 2"), (10, 3, "err 3"), (10, 3, "out 3")]


def test_screen_has_the_last_words_and_each_line_once(tmp_path: Path) -> None:
    shown: list[tuple[int, int, str]] = []

    async def story() -> None:
        there = asyncio.Event()

        def show(node: int, local_rank: int, line: str) -> None:
            shown.append((node, local_rank, line))
            there.set()

        screen = Screen(WorkerLogs(tmp_path, lambda *_: (True, True), None), show)
        write(tmp_path, "node-0/worker-0.log", b"first\n")
        await there.wait()
        write(tmp_path, "node-1/worker-0.log", b"last words")
        await screen.close()

    asyncio.run(asyncio.wait_for(story(), 60))
    assert shown == [(0, 0, "first"), (1, 0, "last words")]


def test_screen_that_nobody_reads_ends_nothing(tmp_path: Path) -> None:
    async def story() -> int:
        calls: list[str] = []
        called = asyncio.Event()

        def show(node: int, local_rank: int, line: str) -> None:
            calls.append(line)
            called.set()
            raise BrokenPipeError

        screen = Screen(WorkerLogs(tmp_path, lambda *_: (True, True), None), show)
        write(tmp_path, "node-0/worker-0.log", b"one\n")
        await called.wait()
        await asyncio.sleep(0)
        write(tmp_path, "node-0/worker-0.log", b"two\n")
        await screen.close()
        return len(calls)

    assert asyncio.run(asyncio.wait_for(story(), 60)) == 1
