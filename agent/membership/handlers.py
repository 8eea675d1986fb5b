"""What is done about each stimulus; which handler is called in which phase, the machine's table says."""

from __future__ import annotations

from resilient.agent.membership.ends import Ends
from resilient.agent.membership.job_parts import JobParts
from resilient.agent.membership.lifecycle import Lifecycle
from resilient.agent.membership.next_generation.members import Member, WorkerId, log_path
from resilient.agent.membership.parts.context import EXIT_DONE, EXIT_FAILED, TRAINING, Phase
from resilient.agent.membership.parts.events import (
    FailureWanted,
    Interrupted,
    ManifestFailed,
    ManifestWritten,
    NodeBack,
    NodeConnected,
    NodeCutOff,
    NodeLeaving,
    NodeLost,
    PlansPrepared,
    StopWanted,
    Tick,
    WorkerEnded,
    WorkerSaid,
)
from resilient.agent.membership.parts.stalls import ADVANCES
from resilient.agent.membership.regrouping import Regrouping
from resilient.common.processes import signal_name
from resilient.errors import CheckpointError
from resilient.protocol.messages import (
    Dropped,
    Failed,
    Finished,
    Installed,
    Note,
    NotSaved,
    Output,
    Ready,
    Report,
    Saved,
    Shutdown,
    StepDone,
    Suspect,
    Welcome,
)
from resilient.state.witnesses import worker_of
from resilient.templates.common.words import listed


class Handlers:
    """Tells the parts and the lifecycle what happened. A method of it takes a stimulus, or a message and its sender."""

    def __init__(self, parts: JobParts) -> None:
        self._parts = parts
        self._context = parts.context
        self._ends = Ends(parts)
        self._regrouping = Regrouping(parts, self._ends)
        self._lifecycle = Lifecycle(parts, self._ends, self._regrouping)

    def ignore(self, *happened: object) -> None:
        """Do nothing; the machine's table says why."""

    # ------------------------------------------------------------ nodes

    def on_node_connected(self, event: NodeConnected) -> None:
        settings, context = self._context.settings, self._context
        context.record("node_connected", node=event.node, host=event.host, pid=event.pid, domain=event.domain)
        member = context.add(event)
        unlike = "" if self._parts.is_too_early(member) else self._parts.likeness.why_unlike(event.node, {})
        if unlike:
            self._lifecycle.fail(event.node, unlike)
            return
        context.tell(
            event.node,
            Welcome(
                node=event.node,
                script=settings.script,
                arguments=settings.arguments,
                directory=settings.directory,
                run_directory=settings.run_directory,
                heartbeat_s=settings.heartbeat_s,
                orphan_s=settings.orphan_s,
                num_nodes=settings.num_nodes,
                trace=settings.trace,
                planner=settings.planner,
                schedule=settings.schedule,
                tp_chunks=settings.tp_chunks,
                network=settings.network,
                tp_degree=settings.tp_degree,
                sharding=settings.sharding,
                is_planned=self._parts.job.is_known,
            ),
        )
        if (wanted := settings.workers_per_node) != event.num_workers:
            got = f"got {event.num_workers}; start this agent with --workers {wanted}"
            self._parts.refuse(member, f"workers per node must be {wanted} in this job, {got}")

    def on_late_node(self, event: NodeConnected) -> None:
        self.on_node_connected(event)
        if event.node in self._context.members:
            self._parts.dismiss(self._context.members[event.node], "the job is over")

    def send_away(self, event: NodeConnected) -> None:
        self._context.tell(event.node, Shutdown(exit_code=EXIT_DONE, reason="the job is over"))

    def on_node_cut_off(self, event: NodeCutOff) -> None:
        """Wait for it, unless the others are leaving a step that they could not do, maybe because of it."""
        member, change = self._context.members.get(event.node), self._parts.change
        if member is None:
            return
        member.cut_off = True
        if change is not None and not change.at_boundary:
            self._lose_who_is_cut_off()

    def _lose_who_is_cut_off(self) -> None:
        for member in list(self._context.members.values()):
            if member.cut_off and self._parts.suspicions.may_concern(member.node):
                self._lifecycle.lose(member.node, "node lost")

    def on_node_back(self, event: NodeBack) -> None:
        if event.node in self._context.members:
            self._context.members[event.node].cut_off = False

    def on_node_lost(self, event: NodeLost) -> None:
        self._lifecycle.lose(event.node, event.cause)

    def on_early_leave(self, event: NodeLeaving) -> None:
        member = self._context.members.get(event.node)
        if member is not None and not member.leaving:
            self._parts.start_up.expect_one_less(member)
        self.on_node_leaving(event)

    def on_node_leaving(self, event: NodeLeaving) -> None:
        member = self._context.members.get(event.node)
        if member is None or member.leaving:
            return
        self._context.record("node_leaving", node=event.node, reason=event.reason)
        self._context.note_leaving(member)
        if not self._parts.is_needed(event.node):
            self._parts.dismiss(member, "left")
        self._lifecycle.proceed()

    def on_worker_ended_early(self, event: WorkerEnded) -> None:
        """Before the job began, a script may end that does not train: then none may."""
        member = self._context.members.get(event.node)
        if member is not None and event.exit_code == 0 and not member.ready:
            member.done.add(event.local_rank)
            self._parts.start_up.note_ended()
            self._lifecycle.proceed()
        else:
            self.on_worker_ended(event)

    def on_worker_ended(self, event: WorkerEnded) -> None:
        worker = (event.node, event.local_rank)
        if event.node not in self._context.members:
            return
        if event.exit_code < 0:
            cause = f"worker killed by {signal_name(-event.exit_code)}"
            self._lifecycle.crash(worker, -event.exit_code, cause)
        elif event.exit_code > 0:
            cause = f"worker ended with exit code {event.exit_code}"
            log = log_path(self._context.settings.run_directory, worker)
            kind = event.error.partition(":")[0] or cause
            self._lifecycle.err(event.node, event.error or f"a {cause}; see {log}", kind)
        else:
            cause = "a worker ended before the job was finished"
            self._lifecycle.fail(event.node, f"{cause}; the script must reach Trainer.fit's end")
        self._lifecycle.lose(event.node, cause)

    def on_worker_done(self, event: WorkerEnded) -> None:
        """After the last step every script is to end by itself."""
        member = self._context.members.get(event.node)
        if member is None or event.exit_code != 0:
            self.on_worker_ended(event)  # of one that is gone, nothing comes
            return
        member.done.add(event.local_rank)
        if member.is_done:
            self._parts.dismiss(member, "the job is finished")
            self._ends.stop_when_all_are_gone()

    # ------------------------------------------------------------ wishes and answers of the launcher

    def on_failure_wanted(self, event: FailureWanted) -> None:
        self._parts.injections.cause(event.injection)

    def on_plans_prepared(self, event: PlansPrepared) -> None:
        self._parts.job.take(event.num_nodes, event.choice)
        self._lifecycle.proceed()

    def on_interrupted(self, event: Interrupted) -> None:
        self._lifecycle.interrupt(event)
        self._lifecycle.proceed()

    def on_stop_wanted(self, event: StopWanted) -> None:
        reason = f"{event.reason}{self._parts.how_to_resume}"
        self._ends.stop(event.exit_code, reason, self._parts.checkpoints.newest_path)

    def on_manifest_written(self, event: ManifestWritten) -> None:
        self._parts.checkpoints.note_written(event.path)
        self._ends.end_written()
        self._finish_if_saved()

    def on_manifest_failed(self, event: ManifestFailed) -> None:
        self._ends.do_without_manifest(event)

    # ------------------------------------------------------------ time

    def on_tick_while_starting(self, event: Tick) -> None:
        for node in self._parts.start_up.too_late():
            self._lifecycle.evict(node, f"not ready within {self._context.settings.start_timeout_s:g} s; see its log")
        self._hear_guests()
        self._lifecycle.proceed()

    def on_tick_while_training(self, event: Tick) -> None:
        parts, lifecycle = self._parts, self._lifecycle
        if parts.ending.interruption is not None:
            lifecycle.end_interrupted_in_time(parts.ending.interruption)
        self._regrouping.begin_stall()
        self._evict_late_joiners()
        if parts.change is not None and not parts.change.at_boundary:
            for node, cause in parts.change.silent(parts.awaiting).items():
                lifecycle.evict(node, cause)
        if parts.phase is Phase.RUNNING or (parts.change is not None and parts.change.waits_for_nodes):
            lifecycle.proceed()
        if parts.phase in TRAINING:
            parts.checkpoints.try_again()

    def _evict_late_joiners(self) -> None:
        limit_s = self._context.settings.start_timeout_s
        for member in list(self._context.members.values()):
            if not member.is_up and self._context.now - member.connected_at >= limit_s:
                log = log_path(self._context.settings.run_directory, (member.node, 0))
                self._lifecycle.evict(member.node, f"not ready within {limit_s:g} s of joining; see {log}")

    def on_tick_while_saving(self, event: Tick) -> None:
        parts, lifecycle = self._parts, self._lifecycle
        if parts.ending.interruption is not None:
            lifecycle.end_interrupted_in_time(parts.ending.interruption)
        last = parts.last_checkpoint
        if last is not None and self._context.now >= last.deadline:
            self._ends.stop_resumable(f"{last.reason}; the checkpoint of step {last.step} was not written in time")
        if parts.phase is Phase.SAVING:
            parts.checkpoints.try_again()

    # ------------------------------------------------------------ messages of workers

    def on_worker_said(self, event: WorkerSaid) -> None:
        """Note that the job advances; the message itself has its own row in the table."""
        if isinstance(event.message, ADVANCES):
            self._parts.stalls.advance()

    def on_ready(self, message: Ready, worker: WorkerId) -> None:
        parts = self._parts
        lifecycle, member = self._lifecycle, self._context.members[worker[0]]
        if worker[1] in member.ready:
            return  # heard twice it would be held back for plans, with a place in the generation in force
        if parts.is_too_early(member):
            parts.start_up.put_off(message, worker)
            return
        if not parts.job.is_known:
            try:
                parts.job.accept(message.job)
            except (ValueError, CheckpointError) as error:
                self._ends.stop(EXIT_FAILED, str(error), None)
                return
        reason = parts.likeness.why_unlike(member.node, message.job.alike) or parts.job.why_too_small(message.job)
        if reason:
            lifecycle.fail(member.node, reason)
        else:
            self._note_ready(message, member, worker[1])
        self._hear_guests()

    def _note_ready(self, message: Ready, member: Member, local_rank: int) -> None:
        parts = self._parts
        member.ready[local_rank] = parts.job.shared(message)
        if member.is_up:
            member.up_at = self._context.now
            parts.job.hold_back(member, parts.start_up.expected if parts.phase is Phase.STARTING else 0)
            pids = [member.ready[local_rank].pid for local_rank in range(member.num_workers)]
            self._context.record("node_ready", node=member.node, pids=pids, device=message.device)
            parts.injections.note_up(member.node)
            self._lifecycle.proceed()

    def _hear_guests(self) -> None:
        """Hear the guests that were put off, if they need not wait any more; who still has to is put off again."""
        for message, worker in self._parts.start_up.take_put_off():
            if worker[0] in self._context.members and self._parts.phase is not Phase.STOPPED:
                self.on_ready(message, worker)

    def on_suspect(self, message: Suspect, worker: WorkerId) -> None:
        parts = self._parts
        if message.generation != self._context.generation:
            return
        where = ""
        if message.peer is not None:
            peer = parts.participants.worker_at(message.peer)
            parts.suspicions.suspect(worker, peer, is_first=parts.change is None or parts.change.at_boundary)
            where = f" between nodes {worker[0]} and {peer[0]}"
        self._lose_who_is_cut_off()  # by the coordinator and by its peers
        self._regrouping.begin_failure([], f"communication{where} failed: {message.reason}")

    def on_dropped(self, message: Dropped, worker: WorkerId) -> None:
        """Do without all the odd copies that one holder tells of: the others' comparison may be cut short by this."""
        change = self._parts.change
        if message.generation != self._context.generation:
            return
        odd = {worker_of(number): list(states) for number, states in message.odd.items()}
        new = {holder: odd[holder] for holder in sorted(odd) if change is None or holder not in change.damaged}
        if not new:
            return
        for (node, local_rank), states in new.items():
            self._context.record("replica_dropped", node=node, local_rank=local_rank, states=states, step=message.step)
        nodes = list(dict.fromkeys(node for node, _ in new))
        layers = dict.fromkeys(name for states in new.values() for name in states)
        where = f"copies on node{'s' if len(nodes) > 1 else ''} {listed(nodes)}"
        cause = f"{where} differed from those of most others after step {message.step}: {', '.join(layers)}"
        self._regrouping.begin_failure([], cause)
        assert self._parts.change is not None
        self._parts.change.note_damage(new)

    def on_report(self, message: Report, worker: WorkerId) -> None:
        change = self._parts.change
        if change is not None and message.generation == change.generation:
            change.hear(worker, message)
            self._lifecycle.proceed()

    def on_installed(self, message: Installed, worker: WorkerId) -> None:
        if message.generation != self._context.generation:
            return
        self._context.record(
            "installed",
            node=worker[0],
            local_rank=worker[1],
            started_at=message.started_at,
            regrouped_at=message.regrouped_at,
            installed_at=message.installed_at,
            bytes_copied=message.bytes_copied,
        )
        self._parts.participants.note_installed(worker)
        if self._parts.phase is Phase.INSTALLING:
            self._lifecycle.proceed()

    def on_step_done(self, message: StepDone, worker: WorkerId) -> None:
        if message.generation != self._context.generation:
            return
        self._parts.suspicions.note_step()
        self._parts.own_errors.note_step()
        self._parts.note_step(message)

    def on_saved(self, message: Saved, worker: WorkerId) -> None:
        """A part of a checkpoint on the way, or of the last one."""
        parts = self._parts
        if parts.last_checkpoint is None:
            parts.checkpoints.add(message, worker[0], parts.job.spec)
        else:
            parts.last_checkpoint.hear(message, worker)
            self._lifecycle.proceed()

    def on_not_saved(self, message: NotSaved, worker: WorkerId) -> None:
        self._parts.checkpoints.note_missed(message.step, worker[0], message.error)

    def on_finished(self, message: Finished, worker: WorkerId) -> None:
        parts = self._parts
        if message.generation != self._context.generation:
            return
        parts.participants.note_finished(worker)
        self._finish_if_saved()

    def _finish_if_saved(self) -> None:
        parts = self._parts
        num_steps = parts.job.spec.num_steps
        is_saved = parts.progress.step == num_steps and parts.checkpoints.has(num_steps)
        if parts.phase in TRAINING and is_saved and parts.participants.is_finished:
            self._ends.finish()  # otherwise somebody died who had still to tell: the survivors are asked

    def on_failed(self, message: Failed, worker: WorkerId) -> None:
        takes_part = self._parts.participants.takes_part(worker)
        if takes_part and not message.is_sound:
            self._parts.ending.note_damage()
        if takes_part and message.damaged:
            self._parts.checkpoints.note_damaged(message.damaged, message.instead)
        if message.kind:
            self._lifecycle.err(worker[0], message.error, message.kind, message.traceback)
        else:
            self._lifecycle.fail(worker[0], message.error, message.traceback)

    def on_output(self, message: Output, worker: WorkerId) -> None:
        self._context.record("output", text=message.text, worker="{}/{}".format(*worker) if message.is_logged else "")

    def on_note(self, message: Note, worker: WorkerId) -> None:
        self._context.record("note", name=message.name, value=message.value)
