"""What a worker does when a generation begins: regroup, bring its layer states together, be ready for the next step.

The same for the first generation, after a failure, and for a join: they differ in what is already here and in where
the missing states come from (peers, initial values, a checkpoint).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from resilient.comm import Communicator, Group, StoreClient, connect
from resilient.models.layer import Batch
from resilient.pipeline.executor import Executor, StepWork
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.p2p import Channel, Downstream, Upstream
from resilient.pipeline.stage import Stage, StageLayer
from resilient.pipeline.stage_timer import StageTimer
from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import INIT, Generation, Installed
from resilient.runtime.commit import Ledger
from resilient.runtime.generation_guard import GenerationGuard
from resilient.runtime.job import Job
from resilient.state import checkpoint
from resilient.state.layer_state import BufferLayout, LayerState, bind
from resilient.state.peer_copy import copy_states
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import Plan, Slot, schedule_of
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.template import StageSpec


@dataclass(frozen=True, kw_only=True)
class Session:
    """One generation on one worker, ready to train."""

    generation: int
    plan: Plan
    slot: Slot
    comm: Communicator
    executor: Executor
    sync: GradientSync
    stage_timer: StageTimer

    def work(self, step: int, num_targets: int, batch: Callable[[int], Batch]) -> StepWork:
        """Return what the step is for this worker's pipeline; ``batch`` loads a microbatch by position."""
        positions = self.plan.microbatches(self.slot.pipeline_index)
        return StepWork(step=step, num_targets=num_targets, first_position=positions.start, batch=batch)


class Installer:
    """Makes sessions of generations.

    Args:
        job: The job.
        profile: Of its model.
        layouts: Of all its layers.
        ledger: This worker's states.
        fence: Ends connecting and copying when membership changes again.
        faults: Told of the phases.
        host: This machine's address for its peers.
    """

    def __init__(
        self,
        *,
        job: Job,
        profile: ModelProfile,
        layouts: dict[str, BufferLayout],
        ledger: Ledger,
        guard: GenerationGuard,
        faults: Faults,
        host: str,
    ) -> None:
        self._job = job
        self._profile = profile
        self._layouts = layouts
        self._ledger = ledger
        self._guard = guard
        self._faults = faults
        self._host = host
        self._store_client = StoreClient()

    def install(self, message: Generation) -> tuple[Session, Installed]:
        """Enter a generation that has a place for this worker.

        Raises:
            CommunicationError: Membership changed again; the states that are complete stay.
        """
        assert message.rank is not None, "a worker without a place stands by"
        slot = message.plan.slots[message.rank]
        holders = message.plan.holders(self._profile)
        started_at = time.time()
        comm = self._connect(message, holders)
        regrouped_at = time.time()
        self._faults.reach("copy", message.version + 1)
        bytes_copied = self._gather(message, slot, comm)
        self._ledger.start()
        session = self._session(message, slot, holders, comm)
        return session, _installed(message, started_at, regrouped_at, bytes_copied)

    def supply(self, message: Generation) -> Installed:
        """Send what a generation that has no place for this worker needs of its states.

        The groups stay until the worker is told what comes next: what was sent may still be on its way.

        Raises:
            CommunicationError: Membership changed again; the states stay.
        """
        started_at = time.time()
        comm = self._connect(message, message.plan.holders(self._profile))
        regrouped_at = time.time()
        self._faults.reach("copy", message.version + 1)
        copy_states(comm, message.transfers, self._ledger.retained)
        return _installed(message, started_at, regrouped_at, bytes_copied=0)

    def _connect(self, message: Generation, holders: dict[str, tuple[int, ...]]) -> Communicator:
        """Bring the states to the generation's version, and meet its other ranks."""
        assert message.rank is not None
        self._ledger.begin_install(message.version, message.roll_forward)
        self._faults.reach("regroup", message.version + 1)
        summed = [ranks for name, ranks in holders.items() if self._layouts[name].num_trainable]
        groups: list[Group] = [ranks for ranks in dict.fromkeys(summed) if len(ranks) > 1]
        pairs = [(transfer.source, transfer.target) for transfer in message.transfers]
        neighbours = pairwise(message.plan.slots)  # more than these exchange carries only where NCCL is not used
        pairs += [(left.rank, right.rank) for left, right in neighbours if left.pipeline_index == right.pipeline_index]
        comm = connect(
            generation=message.generation,
            rank=message.rank,
            size=len(message.plan.slots),
            groups=groups,
            store_address=message.store_address,
            store_client=self._store_client,
            host=self._host,
            timeout_s=self._job.comm_timeout_s,
            interrupted=self._guard.open(message.generation),
            device=self._job.device,
            num_sources=message.num_sources,
            pairs=pairs,
        )
        self._guard.attach(message.generation, comm)
        return comm

    def _gather(self, message: Generation, slot: Slot, comm: Communicator) -> int:
        """Bring together all states the slot needs; return the bytes that came from peers."""
        ledger = self._ledger
        needed = slot.states(self._profile)
        ledger.keep(needed)
        missing = {name: self._allocate(name) for name in needed if name not in ledger.current}
        copied = {transfer.state for transfer in message.transfers if transfer.target == slot.rank}
        made = [state for name, state in missing.items() if name not in copied and state.buffer.numel()]
        if message.source == INIT:
            for state in made:
                state.initialize(self._job.seed)
        elif made:
            checkpoint.load(message.source, made)
        num_bytes = copy_states(comm, message.transfers, {**ledger.retained, **ledger.current, **missing})
        ledger.current.update(missing)
        return num_bytes

    def _allocate(self, name: str) -> LayerState:
        job = self._job
        return LayerState(job.layer(name), self._layouts[name], job.optimizer.slots, job.dtype, job.device)

    def _session(
        self, message: Generation, slot: Slot, holders: dict[str, tuple[int, ...]], comm: Communicator
    ) -> Session:
        job, states = self._job, self._ledger.current
        template = message.plan.pipelines[slot.pipeline_index].template
        num_rows, num_stages = len(template.rows), len(template.stages)
        indices = range(slot.row_index, num_stages, num_rows)
        stages = {index: self._stage(spec) for index, spec in zip(indices, slot.stages, strict=True)}
        first_rank = slot.rank - slot.row_index
        ranks = [first_rank + stage % num_rows for stage in range(num_stages)]
        upstream = {
            stage: Upstream(comm, ranks[stage - 1], job.device, Channel(stage, num_stages))
            for stage in indices
            if stage > 0 and ranks[stage - 1] != slot.rank
        }
        downstream = {
            stage: Downstream(comm, ranks[stage + 1], Channel(stage + 1, num_stages))
            for stage in indices
            if stage < num_stages - 1 and ranks[stage + 1] != slot.rank
        }
        trained = {name: state for name, state in states.items() if state.layout.num_trainable}
        index_of = {name: self._profile.index(name) for name in trained}
        sync = GradientSync(
            comm,
            {index_of[name]: state for name, state in trained.items()},
            {index_of[name]: holders[name] for name in trained},
        )
        stage_timer = StageTimer(job.device, message.plan.pipelines[slot.pipeline_index].num_microbatches)
        executor = Executor(
            schedule=self._schedule(message.plan, slot),
            row=slot.row_index,
            generation=message.generation,
            stages=stages,
            sync=sync,
            comm=comm,
            upstream=upstream,
            downstream=downstream,
            faults=self._faults,
            stage_timer=stage_timer,
        )
        return Session(
            generation=message.generation,
            plan=message.plan,
            slot=slot,
            comm=comm,
            executor=executor,
            sync=sync,
            stage_timer=stage_timer,
        )

    def _stage(self, spec: StageSpec) -> Stage:
        job, states = self._job, self._ledger.current
        layers = [
            StageLayer(index=layer, module=bind(job.model.layers[layer], states, job.device))
            for layer in range(spec.first_layer, spec.end_layer)
        ]
        return Stage(
            job.model,
            layers,
            is_last=spec.end_layer == len(job.model.layers),
            device=job.device,
            autocast=job.autocast,
            seed=job.seed,
            checkpointing=spec.checkpointing,
        )

    def _schedule(self, plan: Plan, slot: Slot) -> Schedule:
        pipeline = plan.pipelines[slot.pipeline_index]
        states = [
            [
                self._profile.index(name)
                for name in self._profile.states(stage.first_layer, stage.end_layer)
                if self._layouts[name].num_trainable
            ]
            for stage in pipeline.template.stages
        ]
        return schedule_of(self._job.kind, pipeline.template, pipeline.num_microbatches, states)


def _installed(message: Generation, started_at: float, regrouped_at: float, bytes_copied: int) -> Installed:
    return Installed(
        generation=message.generation,
        started_at=started_at,
        regrouped_at=regrouped_at,
        installed_at=time.time(),
        bytes_copied=bytes_copied,
    )
