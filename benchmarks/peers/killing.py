"""Starts a peer's training, kills one worker in mid-step and measures from the lines that the workers print.

Owns the peers' processes: whatever happens, none is left when a measurement returns.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import psutil

START_LIMIT_S = 60.0
RECOVERY_LIMIT_S = 60.0
_STEPS_AFTER = 2
_WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Which worker to kill, ``fraction`` of a step after it committed ``step``."""

    worker: int
    step: int
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """A committed step, as a worker told it."""

    worker: int
    pid: int
    step: int
    time: float


@dataclass(frozen=True, kw_only=True)
class PeerRun:
    """What one failure cost.

    Args:
        kill: The failure.
        outcome: "recovered", or what happened instead; the measurements are then None.
        step_s: Median step before.
        gap_s: From the last step before to the first step after, whichever step that is.
        progress_s: From the last step before to the first step that had not been committed before.
        lost_steps: Steps whose work was done again, the interrupted one included.
        restarted: Survivors whose process was replaced.
    """

    kill: Kill
    outcome: str
    step_s: float | None = None
    gap_s: float | None = None
    progress_s: float | None = None
    lost_steps: int | None = None
    restarted: int | None = None


class _StuckError(Exception):
    """The peer did not get where it was to get."""


@dataclass(kw_only=True)
class _Workers:
    """Reads what all workers print; ``seen`` is everything so far."""

    lines: queue.SimpleQueue[Line]
    processes: Sequence[subprocess.Popen[bytes]]
    seen: list[Line] = field(default_factory=list)

    def wait(self, reached: Callable[[Line], bool], limit_s: float, what: str) -> Line:
        """Read up to the first line that is ``reached``."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                line = self.lines.get(timeout=0.2)
                self.seen.append(line)
                if reached(line):
                    return line
                continue
            if all(process.poll() is not None for process in self.processes):
                raise _StuckError(f"all processes ended before {what}")
        raise _StuckError(f"not {what} within {limit_s:.0f} s")

    def of(self, worker: int) -> list[Line]:
        return [line for line in self.seen if line.worker == worker]


def measure(
    commands: Callable[[Path], Sequence[Sequence[str]]],
    num_workers: int,
    kill: Kill,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> PeerRun:
    """Start the commands that ``commands`` makes of a fresh folder, kill, and see what becomes of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _running(commands(folder), folder / "stderr", environment) as workers:
            try:
                return _measure(workers, num_workers, kill)
            except _StuckError as stuck:
                return PeerRun(kill=kill, outcome=f"{stuck}: {_last_words(folder / 'stderr')}")


def _measure(workers: _Workers, num_workers: int, kill: Kill) -> PeerRun:
    victim = workers.wait(
        lambda line: line.worker == kill.worker and line.step >= kill.step, START_LIMIT_S, f"at step {kill.step}"
    )
    watched = (kill.worker + 1) % num_workers
    steps = [after.time - before.time for before, after in pairwise(workers.of(kill.worker)[_WARM_UP_STEPS:])]
    step_s = statistics.median(steps)
    old_pids = {line.pid for line in workers.seen}
    time.sleep(max(0.0, victim.time + kill.fraction * step_s - time.time()))
    os.kill(victim.pid, signal.SIGKILL)
    workers.wait(
        lambda line: line.worker == watched and line.step > victim.step + _STEPS_AFTER,
        RECOVERY_LIMIT_S,
        f"{_STEPS_AFTER} steps further after the kill",
    )
    # The survivors may still commit the step that was under way, so the kill does not tell where the gap begins.
    lines = [line for line in workers.of(watched) if line.step >= kill.step or line.time > victim.time]
    before, after = max(pairwise(lines), key=lambda pair: pair[1].time - pair[0].time)
    progress = next(line for line in lines if line.step > before.step)
    new_pids = {line.pid for line in workers.seen if line.time >= after.time}
    return PeerRun(
        kill=kill,
        outcome="recovered",
        step_s=step_s,
        gap_s=after.time - before.time,
        progress_s=progress.time - before.time,
        lost_steps=before.step + 2 - after.step,
        restarted=len(old_pids - {victim.pid} - new_pids),
    )


@contextlib.contextmanager
def _running(commands: Sequence[Sequence[str]], log: Path, environment: Mapping[str, str]) -> Iterator[_Workers]:
    """Run the commands; afterwards end them and all processes they began."""
    read_end, write_end = os.pipe()
    full = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with log.open("wb") as stderr:
        processes = [subprocess.Popen(command, stdout=write_end, stderr=stderr, env=full) for command in commands]
    os.close(write_end)
    lines: queue.SimpleQueue[Line] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(read_end, lines))
    reader.start()
    try:
        yield _Workers(lines=lines, processes=processes)
    finally:
        _end(processes)
        reader.join()


def _read(descriptor: int, lines: queue.SimpleQueue[Line]) -> None:
    with os.fdopen(descriptor) as output:
        for text in output:
            with contextlib.suppress(ValueError, TypeError):  # not a line of ours
                lines.put(Line(**json.loads(text)))


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    begun: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            begun += [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for process in reversed(begun):  # starters first: what they began is not begun anew
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(begun, timeout=10)
    for process in processes:
        process.wait()


def _last_words(log: Path) -> str:
    """The last error a worker or its starter printed; torchrun's own only sums up."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    errors = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return errors[-1][:200] if errors else "no error was printed"
