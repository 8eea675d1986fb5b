"""Writes times, recoveries and stages for people: in the live view, in tables and in pictures alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resilient.templates.common.words import counted, listed
from resilient.templates.schedules.graph import LaneName
from resilient.templates.schedules.kind import ScheduleKind

RECOVERY_PARTS = ("detect", "agree", "regroup", "copy", "redo")
"""The parts of a recovery, in the order in which they happen; each is reported as ``<part>_ms``."""

_ROUNDED_UP = 999.5
"""From here on three digits are no fraction, and ``g`` would write an exponent."""


def duration(value_ms: float) -> str:
    """Write a time with its unit, measured or simulated: ``2.41 ms``, ``87.1 ms``, ``1.32 s``."""
    return f"{three_digits(value_ms / 1e3)} s" if value_ms >= _ROUNDED_UP else f"{three_digits(value_ms)} ms"


def three_digits(value: float) -> str:
    """Write what :func:`duration` does where the unit stands elsewhere: ``2.41``, ``87.1``, ``1320``."""
    return f"{value:.0f}" if value >= _ROUNDED_UP else f"{value:.3g}"


def recovery_parts(recovery: Mapping[str, Any]) -> str:
    """Write what the parts of a recovery took: ``detect 12 ms, agree 3.1 ms``; parts that are not known are left out.

    Args:
        recovery: One of a report's ``recoveries``.
    """
    known = ((part, recovery[f"{part}_ms"]) for part in RECOVERY_PARTS)
    return ", ".join(f"{part} {duration(value_ms)}" for part, value_ms in known if value_ms is not None)


def schedule_in_words(choice: Mapping[str, Any]) -> str:
    """Write which schedule was chosen, and how much longer a step takes with each of the others.

    Args:
        choice: The event, or a :class:`resilient.templates.replan.schedule_choice.ScheduleChoice` as a dictionary.
    """
    chosen, others = choice["chosen"], choice["others"]
    compared = [
        f"{_schedule(each)} {duration(each['step_ms'])} ({each['step_ms'] / chosen['step_ms'] - 1:+.1%})"
        for each in others
    ]
    told = f"; {', '.join(compared)}" if compared else ""
    return f"schedule {_schedule(chosen)}: {duration(chosen['step_ms'])} a step in simulation{told}"


def _schedule(simulated: Mapping[str, Any]) -> str:
    chunks = simulated["num_chunks"]
    return f"{ScheduleKind(simulated['schedule']).value}{f' with {chunks} stages each' if chunks > 1 else ''}"


def standby_in_words(generation: Mapping[str, Any]) -> list[str]:
    """Write why nodes of a generation stand by, a sentence for each reason.

    Args:
        generation: Its event.
    """
    nodes: dict[str, list[str]] = {}
    for node, reason in generation.get("standby_reasons", {}).items():
        nodes.setdefault(reason, []).append(node)
    return [
        f"{_nodes_stand_by(names)}: {_why_they_stand_by(reason, names, generation)}" for reason, names in nodes.items()
    ]


def _nodes_stand_by(names: Sequence[str]) -> str:
    return f"node {names[0]} stands by" if len(names) == 1 else f"nodes {listed(names)} stand by"


def _why_they_stand_by(reason: str, names: Sequence[str], generation: Mapping[str, Any]) -> str:
    if reason == "most_nodes":
        return "as many nodes train as may"
    them = "it" if len(names) == 1 else "them"
    if reason == "no_place":
        return f"no pipeline has a place for {them}"
    slow = [
        f"{f'node {name}' if len(names) > 1 else 'it'} is {factor:g} times slower than others"
        for name, factor in generation["slowdowns"].items()
        if name in names
    ]
    times = duration(generation["step_ms"]), duration(generation["with_standby_ms"])
    who = [listed(slow)] if slow else []
    return ", ".join([*who, f"a step takes {times[0]} without {them}, {times[1]} with every node"])


def lost_work(recovery: Mapping[str, Any]) -> str:
    """Write how many steps a recovery had to redo.

    Args:
        recovery: One of a report's ``recoveries``.
    """
    return f"{counted(recovery['lost_steps'], 'step')} redone" if recovery["lost_steps"] else "no work lost"


def stages_text(stages: Iterable[tuple[LaneName, int]]) -> str:
    """Return stages as ``stages 0, 3``, of units as their actions begin: ``vision.0:1, llm.0:0``.

    Args:
        stages: The lane of each, and its number there.
    """
    told = list(stages)
    numbers = ", ".join(f"{lane}:{number}" if lane.unit else str(number) for lane, number in told)
    if not told or told[0][0].unit:
        return numbers or "no stage"
    return f"stage{'s' * (len(told) > 1)} {numbers}"
