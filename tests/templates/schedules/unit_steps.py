"""Random steps of graphs of units, and a plain executor that knows nothing of the package's own loops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Action, Op, Peer, Schedule
from resilient.templates.schedules.unit_generator import generate_units

UNITS = ("vision", "audio", "llm", "diffusion")


def random_graph(rng: Random) -> StepGraph:
    """Return a step of up to three units; stages are on any rows, cells have gaps, and flows join any."""
    trains = rng.random() < 0.9
    units = sorted(rng.sample(UNITS, rng.randint(1, 3)), key=UNITS.index)
    num_rows = rng.randint(1, 4)
    shapes = [
        (
            LaneName(unit, number),
            rng.choice((1, 2, 3, 3, 4, 6)),
            sorted(rng.sample(range(6), rng.choice((0, 1, 2, 2, 3, 4)))),
        )
        for unit in units
        for number in range(rng.randint(1, 2))
    ]
    possible = [
        Flow(source, cell, target, target_cell)
        for source, _, cells in shapes
        for cell in cells
        for target, _, target_cells in shapes
        if UNITS.index(source.unit) < UNITS.index(target.unit)
        for target_cell in target_cells
    ]
    share = rng.random()
    flows = tuple(flow for flow in possible if rng.random() < share)
    lanes: list[UnitLane] = []
    for name, num_stages, cells in reversed(shapes):
        fed = {flow.target for flow in flows if flow.source == name}
        feeds_frozen = any(lane.name in fed and not lane.backwards[0] for lane in lanes)
        kinds = [Backward.NONE] * num_stages
        if trains and not feeds_frozen:
            first = rng.choice((0, 0, rng.randint(0, num_stages)))
            kinds[first:] = [rng.choice((Backward.ALL, Backward.ALL, Backward.INPUTS)) for _ in kinds[first:]]
        rows = tuple(rng.randrange(num_rows) for _ in range(num_stages))
        if rng.random() < 0.3:  # comes to the same rows again and again
            rows = tuple((rows[0] + stage % max(1, num_stages // 2)) % num_rows for stage in range(num_stages))
        whole = rng.random() < 0.4
        lanes.insert(0, UnitLane(name=name, rows=rows, cells=tuple(cells), backwards=tuple(kinds), whole=whole))
    return StepGraph(lanes=tuple(lanes), flows=flows, num_rows=num_rows)


def random_schedule(rng: Random) -> Schedule:
    """Return a generated schedule of a random graph that sums a state of each stage and one of all."""
    graph = random_graph(rng)
    states = [
        [stage, 99] if kind is Backward.ALL else []
        for stage, kind in enumerate(kind for lane in graph.lanes for kind in lane.backwards)
    ]
    pace = rng.choice([None, *(lane.name.unit for lane in graph.lanes)])
    split, apart = rng.random() < 0.3, rng.random() < 0.3
    return generate_units(graph, pace=pace, lead=rng.randint(1, 2), split=split, apart=apart, states=states)


def halved(schedule: Schedule, rng: Random) -> Schedule:
    """Return the same with some backwards in two halves, the one for weights as late as it may be or sooner."""
    rows: list[list[Action]] = []
    for actions in schedule.rows:
        row = list(actions)
        for action in actions:
            if action.op is Op.BACKWARD and rng.random() < 0.5:
                position = row.index(action)
                row[position] = replace(action, op=Op.BACKWARD_INPUT)
                end = next((i for i, each in enumerate(row) if each.op is Op.REDUCE), len(row))
                row.insert(rng.randint(position + 1, end), replace(action, op=Op.BACKWARD_WEIGHT))
        rows.append(row)
    return Schedule.of(rows, schedule.graph)


def corrupted(schedule: Schedule, rng: Random) -> Schedule:
    """Return the same with a few actions swapped, left out, doubled or put elsewhere."""
    rows = [list(row) for row in schedule.rows]
    for _ in range(rng.randint(1, 2)):
        row, other = rng.choice([row for row in rows if row] or rows), rng.choice(rows)
        if not row:
            continue
        position, place = rng.randrange(len(row)), rng.randint(0, len(other))
        change = rng.choice(["swap", "turn", "turn", "drop", "duplicate", "move"])
        if change == "swap" or change == "turn":
            near = rng.randrange(len(row)) if change == "swap" else max(0, position - 1)
            row[position], row[near] = row[near], row[position]
        elif change == "duplicate":
            other.insert(place, row[position])
        else:
            action = row.pop(position)
            if change == "move":
                other.insert(min(place, len(other)), action)
    return Schedule.of(rows, schedule.graph)


class ViolationError(Exception):
    """A schedule breaks a rule."""


Costs = Callable[[Action], int]
"""How long an action takes; a send, how long it occupies its link."""


@dataclass
class PlainExecutor:
    """Runs a schedule action by action, and times it.

    Args:
        schedule: What is run.
        cost: Of an action.
        latency: From the end of a send to its receipt.
    """

    schedule: Schedule
    cost: Costs = lambda _: 0
    latency: Costs = lambda _: 0
    done: set[Action] = field(default_factory=set[Action])
    times: dict[Action, tuple[int, int]] = field(default_factory=dict[Action, tuple[int, int]])

    def __post_init__(self) -> None:
        self.graph = self.schedule.graph
        self.lanes = {lane.name: lane for lane in self.graph.lanes}
        self.row_at = {(lane.name, stage): row for lane in self.graph.lanes for stage, row in enumerate(lane.rows)}
        self.sent: dict[Action, int] = {}
        self.in_order: dict[tuple[LaneName, int, Op], list[Action]] = defaultdict(list)
        self.free_at: dict[tuple[int, int], int] = defaultdict(int)

    def run(self) -> None:
        """Run all rows.

        Raises:
            ViolationError: A rule is broken, or all rows wait.
        """
        positions, clocks = [0] * self.graph.num_rows, [0] * self.graph.num_rows
        progress = True
        while progress:
            progress = False
            for row, actions in enumerate(self.schedule.rows):
                while positions[row] < len(actions):
                    clock = self.step(row, actions[positions[row]], clocks[row])
                    if clock is None:
                        break
                    clocks[row] = clock
                    positions[row] += 1
                    progress = True
        if any(position < len(actions) for position, actions in zip(positions, self.schedule.rows, strict=True)):
            raise ViolationError("deadlock")
        ran = {action for action in self.done if action.op is not Op.REDUCE}
        missing = [action for action in self.needed() if action not in ran]
        if missing:
            raise ViolationError(f"missing: {missing[0]}")

    def step(self, row: int, action: Action, clock: int) -> int | None:
        """Run one action; return when its row is free again, None where it has to wait."""
        begin = clock
        if action.op in (Op.RECV_F, Op.RECV_B):
            self.check(row, action)
            send = self.partner(action)
            if send not in self.sent:
                return None
            if action.peer is None:
                border = self.in_order[send.lane, send.stage, send.op]
                if border.pop(0) != send:
                    raise ViolationError(f"{action} is overtaken")
            end = clock = max(clock, self.sent[send])
        else:
            self.check(row, action)
            end = clock = clock + (self.cost(action) if action.op.computes else 0)
            if action.op in (Op.SEND_F, Op.SEND_B):
                receipt = self.partner(action)
                link = row, self.row_at[receipt.lane, receipt.stage]
                begin = max(clock, self.free_at[link])
                end = self.free_at[link] = begin + self.cost(action)
                self.sent[action] = end + self.latency(action)
                self.in_order[action.lane, action.stage, action.op].append(action)
        self.done.add(action)
        self.times[action] = begin, end
        return clock

    def partner(self, action: Action) -> Action:
        """Return the other end of a message."""
        op = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}[action.op]
        if action.peer is None:
            away = 1 if action.op in (Op.SEND_F, Op.RECV_B) else -1
            return replace(action, op=op, stage=action.stage + away)
        lane = self.lanes[action.peer.lane]
        stage = 0 if op in (Op.RECV_F, Op.SEND_B) else len(lane.rows) - 1
        return Action(stage, op, action.peer.cell, action.part, lane.name, Peer(action.lane, action.index))

    def check(self, row: int, action: Action) -> None:
        """Check that an action may run now."""
        if action in self.done:
            raise ViolationError(f"{action} twice")
        lane = self.lanes[action.lane]
        if lane.rows[action.stage] != row:
            raise ViolationError(f"{action} in another's row")
        if action.op is Op.REDUCE:
            mine = [each for each in self.needed() if each.op.computes and self.row_at[each.lane, each.stage] == row]
            late = any(each not in self.done for each in mine)
            later = any(
                each.op is Op.REDUCE and each.index <= action.index and self.row_at[each.lane, each.stage] == row
                for each in self.done
            )
            if lane.backwards[action.stage] is not Backward.ALL or late or later:
                raise ViolationError(f"{action} at a wrong place")
            return
        if action not in self.allowed():
            raise ViolationError(f"{action} is not of this step")
        missing = [each for each in self.before(action) if each not in self.done]
        if missing:
            raise ViolationError(f"{action} before {missing[0]}")

    def before(self, action: Action) -> Iterator[Action]:
        """Yield what an action needs of its own row."""
        lane, stage, cell, part = self.lanes[action.lane], action.stage, action.index, action.part
        last = len(lane.rows) - 1
        forward = Action(stage, Op.FORWARD, cell, 0, lane.name)
        if action.op is Op.FORWARD and stage > 0:
            same = lane.rows[stage - 1] == lane.rows[stage]
            yield replace(forward, stage=stage - 1) if same else replace(forward, op=Op.RECV_F)
        elif action.op is Op.FORWARD:
            for flow in self.graph.flows:
                if (flow.target, flow.target_cell) == (lane.name, cell):
                    source = self.lanes[flow.source]
                    end, number = len(source.rows) - 1, self.part(flow)
                    same = source.rows[end] == lane.rows[0]
                    yield (
                        Action(end, Op.FORWARD, flow.cell, 0, flow.source)
                        if same
                        else Action(0, Op.RECV_F, cell, number, lane.name, Peer(flow.source, flow.cell))
                    )
        elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            yield forward
            if stage < last:
                same = lane.rows[stage + 1] == lane.rows[stage]
                yield (
                    self.backward(lane, stage + 1, cell, part)
                    if same
                    else Action(stage, Op.RECV_B, cell, part, lane.name)
                )
            else:
                for flow in self.graph.flows:
                    if flow[:2] == (lane.name, cell) and self.part(flow) == part:
                        target = self.lanes[flow.target]
                        if target.rows[0] == lane.rows[last]:
                            yield from self.backwards(target, 0, flow.target_cell)
                        else:
                            yield Action(last, Op.RECV_B, cell, part, lane.name, Peer(flow.target, flow.target_cell))
        elif action.op is Op.BACKWARD_WEIGHT:
            yield replace(action, op=Op.BACKWARD_INPUT)
        elif action.op is Op.SEND_F:
            yield forward
        elif action.op is Op.SEND_B and action.peer is None:
            yield self.backward(lane, stage, cell, part)
        elif action.op is Op.SEND_B:
            yield from self.backwards(lane, stage, cell)

    def part(self, flow: Flow) -> int:
        """Return which part of its source a flow is."""
        if self.lanes[flow.source].whole:
            return 0
        return [each for each in self.graph.flows if each[:2] == flow[:2]].index(flow)

    def num_parts(self, lane: UnitLane, cell: int) -> int:
        return 1 if lane.whole else max(1, Counter(flow[:2] for flow in self.graph.flows)[lane.name, cell])

    def backwards(self, lane: UnitLane, stage: int, cell: int) -> Iterator[Action]:
        for part in range(self.num_parts(lane, cell)):
            yield self.backward(lane, stage, cell, part)

    def backward(self, lane: UnitLane, stage: int, cell: int, part: int) -> Action:
        """Return the backward, or its half that others wait for."""
        halves = {Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
        found = any(Action(stage, op, cell, part, lane.name) in self.all_actions() for op in halves)
        halved = lane.backwards[stage] is Backward.INPUTS or found
        return Action(stage, Op.BACKWARD_INPUT if halved else Op.BACKWARD, cell, part, lane.name)

    def all_actions(self) -> set[Action]:
        if not hasattr(self, "_all"):
            self._all = {action for row in self.schedule.rows for action in row}
        return self._all

    def allowed(self) -> set[Action]:
        if not hasattr(self, "_allowed"):
            self._allowed = set(self.needed())
        return self._allowed

    def needed(self) -> Iterator[Action]:
        """Yield what the step consists of, but the sums."""
        for lane in self.graph.lanes:
            for stage, (row, backward) in enumerate(zip(lane.rows, lane.backwards, strict=True)):
                for cell in lane.cells:
                    forward = Action(stage, Op.FORWARD, cell, 0, lane.name)
                    yield forward
                    if stage > 0 and lane.rows[stage - 1] != row:
                        yield replace(forward, op=Op.RECV_F)
                        yield replace(forward, op=Op.SEND_F, stage=stage - 1)
                    for part in range(self.num_parts(lane, cell)) if backward else ():
                        first = self.backward(lane, stage, cell, part)
                        yield first
                        if first.op is Op.BACKWARD_INPUT and backward is Backward.ALL:
                            yield replace(first, op=Op.BACKWARD_WEIGHT)
                        if stage > 0 and lane.backwards[stage - 1] and lane.rows[stage - 1] != row:
                            yield replace(first, op=Op.SEND_B)
                            yield replace(first, op=Op.RECV_B, stage=stage - 1)
        for flow in self.graph.flows:
            source, target = self.lanes[flow.source], self.lanes[flow.target]
            if source.rows[-1] != target.rows[0]:
                peer = Peer(flow.target, flow.target_cell)
                send = Action(len(source.rows) - 1, Op.SEND_F, flow.cell, self.part(flow), flow.source, peer)
                yield from (send, self.partner(send))
                if source.backwards[-1]:
                    receipt = replace(send, op=Op.RECV_B)
                    yield from (receipt, self.partner(receipt))
