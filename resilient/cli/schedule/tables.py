"""What ``resilient schedule`` prints: timelines as text, one row for each worker, and tables, in 80 columns or more.

Must not import torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.style import Style
from rich.text import Text

from resilient.cli.schedule.report import ScheduleReport
from resilient.cli.shared.printing import plain_table
from resilient.observability.figures.bars import COMPUTING, Bar, Chart
from resilient.observability.wording import duration, three_digits

_STYLES = {
    "F": Style(bgcolor="dodger_blue3", color="white"),
    "B": Style(bgcolor="dark_green", color="white"),
    "I": Style(bgcolor="dark_orange3", color="black"),
    "W": Style(bgcolor="chartreuse3", color="black"),
}
_WAITING = "·"


def show_timeline(chart: Chart, console: Console) -> None:
    """Print a chart: letters are kinds of bars, followed by the microbatch where there is room for it.

    Bars of less than a cell are not drawn one by one: letters then come as often as what they stand for takes time.
    """
    names = [name.partition("\n")[0].removeprefix("worker ") for name in chart.rows]
    margin = max(map(len, names)) + 1
    fill = "─" if console.color_system is None else " "
    rows: list[list[Bar]] = [[] for _ in chart.rows]
    for bar in sorted(chart.bars, key=lambda bar: bar.start_ns):
        if bar.kind in COMPUTING:
            rows[bar.row].append(bar)
    lengths = sorted(bar.length_ns for bars in rows for bar in bars)
    cell_ns, num_cells = _cells(max(1, chart.length_ns), min(lengths, default=1), console.width - margin)
    singly = not lengths or lengths[len(lengths) // 2] >= cell_ns
    console.print(chart.title, style="bold", markup=False)
    for name, bars in zip(names, rows, strict=True):
        line = Text(f"{name:>{margin - 1}} ", no_wrap=True)
        line.append(_drawn_singly(bars, cell_ns, num_cells, fill) if singly else _mixed(bars, cell_ns, num_cells))
        console.print(line, soft_wrap=True)
    _legend({bar.kind for bar in chart.bars}, chart.odd_chunks if any(bar.chunk for bar in chart.bars) else "", console)


def _cells(total_ns: int, shortest_ns: int, room: int) -> tuple[float, int]:
    """Return what a cell stands for, and how many there are: whole cells for the shortest bar, where it gets one."""
    per_bar = room * shortest_ns // total_ns
    cell_ns = shortest_ns / per_bar if per_bar else total_ns / room
    return cell_ns, min(room, -int(-total_ns // cell_ns))


def _drawn_singly(bars: Sequence[Bar], cell_ns: float, num_cells: int, fill: str) -> Text:
    """Return a worker's line; a cell shows what its middle falls into."""
    line = Text()
    for bar in bars:
        start, end = (min(num_cells, int(at / cell_ns + 0.5)) for at in (bar.start_ns, bar.end_ns))
        label = _letter(bar) + bar.label
        text = label.ljust(end - start, fill) if len(label) <= end - start else _letter(bar) * (end - start)
        line.append(_WAITING * (start - len(line)), style="dim")
        line.append(text, style=_STYLES[bar.kind])
    return line.append(_WAITING * (num_cells - len(line)), style="dim")


def _mixed(bars: Sequence[Bar], cell_ns: float, num_cells: int) -> Text:
    """Return a worker's line; a cell shows what was shown least for the time it took up to there."""
    line, due, taken = Text(), {_WAITING: 0.0}, iter(bars)
    bar = next(taken, None)
    for cell in range(num_cells):
        at_ns, end_ns = cell * cell_ns, (cell + 1) * cell_ns
        while bar is not None and bar.start_ns < end_ns:
            due[_WAITING] += max(0.0, bar.start_ns - at_ns)
            at_ns = max(at_ns, bar.start_ns)
            due[_letter(bar)] = due.get(_letter(bar), 0.0) + min(bar.end_ns, end_ns) - at_ns
            at_ns = min(bar.end_ns, end_ns)
            if bar.end_ns > end_ns:
                break
            bar = next(taken, None)
        due[_WAITING] += max(0.0, end_ns - at_ns)
        letter = max(due, key=lambda each: due[each])
        due[letter] -= cell_ns
        line.append(letter, style=_STYLES.get(letter.upper(), "dim"))
    return line


def _letter(bar: Bar) -> str:
    return bar.kind.lower() if bar.chunk % 2 else bar.kind


def _legend(kinds: set[str], small: str, console: Console) -> None:
    line = Text()
    for kind, meaning in COMPUTING.items():
        if kind in kinds:
            line.append(f" {kind} ", style=_STYLES[kind]).append(f" {meaning}  ")
    line.append(f"{_WAITING} waiting", style="dim")
    if small:
        line.append(f"  small: {small}", style="dim")
    console.print(line)


def show_workers(report: ScheduleReport, memory_bytes: int | None, console: Console) -> None:
    """Print what a schedule costs each worker."""
    timeline = report.timeline
    console.print(f"\niteration  {duration(timeline.iteration_ms)}")
    console.print(f"ideal      {duration(report.ideal_ms)}, if the busiest worker never waited")
    console.print(f"bubble     {100 * report.bubble:.1f} % of the workers' time\n")
    columns = ("worker", "busy ms", "bubble ms", "bubble", "in flight")
    table = plain_table(*columns, *(["GB"] if report.memory_bytes else []))
    if report.stages:
        table.add_column("layers", overflow="ellipsis", no_wrap=True)
    for worker, (busy_ms, idle_ms) in enumerate(zip(report.busy_ms, timeline.bubble_ms, strict=True)):
        cells = [Text(f"{report.memory_bytes[worker] / 1e9:.1f}")] if report.memory_bytes else []
        if memory_bytes is not None and cells and report.memory_bytes[worker] > memory_bytes:
            cells[0].stylize("bold red")
        table.add_row(
            str(worker),
            three_digits(busy_ms),
            three_digits(idle_ms),
            f"{100 * idle_ms / timeline.iteration_ms if timeline.iteration_ms else 0:.1f} %",
            f"{report.in_flight[worker]:.4g}",
            *cells,
            *(report.stages[worker : worker + 1]),
        )
    console.print(table)


def show_kinds(reports: Sequence[ScheduleReport], memory_bytes: int | None, console: Console) -> None:
    """Print several schedules below each other."""
    known = any(report.memory_bytes for report in reports)
    columns = ("schedule", "iteration ms", "bubble", "most in flight", *(["most GB"] if known else []))
    table = plain_table(*columns, left=("schedule",))
    for report in reports:
        most = max(report.memory_bytes, default=0)
        too_much = memory_bytes is not None and most > memory_bytes
        table.add_row(
            f"{report.kind.value}, {report.num_chunks} stages each" if report.num_chunks > 1 else report.kind.value,
            three_digits(report.timeline.iteration_ms),
            f"{100 * report.bubble:.1f} %",
            f"{max(report.in_flight):.4g}",
            *([Text(f"{most / 1e9:.1f}", style="bold red" if too_much else "")] if known else []),
        )
    console.print(table)


def show_misfits(reports: Sequence[ScheduleReport], memory_bytes: int | None, console: Console) -> None:
    """Say which schedules need more memory than there is."""
    for report in reports:
        most = max(report.memory_bytes, default=0)
        if memory_bytes is not None and most > memory_bytes:
            worker = report.memory_bytes.index(most)
            console.print(
                f"{report.kind.value} does not fit: worker {worker} holds {most / 1e9:.1f} GB, "
                f"{memory_bytes / 1e9:.1f} GB are to use; take more stages or smaller microbatches",
                style="red",
            )
