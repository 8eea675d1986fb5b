"""Recognises that a process is one of several copies that another launcher started, each of which would train alone.

Owns the names that other launchers give to the environment of what they start.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resilient.errors import ArgumentError, literal


@dataclass(frozen=True)
class _Launcher:
    """What a launcher sets.

    Args:
        name: As users call it.
        size: Variable with the number of processes it started.
        mark: Variable that tells it from others with the same ``size``.
        local_size: Variable with those on this machine; "" where there is none.
        join: Command that starts something on each of its machines.
    """

    name: str
    size: str
    mark: str
    local_size: str = ""
    join: str = ""


_LAUNCHERS = (
    _Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", join="srun "),
    _Launcher("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    _Launcher("accelerate launch", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION", "LOCAL_WORLD_SIZE"),
    _Launcher("torchrun", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE"),
    _Launcher("deepspeed", "WORLD_SIZE", "CROSS_RANK", "LOCAL_SIZE"),
    _Launcher("a launcher like torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("a launcher like torchrun", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher("MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)
"""The first that fits counts: mpirun and torchrun are also started by srun, accelerate starts torchrun's agent."""


def check_started_once(environment: Mapping[str, str], command: Sequence[str], *, is_script: bool) -> None:
    """Check that this process is no copy among others.

    Args:
        environment: Of a process that no agent started: an agent's workers carry torchrun's names, too.
        command: The job's script and its arguments.
        is_script: The script itself was started, not ``resilient run``.

    Raises:
        ArgumentError: Another launcher started several; it is named, with the command to use instead.
    """
    for launcher in _LAUNCHERS:
        num_copies = _number(environment, launcher.size)
        if num_copies > 1 and launcher.mark in environment:
            raise _refusal(launcher, num_copies, _number(environment, launcher.local_size), command, is_script)


def _refusal(
    launcher: _Launcher, num_copies: int, num_here: int, command: Sequence[str], is_script: bool
) -> ArgumentError:
    what = "the script" if is_script else "`resilient run`"
    start = f"use `resilient run --nodes {num_here or num_copies} {literal(shlex.join(command))}`"
    fix = start if is_script else "start it by itself"
    if num_here != num_copies:
        fix += f" on one machine and `{launcher.join}resilient agent --join HOST:PORT` on the others"
    return ArgumentError(
        what,
        "be started once",
        f"{launcher.size}={num_copies} of {launcher.name}, whose {num_copies} processes would each train a job alone",
        f"{fix} (docs/operator_guide.md), or unset {launcher.size} if it is left over",
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
