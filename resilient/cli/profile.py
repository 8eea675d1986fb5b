"""``resilient profile``: what each layer of a job costs on this machine.

Owns the options and the table; :mod:`resilient.profiling.profiler` measures, and of planned jobs
:mod:`resilient.profiling.unit_costs`. Must not import torch before the command runs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table
from rich.text import Text

from resilient.cli.shared.job_options import refusals
from resilient.cli.shared.output_files import check_outputs
from resilient.cli.shared.printing import plain_table, progress_bar
from resilient.cli.shared.script_options import ARGUMENTS_HELP, hint
from resilient.errors import ResilientError
from resilient.templates.inputs.profile import ModelProfile

_COLUMNS = ("layer", "forward", "backward\ninputs", "backward\nweights", "activations", "input", "state")


def profile(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The job's script.")],
    arguments: Annotated[list[str] | None, typer.Argument(help=ARGUMENTS_HELP)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the profile here, for `resilient plan --profile`.")
    ] = None,
    planner: Annotated[
        str,
        typer.Option(
            help="Measure each unit on packed cells of several sizes, as runs with a planner do, also by the script's."
        ),
    ] = "",
) -> None:
    """Measure every layer of a job on this machine, and keep the result for its runs here.

    The script is run up to Trainer.fit; nothing is trained. Options come before the script.
    """
    with refusals(context):
        check_outputs([("--json", json_file)], [script])
    import torch

    from resilient.profiling.cache import fresh_profile
    from resilient.profiling.script import job_of

    console = Console(highlight=False, emoji=False)
    hint(context, arguments or ())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as `resilient run` sets its workers'
    if planner:
        os.environ["RESILIENT_PLANNER"] = planner  # as `resilient run` tells its workers
    try:
        job = job_of(str(script), arguments or ())
        columns = (TextColumn("measuring"), MofNCompleteColumn(), TextColumn("{task.description}"))
        with progress_bar(*columns, console=console) as progress:
            bar = progress.add_task("", total=len(job.model.layers))
            measured, path = fresh_profile(job, lambda name: progress.update(bar, description=name, advance=1))
    except (ResilientError, ValueError) as error:
        Console(stderr=True, highlight=False, emoji=False).print(
            "\n".join([f"error: {error}", *getattr(error, "__notes__", ())]), markup=False, style="red", soft_wrap=True
        )
        raise typer.Exit(1) from None
    what = f"one {'mean cell of each unit' if job.planner else 'microbatch'} of {job.microbatch}"
    console.print(f"{measured.source}, {what}; times in ms", markup=False)
    console.print(table(measured))
    console.print(Text(f"kept in {path}"), soft_wrap=True)
    if json_file is not None:
        json_file.write_bytes(measured.to_json())
        console.print(Text(f"written to {json_file}"), soft_wrap=True)


def table(measured: ModelProfile) -> Table:
    """Return the profile as a table, with totals; what is not computed shows as a dash."""
    rows = plain_table()
    rows.show_footer = True
    costs = [layer.costs[0] for layer in measured.layers]
    footers = (
        "total",
        _ms(sum(cost.forward_ms for cost in costs)),
        _ms(sum(cost.backward_input_ms for cost in costs)),
        _ms(sum(cost.backward_weight_ms for cost in costs)),
        _bytes(sum(cost.activation_bytes for cost in costs)),
        "",
        _bytes(sum(layer.state_bytes for layer in measured.layers)),
    )
    for index, (title, footer) in enumerate(zip(_COLUMNS, footers, strict=True)):
        rows.add_column(title, footer, justify="right" if index else "left", footer_style="bold", no_wrap=True)
    for layer, cost in zip(measured.layers, costs, strict=True):
        rows.add_row(
            Text(layer.name),
            _ms(cost.forward_ms),
            _ms(cost.backward_input_ms),
            _ms(cost.backward_weight_ms),
            _bytes(cost.activation_bytes),
            _bytes(layer.input_bytes),
            _bytes(layer.state_bytes),
        )
    return rows


def _ms(value: float) -> str:
    return f"{value:.3f}" if value else "-"


def _bytes(value: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value} B" if value else "-"
