"""Shows a running job: redrawn in place on a terminal, as plain lines elsewhere.

Owns the drawing only; the state comes from :mod:`resilient.observability.job_status`. Must not import torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import TracebackType

from rich.bar import Bar
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from resilient.common.printable import printable
from resilient.observability.event_log import Event, loss_of, losses_in_words
from resilient.observability.job_status import JobStatus, Message, NodeStatus
from resilient.observability.worker_logs import signed
from resilient.templates.common.words import counted

_TONES = {"bad": "bold red", "good": "green", "note": "cyan", "plain": ""}
_PHASES = {"training": "green", "recovering": "bold red", "changing": "yellow", "finished": "green", "stopped": "red"}
_STATES = {"training": "green", "lost": "red", "leaving": "yellow", "joining": "yellow", "ready": "cyan", "left": "dim"}
_STAGE_COLOURS = (
    "white on dark_blue",
    "white on dark_green",
    "white on purple4",
    "white on dark_red",
    "white on grey30",
)
_MAX_MESSAGES = 8
_REFRESH_PER_SECOND = 8
_PLAIN_STEP_INTERVAL_S = 1.0


def make_view(plain: bool | None = None, console: Console | None = None) -> LiveView | PlainView:
    """Return the view for a console.

    Args:
        plain: True for lines, False for the live view, None for the live view exactly where a terminal is.
        console: Where to draw; standard output when None.
    """
    console = console or Console(highlight=False, emoji=False)
    return PlainView(console) if plain or (plain is None and not console.is_terminal) else LiveView(console)


class PlainView:
    """Prints a line for each notable event, at most about one a second for steps, and the script's own lines.

    Use it as a context manager and give :meth:`on_event` every event.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = JobStatus()
        self._next_step_at = float("-inf")

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def on_event(self, event: Event) -> None:
        """Show one event; may be called from one thread at a time."""
        if text := _verbatim(event):
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        messages = self._status.apply(event)
        if event["kind"] == "step" and (messages or self._step_is_due(event)):
            self._line(event["time"], self._step_in_words(event), "")
            self._next_step_at = event["time"] + _PLAIN_STEP_INTERVAL_S
        for message in messages if event["kind"] != "stopped" else ():
            self._line(message.time, message.text, _TONES[message.tone])

    def print_ending(self) -> None:
        """Print why the job stopped, if it did; to be called when nothing else is to be printed."""
        _print_ending(self._console, self._status)

    def _step_is_due(self, event: Event) -> bool:
        return event["time"] >= self._next_step_at or event["step"] == self._status.job.get("num_steps")

    def _step_in_words(self, event: Event) -> str:
        total = self._status.job.get("num_steps", "?")
        rate = f"  {self._status.samples_per_s:.0f} samples/s" if self._status.samples_per_s else ""
        return f"step {event['step']}/{total}  loss {loss_of(event):.4f}{losses_in_words(event)}{rate}"

    def _line(self, time: float, text: str, style: str) -> None:
        self._console.print(Text(_clock(time) + "  ").append(printable(text), style=style), soft_wrap=True)


class LiveView:
    """Redraws the state of the job in place; the script's own lines scroll by above it.

    Use it as a context manager and give :meth:`on_event` every event.
    """

    def __init__(self, console: Console) -> None:
        self._status = JobStatus()
        self._lock = threading.Lock()
        self._live = Live(
            console=console,
            get_renderable=lambda: _Screen(self._status, self._lock),
            refresh_per_second=_REFRESH_PER_SECOND,
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_event(self, event: Event) -> None:
        """Show one event; may be called from one thread at a time."""
        if text := _verbatim(event):
            # Not under the lock: printing waits for the refreshing thread, and that thread for the lock.
            self._live.console.print(text, markup=False, highlight=False, emoji=False)
        with self._lock:
            self._status.apply(event)

    def print_ending(self) -> None:
        """Print why the job stopped, if it did; to be called when nothing else is to be printed."""
        _print_ending(self._live.console, self._status)


def _print_ending(console: Console, status: JobStatus) -> None:
    """Print the ending in one line, however long: its command is there to be copied."""
    if status.ending:
        console.print(Text(printable(status.ending), style=_TONES["bad"]), soft_wrap=True)


class _Screen:
    """Draws a status into the height that is there: events give way first, then nodes."""

    def __init__(self, status: JobStatus, lock: threading.Lock) -> None:
        self._status = status
        self._lock = lock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            parts = list(self._draw(options.max_width, console.size.height - 1))
        yield from parts

    def _draw(self, width: int, height: int) -> Iterator[RenderableType]:
        status = self._status
        yield from _header(status, width)
        rest = height - 3
        pipelines = status.pipelines[: max(1, rest // 4)]
        if pipelines:
            yield from _pipelines(status, pipelines, width)
            rest -= 1 + len(pipelines) + (len(pipelines) < len(status.pipelines))
        num_messages = min(_MAX_MESSAGES, len(status.messages), max(3, rest - 3 - len(status.nodes)))
        num_nodes = rest - 2 - num_messages
        if status.nodes and num_nodes > 1:
            yield from _nodes(status, num_nodes, width)
        if num_messages:
            yield Rule("events", align="left", style="dim")
            for message in list(status.messages)[-num_messages:]:
                yield _message(message)


def _header(status: JobStatus, width: int) -> Iterator[RenderableType]:
    num_steps = status.job.get("num_steps", 0)
    name = Path(status.job["script"]).name if status.job else "waiting for the first worker"
    yield Rule(Text.assemble(("resilient", "bold"), f"  {name}"), align="left", style="dim")
    facts = Text(no_wrap=True, overflow="ellipsis")
    facts.append(status.phase, style=_PHASES.get(status.phase, "yellow"))
    facts.append(f"  generation {status.generation}  step {status.step}/{num_steps}")
    if status.loss is not None:
        facts.append(f"  loss {status.loss:.4f}", style="bold")
        if status.num_skipped:
            facts.append(f"  {status.num_skipped} skipped", style="bold red")
        facts.append(f"  {status.samples_per_s:.0f} samples/s  {status.now - (status.started_at or 0.0):.0f} s")
    room = width - facts.cell_len - 2
    if room >= 10:
        facts.append("  " + sparkline(list(status.losses), min(room, 40)), style="cyan")
    yield facts
    yield Bar(max(1, num_steps), 0, status.step, width=width, color="green", bgcolor="grey23")


def _pipelines(status: JobStatus, pipelines: Sequence[dict], width: int) -> Iterator[RenderableType]:
    """A bar for each pipeline, cut where the stages are cut, so that unequal cuts stand one below the other."""
    yield Rule("pipelines", align="left", style="dim")
    num_layers = max(pipeline["stages"][-1]["end_layer"] for pipeline in pipelines)
    room = width - 18
    for index, pipeline in enumerate(pipelines):
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{index:>2} ", style="bold")
        line.append(f"{shares_of(pipeline['num_microbatches']):<15}", style="cyan")
        for position, stage in enumerate(pipeline["stages"]):
            start, end = (round(stage[edge] * room / num_layers) for edge in ("first_layer", "end_layer"))
            label = _fit(f" node {stage['node']}", f" {stage['node']}", max(0, end - start - 1))
            line.append(label, style=_STAGE_COLOURS[position % len(_STAGE_COLOURS)])
            line.append(" ")
        yield line
    if len(pipelines) < len(status.pipelines):
        yield Text(f"   and {counted(len(status.pipelines) - len(pipelines), 'more pipeline')}", style="dim")


def _fit(text: str, shorter: str, width: int) -> str:
    chosen = text if len(text) <= width else shorter
    return f"{chosen[:width]:<{width}}"


def _nodes(status: JobStatus, height: int, width: int) -> Iterator[RenderableType]:
    """The nodes by pipeline, those out of the job last; in two columns where they are wide enough."""
    yield Rule("nodes", align="left", style="dim")
    nodes = sorted(status.nodes.values(), key=_order)
    columns = 2 if width >= 120 and len(nodes) > 4 else 1
    shown = nodes if len(nodes) <= height * columns else nodes[: max(1, height * columns - columns)]
    per_column = -(-len(shown) // columns)
    yield Columns(
        [
            _node_table(shown[start : start + per_column], width // columns - 1)
            for start in range(0, len(shown), per_column)
        ],
        padding=(0, 1),
    )
    if len(shown) < len(nodes):
        yield Text(f"   and {counted(len(nodes) - len(shown), 'more node')}", style="dim")


def _node_table(nodes: Sequence[NodeStatus], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.width = width
    for column_width in (7, 8, 10):
        table.add_column(width=column_width, no_wrap=True)
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for node in nodes:
        pipeline = "" if node.pipeline_index is None else f"pipeline {node.pipeline_index}"
        state = Text(node.state, style=_STATES.get(node.state, ""))
        table.add_row(f"node {node.node}", state, pipeline, node.layers or Text(printable(node.host), style="dim"))
    return table


def _order(node: NodeStatus) -> tuple[int, int, int]:
    out = {"lost": 2, "left": 2}.get(node.state, 0 if node.pipeline_index is not None else 1)
    return out, node.pipeline_index or 0, node.node


def _message(message: Message) -> Text:
    line = Text(_clock(message.time) + "  ", style="dim", no_wrap=True, overflow="ellipsis")
    return line.append(printable(message.text), style=_TONES[message.tone] or "not dim")


def shares_of(number: int) -> str:
    """Draw microbatches as squares, or as a number where they are many."""
    return "▪" * number if number <= 14 else f"{number} microb."


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as a row of ``width`` bars at most, each the mean of its share of them."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if len(finite) < 2:
        return ""
    width = min(width, len(finite))
    edges = [index * len(finite) // width for index in range(width + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[int(7.999 * (mean - low) / (high - low or 1.0))] for mean in means)


def _verbatim(event: Event) -> str:
    """What the script itself had to say: its output, or where it failed."""
    if event["kind"] == "printed":
        return signed(event["node"], event["local_rank"], event["text"])
    text = event["text"] if event["kind"] == "output" else event.get("traceback", "")
    return printable(text.replace("\r\n", "\n").replace("\r", "\n"))  # as progress bars end what they draw again


def _clock(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%H:%M:%S")
