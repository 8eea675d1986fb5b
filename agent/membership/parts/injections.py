"""Failures that somebody wants to happen."""

from __future__ import annotations

from resilient.agent.membership.parts.context import Context
from resilient.protocol.messages import Arm, Injection, Kill


class Injections:
    """Has failures caused where they are wanted, those of nodes that are not up yet as soon as they are."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._waiting = list(context.settings.injections)

    def cause(self, injection: Injection) -> None:
        """Have a failure caused by the agent if it is to happen at once, by the workers if in a step or phase."""
        member = self._context.members.get(injection.node)
        if member is None or not member.is_up:
            self._waiting.append(injection)
        elif injection.at_step is None and injection.at_phase is None:
            self._context.tell(injection.node, Kill(injection=injection))
        elif injection.worker_only:
            self._context.send((injection.node, injection.worker), Arm(injection=injection))
        else:
            self._context.send_node(injection.node, Arm(injection=injection))

    def note_up(self, node: int) -> None:
        """Cause what waits for a node that has just come up."""
        due = [injection for injection in self._waiting if injection.node == node]
        self._waiting = [injection for injection in self._waiting if injection.node != node]
        for injection in due:
            self.cause(injection)
