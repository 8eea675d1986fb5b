"""From one generation to the next: ask everybody for a new one, agree, publish. Part of the membership machine."""

from __future__ import annotations

from collections.abc import Mapping

from resilient.agent.membership.agreement import Agreement
from resilient.agent.membership.endings import Endings
from resilient.agent.membership.events import PreparePlans, Send, WorkerId
from resilient.agent.membership.forming import NextGeneration, describe, form, message_for
from resilient.agent.membership.members import Member, available
from resilient.agent.membership.saving import Parts
from resilient.agent.membership.speeds import slowdowns
from resilient.agent.membership.state import EXIT_FAILED, EXIT_INTERRUPTED, Change, Interruption, Phase
from resilient.errors import StateLostError
from resilient.protocol.messages import Regroup, WorkerProgress
from resilient.templates.common.words import counted
from resilient.templates.search.template_sizes import TooFewNodes


class Changes(Endings):
    """Changes the membership."""

    def _await_plans(self, member: Member) -> None:
        """Keep a node from being planned with, as long as a plan for one node more would have to be computed first.

        Templates for a number of nodes never reached before can take seconds, for which neither a recovery nor the
        heartbeats may wait.
        """
        live = sum(other.is_up and not other.leaving for other in self.members.values())
        num_nodes = max(live, self._expected) if self.phase is Phase.STARTING else live
        member.lacks_plans = num_nodes > self._planned_for
        if num_nodes > self._asked_plans_for:
            self._ask_for_plans(num_nodes)

    def _ask_for_plans(self, num_nodes: int) -> None:
        assert self._problem is not None
        self._asked_plans_for = max(self._asked_plans_for, num_nodes)
        self._out.append(PreparePlans(problem=self._problem, num_nodes=num_nodes))

    def _take_plans(self, num_nodes: int) -> None:
        """Plan with as many of the nodes that waited for it as the plans that are ready allow."""
        self._planned_for = max(self._planned_for, num_nodes)
        num_ready = len(available(self.members.values()))
        for member in self.members.values():
            if member.lacks_plans and not member.leaving and num_ready < self._planned_for:
                member.lacks_plans = False
                num_ready += 1

    def _ask_for_boundary(self) -> None:
        if self._interruption is not None:
            self._begin(at_boundary=True, cause="interruption")
            return
        joining = [node for node in available(self.members.values()) if not self.members[node].admitted]
        leaving = [node for node in sorted(self.members) if self.members[node].leaving]
        if joining or leaving:
            self._record("boundary", generation=self.generation + 1, joining=joining, leaving=leaving)
            self._begin(at_boundary=True, cause="join" if joining else "leave")

    def _fail(self, node: int, error: str, traceback: str = "") -> None:
        """End the job because its own code failed, after saving what it has done so far."""
        if self._failed:
            return  # others fail of the same, or end because they were told to
        member = self.members.get(node)
        if self.plan is not None and member is not None and not member.admitted:
            self._record("node_lost", node=node, cause=f"cannot join: {error}")
            self._dismiss(member, f"cannot join: {error}", exit_code=EXIT_FAILED)
            return
        self._record("failed", node=node, error=error, traceback=traceback)
        self._failed = f"node {node}: {error}"
        if self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING) and self._placed():
            self._begin(at_boundary=False, cause="failure")
        elif self.phase is not Phase.SAVING:
            self._stop(EXIT_FAILED, self._failed, self._newest_path())

    def _interrupt(self, reason: str) -> None:
        """End the job after the running step, with a checkpoint; at once when that is asked for again."""
        training = self.phase in (Phase.INSTALLING, Phase.RUNNING, Phase.AGREEING, Phase.SAVING)
        if self._interruption is not None or not training:
            twice = "twice " if self._interruption is not None else ""
            self._stop(EXIT_INTERRUPTED, f"interrupted {twice}({reason}){self._how_to_resume()}", self._newest_path())
            return
        grace_s = self.settings.grace_s
        self._interruption = Interruption(
            reason=f"interrupted ({reason})", step_deadline=self._now + grace_s / 2, deadline=self._now + grace_s
        )
        self._needed_nodes = max(self._needed_nodes, self.settings.num_nodes)
        if self._change is not None:
            self._change.deadline = min(self._change.deadline, self._interruption.step_deadline)
        self._record("interrupted", reason=reason, grace_s=grace_s)

    def _end_interrupted_in_time(self, interruption: Interruption) -> None:
        """Give up the running step, and later the checkpoint, when they take too long."""
        if self._now >= interruption.deadline:
            reason = f"{interruption.reason}; the checkpoint was not written within {self.settings.grace_s:g} s"
            self._stop(EXIT_INTERRUPTED, f"{reason}{self._how_to_resume()}", self._newest_path())
        elif self._change is not None and self._change.at_boundary and self._now >= interruption.step_deadline:
            self._begin(at_boundary=False, cause="interruption")

    def _begin_failure(self, nodes: list[int], cause: str) -> None:
        change = self._change
        if change is None or change.at_boundary:
            self._record("detected", generation=self.generation + 1, nodes=nodes, cause=cause, step=self._step)
            self._begin(at_boundary=False, cause="failure")
        assert self._change is not None
        self._change.lost_nodes |= bool(nodes)

    def _begin(self, *, at_boundary: bool, cause: str) -> None:
        """Ask everybody for a new generation, or for the same one at once instead of at the boundary."""
        change, patience_s = self._change, self.settings.report_timeout_s
        if self._interruption is not None:  # who does not report must leave the others time for the checkpoint
            patience_s = min(patience_s, (self._interruption.deadline - self._now) / 2)
        self._change = Change(
            generation=self.generation + 1,
            at_boundary=at_boundary,
            cause=cause,
            began=self._now,
            deadline=self._now + patience_s,
            reports=change.reports if change is not None else {},
        )
        self.phase, self._saving, self._sources = Phase.AGREEING, None, set()
        self._send_all(Regroup(generation=self._change.generation, at_boundary=at_boundary))

    def _publish_next(self, agreement: Agreement) -> None:
        """Publish the generation that was agreed on, or stop if there can be none."""
        assert self._problem is not None
        change = self._change
        ending = self._failed or (self._interruption.reason if self._interruption is not None else "")
        if ending:
            self._save_and_stop(agreement, ending)
            return
        if change is not None and change.cause == "failure":
            self._suspicions = 0 if change.lost_nodes else self._suspicions + 1
        nodes = available(self.members.values())
        if self.plan is not None and change is not None:
            self._observe_speeds(change.reports)
        try:
            formed = form(self._problem, self.plan, self.members, agreement, self._checkpoints, self._slowdowns)
        except TooFewNodes as error:
            self._needed_nodes = error.needed
            live = f"{counted(len(nodes), 'node')} {_be(len(nodes))} live ({nodes})"
            self._save_and_stop(agreement, f"{live}, {error.needed} {_be(error.needed)} needed")
        except StateLostError as error:
            self._save_and_stop(agreement, str(error))
        except ValueError as error:
            self._stop(EXIT_FAILED, str(error), self._newest_path())
        else:
            if self._suspicions > self.settings.max_suspicions:
                self._save_and_stop(agreement, _why_in_vain(change))
            else:
                self._publish(formed, agreement.begun)

    def _observe_speeds(self, reports: Mapping[WorkerId, WorkerProgress]) -> None:
        """Take in what the workers measured under the plan that ends; what is not measured anew stays known."""
        assert self._problem is not None
        assert self.plan is not None
        stage_ms = {worker: progress.stage_ms for worker, progress in reports.items()}
        self._slowdowns.update(slowdowns(self._problem.profile, self.plan, stage_ms))

    def _publish(self, formed: NextGeneration, begun: bool) -> None:
        change = self._change
        cause = change.cause if change is not None else ("resume" if self.settings.resume else "start")
        self._redoing = begun or (self._redoing and formed.version <= self._version)
        self.generation += 1
        self.phase, self._change, self.plan = Phase.INSTALLING, None, formed.plan
        self._version, self._parts = formed.version, Parts()
        self._installed, self._finished, self._sources = set(), set(), set(formed.senders)
        self._advanced_at = self._now
        self._needed_nodes = formed.needed_nodes
        if formed.lost:
            self.outcome = None  # the job goes back behind what was seen
            text = f"nobody holds {', '.join(formed.lost)}: everybody loads {formed.source}"
            self._record("output", text=text)
        elif formed.roll_forward is not None:
            self.outcome = formed.roll_forward
        self._let_go()
        description = describe(formed, self.members, self._slowdowns)
        self._record("generation", cause=cause, lost_steps=int(self._redoing), **description)
        for worker in self._ready_workers():
            self.members[worker[0]].admitted = True
            message = message_for(worker, self.generation, formed, self.members)
            self._out.append(Send(node=worker[0], local_rank=worker[1], message=message))
        self._ask_for_plans(len(available(self.members.values())))

    def _let_go(self) -> None:
        """Dismiss the nodes that leave, once nothing is taken from them any more."""
        kept = {node for node, _ in self._sources}
        for member in list(self.members.values()):
            if member.leaving and member.node not in kept and not self._is_placed(member.node):
                self._dismiss(member, "left")


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _why_in_vain(change: Change | None) -> str:
    """Say why the same members are regrouped again and again."""
    if change is None or not change.stalled_s:
        return "communication keeps failing between live nodes; check the network"
    return (
        f"no step is done within {change.stalled_s:.0f} s, and yet all workers answer; raise the Trainer's "
        "comm_timeout_s if steps may take that long"
    )
