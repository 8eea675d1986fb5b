"""Parts of a benchmark that share one budget of time: each runs in a process of its own, which is killed in time.

Owns what a part is and how it is run, or why it is not; which there are, and what they measure, is decided by others.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

_CONTEXT = multiprocessing.get_context("forkserver")
"""A process that ends gives all of the device back. Its server imports what all need once, and has not used CUDA."""
LOG = "output.log"

_STACKS_S = 1.0
"""So long before a part is killed it writes down what its threads do."""
_DYING_S = 30.0
"""A process that was killed is gone sooner, unless a driver keeps it: nobody can wait for that."""


class SkippedError(Exception):
    """A part cannot be run here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a part runs.

    Args:
        device: "cuda" or "cpu".
        num_devices: How many of them there are.
        folder: The part's own.
        limit_s: After which it is killed.
        is_rehearsal: Have sizes so small that cores do: what is measured says nothing.
    """

    device: str
    num_devices: int
    folder: Path
    limit_s: float
    is_rehearsal: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """Something measured or checked.

    Args:
        what: In words.
        value: A number, or words.
        unit: Of the number.
        beside: What to compare it with, in words.
        wrong: Why it is not as it should be; "" where it is.
    """

    what: str
    value: float | str
    unit: str = ""
    beside: str = ""
    wrong: str = ""


Measure = Callable[[Setting], Iterable[Row]]
"""What it yields is known also if it is killed before it is done."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the benchmark.

    Args:
        name: By which it is asked for.
        measure: Does it, in a process of its own.
        needs_s: With less time left it is not begun; parts before it leave it as much.
        num_devices: That it needs.
    """

    name: str
    measure: Measure
    needs_s: float
    num_devices: int = 1


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a part went: ``skipped`` and ``failed`` say why it was or did, whatever it had measured before."""

    part: str
    rows: list[Row] = field(default_factory=list)
    took_s: float = 0.0
    skipped: str = ""
    failed: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether it failed, or something in it is not as it should be, or it measured nothing."""
        return bool(self.failed) or any(row.wrong for row in self.rows) or not (self.rows or self.skipped)


def run_all(
    parts: Sequence[Part],
    *,
    device: str,
    num_devices: int,
    folder: Path,
    budget_s: float,
    is_rehearsal: bool = False,
    clock: Callable[[], float] = time.monotonic,
    run: Callable[[Part, Setting], Outcome] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Outcome]:
    """Run parts one after the other, as far as devices and time allow; what one does not take, later ones may.

    Args:
        parts: In order.
        device: "cuda" or "cpu".
        num_devices: How many there are.
        folder: Each part has a folder in it, with what it printed.
        budget_s: For all of them.
        is_rehearsal: See :class:`Setting`.
        clock: In seconds.
        run: Runs a part; :func:`run_apart` by default.
        tell: Told what is done next, in words.
    """
    ends_at = clock() + budget_s
    _CONTEXT.set_forkserver_preload([part.measure.__module__ for part in parts])
    outcomes: list[Outcome] = []
    for number, part in enumerate(parts):
        left_s = ends_at - clock()
        reason = reason_to_skip(part, num_devices, left_s)
        if reason:
            outcomes.append(Outcome(part=part.name, skipped=reason))
            continue
        later_s = sum(each.needs_s for each in parts[number + 1 :] if each.num_devices <= num_devices)
        limit_s = left_s if is_rehearsal else max(part.needs_s, left_s - later_s)  # cores may do much else
        tell(f"{part.name} (at most {limit_s:.0f} s)")
        own = folder / part.name
        own.mkdir(parents=True)
        setting = Setting(
            device=device, num_devices=num_devices, folder=own, limit_s=limit_s, is_rehearsal=is_rehearsal
        )
        outcomes.append((run or run_apart)(part, setting))
    return outcomes


def reason_to_skip(part: Part, num_devices: int, left_s: float) -> str:
    """Return why a part cannot be run; "" where it can."""
    if num_devices < part.num_devices:
        return f"needs {part.num_devices} devices, got {num_devices}"
    if left_s < part.needs_s:
        return f"needs {part.needs_s:.0f} s, {max(0.0, left_s):.0f} s are left"
    return ""


def run_apart(part: Part, setting: Setting) -> Outcome:
    """Run a part in a process of its own, which ends with all that it started."""
    began = time.monotonic()
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_work, args=(part, setting, began + setting.limit_s, sending))
    process.start()
    sending.close()
    rows: list[Row] = []
    try:
        end = _received(receiving, rows, began + setting.limit_s)
    except EOFError:
        process.join()
        end = f"its process ended with exit code {process.exitcode}, see {setting.folder / LOG}"
    except TimeoutError:
        end = f"killed after {setting.limit_s:.0f} s, see {setting.folder / LOG}"
    finally:
        _end(process)
    skipped, failed = (str(end), "") if isinstance(end, SkippedError) else ("", end)
    return Outcome(part=part.name, rows=rows, took_s=time.monotonic() - began, skipped=skipped, failed=failed)


def _received(receiving: Connection, rows: list[Row], ends_at: float) -> SkippedError | str:
    """Collect what a part measures, until it has ended; return how, as :func:`_end_of` does.

    Raises:
        EOFError: Its process has died.
        TimeoutError: It has not ended by then.
    """
    while receiving.poll(max(0.0, ends_at - time.monotonic())):
        told = receiving.recv()
        if not isinstance(told, Row):
            return told
        rows.append(told)
    raise TimeoutError


def _work(part: Part, setting: Setting, ends_at: float, sending: Connection) -> None:
    with (setting.folder / LOG).open("ab", buffering=0) as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    left_s = ends_at - time.monotonic() - _STACKS_S
    if left_s > 0:
        faulthandler.dump_traceback_later(left_s)  # where it is, should it be killed
    end = _end_of(part, setting, sending.send)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # who hears of the end kills this process
    sending.send(end)


def _end_of(part: Part, setting: Setting, tell: Callable[[Row], None]) -> SkippedError | str:
    """Measure; return why nothing was, or what went wrong, or ""."""
    try:
        for row in part.measure(setting):
            tell(row)
    except SkippedError as reason:
        return reason
    except BaseException as error:  # a part that ends itself has failed as well
        traceback.print_exc()
        first = (str(error).strip() or repr(error)).splitlines()[0]
        return f"{type(error).__name__}: {first}; see {setting.folder / LOG}"
    return ""


def _end(process: BaseProcess) -> None:
    """Kill a process and what descends from it, and wait until they are gone."""
    try:
        own = psutil.Process(process.pid)
        family = [*own.children(recursive=True), own]
    except psutil.NoSuchProcess:
        family = []
    for each in family:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.join()
    until = time.monotonic() + _DYING_S
    while any(map(_lives, family)) and time.monotonic() < until:
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    """Whether a process has memory still: one that nobody has asked for its end has none."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
