"""From an agreement to a generation: the plan, the copies, where everything else comes from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resilient.agent.agreement import Agreement
from resilient.agent.events import Worker
from resilient.agent.members import Member
from resilient.errors import StateLostError
from resilient.messages import INIT, Generation, JobSpec, Outcome
from resilient.templates.batch import check_batch
from resilient.templates.plan import Plan, Problem
from resilient.templates.replan import first_plan, replan
from resilient.templates.transfer import Transfer, plan_transfers


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: str


@dataclass(frozen=True, kw_only=True)
class Formed:
    """A generation ready to be published; ``lost`` names states that made it fall back to ``source``."""

    plan: Plan
    version: int
    roll_forward: Outcome | None
    transfers: tuple[Transfer, ...]
    source: str
    lost: tuple[str, ...] = ()


def problem_of(job: JobSpec, workers_per_node: int) -> Problem:
    """Return the planning problem of a job.

    Raises:
        ValueError: The batch cannot be split; the message says what to do.
    """
    check_batch(job.global_batch, job.microbatch, job.max_failures + 1)
    return Problem(
        profile=job.profile,
        num_microbatches=job.global_batch // job.microbatch,
        devices_per_node=workers_per_node,
        max_failures=job.max_failures,
        min_pipeline_nodes=job.min_pipeline_nodes,
    )


def source_at(version: int, checkpoints: Collection[Checkpoint]) -> str:
    """Return where states at this version can come from besides peers; "" for nowhere."""
    if version == 0:
        return INIT
    return next((checkpoint.path for checkpoint in checkpoints if checkpoint.step == version), "")


def form(
    problem: Problem, plan: Plan | None, nodes: Sequence[int], agreement: Agreement, checkpoints: Collection[Checkpoint]
) -> Formed:
    """Make the next generation.

    Raises:
        TooFewNodes: The job cannot go on with its promised redundancy.
        StateLostError: A state is gone for good.
        ValueError: The job fits no plan; the message says what to change.
    """
    new = first_plan(problem, nodes) if plan is None else replan(problem, plan, nodes)
    source = source_at(agreement.version, checkpoints)
    rank_of: dict[Worker, int] = {(slot.node, slot.local_rank): slot.rank for slot in new.slots}
    held = {
        state: [rank_of[worker] for worker in workers if worker in rank_of]
        for state, workers in agreement.holders().items()
    }
    transfers, lost = plan_transfers(problem, new, held)
    if not lost or source:
        return Formed(
            plan=new,
            version=agreement.version,
            roll_forward=agreement.roll_forward,
            transfers=transfers,
            source=source,
        )
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.step, default=None)
    if newest is None:
        raise StateLostError(f"no live node holds {', '.join(lost)} and there is no checkpoint; start the job again")
    return Formed(plan=new, version=newest.step, roll_forward=None, transfers=(), source=newest.path, lost=lost)


def message_for(worker: Worker, generation: int, formed: Formed, members: Mapping[int, Member]) -> Generation:
    """Return the announcement for one worker."""
    slots = formed.plan.slots
    first = members[slots[0].node].ready[slots[0].local_rank]
    return Generation(
        generation=generation,
        rank=next((slot.rank for slot in slots if (slot.node, slot.local_rank) == worker), None),
        plan=formed.plan,
        version=formed.version,
        roll_forward=formed.roll_forward,
        transfers=formed.transfers,
        source=formed.source,
        store_address=first.store_address,
    )


def describe(formed: Formed, members: Mapping[int, Member]) -> dict[str, Any]:
    """Return what the event log says of a generation."""
    slots = formed.plan.slots
    pipelines = [
        {
            "nodes": list(pipeline.nodes),
            "num_microbatches": pipeline.num_microbatches,
            "stages": [
                {
                    "node": slot.node,
                    "local_rank": slot.local_rank,
                    "first_layer": slot.stage.first_layer,
                    "end_layer": slot.stage.end_layer,
                }
                for slot in slots
                if slot.pipeline_index == index
            ],
        }
        for index, pipeline in enumerate(formed.plan.pipelines)
    ]
    placed = set(formed.plan.nodes)
    return {
        "version": formed.version,
        "roll_forward": formed.roll_forward is not None,
        "interrupted_step": formed.version + 1,
        "nodes": sorted(placed),
        "pipelines": pipelines,
        "transfers": len(formed.transfers),
        "standby": sorted(node for node, member in members.items() if member.is_ready and node not in placed),
        "pids": {key: pid for node in sorted(members) for key, pid in members[node].pids.items()},
    }
