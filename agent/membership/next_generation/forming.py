"""From an agreement to a generation: the plan, the copies, where everything else comes from. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from resilient.agent.membership.next_generation.agreement import Agreement
from resilient.agent.membership.next_generation.members import Member, WorkerId, available
from resilient.errors import StateLostError
from resilient.protocol.checkpoint_pace import CheckpointPace
from resilient.protocol.messages import INIT, Generation, JobSpec, StepOutcome
from resilient.state.skipped import NONE_SKIPPED, SkippedSteps
from resilient.templates.common.words import counted, listed
from resilient.templates.composition.batch_split import check_batch
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Plan, PlanningProblem, Sharding
from resilient.templates.replan.replan import first_candidate, replan_candidates, templates_for
from resilient.templates.replan.transfer import Transfer, plan_transfers
from resilient.templates.schedules.graph import CHAIN

StandbyReason = Literal["most_nodes", "no_place", "faster"]
"""Why a node stands by: as many train as may, no pipeline has a place for it, or a step is shorter without it."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    path: str
    skipped: SkippedSteps = NONE_SKIPPED


@dataclass(frozen=True, kw_only=True)
class NextGeneration:
    """A generation ready to be published.

    Args:
        senders: Workers without a place that send states: their ranks follow those of the plan.
        needed_nodes: The fewest nodes the job can go on with.
        templates: Digest of the templates that the plan is made of.
        lost: States that made it fall back to ``source``.
        step_ms: What a step is expected to take.
        with_more_ms: What it would take with nodes that stand by to make it shorter; None where there are none.
        usable: The nodes that it could have used.
    """

    plan: Plan
    version: int
    roll_forward: StepOutcome | None
    transfers: tuple[Transfer, ...]
    senders: tuple[WorkerId, ...]
    source: str
    needed_nodes: int
    templates: str
    skipped: SkippedSteps
    lost: tuple[str, ...] = ()
    step_ms: float
    with_more_ms: float | None
    usable: tuple[int, ...]

    @cached_property
    def ranks(self) -> dict[WorkerId, int]:
        """The global ranks of all who take part."""
        placed = ((slot.node, slot.local_rank) for slot in self.plan.slots)
        return {worker: rank for rank, worker in enumerate((*placed, *self.senders))}


def problem_of(
    job: JobSpec,
    workers_per_node: int,
    network: Link,
    failure_interval_s: float,
    sharding: Sharding = Sharding.OFF,
    tp_degree: int | None = 1,
) -> PlanningProblem:
    """Return the planning problem of a job on nodes with so many workers and this network between them.

    Args:
        job: What its workers say of it.
        workers_per_node: Of each node.
        network: Between two nodes.
        failure_interval_s: Expected time between two failures.
        sharding: Whether workers of a node divide the states of their stage.
        tp_degree: How many of them share each microbatch; None for what makes steps shortest.

    Raises:
        ValueError: The batch cannot be split, or the model at that degree; the message says what to do.
    """
    check_batch(job.global_batch, job.microbatch, job.max_failures + 1)
    kind, num_chunks = job.first_schedule
    return PlanningProblem(
        profile=job.profile if tp_degree is None else job.profile.at_degree(tp_degree),
        num_microbatches=job.global_batch // job.microbatch,
        cluster=Cluster(devices_per_node=workers_per_node, memory_bytes=job.memory_bytes, inter_node=network),
        max_failures=job.max_failures,
        min_pipeline_nodes=job.min_pipeline_nodes,
        failure_interval_s=failure_interval_s,
        schedule=kind,
        num_chunks=num_chunks,
        sharding=sharding,
        templates=job.templates,
    )


def source_at(version: int, checkpoints: Collection[Checkpoint]) -> str:
    """Return where states at this version can come from besides peers; "" for nowhere."""
    if version == 0:
        return INIT
    return next((checkpoint.path for checkpoint in checkpoints if checkpoint.step == version), "")


def why_too_few(nodes: Sequence[int], needed: int) -> str:
    """Return why a job cannot go on with these nodes when it needs so many."""
    live = f"{counted(len(nodes), 'node')} {_be(len(nodes))} live ([{listed(nodes)}])"
    return f"{live}, {needed} {_be(needed)} needed"


def why_so_many(problem: PlanningProblem, needed: int) -> str:
    """Return why a job needs so many nodes, by what its script says."""
    pipelines = problem.max_failures + 1
    each = needed // pipelines
    what = f"max_failures={problem.max_failures}"
    if each == problem.min_pipeline_nodes:
        what += f", min_pipeline_nodes={each}"
    return f", for {counted(pipelines, 'pipeline')} of {counted(each, 'node')} ({what})"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def form(
    problem: PlanningProblem,
    plan: Plan | None,
    members: Mapping[int, Member],
    agreement: Agreement,
    checkpoints: Collection[Checkpoint],
    slowdowns: Mapping[int, float],
    most_nodes: int | None = None,
) -> NextGeneration:
    """Make the next generation.

    Args:
        problem: The job.
        plan: The plan of the generation before, None for the first.
        members: Who is there.
        agreement: What they agreed on.
        checkpoints: Those there are.
        slowdowns: Of nodes, as observed.
        most_nodes: That may train at once; None for all.

    Raises:
        TooFewNodes: The job cannot go on with its promised redundancy.
        StateLostError: A state is gone for good.
        ValueError: The job fits no plan; the message says what to change.
    """
    nodes = available(members.values(), most_nodes)
    domains = {node: members[node].domain for node in nodes if members[node].domain}
    slow = {node: slowdowns[node] for node in nodes if slowdowns.get(node, 1.0) > 1}
    if plan is None:
        chosen = first_candidate(problem, nodes, domains=domains, slowdowns=slow)
    else:
        chosen = next(replan_candidates(problem, plan, nodes, domains=domains, slowdowns=slow))
    new, templates = chosen.plan, templates_for(problem, len(nodes))
    needed_nodes = (problem.max_failures + 1) * templates.sizes.start
    source = source_at(agreement.version, checkpoints)
    transfers, lost, senders = _copies(problem, new, agreement)
    formed = NextGeneration(
        plan=new,
        version=agreement.version,
        roll_forward=agreement.roll_forward,
        transfers=transfers,
        senders=senders,
        source=source,
        needed_nodes=needed_nodes,
        templates=templates.digest,
        skipped=agreement.skipped,
        step_ms=chosen.step_ms,
        with_more_ms=chosen.with_more_ms,
        usable=tuple(nodes),
    )
    if not lost or source:
        return formed
    newest = max(checkpoints, key=lambda checkpoint: checkpoint.step, default=None)
    if newest is None:
        raise StateLostError(f"no live node holds {', '.join(lost)} and there is no checkpoint; start the job again")
    return replace(
        formed,
        version=newest.step,
        roll_forward=None,
        transfers=(),
        senders=(),
        source=newest.path,
        skipped=newest.skipped,
        lost=lost,
    )


def _copies(
    problem: PlanningProblem, plan: Plan, agreement: Agreement
) -> tuple[tuple[Transfer, ...], tuple[str, ...], tuple[WorkerId, ...]]:
    """Plan the copies; return them, the states nobody holds, and who sends without a place in the plan."""
    placed = [(slot.node, slot.local_rank) for slot in plan.slots]
    others = sorted(agreement.held.keys() - set(placed))
    rank_of = {worker: rank for rank, worker in enumerate((*placed, *others))}
    holders = agreement.holders(problem.profile)
    held = {state: {rank_of[worker]: part for worker, part in of.items()} for state, of in holders.items()}
    transfers, lost = plan_transfers(problem, plan, held, len(others))
    sending = sorted({transfer.source for transfer in transfers} - set(range(len(placed))))
    if not sending:
        return transfers, lost, ()
    ranks = {rank: len(placed) + position for position, rank in enumerate(sending)}
    renumbered = tuple(
        msgspec.structs.replace(transfer, source=ranks[transfer.source]) if transfer.source in ranks else transfer
        for transfer in transfers
    )
    return renumbered, lost, tuple(others[rank - len(placed)] for rank in sending)


def message_for(
    worker: WorkerId,
    generation: int,
    formed: NextGeneration,
    members: Mapping[int, Member],
    *,
    checkpoint_due: bool,
    pace: CheckpointPace | None = None,
) -> Generation:
    """Return the announcement for one worker."""
    first = formed.plan.slots[0]
    return Generation(
        generation=generation,
        rank=formed.ranks.get(worker),
        plan=formed.plan,
        version=formed.version,
        roll_forward=formed.roll_forward,
        transfers=formed.transfers,
        source=formed.source,
        store_address=members[first.node].ready[first.local_rank].store_address,
        num_sources=len(formed.senders),
        skipped=formed.skipped,
        checkpoint_due=checkpoint_due,
        pace=pace,
    )


def _why_standing_by(node: int, formed: NextGeneration) -> StandbyReason:
    if node not in formed.usable:
        return "most_nodes"
    return "no_place" if formed.with_more_ms is None else "faster"


def describe(formed: NextGeneration, members: Mapping[int, Member], slowdowns: Mapping[int, float]) -> dict[str, Any]:
    """Return what the event log says of a generation."""
    staying = {node: member for node, member in sorted(members.items()) if member.is_ready and not member.leaving}
    pipelines = [
        {
            "nodes": list(pipeline.nodes),
            "num_microbatches": pipeline.num_microbatches,
            "stages": [
                {
                    "node": pipeline.nodes[stage.node_index],
                    "local_rank": stage.first_device,
                    **({"num_workers": stage.num_devices} if stage.num_devices > 1 else {}),
                    **({"sharded": True} if stage.shard > 1 else {}),
                    **({"lane": str(stage.lane)} if stage.lane != CHAIN else {}),
                    "first_layer": stage.first_layer,
                    "end_layer": stage.end_layer,
                }
                for stage in pipeline.template.stages
            ],
        }
        for pipeline in formed.plan.pipelines
    ]
    placed = set(formed.plan.nodes)
    standby = [node for node in staying if node not in placed]
    return {
        "version": formed.version,
        "roll_forward": formed.roll_forward is not None,
        "interrupted_step": formed.version + 1,
        "nodes": sorted(placed),
        "templates": formed.templates,
        "pipelines": pipelines,
        "transfers": len(formed.transfers),
        "senders": sorted({node for node, _ in formed.senders}),
        "standby": standby,
        "standby_reasons": {str(node): _why_standing_by(node, formed) for node in standby},
        "step_ms": formed.step_ms,
        "with_standby_ms": formed.with_more_ms,
        "slowdowns": {str(node): slowdowns[node] for node in staying if slowdowns.get(node, 1.0) > 1},
        "pids": {key: pid for member in staying.values() for key, pid in member.pids.items()},
    }
