"""What parts of a device's memory for activations samples take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from resilient.errors import ArgumentError
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Replica, Setting
from resilient.planners.stages.degraded_replicas import left_bytes
from resilient.planners.stages.stage_work import gathered_bytes, kept_bytes
from resilient.templates.common.arrays import Floats, Ints


def kept_shares(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica] = ()
) -> Floats:
    """Return what samples take of a microbatch's room, on the device where that is most. [num_samples]

    The room is what parameters, gradients and the optimizer, which is sharded over replicas, leave of the memory,
    divided by the microbatches that a stage holds at a time: under 1F1B one for each stage from it on, and all of them
    in encoders on the language model's devices, as their work comes first. These divide the room as
    these samples need it: a device may have much of one unit in one microbatch, and of another in the next. Where
    encoders are replicated, each microbatch is encoded when its turn comes, and takes what it does in all units. So a
    microbatch whose shares sum up to 1 or less fits, as long as no other one has more. Where several ranks share its
    samples, that sum is their number.

    Args:
        setting: The job.
        configuration: Decided, or considered.
        batch: The samples.
        replicas: Of the language model, if they are not as configured: the room is that of the one that has least.

    Raises:
        ValueError: The state alone does not fit.
    """
    stages = _stages(
        setting,
        configuration,
        replicas or [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units[LLM].dp,
    )
    if stages is None:
        return np.zeros(len(batch))
    kept = {
        name: each.kept_bytes[:, None] * each.held[:, None] * batch.units[name].tokens for name, each in stages.items()
    }
    if configuration.encoders is Encoders.REPLICATED:
        free = stages[LLM].free_bytes[:, None]
        return (sum(kept.values(), np.zeros_like(kept[LLM])) / free).max(axis=0)
    shares: list[Floats] = []
    for name, each in stages.items():
        part = np.ones(len(each.free_bytes))
        if configuration.colocated:
            needs = kept[name].sum(axis=1)
            every = np.sum([other.sum(axis=1) for other in kept.values()], axis=0)
            part = np.divide(needs, every, out=part, where=needs > 0)
        shares.append((kept[name] / (each.free_bytes * part)[:, None]).max(axis=0))
    return np.max(shares, axis=0)


def unit_shares(
    setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
) -> Mapping[str, Floats]:
    """Return what samples take in each unit of the room of a device that has one stage of all of them. [num_samples]

    Args:
        setting: The job.
        configuration: Of one stage.
        batch: The samples.
        replicas: Of the language model: the room is that of the one that has least.

    Raises:
        ValueError: The state alone does not fit.
    """
    stages = _stages(setting, configuration, replicas)
    if stages is None:
        return dict.fromkeys(configuration.units, np.zeros(len(batch)))
    rooms = {name: float(each.kept_bytes[0] / each.free_bytes[0]) for name, each in stages.items()}
    return {name: np.multiply(batch.units[name].tokens, part, dtype=np.float64) for name, part in rooms.items()}


class _Stages(NamedTuple):
    kept_bytes: Floats  # of a token of one pipeline; all [num_stages]
    held: Ints  # microbatches at a time
    free_bytes: Floats  # beside the state


def _stages(
    setting: Setting, configuration: Configuration, replicas: Sequence[Replica]
) -> Mapping[str, _Stages] | None:
    """Return the stages of each unit, None where memory is not bounded.

    Raises:
        ValueError: The state alone does not fit.
    """
    memory = setting.cluster.memory_bytes
    if memory is None:
        return None
    found: dict[str, _Stages] = {}
    behind, language = 0, configuration.units[LLM]
    number = max(each.num_microbatches for each in replicas)
    names = [unit.name for unit in setting.costs.units]
    for unit in reversed(setting.costs.units):
        spread, early = configuration.units[unit.name], names.index(unit.name) < names.index(LLM)
        held = np.minimum(behind + np.arange(spread.pp, 0, -1), number)
        if early and configuration.encoders is Encoders.REPLICATED:
            held = found[LLM].held
        elif early and configuration.colocated:
            held = np.full(spread.pp, number)
        kept = kept_bytes(unit, replace(spread, cp=1))
        # A lane may have all samples of a microbatch, or those of several pipelines.
        pipelines = 1 if configuration.colocated else -(-language.dp // spread.dp)
        state = left_bytes(setting, unit, spread, configuration, replicas).max(axis=0)
        found[unit.name] = _Stages(kept * pipelines, held, memory - state)
        behind += 0 if early or configuration.colocated else spread.pp
    if configuration.colocated:
        free = sum((each.free_bytes - memory for each in found.values()), np.full(language.pp, float(memory)))
        found = {name: each._replace(free_bytes=free) for name, each in found.items()}
    gathered = gathered_bytes(setting.costs.units, configuration)
    found = {name: each._replace(free_bytes=each.free_bytes - gathered) for name, each in found.items()}
    least = min(float(each.free_bytes.min()) for each in found.values())
    if least <= 0:
        raise ArgumentError(
            "memory_bytes",
            f"be more than the {memory - least:.0f} bytes of parameters, gradients and optimizer on a device",
            memory,
            "configure the job again",
        )
    return found
