"""What the workers of a run write, as they write it: the lines of their logs, also of workers that come later.

A worker's log is ``logs/node-N/worker-R.log`` in the run's folder. Where only one of its streams is shown, stdout has a
file of its own, ``worker-R.stdout.log``. Must not import torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from resilient.common.printable import printable

LOOK_EVERY_S = 0.2


class GrowingFile:
    """The lines of a file that grows; one that is not whole yet is left for later.

    Args:
        path: It need not be there yet.
        tail: Lines to begin with, from its end; None for all.
    """

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self._path = path
        self._tail = tail
        self._at = 0

    def new(self, *, is_whole: bool = False) -> Iterator[str]:
        """Yield what was written since the last time; ``is_whole``: nothing follows, so the last line is one, too."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                found = file.read()
        except FileNotFoundError:
            return
        if not is_whole or found.endswith(b"\n"):
            found = found[: found.rfind(b"\n") + 1]
        if found:
            self._at += len(found)
            lines: Iterable[bytes] = found.removesuffix(b"\n").split(b"\n")
            lines, self._tail = (lines if self._tail is None else deque(lines, self._tail)), None
            yield from (line.decode(errors="replace") for line in lines)


class WorkerLogs:
    """The logs of some of a run's workers.

    Args:
        folder: Of the run.
        is_wanted: Returns for a node and a local rank whether its log is, and whether the one of stdout is that stands
            beside it where the streams are apart.
        tail: Lines of each to begin with, from its end; None for all.
    """

    def __init__(self, folder: Path, is_wanted: Callable[[int, int], tuple[bool, bool]], tail: int | None) -> None:
        self._folder = folder
        self._is_wanted = is_wanted
        self._tail = tail
        self._files: dict[Path, GrowingFile] = {}

    def found(self) -> list[tuple[int, int, Path]]:
        """Return node, local rank and file of each log that is wanted, in order."""
        logs: list[tuple[int, int, Path]] = []
        for path in (self._folder / "logs").glob("node-*/worker-*.log"):
            node = path.parent.name.partition("-")[2]
            local_rank, _, stream = path.stem.partition("-")[2].partition(".")
            if node.isdigit() and local_rank.isdigit() and stream in ("", "stdout"):
                wanted, wanted_apart = self._is_wanted(int(node), int(local_rank))
                if wanted_apart if stream else wanted:
                    logs.append((int(node), int(local_rank), path))
        return sorted(logs)

    def new_lines(self, *, is_whole: bool = False) -> Iterator[tuple[int, int, str]]:
        """Yield node and local rank of who wrote, and each line since the last time.

        Args:
            is_whole: Nobody writes any more, so last lines are told without an end, too.
        """
        for node, local_rank, path in self.found():
            file = self._files.setdefault(path, GrowingFile(path, self._tail))
            for line in file.new(is_whole=is_whole):
                yield node, local_rank, line


class Screen:
    """Shows logs while they grow.

    Args:
        logs: Whose lines are shown.
        show: Called in the event loop with node, local rank and each line; not any more once it has raised ``OSError``.
    """

    def __init__(self, logs: WorkerLogs, show: Callable[[int, int, str], None]) -> None:
        self._logs = logs
        self._show = show
        self._following = asyncio.get_running_loop().create_task(self._follow())

    async def close(self) -> None:
        """Show the last words of workers that have ended."""
        is_broken = self._following.done()
        self._following.cancel()
        await asyncio.gather(self._following, return_exceptions=True)
        if not is_broken:
            with contextlib.suppress(OSError):
                await self._show_new(is_whole=True)

    async def _follow(self) -> None:
        while True:
            await self._show_new(is_whole=False)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _show_new(self, *, is_whole: bool) -> None:
        # what was read is shown, even if this is cancelled meanwhile
        reading = asyncio.create_task(asyncio.to_thread(lambda: list(self._logs.new_lines(is_whole=is_whole))))
        try:
            await asyncio.shield(reading)
        finally:
            for each in await reading:
                self._show(*each)


def signed(node: int, local_rank: int, line: str) -> str:
    """Return a line with who wrote it, without what moves the reader's cursor."""
    return f"[node {node} worker {local_rank}]: {printable(line)}"
