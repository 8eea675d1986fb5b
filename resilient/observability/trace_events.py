"""Encodes traces, what each worker did from when to when, in the event format of Perfetto and Chrome's viewer.

Owns the format, which is the same for simulated schedules and for real runs: processes have threads, on which slices
lie; a slice on another is a part of it. Open a file in https://ui.perfetto.dev. Reads and writes no files. Must not
import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from resilient.observability.wording import stages_text
from resilient.templates.common.interval import Interval
from resilient.templates.schedules.graph import CHAIN
from resilient.templates.schedules.schedule import Action, Op
from resilient.templates.schedules.simulator import Span, Timeline

ACTION, STEP, PART, RECOVERY, PLANNED = "action", "step", "part", "recovery", "planned"
"""Categories of slices: an action of the schedule; a whole step; another part of a step or of an action; what comes
between steps when membership changes; an action as it was planned."""

Thread = tuple[int, int]
"""Process, and thread in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice(Interval):
    """An interval of one thread's time, with a name.

    Args:
        process: Its process.
        thread: Its thread.
        name: What it does; an action as it prints.
        category: One of those above.
        args: What else is known of it.
    """

    process: int
    thread: int
    name: str
    category: str
    args: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Named processes and threads, and their slices.

    Args:
        processes: Names of the processes, in the order to show them.
        threads: Names of their threads, likewise.
        slices: What they do.
    """

    processes: Mapping[int, str]
    threads: Mapping[Thread, str]
    slices: tuple[Slice, ...]

    def of(self, process: int, thread: int, category: str) -> list[Slice]:
        """Return the slices of a thread that have a category, by their start."""
        found = [s for s in self.slices if (s.process, s.thread, s.category) == (process, thread, category)]
        return sorted(found, key=lambda s: s.start_ns)

    def to_json(self) -> bytes:
        """Encode; the first slice starts at 0."""
        origin_ns = min((s.start_ns for s in self.slices), default=0)
        events: list[_Event] = []
        for order, (process, name) in enumerate(self.processes.items()):
            events.append(_metadata("process_name", process, 0, {"name": name}))
            events.append(_metadata("process_sort_index", process, 0, {"sort_index": order}))
        for order, ((process, thread), name) in enumerate(self.threads.items()):
            events.append(_metadata("thread_name", process, thread, {"name": name}))
            events.append(_metadata("thread_sort_index", process, thread, {"sort_index": order}))
        # the longer of two that start together is the one that the other is a part of
        for s in sorted(self.slices, key=lambda s: (s.process, s.thread, s.start_ns, -s.end_ns)):
            times = {"ts": (s.start_ns - origin_ns) / 1e3, "dur": s.length_ns / 1e3}
            events.append(
                _Event(ph="X", name=s.name, cat=s.category, pid=s.process, tid=s.thread, args=dict(s.args), **times)
            )
        return msgspec.json.encode(_File(traceEvents=events))

    @classmethod
    def from_json(cls, data: bytes) -> Trace:
        """Decode what :meth:`to_json` wrote.

        Raises:
            ValueError: It is no such file (``msgspec.ValidationError`` or ``msgspec.DecodeError``, which are
                ValueErrors).
        """
        processes: dict[int, str] = {}
        threads: dict[Thread, str] = {}
        slices: list[Slice] = []
        for event in msgspec.json.decode(data, type=_File).traceEvents:
            if event.name == "process_name":
                processes[event.pid] = str(event.args["name"])
            elif event.name == "thread_name":
                threads[event.pid, event.tid] = str(event.args["name"])
            elif event.ph == "X":
                start_ns = round(1e3 * event.ts)
                slices.append(
                    Slice(
                        process=event.pid,
                        thread=event.tid,
                        name=event.name,
                        category=event.cat,
                        start_ns=start_ns,
                        end_ns=start_ns + round(1e3 * event.dur),
                        args={key: int(value) for key, value in event.args.items()},
                    )
                )
        return cls(processes=processes, threads=threads, slices=tuple(slices))


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of the format; times are microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, int | str] = {}


class _File(msgspec.Struct, frozen=True, kw_only=True):
    traceEvents: list[_Event]  # noqa: N815 (the format's names)
    displayTimeUnit: str = "ms"  # noqa: N815


def _metadata(kind: str, process: int, thread: int, args: dict[str, int | str]) -> _Event:
    return _Event(ph="M", name=kind, pid=process, tid=thread, args=args)


def simulated_trace(timelines: Mapping[str, Timeline]) -> Trace:
    """Return the trace of simulated schedules, each in a process of its own; what takes no time is left out.

    A row is a thread; the messages that it sends to one other row are another, and so are its gradient sums.

    Args:
        timelines: By name.
    """
    threads: dict[Thread, str] = {}
    slices: list[Slice] = []
    for process, timeline in enumerate(timelines.values()):
        names = _lanes(timeline)
        lanes = {lane: thread for thread, lane in enumerate(names)}
        threads.update({(process, lanes[lane]): name for lane, name in names.items()})
        slices += [
            Slice(
                process=process,
                thread=lanes[_lane(span, timeline)],
                name=str(span.action),
                category=ACTION,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                args=_args(span.action),
            )
            for span in _spans(timeline)
        ]
    return Trace(processes=dict(enumerate(timelines)), threads=threads, slices=tuple(slices))


_Lane = tuple[int, int]
"""Row, and what of it: itself, its sums, or its messages to another row."""
_ITSELF, _SUMS, _FIRST_LINK = 0, 1, 2


def _lanes(timeline: Timeline) -> dict[_Lane, str]:
    """Return the lanes there is anything on, with their names; a row's own always."""
    graph = timeline.schedule.graph
    used = {_lane(span, timeline) for span in _spans(timeline)}
    used.update((row, _ITSELF) for row in range(graph.num_rows))
    names: dict[_Lane, str] = {}
    for row, what in sorted(used):
        if what == _ITSELF:
            names[row, what] = f"worker {row}: {stages_text(graph.stages_of(row))}"
        elif what == _SUMS:
            names[row, what] = f"worker {row}: gradient sums"
        else:
            names[row, what] = f"worker {row} sends to {what - _FIRST_LINK}"
    return names


def _lane(span: Span, timeline: Timeline) -> _Lane:
    action = span.action
    if action.op is Op.REDUCE:
        return span.row, _SUMS
    if action.op in (Op.SEND_F, Op.SEND_B):
        return span.row, _FIRST_LINK + timeline.schedule.target_row(action)
    return span.row, _ITSELF


def _spans(timeline: Timeline) -> Sequence[Span]:
    return [span for span in timeline.spans if span.length_ns > 0]


def _args(action: Action) -> dict[str, int]:
    if action.op is Op.REDUCE:
        return {"stage": action.stage, "state": action.index}
    if action.lane == CHAIN:
        return {"stage": action.stage, "microbatch": action.index}
    return {"lane": action.lane.number, "stage": action.stage, "cell": action.index, "part": action.part}
