"""Enters a generation: connects its ranks, gathers the layer states, builds what runs its steps.

The same for the first generation, after a failure, and for a join: they differ in what is already here and in where
the missing states come from (peers, initial values, a checkpoint).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from resilient.comm import Communicator, Group, StoreClient, connect
from resilient.models.summed_loss import loss_units
from resilient.pipeline.executor import Executor
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.sharded_stage import ShardedStage
from resilient.pipeline.stage import Stage, StageLayer
from resilient.pipeline.stage_sharding import StageSharding, Tokens
from resilient.pipeline.stage_timer import StageTimer
from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import INIT, Generation, Installed
from resilient.runtime.batches import sampler_of
from resilient.runtime.commit import Ledger
from resilient.runtime.generation_guard import GenerationGuard
from resilient.runtime.job import Job
from resilient.runtime.sample_agreement import SampleAgreement
from resilient.runtime.steps.assignments import Assignments
from resilient.runtime.steps.exchanges import LaneRows, exchanging_pairs, goes_over_nccl, lanes_of, row_of
from resilient.runtime.steps.learning import Learning
from resilient.runtime.steps.planning import UnitPlanning
from resilient.runtime.steps.steps import ChainSteps, Steps
from resilient.runtime.steps.unit_graph import PlanLanes
from resilient.runtime.steps.unit_steps import UnitSteps
from resilient.runtime.steps.unit_times import UnitTimes
from resilient.state import checkpoint
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.state.peer_copy import copy_states, received_by
from resilient.state.replicas import Replicas
from resilient.state.witnesses import witness
from resilient.templates.common.byte_intervals import NO_BYTES, ByteIntervals, Piece
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan, Slot
from resilient.templates.schedules.graph import StageName
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.stage_times import stage_times
from resilient.templates.template import PipelineTemplate, StageSpec


@dataclass(frozen=True, kw_only=True)
class Session:
    """One generation on one worker, ready to train.

    Args:
        generation: Its number.
        plan: Its plan.
        slot: This worker's place.
        steps: What its steps are.
        comm: Its groups.
        executor: Runs the steps up to the reduced gradients.
        gradient_sync: Sums them.
        stage_timer: Times the stage.
        sample_agreement: Compares what its pipeline's stages read.
        replicas: The copies of its states.
    """

    generation: int
    plan: Plan
    slot: Slot
    steps: Steps
    comm: Communicator
    executor: Executor
    gradient_sync: GradientSync
    stage_timer: StageTimer
    sample_agreement: SampleAgreement
    replicas: Replicas

    @property
    def template(self) -> PipelineTemplate:
        """Of this worker's pipeline."""
        return self.plan.pipelines[self.slot.pipeline_index].template


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What of a worker outlives its generations.

    Args:
        job: The job.
        profile: Of its model.
        layouts: Of all its layers, by name.
        ledger: This worker's states.
        guard: Ends connecting and copying when membership changes again.
        faults: Told of the phases.
        host: This machine's address for its peers.
        ports: The range to listen in there, "" for any port.
        store_client: Keeps the connections to stores.
        planning: What assigns samples to the cells of units; None for a chain.
        learning: What it corrects expected times by; None for a chain.
    """

    job: Job
    profile: ModelProfile
    layouts: dict[str, BufferLayout]
    ledger: Ledger
    guard: GenerationGuard
    faults: Faults
    host: str
    ports: str
    store_client: StoreClient
    planning: UnitPlanning | None = None
    learning: Learning | None = None


Pieces = dict[str, tuple[Piece, ...]]
"""Per state, what of it the same ranks hold (:meth:`resilient.templates.plan.Plan.pieces`)."""


def install(context: WorkerContext, message: Generation) -> tuple[Session, Installed]:
    """Enter a generation that has a place for this worker; all its ranks call this.

    Returns:
        The session, and the answer to the coordinator.

    Raises:
        CommunicationError: Membership changed again; the states that are complete stay.
    """
    assert message.rank is not None, "a worker without a place stands by"
    slot = message.plan.slots[message.rank]
    pieces = message.plan.pieces(context.profile)
    started_at = time.time()
    comm = connect_ranks(context, message, pieces)
    regrouped_at = time.time()
    context.faults.reach("copy", message.version + 1)
    bytes_copied = gather_states(context, message, slot, comm)
    context.ledger.start()
    session = build_session(context, message, slot, comm, pieces)
    return session, _installed(message, started_at, regrouped_at, bytes_copied)


def supply(context: WorkerContext, message: Generation) -> Installed:
    """Send what a generation that has no place for this worker needs of its states.

    The groups stay until the worker is told what comes next: what was sent may still be on its way.

    Returns:
        The answer to the coordinator.

    Raises:
        CommunicationError: Membership changed again; the states stay.
    """
    started_at = time.time()
    comm = connect_ranks(context, message, message.plan.pieces(context.profile))
    regrouped_at = time.time()
    context.faults.reach("copy", message.version + 1)
    copy_states(comm, message.transfers, context.ledger.retained, {})
    return _installed(message, started_at, regrouped_at, bytes_copied=0)


def connect_ranks(context: WorkerContext, message: Generation, pieces: Pieces) -> Communicator:
    """Bring the states to the generation's version, and meet its other ranks, which call this, too.

    Returns:
        The generation's groups; the guard aborts them when membership changes.

    Raises:
        CommunicationError: Membership changed again, or a rank did not come.
    """
    assert message.rank is not None
    context.ledger.begin_install(message.version, message.roll_forward, message.skipped)
    context.ledger.drop_replaced(received_by(message.rank, message.transfers))
    context.faults.reach("regroup", message.version + 1)
    trained_bytes = {
        name: layout.num_trainable * context.job.dtype.itemsize for name, layout in context.layouts.items()
    }
    summed = [
        piece.holders
        for name, of_state in pieces.items()
        for piece in of_state
        if piece.intervals.before(trained_bytes[name])
    ]
    groups: list[Group] = [ranks for ranks in dict.fromkeys(summed) if len(ranks) > 1]
    copying = [(transfer.source, transfer.target) for transfer in message.transfers]
    plan, exchanging = message.plan, []
    if message.rank < len(plan.slots):
        exchanging = exchanging_pairs(*_lanes(context, plan, plan.slots[message.rank]), message.rank)
    over_nccl = goes_over_nccl(plan, context.job.planner, context.job.schedule)
    comm = connect(
        generation=message.generation,
        rank=message.rank,
        size=len(plan.slots),
        groups=groups,
        store_address=message.store_address,
        store_client=context.store_client,
        host=context.host,
        timeout_s=context.job.comm_timeout_s,
        interrupted=context.guard.open(message.generation),
        device=context.job.device if over_nccl else torch.device("cpu"),
        num_sources=message.num_sources,
        pairs=[*copying, *exchanging],
        ports=context.ports,
        on_group=partial(context.faults.reach, "connect", message.version + 1),
    )
    context.guard.attach(message.generation, comm)
    return comm


def gather_states(context: WorkerContext, message: Generation, slot: Slot, comm: Communicator) -> int:
    """Bring together all states the slot needs, in the ledger: what is here, what peers send, what the source gives.

    Returns:
        The bytes that came from peers.

    Raises:
        CommunicationError: A peer is gone; the ledger holds what it did before.
        CheckpointError: The source is a checkpoint that cannot be read.
    """
    ledger = context.ledger
    needed = slot.intervals(context.profile)
    received = received_by(slot.rank, message.transfers)
    ledger.keep(needed)
    held = {**ledger.retained, **ledger.current}
    missing = {name: _allocate(context, name, needed[name]) for name in needed if name not in ledger.current}
    here = {name: state.held for name, state in held.items()}
    made = [
        state for name, state in missing.items() if state.held - received.get(name, NO_BYTES) - here.get(name, NO_BYTES)
    ]
    for state in made:
        state.origin = witness(slot.node, slot.local_rank)
    if message.source == INIT:
        for state in made:
            state.initialize(context.job.seed)
    elif made:
        checkpoint.load(message.source, made)
    on_copy = partial(context.faults.reach, "verify", message.version + 1)
    num_bytes = copy_states(comm, message.transfers, held, missing, on_copy)
    ledger.current.update(missing)
    return num_bytes


def build_session(
    context: WorkerContext, message: Generation, slot: Slot, comm: Communicator, pieces: Pieces
) -> Session:
    """Build what runs the steps of a slot, over the ledger's current states.

    Args:
        context: The worker.
        message: The generation's.
        slot: This worker's place in its plan.
        comm: Its groups (:func:`connect_ranks`).
        pieces: Of each state: their holders sum its gradient.
    """
    job, states = context.job, context.ledger.current
    lanes, rows = _lanes(context, message.plan, slot)
    place = row_of(rows, slot.rank)
    own, borders = lanes.stages(place), lanes.borders(place)

    def ranks_of(stage: StageName) -> list[int]:
        return [device.rank for device in rows[lanes.row_of[stage]]]

    def tokens(stage: StageName) -> Tokens:
        return job.model.layers[lanes.specs[stage].first_layer].tokens

    def on_exchange() -> None:
        context.faults.reach("exchange", context.ledger.version + 1)

    sharding = StageSharding(
        context.profile, context.layouts, comm, message.plan, slot, states, job.tp_chunks, on_exchange
    )
    trained = [(context.profile.index(name), name) for name, state in states.items() if state.layout.num_trainable]
    gradient_sync = GradientSync(
        comm,
        {index: states[name] for index, name in trained},
        {index: pieces[name] for index, name in trained},
        sharding.arrivals,
    )
    stage_timer = StageTimer(job.device)
    executor = Executor(
        generation=message.generation,
        stages={name: _stage(context, lanes.specs[name], sharding, gradient_sync) for name in own},
        gradient_sync=gradient_sync,
        comm=comm,
        upstream={
            (source, target): sharding.upstream(ranks_of(source), job.device, channel, tokens(target))
            for (source, target), channel in borders.items()
            if target in own
        },
        downstream={
            (source, target): sharding.downstream(ranks_of(target), channel, tokens(target))
            for (source, target), channel in borders.items()
            if source in own
        },
        faults=context.faults,
        stage_timer=stage_timer,
        num_losses=len(loss_units(job.model)),
    )
    return Session(
        generation=message.generation,
        plan=message.plan,
        slot=slot,
        steps=_steps(context, message.plan, slot, comm, lanes),
        comm=comm,
        executor=executor,
        gradient_sync=gradient_sync,
        stage_timer=stage_timer,
        sample_agreement=SampleAgreement(job, message.plan, slot),
        replicas=Replicas(
            comm=comm,
            plan=message.plan,
            pieces=pieces,
            states=states,
            device_name=job.device_name,
            every=job.compare_replicas_every,
        ),
    )


def _lanes(context: WorkerContext, plan: Plan, slot: Slot) -> tuple[PlanLanes, LaneRows]:
    trained = [context.layouts[spec.name].num_trainable > 0 for spec in context.job.model.layers]
    feeds = None if context.planning is None else context.planning.feeds
    return lanes_of(plan, slot.pipeline_index, feeds, trained)


def _allocate(context: WorkerContext, name: str, held: ByteIntervals) -> LayerState:
    job = context.job
    return LayerState(job.layer(name), context.layouts[name], job.optimizer.slots, job.dtype, job.device, held)


def _stage(context: WorkerContext, spec: StageSpec, sharding: StageSharding, gradient_sync: GradientSync) -> Stage:
    job, numbers = context.job, range(spec.first_layer, spec.end_layer)
    states = sharding.gathered or context.ledger.current
    modules = [bind(job.model.layers[number], states, job.device, sharding.tensor_devices) for number in numbers]
    layers = [StageLayer(index=number, module=module) for number, module in zip(numbers, modules, strict=True)]
    make = Stage
    if sharding.gathered:
        make = partial(
            ShardedStage,
            sharded=[sharding.layer(number) for number in numbers],
            reach=context.faults.reach,
            on_summed=gradient_sync.arrived,
        )
    return make(
        job.model,
        layers,
        device=job.device,
        autocast=job.autocast,
        seed=job.seed,
        recomputed_layers=spec.recomputed_layers,
    )


def _steps(context: WorkerContext, plan: Plan, slot: Slot, comm: Communicator, lanes: PlanLanes) -> Steps:
    job, planning = context.job, context.planning
    pipeline = plan.pipelines[slot.pipeline_index]
    if planning is None or context.learning is None:
        template, index = pipeline.template, slot.pipeline_index
        schedule = plan.schedule(index, [_trained_states(context, stage) for stage in template.stages])
        times = stage_times(template, context.profile)
        positions = plan.microbatches(index)[slot.group_index :: template.round_size]
        return ChainSteps(schedule, positions, job.microbatch, index, slot.row_index, times, slot.shard_index)
    placement, sampler = planning.placement(plan, job.microbatch), sampler_of(job)
    assignments = Assignments(
        comm,
        planning.units,
        job.global_batch,
        job.num_steps,
        partial(planning.prepared, placement, sampler),
        context.learning,
        ahead=job.read_ahead + 1,
    )
    return UnitSteps(
        comm=comm,
        assignments=assignments,
        slot=slot,
        lanes=lanes,
        states=partial(_trained_states, context),
        split=plan.schedule_kind is ScheduleKind.ZB_H1,
        times=UnitTimes(lanes, plan, planning.costs, planning.cluster),
    )


def _trained_states(context: WorkerContext, stage: StageSpec) -> list[int]:
    """Return the indices of the states whose gradients are summed for a stage."""
    profile, layouts = context.profile, context.layouts
    used = profile.states(stage.first_layer, stage.end_layer)
    return [profile.index(name) for name in used if layouts[name].num_trainable]


def _installed(message: Generation, started_at: float, regrouped_at: float, bytes_copied: int) -> Installed:
    return Installed(
        generation=message.generation,
        started_at=started_at,
        regrouped_at=regrouped_at,
        installed_at=time.time(),
        bytes_copied=bytes_copied,
    )
