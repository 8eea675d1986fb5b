"""The job that a command plans or simulates without having it: its options, and what they mean.

What is slow to import is imported when it is used. Must not import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from resilient.cli.shared.errors import told
from resilient.cli.shared.ranges import within
from resilient.cli.shared.standard_output import is_of_output
from resilient.common.extras import MissingPackageError
from resilient.errors import ArgumentError

if TYPE_CHECKING:
    from resilient.templates.inputs.cluster import Cluster
    from resilient.templates.inputs.profile import ModelProfile
    from resilient.templates.plan import PlanningProblem

ModelOption = Annotated[str | None, typer.Option("--model", help="A published model, to plan for without having it.")]
ProfileOption = Annotated[
    Path | None,
    typer.Option("--profile", exists=True, dir_okay=False, help="A measured profile, from `resilient profile`."),
]


def full_device(name: str | None) -> str | None:
    """Return the device that ``--device`` means, as the option's callback; say so where a size was left out."""
    from resilient.templates.inputs.devices import DEVICES, full_name

    full = name and full_name(name)
    if name and full != name:
        others = [known for known in DEVICES if known.startswith(f"{name}-") and known != full]
        also = f"; there is {' and '.join(others)}, too" if others else ""
        _to_stderr(f"note: --device {name} is taken as {full}{also}", "yellow")
    return full


DeviceOption = Annotated[
    str | None,
    typer.Option("--device", callback=full_device, help="The accelerator; with --profile for memory and links alone."),
]
GpusOption = Annotated[int, typer.Option("--gpus-per-node", callback=within(1, 100_000), help="Devices of each node.")]
NetworkOption = Annotated[
    float | None,
    typer.Option("--network-gbit-s", help="Between two nodes, for each device; the usual network by default."),
]
FailuresOption = Annotated[
    int, typer.Option("--max-failures", callback=within(0), help="Node failures to survive at the same time.")
]
PipelineNodesOption = Annotated[
    int, typer.Option("--min-pipeline-nodes", callback=within(1), help="Fewest nodes of a pipeline.")
]
BatchOption = Annotated[
    int | None, typer.Option("--global-batch", help="Samples of a step; the model's usual by default.")
]
MicrobatchOption = Annotated[
    int | None,
    typer.Option("--microbatch", help="Samples of a microbatch; the model's usual, or the measured one, by default."),
]
SeqLenOption = Annotated[
    int | None, typer.Option("--seq-len", help="Tokens of a sample; the model's usual by default.")
]
FrozenOption = Annotated[
    str | None,
    typer.Option("--frozen", metavar="UNITS", help='Units that are not trained, such as "vision,llm".'),
]

MOST_NODES = 100_000
"""That a command plans for: a plan from the one before then takes seconds, and a third of a gigabyte."""

_LEAST_GBIT_S = 0.001
_MOST_MICROBATCHES = 1_000_000
"""Of a step: their times still fit into 64 bits."""

JOB_OPTIONS = {
    "memory_bytes": "the memory of --device",
    "devices_per_node": "--gpus-per-node",
    "num_nodes": "--nodes",
    "the number of nodes": "--nodes",
    "num_devices": "the number of devices",
    "num_microbatches": "the number of microbatches",
    "num_chunks": "--chunks",
    "transfer_ms": "--send-ms",
    "run_directory": "--run-dir",
    "planner": "--planners",
    "samples": "samples of --workload",
    "encoder": "--model",
    "language model": "--model",
    "bad=drop": "--bad drop",
    "bad=resize": "--bad resize",
}
"""Of arguments of planning that are not called as their options are."""


@contextmanager
def refusals(ctx: typer.Context) -> Iterator[None]:
    """Print what a command refuses, in the words of its options, and end it with 2.

    Args:
        ctx: Of the command.

    Raises:
        OSError: Of standard output.
    """
    try:
        if sys.stdout is None:
            raise ValueError("standard output must be open, got a closed one; redirect it to a file or to /dev/null")
        yield
    except (ValueError, OSError, MissingPackageError) as error:
        if is_of_output(error):
            raise
        _to_stderr(f"error: {told(error, ctx, JOB_OPTIONS)}", "red")
        raise typer.Exit(2) from None


def _to_stderr(text: str, style: str) -> None:
    Console(stderr=True, highlight=False, emoji=False).print(text, markup=False, style=style, soft_wrap=True)


def described_cluster(device: str | None, gpus_per_node: int = 1, network_gbit_s: float | None = None) -> Cluster:
    """Return the nodes; without a device, memory has no limit and what is not known of links costs nothing.

    Raises:
        ValueError: The device is not known, or the network has no bandwidth.
    """
    from resilient.templates.inputs.cluster import Cluster, Link
    from resilient.templates.inputs.devices import cluster_of, network

    if network_gbit_s is not None and not network_gbit_s >= _LEAST_GBIT_S:
        raise ArgumentError(
            "network_gbit_s", f"be at least {_LEAST_GBIT_S}", network_gbit_s, "leave it out for the usual network"
        )
    inter_node = None if network_gbit_s is None else network(network_gbit_s)
    if device is None:
        return Cluster(devices_per_node=gpus_per_node, inter_node=inter_node or Link())
    return cluster_of(device, gpus_per_node, inter_node=inter_node)


def described_layers(
    model: str | None,
    profile: Path | None,
    device: str | None,
    *,
    microbatch: int | None = None,
    seq_len: int | None = None,
    frozen: str | None = None,
) -> ModelProfile:
    """Return what the layers cost: derived for a model, or read from a profile.

    Args:
        model: ``--model``; it needs a device.
        profile: ``--profile``, instead.
        device: ``--device``.
        microbatch: Samples of a microbatch that costs are derived for.
        seq_len: Tokens of a sample likewise.
        frozen: Units that are not trained, with commas between.

    Raises:
        ValueError: Not exactly one of model and profile is given, or it cannot be what is wanted.
    """
    from resilient.templates.inputs.derive import derive_profile
    from resilient.templates.inputs.devices import DEVICES
    from resilient.templates.inputs.known_models import MODELS

    units = tuple(unit for part in (frozen or "").split(",") if (unit := part.strip()))
    if profile is not None:
        said = [f"{{{name}}}" for name, value in (("model", model), ("seq_len", seq_len)) if value is not None]
        if said:
            fix = "leave one of them out"
            raise ArgumentError("profile", f"come without {' and '.join(said)}, which it says", profile, fix)
        return _read_profile(profile, units)
    if model is None:
        fix = f"{{model}} can be {', '.join(MODELS)}"
        raise ArgumentError("{model} or {profile}", "be given", "neither", fix)
    if device is None:
        raise ArgumentError("device", "be given with {model}", "none", f"it can be {', '.join(DEVICES)}")
    return derive_profile(model, device, microbatch=microbatch, seq_len=seq_len, frozen=units)


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The options that describe a job without having it."""

    model: ModelOption = None
    profile: ProfileOption = None
    device: DeviceOption = None
    gpus_per_node: GpusOption = 1
    network_gbit_s: NetworkOption = None
    max_failures: FailuresOption = 1
    min_pipeline_nodes: PipelineNodesOption = 1
    global_batch: BatchOption = None
    microbatch: MicrobatchOption = None
    seq_len: SeqLenOption = None
    frozen: FrozenOption = None


def described_job(options: JobOptions) -> tuple[PlanningProblem, int]:
    """Return the job that options describe, and the samples of its microbatch.

    Raises:
        ValueError: They do not fit each other; the message says what would do.
    """
    from resilient.templates.composition.batch_split import check_batch
    from resilient.templates.inputs.known_models import MODELS
    from resilient.templates.plan import PlanningProblem

    microbatch, global_batch = options.microbatch, options.global_batch
    cluster = described_cluster(options.device, options.gpus_per_node, options.network_gbit_s)
    costs = described_layers(
        options.model,
        options.profile,
        options.device,
        microbatch=microbatch,
        seq_len=options.seq_len,
        frozen=options.frozen,
    )
    if options.model is None:
        global_batch, microbatch = _measured_batch(costs, global_batch, microbatch)
    else:
        usual = MODELS[options.model]
        global_batch = usual.global_batch if global_batch is None else global_batch
        microbatch = usual.microbatch if microbatch is None else microbatch
    check_batch(global_batch, microbatch, options.max_failures + 1)
    if global_batch // microbatch > _MOST_MICROBATCHES:
        most = _MOST_MICROBATCHES * microbatch
        raise ArgumentError("global_batch", f"be at most {most}", global_batch, "lower it, or raise {microbatch}")
    problem = PlanningProblem(
        profile=costs,
        num_microbatches=global_batch // microbatch,
        cluster=cluster,
        max_failures=options.max_failures,
        min_pipeline_nodes=options.min_pipeline_nodes,
    )
    return problem, microbatch


def _read_profile(path: Path, frozen: Sequence[str]) -> ModelProfile:
    from resilient.templates.inputs.derive import freeze
    from resilient.templates.inputs.profile import ModelProfile

    try:
        measured = ModelProfile.from_json(path.read_bytes())
    except ValueError as error:
        raise ArgumentError(
            "profile", "be a file that `resilient profile` wrote", f"{path} ({error})", "write it again"
        ) from None
    return freeze(measured, frozen) if frozen else measured


def _measured_batch(costs: ModelProfile, global_batch: int | None, microbatch: int | None) -> tuple[int, int]:
    measured = costs.microbatch
    microbatch = measured if microbatch is None else microbatch
    if measured is not None and microbatch != measured:
        raise ArgumentError(
            "microbatch",
            f"be {measured}, the one that {{profile}} is of",
            microbatch,
            "leave it out, or profile with another",
        )
    if global_batch is None and microbatch is not None:
        fix = f"give the job's, a multiple of its microbatch {microbatch}"
        raise ArgumentError("global_batch", "be given with {profile}", "none", fix)
    if global_batch is None or microbatch is None:
        raise ArgumentError(
            "{global_batch} and {microbatch}",
            "be given with {profile}",
            f"{global_batch or 'none'} and {microbatch or 'none'}",
            "the microbatch is the one that was measured",
        )
    return global_batch, microbatch
