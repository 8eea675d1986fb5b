"""Records spans of the chosen steps of a run, worker by worker, and puts them together as one trace.

A worker takes down what it does in every step, which costs it less than a microsecond for each action, in chosen steps
two for its processor time as well. When one of these ends, it writes that to a file of its own beside its log; when the
run is over the files become one trace, with what the event log knows of the recoveries between. Times are Unix times:
those of several machines fit together as well as their clocks do. On a GPU they are the host's, which runs ahead of the
device. Must not import torch.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilient.errors import ArgumentError
from resilient.observability.event_log import Event, read_events
from resilient.observability.trace_events import ACTION, PART, RECOVERY, STEP, Slice, Thread, Trace
from resilient.observability.wording import stages_text
from resilient.templates.schedules.graph import LaneName, StepGraph
from resilient.templates.schedules.schedule import Action

logger = logging.getLogger(__name__)


class RecordedSpan(NamedTuple):
    """A part of a step as it is written to the worker's file, without the names of its fields.

    Args:
        category: ``action`` or ``part``.
        name: What was done; an action as it prints.
        start_ns: When it started, Unix time.
        end_ns: When it ended.
        busy_us: Processor time between them.
    """

    category: str
    name: str
    start_ns: int
    end_ns: int
    busy_us: int


_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def parse_steps(text: str) -> range:
    """Read ``10`` or ``10-12``, the first and the last step; nothing for none.

    Raises:
        ValueError: It does not have this form.
    """
    if not text:
        return range(0)
    match = _STEPS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ArgumentError(
            "trace_steps",
            'be a step or the first and the last of some, as in "10" or "10-12"',
            repr(text),
            "the first step of a job is 1",
        )
    return range(first, last + 1)


class SpanRecorder:
    """Records the spans of one worker's step: what it does, from when to when.

    Attributes:
        with_processor_time: Also take down the thread's processor time, which tells work from waiting.
    """

    def __init__(self) -> None:
        self.with_processor_time = False
        self._entries: list[_Entry] = []

    def clear(self) -> None:
        """Begin a new step."""
        self._entries.clear()

    def during(self, what: Action | str) -> _Entry:
        """Return a context that takes down when it is entered and left, also by an exception."""
        entry = _ThoroughEntry(what) if self.with_processor_time else _Entry(what)
        self._entries.append(entry)
        return entry

    def spans(self) -> tuple[RecordedSpan, ...]:
        """Return all of the step, in the order in which it began."""
        return tuple(
            RecordedSpan(
                ACTION if isinstance(entry.what, Action) else PART,
                str(entry.what),
                entry.start_ns,
                entry.end_ns,
                entry.busy_ns // 1000,
            )
            for entry in self._entries
        )


class _Entry:
    __slots__ = ("busy_ns", "end_ns", "start_ns", "what")

    def __init__(self, what: Action | str) -> None:
        self.what = what
        self.start_ns = self.end_ns = self.busy_ns = 0

    def __enter__(self) -> None:
        self.start_ns = time.time_ns()

    def __exit__(self, *_: object) -> None:
        self.end_ns = time.time_ns()


class _ThoroughEntry(_Entry):
    __slots__ = ()

    def __enter__(self) -> None:
        super().__enter__()
        self.busy_ns = -time.thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self.busy_ns += time.thread_time_ns()
        super().__exit__()


class PlannedRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one worker's step is expected to be.

    Args:
        graph: The step of its whole pipeline, or of several that exchange features.
        pipelines: These, whose rows follow each other in the graph.
        row: Of the graph.
        device: Which one of the row's, where each has microbatches of its own.
        action_ms: What each of its actions takes, in order. Of messages that is how long they are on their way, and
            only those with activations are said; waiting is nothing.
        latency_ms: The part of it in which a message does not occupy its link, in the same order; left out for none.
    """

    graph: StepGraph
    pipelines: tuple[int, ...]
    row: int
    action_ms: tuple[float, ...]
    latency_ms: tuple[float, ...] = ()
    device: int = 0


class TracedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The spans of one worker in one step, whether the step was finished or given up.

    Args:
        step: Its number.
        generation: In which it was done.
        node: The worker's node.
        local_rank: Which of the node's workers.
        pipeline: Its pipeline in that generation.
        row: Its row of the pipeline.
        start_ns: When the step started, Unix time.
        end_ns: When it ended.
        busy_us: Processor time it took.
        spans: What was done.
        planned: What was expected.
    """

    step: int
    generation: int
    node: int
    local_rank: int
    pipeline: int
    row: int
    start_ns: int
    end_ns: int
    busy_us: int
    spans: tuple[RecordedSpan, ...]
    planned: PlannedRow

    def write(self, run_directory: str | Path) -> None:
        """Append it to the worker's file; where that cannot be written, the log says so and training goes on."""
        path = Path(run_directory, "logs", f"node-{self.node}", f"worker-{self.local_rank}.trace.jsonl")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(self) + b"\n")
        except OSError as error:
            logger.warning("step %d is missing in the trace: %s", self.step, error)

    def slices(self) -> Iterator[Slice]:
        """Yield the step and all that was done in it."""
        known = {"step": self.step, "generation": self.generation, "pipeline": self.pipeline, "row": self.row}
        whole = RecordedSpan(STEP, f"step {self.step}", self.start_ns, self.end_ns, self.busy_us)
        for span in (whole, *self.spans):
            yield Slice(
                process=self.node,
                thread=self.local_rank,
                name=span.name,
                category=span.category,
                start_ns=span.start_ns,
                end_ns=span.end_ns,
                args={**known, "busy_us": span.busy_us},
            )


def traced_steps(run_directory: str | Path) -> list[TracedStep]:
    """Return what the workers of a run wrote, in the order of generations, steps, pipelines and rows.

    Raises:
        ValueError: A worker's file is damaged elsewhere than in its last line.
    """
    files = sorted(Path(run_directory).glob("logs/node-*/worker-*.trace.jsonl"))
    steps = [msgspec.convert(line, TracedStep) for file in files for line in read_events(file)]
    return sorted(steps, key=lambda step: (step.generation, step.step, step.pipeline, step.row))


def recorded_trace(run_directory: str | Path, steps: Sequence[TracedStep]) -> Trace | None:
    """Return the trace of a run; None where no chosen step began.

    Nodes are processes, in the order of pipelines and rows, and workers are their threads. The recoveries are those
    from the first traced step's start to the last one's end.

    Args:
        run_directory: Has the event log.
        steps: What the workers wrote (:func:`traced_steps`).

    Raises:
        ValueError: The event log is damaged elsewhere than in its last line.
    """
    if not steps:
        return None
    processes = {step.node: f"node {step.node}" for step in steps}
    threads = _workers(steps)
    slices = [each for step in steps for each in step.slices()]
    start_ns, end_ns = min(step.start_ns for step in steps), max(step.end_ns for step in steps)
    events = read_events(Path(run_directory, "events.jsonl"))
    coordinator = 1 + max([*processes, *(event["node"] for event in events if event["kind"] == "installed")])
    for each in _recoveries(events, coordinator):
        if each.start_ns < end_ns and each.end_ns > start_ns:
            slices.append(each)
            is_worker = each.process != coordinator
            processes.setdefault(each.process, f"node {each.process}" if is_worker else "coordinator")
            threads.setdefault((each.process, each.thread), f"worker {each.thread}" if is_worker else "membership")
    return Trace(processes=processes, threads=threads, slices=tuple(slices))


def _workers(steps: Sequence[TracedStep]) -> dict[Thread, str]:
    """Return the workers by name: of units with their stages, which may be others after a recovery."""
    stages: dict[Thread, list[tuple[LaneName, int]]] = {}
    for step in steps:
        of_row = (stage for stage in step.planned.graph.stages_of(step.planned.row) if stage[0].unit)
        stages.setdefault((step.node, step.local_rank), []).extend(of_row)
    return {
        worker: f"worker {worker[1]}" + (f": {stages_text(dict.fromkeys(found))}" if found else "")
        for worker, found in stages.items()
    }


def _recoveries(events: Sequence[Event], coordinator: int) -> Iterator[Slice]:
    """Yield what the coordinator and the workers did whenever membership changed."""
    changing: dict[str, float] = {}

    def during(name: str, start: float, end: float, process: int, thread: int, generation: int) -> Slice:
        return Slice(
            process=process,
            thread=thread,
            name=name,
            category=RECOVERY,
            start_ns=round(1e9 * start),
            end_ns=round(1e9 * max(start, end)),
            args={"generation": generation},
        )

    for event in events:
        kind, now, generation = event["kind"], event["time"], event["generation"]
        if kind == "injected":
            changing.setdefault("detect", now)
        elif kind == "detected":
            if "detect" in changing:
                yield during("detect", changing.pop("detect"), now, coordinator, 0, generation)
            changing.setdefault("agree", now)
        elif kind == "generation" and "agree" in changing:
            yield during("agree", changing.pop("agree"), now, coordinator, 0, generation)
        elif kind == "installed":
            node, local_rank = event["node"], event["local_rank"]
            yield during("regroup", event["started_at"], event["regrouped_at"], node, local_rank, generation)
            yield during("copy", event["regrouped_at"], event["installed_at"], node, local_rank, generation)
