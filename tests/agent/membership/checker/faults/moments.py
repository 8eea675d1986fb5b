"""Moments at which faults are worst: when some workers are further than others."""

from __future__ import annotations

from enum import Enum

from tests.agent.membership.checker.fabric import Fabric
from tests.agent.membership.checker.nodes import Node
from tests.agent.membership.checker.worker import STEPPING, At
from tests.agent.membership.checker.world import World

_TRAINING = (*STEPPING, At.LAST_DONE)


class Moment(Enum):
    """A moment."""

    ANY = "any"
    INSTALLING = "some have installed the generation, others not"
    COPYING = "copies are still to be sent"
    PASSING = "some have passed the barrier, others not"
    FIRST_STEP = "the same, in the first step of a generation that is not the first"
    SAVED = "some have passed the barrier, saved that step and said so, others not"
    LEAVING = "copies are still to be sent of what only one stays with"
    LAST_STEP = "some have done the last step, and there is no checkpoint of it"
    ENDING = "the last checkpoint is being written"


def targets(world: World, moment: Moment) -> list[Node]:
    """Return the nodes to be hit at a moment, none if it is not now."""
    alive = [node for node in world.nodes.values() if node.is_alive]
    if moment is Moment.ANY:
        return alive
    if not world.fabrics:
        return []
    fabric = world.fabrics[max(world.fabrics)]
    if moment is Moment.INSTALLING:
        return alive if 0 < len(fabric.installed) < fabric.num_ranks else []
    if moment is Moment.COPYING:
        return _senders(fabric)
    if moment is Moment.LEAVING:
        return _who_holds_with_a_leaver(fabric, alive)
    if moment is Moment.LAST_STEP:
        done = [node for node in alive if any(worker.at is At.LAST_DONE for worker in node.workers)]
        return done if world.last_path not in world.disk.manifests else []
    if moment is Moment.ENDING:
        return [node for node in alive if any(part.is_asked for worker in node.workers for part in worker.writing)]
    return _ahead(fabric, moment)


def _senders(fabric: Fabric) -> list[Node]:
    unsent = {transfer.source for place, transfer in enumerate(fabric.transfers) if place not in fabric.sent}
    unsent = {rank for rank in unsent if rank >= len(fabric.slots)} or unsent  # without a place, they are rare
    return [fabric.members[rank].node for rank in sorted(unsent) if fabric.members[rank].node.is_alive]


def _who_holds_with_a_leaver(fabric: Fabric, alive: list[Node]) -> list[Node]:
    held = {node: {name for worker in node.workers for name in (*worker.states, *worker.retained)} for node in alive}
    unsent = {transfer.state for place, transfer in enumerate(fabric.transfers) if place not in fabric.sent}
    unsent &= {name for node in alive if node.is_leaving for name in held[node]}
    return [node for node in alive if not node.is_leaving and held[node] & unsent]


def _ahead(fabric: Fabric, moment: Moment) -> list[Node]:
    workers = [worker for worker in fabric.members.values() if worker.fabric is fabric and worker.at in _TRAINING]
    newest = max((worker.version for worker in workers), default=0)
    ahead = [worker for worker in workers if worker.version == newest and worker.node.is_alive]
    if len(ahead) == len(workers):
        return []
    if moment is Moment.FIRST_STEP and (fabric.number == 1 or newest != fabric.version + 1):
        return []
    if moment is Moment.SAVED:
        ahead = [worker for worker in ahead if worker.saved_step == newest and not worker.node.up]
    return [worker.node for worker in ahead]
