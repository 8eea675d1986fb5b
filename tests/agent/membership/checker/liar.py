"""Somebody who says what no worker would: to a copy of the machine, which has to stand that."""

from __future__ import annotations

import copy
import math
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from resilient.agent.membership.machine import Membership
from resilient.agent.membership.next_generation.members import WorkerId
from resilient.agent.membership.parts.context import Phase
from resilient.agent.membership.parts.events import NodeLeaving, Record, WorkerEnded, WorkerSaid
from resilient.protocol.messages import Failed, FromWorkerMessage, Ready
from resilient.templates.common.byte_intervals import ByteIntervals
from tests.agent.membership.simulated import job_spec

KINDS = typing.get_args(FromWorkerMessage)


class Liar:
    """Makes up messages of the right types.

    Args:
        random: Decides everything.
        machine: That is lied to: numbers and names are often those that it knows.
    """

    def __init__(self, random: Random, machine: Membership) -> None:
        self._random, self._machine = random, machine

    def message(self, kind: type) -> FromWorkerMessage:
        """Make up a message of a kind."""
        return self._struct(kind)

    def _struct(self, kind: type) -> Any:
        if kind is Ready:
            return self._ready()
        hints = typing.get_type_hints(kind)
        return kind(**{name: self._value(hints[name]) for name in kind.__struct_fields__})  # pyright: ignore

    def _ready(self) -> Ready:
        known = self._machine.parts.job.is_known
        spec = self._machine.parts.job.spec if known and self._random.random() < 0.7 else job_spec()
        changes = {name: self._value(kind) for name, kind in typing.get_type_hints(type(spec)).items() if kind is int}
        some = {name: value for name, value in changes.items() if self._random.random() < 0.2}
        try:
            job = replace(spec, **some)
        except ValueError:  # it could not even be said
            job = spec
        return Ready(job=job, store_address=self._value(str), pid=self._value(int), device=self._value(str))

    def _value(self, kind: Any) -> Any:
        pick, parts = self._random.choice, typing.get_args(kind)
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return self._struct(kind)
        if kind is ByteIntervals:
            start = pick((0, 1, 8, 1 << 40))
            return ByteIntervals.of(start, start + pick((0, 1, 8, 1 << 40)))
        match typing.get_origin(kind) or kind:
            case types.UnionType | typing.Union:
                return self._value(pick(parts))
            case builtin if builtin is tuple:
                return tuple(self._value(parts[0]) for _ in range(self._random.randrange(3)))
            case builtin if builtin is dict:
                pairs = range(self._random.randrange(3))
                return {self._value(parts[0]): self._value(parts[1]) for _ in pairs}
            case builtin if builtin is bool:
                return pick((True, False))
            case builtin if builtin is int:
                return pick((*self._known_numbers(), -1, 0, 1, 2, 99, -(2**63), 2**63 - 1))
            case builtin if builtin is float:
                return pick((0.0, 1.5, -1.0, 1e308, math.inf, -math.inf, math.nan))
            case builtin if builtin is str:
                return pick((*self._known_names(), "", "x", "../../x", "/etc/x", "a/../b", "\0", "step-00000001"))
            case builtin if builtin in (None, types.NoneType):
                return None
        raise TypeError(f"kind must be one that can be made up, got {kind}")

    def _known_numbers(self) -> Iterator[int]:
        yield from (self._machine.generation, self._machine.generation + 1, self._machine.parts.progress.step)
        yield self._machine.parts.progress.step + 1

    def _known_names(self) -> Iterator[str]:
        if self._machine.parts.job.is_known:
            yield from (layer.name for layer in self._machine.parts.job.spec.profile.layers[:2])
        for checkpoint in self._machine.parts.checkpoints.whole:
            yield checkpoint.path


def known(machine: Membership) -> str:
    """Return all that a machine knows, but for the time and for what it would tell of the last stimuli."""
    seen: dict[int, int] = {}

    def told(thing: Any) -> Any:
        if isinstance(thing, dict):
            return [(told(key), told(value)) for key, value in thing.items()]
        if isinstance(thing, list | tuple):
            return [told(each) for each in thing]
        if isinstance(thing, set | frozenset):
            return sorted(map(repr, thing))
        if not hasattr(thing, "__dict__") or isinstance(thing, type | Callable):
            return repr(thing)
        if id(thing) in seen:
            return seen[id(thing)]
        seen[id(thing)] = len(seen)
        return [type(thing).__name__, told({k: v for k, v in vars(thing).items() if k not in ("_now", "_out", "_one")})]

    return repr(told(machine.parts))


def attack(machine: Membership, now: float, random: Random) -> None:
    """Have a random member's worker say something random, to a copy of the machine."""
    if machine.phase is Phase.STOPPED or not machine.members:
        return
    victim = copy.deepcopy(machine)
    member = victim.members[random.choice(sorted(victim.members))]
    if random.random() < 0.1:
        _end(victim, now, member.node, random)
        return
    worker = (member.node, random.choice((*range(member.num_workers), -1, 99)))
    message = Liar(random, victim).message(random.choice(KINDS))
    may_speak = speaks_for_the_job(victim, worker, message)
    before = known(victim)
    instructions = victim.handle(WorkerSaid(node=worker[0], local_rank=worker[1], message=message), now)
    victim.validate()
    if not may_speak:
        assert known(victim) == before, (worker, message, instructions)
        may_tell = Record if victim.plan is None else ()  # what is printed before there are places is shown
        assert not [each for each in instructions if not isinstance(each, may_tell)], (worker, message, instructions)


def _end(machine: Membership, now: float, node: int, random: Random) -> None:
    """Have a node say how its own work ends: of one that stands by, nothing else ends or begins with it."""
    code = random.choice((0, 1, -6, -9, -11, 2**62, -(2**62)))
    ended = random.choice((NodeLeaving(node=node, reason="x"), WorkerEnded(node=node, local_rank=0, exit_code=code)))
    participants = machine.parts.participants
    is_outside = machine.phase in (Phase.INSTALLING, Phase.RUNNING) and not (
        participants.is_placed(node) or participants.sends(node)
    )
    before = _of_others(machine, node)
    machine.handle(ended, now)
    machine.validate()
    assert not is_outside or _of_others(machine, node) == before, ended


def _of_others(machine: Membership, node: int) -> tuple[object, ...]:
    """Return where the job is but for one node, and whose errors and crashes may be held against others."""
    parts, errors = machine.parts, machine.parts.own_errors
    others = {number: repr(member) for number, member in machine.members.items() if number != node}
    crashed = {number: member.node for number, member in errors._crashed.items()}
    erring = (errors.erring, dict(errors._first), list(errors._since_step))
    return machine.phase, machine.generation, others, crashed, erring, parts.change is None, parts.ending.reason


def speaks_for_the_job(machine: Membership, worker: WorkerId, message: FromWorkerMessage) -> bool:
    """Return whether what a worker says may change what the machine knows."""
    member = machine.members[worker[0]]
    if not 0 <= worker[1] < member.num_workers:
        return False
    if isinstance(message, Ready | Failed):
        return True  # it gets a place, or it goes
    last = machine.parts.last_checkpoint
    is_asked = worker in machine.awaiting or (last is not None and worker in last.awaiting)
    stands_by = member.is_ready and member.admitted and machine.phase is Phase.AGREEING
    participants = machine.parts.participants
    return participants.takes_part(worker) or participants.is_main(worker) or is_asked or stands_by
