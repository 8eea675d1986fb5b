"""Reads, cuts and scales availability traces: which nodes there are, and when they come and go."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from resilient.errors import ArgumentError

_HOUR_MS = 3_600_000
_EVENTS, _COUNTS = "time_ms,add|remove,node", "YYYY-MM-DD, HH:MM:SS, count"

_LATE_MS = 60_000
"""How far a sample's clock may be behind that of the sample before: more is rather a mistake."""

MOST_HOURS = 10 * 365 * 24
"""Of a trace: a longer one is rather a mistake."""

MOST_TRACED_NODES = 100_000
"""Of a trace: more can hardly be planned for, and are rather a mistake."""


@dataclass(frozen=True, kw_only=True)
class AvailabilityChange:
    """Nodes that come and go at one time.

    Args:
        time_ms: Since the trace's beginning.
        joined: Nodes that are there from now on.
        lost: Nodes that are gone.
    """

    time_ms: int
    joined: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AvailabilityTrace:
    """The nodes of a cluster over time, beginning without any. A node that comes back is another node.

    Args:
        name: For people.
        changes: By time, at most one for each time.
        end_ms: When the observation ends.
    """

    name: str
    changes: tuple[AvailabilityChange, ...]
    end_ms: int

    def __post_init__(self) -> None:
        if not any(change.joined for change in self.changes):
            raise ValueError(f"trace {self.name!r} must have a node that joins, got none; nothing could be trained")
        first_ms, last_ms = self.changes[0].time_ms, self.changes[-1].time_ms
        if not first_ms < self.end_ms >= last_ms:
            raise ValueError(
                f"trace {self.name!r} must end after its first change at {first_ms} ms and not before its last at "
                f"{last_ms} ms, got an end at {self.end_ms} ms; observe for longer (a file ends with its last line, "
                f"or after the hours that it is given)"
            )
        if self.end_ms > MOST_HOURS * _HOUR_MS:
            raise ValueError(
                f"trace {self.name!r} must last at most {MOST_HOURS} hours, got {self.end_ms / _HOUR_MS:g}; observe "
                f"for less"
            )

    def counts(self) -> Iterator[tuple[int, int]]:
        """Yield (time in ms, live nodes from then on) for each change."""
        live = 0
        for change in self.changes:
            live += len(change.joined) - len(change.lost)
            yield change.time_ms, live

    @property
    def max_nodes(self) -> int:
        """The most nodes that are live at a time."""
        return max(count for _, count in self.counts())

    @property
    def first_nodes(self) -> int:
        """Nodes there are when the first ones are."""
        return next(count for _, count in self.counts() if count)

    def lasting(self, hours: float) -> AvailabilityTrace:
        """Return the trace cut, or prolonged without changes, to a number of hours.

        Raises:
            ValueError: No node joins so early.
        """
        end_ms = round(hours * _HOUR_MS)
        return replace(self, changes=tuple(c for c in self.changes if c.time_ms <= end_ms), end_ms=end_ms)

    def scaled(self, num_nodes: int) -> AvailabilityTrace:
        """Return the trace for a cluster whose most live nodes are ``num_nodes``.

        Each node becomes no, one or several nodes that come and go together, such that the number of live nodes stays
        near its share: what is lost at once stays so, in proportion.

        Raises:
            ValueError: ``num_nodes`` is less than 1.
        """
        if num_nodes < 1:
            raise ArgumentError("num_nodes", "be >= 1", num_nodes, "leave scaling out to keep the trace's own")
        most = self.max_nodes
        if num_nodes == most:
            return self
        copies: dict[int, tuple[int, ...]] = {}
        live, scaled_live, next_node = 0, 0, 0
        changes: list[AvailabilityChange] = []
        for change in self.changes:
            lost = [copy for node in change.lost for copy in copies.pop(node)]
            live -= len(change.lost)
            scaled_live -= len(lost)
            joined: list[int] = []
            for node in change.joined:
                live += 1
                missing = (2 * live * num_nodes + most) // (2 * most) - scaled_live
                count = max(0, min(missing, -(-num_nodes // most)))
                copies[node] = tuple(range(next_node, next_node + count))
                next_node += count
                scaled_live += count
                joined += copies[node]
            if joined or lost:
                changes.append(AvailabilityChange(time_ms=change.time_ms, joined=tuple(joined), lost=tuple(lost)))
        return replace(self, changes=tuple(changes))


def read_trace(path: Path, *, seed: int = 0, hours: float = 0.0) -> AvailabilityTrace:
    """Read a trace of either format; the first line decides which.

    - ``time_ms,add|remove,node``, a line for each node that comes or goes;
    - ``YYYY-MM-DD, HH:MM:SS, count``, samples of how many nodes there are. They stand in the order in which they were
      taken, whatever clocks say: one that is up to a minute earlier than the line before counts as of the same time.
      Of one time the last counts: put in the order of their clocks, late lines would make nodes go and come again.

    Args:
        path: The file.
        seed: For counts, which do not say which nodes are lost: any of them, evenly.
        hours: The least length.

    Returns:
        The trace, ending with the file's last line or after that length.

    Raises:
        ValueError: A line does not have the form of the first or contradicts those before; the message names it.
        OSError: The file cannot be read.
    """
    try:
        # Spreadsheets write a byte order mark.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [
                (line, [field.strip() for field in row])
                for line, row in enumerate(csv.reader(file), start=1)
                if any(field.strip() for field in row)
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} must be text with lines {_EVENTS} or {_COUNTS}, got other bytes ({error})") from None
    if not rows:
        raise ValueError(f"{path} must hold a trace, got no lines; write lines {_EVENTS} or {_COUNTS}")
    first = rows[0][1][0]
    if not first.isdecimal() and not first.replace("-", "").isdecimal():
        raise ValueError(
            f"{path}: line {rows[0][0]} must be {_EVENTS} or {_COUNTS}, got {', '.join(rows[0][1])!r}; "
            f"leave out what is before the first time"
        )
    try:
        changes, end_ms = _read_events(rows) if first.isdecimal() else _read_counts(rows, random.Random(seed))
        return AvailabilityTrace(name=path.stem, changes=changes, end_ms=max(end_ms, round(hours * _HOUR_MS)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def periodic_failures(
    num_nodes: int, interval_s: float, *, down_to: int | None = None, seed: int = 0
) -> AvailabilityTrace:
    """Lose one node after every interval, until so many are left; those stay for an interval, too.

    Args:
        num_nodes: Nodes at the start.
        interval_s: Between two losses.
        down_to: Nodes at the end; half of them, but one at least, by default.
        seed: Which nodes are lost.

    Raises:
        ValueError: ``down_to`` is not 1 .. ``num_nodes``, or the interval shorter than a millisecond.
    """
    down_to = max(1, num_nodes // 2) if down_to is None else down_to
    if not 1 <= down_to <= num_nodes:
        raise ArgumentError("down_to", f"be 1 to {{num_nodes}} {num_nodes}", down_to, "lose fewer nodes")
    if not 1e-3 <= interval_s < math.inf:
        raise ArgumentError("interval_s", "be at least 0.001", interval_s, "give seconds")
    lost = random.Random(seed).sample(range(num_nodes), num_nodes - down_to)
    losses = (
        AvailabilityChange(time_ms=round(1e3 * interval_s * count), lost=(node,))
        for count, node in enumerate(lost, start=1)
    )
    return AvailabilityTrace(
        name=f"every-{interval_name(interval_s)}",
        changes=(AvailabilityChange(time_ms=0, joined=tuple(range(num_nodes))), *losses),
        end_ms=math.ceil(1e3 * interval_s * (len(lost) + 1)),
    )


def interval_name(interval_s: float) -> str:
    """Return ``6h``, ``10min`` or ``45s``."""
    for seconds, unit in ((3600, "h"), (60, "min")):
        if interval_s >= seconds and interval_s % seconds == 0:
            return f"{interval_s / seconds:g}{unit}"
    return f"{interval_s:g}s"


def _read_events(rows: Iterable[tuple[int, list[str]]]) -> tuple[tuple[AvailabilityChange, ...], int]:
    gathered = _Gathered()
    live: dict[str, int] = {}
    for line, fields in rows:
        if len(fields) != 3 or not fields[0].isdecimal() or fields[1] not in ("add", "remove") or not fields[2]:
            raise ValueError(f"line {line} must be {_EVENTS}, got {','.join(fields)!r}; mend it, or leave it out")
        time_ms, name = int(fields[0]), fields[2]
        gathered.advance(line, time_ms)
        if fields[1] == "add":
            if name in live:
                raise ValueError(
                    f"line {line} must add a node that is not there, got {name}, which is; remove it first"
                )
            live[name] = gathered.join()
        else:
            if name not in live:
                raise ValueError(
                    f"line {line} must remove a node that is there, got {name}, which is not; add it first"
                )
            gathered.lose(live.pop(name))
    return gathered.changes(), gathered.time_ms


def _read_counts(
    rows: Iterable[tuple[int, list[str]]], rng: random.Random
) -> tuple[tuple[AvailabilityChange, ...], int]:
    gathered = _Gathered()
    samples: list[tuple[int, int]] = []
    first: datetime | None = None
    for line, fields in rows:
        try:
            date, time, number = fields
            moment, count = datetime.strptime(f"{date} {time}", "%Y-%m-%d %H:%M:%S"), int(number)
            if count < 0:
                raise ValueError(number)
        except ValueError:
            reason = f"line {line} must be {_COUNTS}, got {', '.join(fields)!r}"
            raise ValueError(f"{reason}; mend it, or leave it out") from None
        if count > MOST_TRACED_NODES:
            raise ValueError(
                f"line {line} must have a count of at most {MOST_TRACED_NODES}, got {count}; take a part of it"
            )
        first = first or moment
        time_ms = round((moment - first).total_seconds() * 1e3)
        if gathered.time_ms - _LATE_MS <= time_ms < gathered.time_ms:
            time_ms = gathered.time_ms
        if samples and samples[-1][0] == time_ms:
            samples.pop()
        gathered.advance(line, time_ms, "leave it out, up to a minute less counts as the same time")
        samples.append((time_ms, count))
    return _changes_of(samples, rng), gathered.time_ms


def _changes_of(samples: Iterable[tuple[int, int]], rng: random.Random) -> tuple[AvailabilityChange, ...]:
    gathered = _Gathered()
    live: list[int] = []
    for time_ms, count in samples:
        gathered.time_ms = time_ms
        while len(live) < count:
            live.append(gathered.join())
        while len(live) > count:
            gathered.lose(live.pop(rng.randrange(len(live))))
    return gathered.changes()


class _Gathered:
    """Changes line by line; those of one time become one."""

    def __init__(self) -> None:
        self.time_ms = 0
        self._changes: dict[int, tuple[list[int], list[int]]] = {}
        self._num_nodes = 0

    def advance(self, line: int, time_ms: int, fix: str = "sort the file") -> None:
        if time_ms < self.time_ms:
            raise ValueError(
                f"line {line} must not be earlier than the line before, at {self.time_ms} ms, got {time_ms}; {fix}"
            )
        self.time_ms = time_ms

    def join(self) -> int:
        self._num_nodes += 1
        self._now()[0].append(self._num_nodes - 1)
        return self._num_nodes - 1

    def lose(self, node: int) -> None:
        joined, lost = self._now()
        # Here and gone at the same time: never seen.
        joined.remove(node) if node in joined else lost.append(node)

    def changes(self) -> tuple[AvailabilityChange, ...]:
        return tuple(
            AvailabilityChange(time_ms=time_ms, joined=tuple(joined), lost=tuple(lost))
            for time_ms, (joined, lost) in self._changes.items()
            if joined or lost
        )

    def _now(self) -> tuple[list[int], list[int]]:
        return self._changes.setdefault(self.time_ms, ([], []))
