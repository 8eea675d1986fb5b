"""``resilient status``, ``drain`` and ``stop``: what operators ask of a running job."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.text import Text

from resilient.cli.shared.coordinator import RunFolder, ask
from resilient.cli.shared.printing import plain_table, table_console
from resilient.common.printable import printable
from resilient.observability.event_log import losses_in_words
from resilient.templates.common.words import counted

_MOST_NODES = 64
"""That are told one by one; of more, those that train are only counted."""


def status(
    run_dir: RunFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="All that the coordinator tells, as JSON.")] = False,
) -> None:
    """Show where a running job is: its step, its nodes and what they do."""
    told = ask(run_dir, "status")
    if as_json:
        typer.echo(json.dumps(told))
        return
    table_console().print(_shown(told))


def drain(
    nodes: Annotated[list[int], typer.Argument(help="Numbers of the nodes.", min=0)], run_dir: RunFolder = None
) -> None:
    """Have nodes leave at the next step boundary, as a spot notice would: no step is lost."""
    for node in nodes:
        ask(run_dir, "leave", {"node": node})


def stop(run_dir: RunFolder = None) -> None:
    """End a job after the running step, with a checkpoint, as Ctrl-C would; said again, at once."""
    ask(run_dir, "stop", {})


def _shown(told: Mapping[str, Any]) -> Group:
    pipeline_of = {node: index for index, nodes in enumerate(told["pipelines"]) for node in nodes}
    rows = [(each, _state(each, pipeline_of), pipeline_of.get(each["node"])) for each in told["nodes"]]
    counts = Counter(state for _, state, _ in rows)
    loss = "none yet" if told["loss"] is None else f"{told['loss']:.6g}{losses_in_words(told)}"
    skipped = f", {told['num_skipped']} skipped" if told["num_skipped"] else ""
    generation, pipelines = told["generation"], counted(len(told["pipelines"]), "pipeline")
    states = f" ({', '.join(f'{number} {state}' for state, number in counts.items())})" if rows else ""
    waits = not told["pipelines"] and len(told["nodes"]) < told["needed_nodes"]
    needed = f", {told['needed_nodes']} are needed" if waits else ""
    lines = [
        f"{told['phase']}: step {told['step']}{skipped}, loss {loss}",
        (f"generation {generation}: {pipelines} on " if generation else "no generation yet: ")
        + f"{counted(len(rows), 'node')}{states}{needed}",
    ]
    shown = rows if len(rows) <= _MOST_NODES else [row for row in rows if row[1] != "training"]
    table = plain_table("node", "host", "state", "pipeline", "processor", "memory", left=("host", "state"))
    for node, state, pipeline in shown:
        health = told["health"].get(str(node["node"]))
        table.add_row(
            str(node["node"]),
            Text(printable(node["host"])),
            state,
            "" if pipeline is None else str(pipeline),
            "" if health is None else f"{health['cpu_percent']:.0f} %",
            "" if health is None else f"{health['memory_bytes'] / 2**30:.1f} GiB",
        )
    return Group(*(Text(printable(line)) for line in lines), *([table] if shown else []))


def _state(node: Mapping[str, Any], pipeline_of: Mapping[int, int]) -> str:
    if node["leaving"]:
        return "leaving"
    if not node["ready"]:
        return "getting ready"
    return "training" if node["node"] in pipeline_of else "standing by"
