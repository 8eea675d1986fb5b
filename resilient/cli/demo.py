"""``resilient demo``: train, kill a node in mid-step, let one join, and check that none of it changed the result.

Owns what is done to the job and the verdict on it; the runs themselves are the launcher's. Must not import torch.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resilient.cli.shared.job_options import refusals
from resilient.cli.shared.output_files import check_outputs, drawing
from resilient.cli.shared.ranges import within
from resilient.common.extras import require
from resilient.errors import ArgumentError
from resilient.observability.event_log import Event, read_events
from resilient.observability.figures.run_figure import draw_report
from resilient.observability.live_view import LiveView, PlainView, make_view
from resilient.observability.run_report import write_report
from resilient.observability.wording import duration, recovery_parts
from resilient.planners.registry import AUTO, PLANNERS
from resilient.protocol.messages import Injection
from resilient.templates.common.words import counted, look_up

NUM_NODES = 5
PLANNER = "dflop"
"""Unless another is asked for: one that gives encoders nodes of their own. Layers as small as the example's take as
long for few tokens as for some more, so `resilient` has all nodes do both: then few large microbatches are fastest."""
KILL_PHASES = ("forward", "backward", "reduce", "prepare", "commit")
PARAM_TOLERANCE = 1e-9
"""Largest accepted ``max_param_rel_diff``: float64, where only the order of summation differs."""
LOSS_TOLERANCE = 1e-9
_JOIN_DELAY_STEPS = 3
_INTERRUPTED = 130
MIN_DEMO_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class DemoScenario:
    """What happens to the job; a function of the seed and the number of steps.

    Args:
        at_step: The step in which a node dies.
        at_phase: The phase of it.
        draw: Chooses the node, of those that only encode, if there are any: 0 to 1.
        join_delay_steps: Steps from the recovery to the start of another node.
    """

    at_step: int
    at_phase: str
    draw: float
    join_delay_steps: int = _JOIN_DELAY_STEPS


def choose_scenario(seed: int, num_steps: int) -> DemoScenario:
    """Draw which node dies where, in the second fifth of the run so that a join has time to follow.

    Raises:
        ValueError: If ``num_steps`` leaves no room for a failure and a join.
    """
    if num_steps < MIN_DEMO_STEPS:
        raise ArgumentError(
            "steps", f"be at least {MIN_DEMO_STEPS} for a failure and a join to fit in", num_steps, "train for more"
        )
    rng = random.Random(seed)
    return DemoScenario(
        at_step=rng.randint(num_steps // 5, 2 * num_steps // 5),
        at_phase=rng.choice(KILL_PHASES),
        draw=rng.random(),
    )


def encoder_nodes(generation: Event) -> list[int]:
    """Return the nodes of a generation that have nothing of the language model."""
    stages = [stage for pipeline in generation["pipelines"] for stage in pipeline["stages"]]
    others = {stage["node"] for stage in stages if stage.get("lane", "").rpartition(".")[0] in ("", "llm")}
    return [node for node in generation["nodes"] if node not in others]


class Director:
    """Has a node killed that only encodes, or any if all have something of the language model, and starts another one
    some steps after the recovery.

    Args:
        scenario: When to.
        kill: Causes a failure; called once, long before its step.
        add_node: Starts a node; called once.
    """

    def __init__(self, scenario: DemoScenario, kill: Callable[[Injection], None], add_node: Callable[[], None]) -> None:
        self._scenario = scenario
        self._kill = kill
        self._delay_steps = scenario.join_delay_steps
        self._add_node = add_node
        self._recovering: int | None = None
        self._join_at: int | None = None
        self._done = False

    def on_event(self, event: Event) -> None:
        """Follow the run; give every event, in order."""
        if event["kind"] == "generation" and event["cause"] == "start":
            nodes = encoder_nodes(event) or event["nodes"]
            node = nodes[int(self._scenario.draw * len(nodes))]
            self._kill(Injection(node=node, at_step=self._scenario.at_step, at_phase=self._scenario.at_phase))
        elif event["kind"] == "generation" and event["cause"] == "failure":
            self._recovering = event["generation"]
        elif event["kind"] == "step" and self._recovering is not None and event["generation"] >= self._recovering:
            self._join_at = event["step"] + self._delay_steps if self._join_at is None else self._join_at
            if not self._done and event["step"] >= self._join_at:
                self._done = True
                self._add_node()


def example_script() -> Path:
    """Return the path of ``digits_vlm.py``, which is part of the package."""
    return Path(str(files("resilient.examples") / "digits_vlm.py"))


def judge(report: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a demo's report: nothing, if the failure and the join did no harm."""
    recoveries, joins = report["recoveries"], report["joins"]
    restarted = sum(change["restarted_workers"] for change in (*recoveries, *joins))
    lost_steps = max((recovery["lost_steps"] for recovery in recoveries), default=0)
    lost_by_joins = sum(join["lost_steps"] for join in joins)
    checks = [
        (report["exit"]["code"] == 0, f"the run must finish, got: {report['exit']['reason']}"),
        (bool(recoveries), "a failure must happen and be recovered from, got none"),
        (bool(joins), "a node must join, got none: it was not ready before the last step, use more --steps"),
        (restarted == 0, f"no surviving worker may be restarted, got {restarted}"),
        (lost_steps <= 1, f"a failure must cost at most 1 step, got {lost_steps}"),
        (lost_by_joins == 0, f"a join must cost no step, got {lost_by_joins}"),
        (
            report["same_steps_and_samples"] is True,
            "both runs must train the same samples in the same steps, got others",
        ),
        _within(report, "max_loss_abs_diff", LOSS_TOLERANCE),
        _within(report, "max_param_rel_diff", PARAM_TOLERANCE),
    ]
    return [reason for holds, reason in checks if not holds]


def _within(report: Mapping[str, Any], key: str, tolerance: float) -> tuple[bool, str]:
    value = report[key]
    # "<=" is false for NaN.
    return value is not None and value <= tolerance, f"{key} must be at most {tolerance:g}, got {value}"


def summary(report: Mapping[str, Any]) -> Table:
    """Return the table a demo ends with."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for recovery in report["recoveries"]:
        table.add_row(f"failure in step {recovery['step']}", recovery["cause"])
        if recovery["units"]:
            what = " and ".join(recovery["units"])
            only = "" if "llm" in recovery["units"] else ", nothing of the language model"
            table.add_row("  which had", f"{what}{only}")
        table.add_row("  recovered in", duration(recovery["total_ms"]))
        table.add_row("  of that", recovery_parts(recovery))
        table.add_row("  steps redone", str(recovery["lost_steps"]))
        table.add_row("  state copied", f"{recovery['bytes_copied'] / 1e6:.1f} MB")
        table.add_row("  workers restarted", str(recovery["restarted_workers"]))
    for join in report["joins"]:
        names = ", ".join(f"node {node}" for node in join["nodes"])
        pause = "unknown" if join["pause_ms"] is None else duration(join["pause_ms"])
        table.add_row(f"join before step {join['step']}", names)
        table.add_row("  training paused for", f"{pause}, {counted(join['lost_steps'], 'step')} lost")
    table.add_row("final loss", _value(report["final_loss"], ".6f"))
    table.add_row("throughput", f"{_value(report['throughput_samples_per_s'], '.0f')} samples/s")
    for name, value in report["notes"].items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    for key, label in (("max_loss_abs_diff", "loss differs by"), ("max_param_rel_diff", "parameters differ by")):
        table.add_row(label, f"{_value(report[key], '.1e')} from the failure-free run")
    return table


def _value(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)


def show_verdict(report: Mapping[str, Any], run_directory: Path, console: Console) -> int:
    """Print summary and verdict and return the exit code: 0 if the demo passed, else 1."""
    reasons = judge(report)
    console.print()
    console.print(summary(report))
    console.print()
    for name in ("events.jsonl", "report.json", "report.png"):
        if (run_directory / name).exists():
            console.print(Text(f"  {run_directory / name}"), soft_wrap=True)
    console.print()
    if reasons:
        console.print(Text("FAILED", style="bold red"))
        for reason in reasons:
            console.print(Text(f"  {reason}"), soft_wrap=True)
        return 1
    console.print(
        Text.assemble(
            ("PASSED", "bold green"),
            "  no worker was restarted, at most one step redone, none lost by the join; the samples are the same,\n"
            f"        the parameters equal the failure-free run's within {PARAM_TOLERANCE:g} (relative, float64)",
        ),
        soft_wrap=True,
    )
    return 0


def demo(
    ctx: typer.Context,
    seed: Annotated[int, typer.Option(help="Chooses the node, step and phase of the failure.")] = 0,
    steps: Annotated[int, typer.Option(callback=within(MIN_DEMO_STEPS), help="Steps to train.")] = 60,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the report here as well.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; runs/<time> by default.")] = None,
    planner: Annotated[str, typer.Option(help="Decides which nodes encode, and places the samples.")] = PLANNER,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
) -> None:
    """Train vision and language, kill a node in mid-step, let one join, and compare with a run without failures."""
    from resilient.cli.shared.run_folder import new_run_directory

    console = Console(highlight=False, emoji=False)
    scenario = choose_scenario(seed, steps)
    run_directory = run_dir or new_run_directory()
    with refusals(ctx):
        look_up("planner", planner, dict.fromkeys((AUTO, *PLANNERS)))
        require("sklearn", "`resilient demo`")
        check_outputs([("--json", json_file)])
        console.print(
            f"{NUM_NODES} nodes train for {steps} steps, planned by {planner}; one is killed in step "
            f"{scenario.at_step} ({scenario.at_phase}), which only encodes if any does, another node joins later",
            soft_wrap=True,
        )
        exit_code = _train(steps, planner, scenario, run_directory, make_view(plain or None, console))
        reference_directory = run_directory / "reference"
        if exit_code == 0:
            console.print("\nthe same job without failures, to compare with")
            exit_code = _train(steps, planner, None, reference_directory, make_view(plain or None, console))
        if exit_code == _INTERRUPTED:  # there is no verdict
            raise typer.Exit(exit_code)
        report = _write(run_directory, reference_directory if exit_code == 0 else None)
        if json_file is not None:
            shutil.copyfile(run_directory / "report.json", json_file)
    raise typer.Exit(show_verdict(report, run_directory, console))


def _train(
    num_steps: int, planner: str, scenario: DemoScenario | None, run_directory: Path, view: LiveView | PlainView
) -> int:
    """Run the job, without failure and join where there is no scenario; return the exit code."""
    from resilient.agent.launch import Launcher
    from resilient.agent.launch_options import LaunchOptions

    options = LaunchOptions(
        script=str(example_script()),
        arguments=("--steps", str(num_steps), "--precision", "fp64"),
        num_nodes=NUM_NODES,
        planner=planner,
        run_directory=str(run_directory),
    )
    launcher = Launcher(options)
    if scenario:
        launcher.subscribe(Director(scenario, launcher.inject, launcher.add_node).on_event)
    with view:
        launcher.subscribe(view.on_event)
        exit_code = launcher.run()
    view.print_ending()
    return exit_code


def _write(run_directory: Path, reference_directory: Path | None) -> dict[str, Any]:
    """Write report and picture next to the events."""
    report = write_report(run_directory, reference_directory)
    reference = read_events(reference_directory / "events.jsonl") if reference_directory else None
    with drawing(run_directory / "report.png") as picture:
        draw_report(read_events(run_directory / "events.jsonl"), report, picture, reference)
    return report
