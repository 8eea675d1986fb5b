"""Failures one after the other in a job: nodes are chosen by what they do in the plan that is in force.

A drill begins when a generation of enough nodes has done a step, and is over when one without those who were to die has
done another. Where the next one would leave too few nodes, as many are added as there were at the beginning: a join
takes longer than several drills. After the last one the job is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient.agent.launch import Launcher
from resilient.observability.run_comparison import compare_parameters
from resilient.protocol.messages import Injection
from tests.integration.harness import TOLERANCE, Event, Run, check_survivors, run_alone, run_job, spare_nodes

SCRIPT = Path(__file__).parent / "jobs" / "planned.py"
FEWEST = {
    **dict.fromkeys(("disttrain", "dflop", "entrain"), 3),  # a device for each unit
    **dict.fromkeys(("fsdp", "static-cp", "dhp", "dhp-across-nodes"), 1),  # no stages
}
"""Nodes of the smallest pipelines asked for; of other planners 2."""

JOB = ("--batch", "12", "--microbatch", "2", "--optimizer", "sgd")
"""Steps of two microbatches or more in each pipeline: the samples of an encoder's cell may go to several. Adam makes
large steps of rounding errors: after a hundred, two processes with other microbatches differ by 1e-5."""

LANGUAGE = "llm"
LEAVES = "leaves"
JOINER = "joiner"
SHARDED, PARALLEL, ONE_DEVICE = "sharded", "tensor parallel", "one device"
_MOST_STEPS = 25
"""Of one generation, until it is clear that a failure's moment does not come: the coordinator may lag behind some."""

_MOST_AGAIN = 3
"""How many drills of a job are done again, because a node stood by when it was to die."""


@dataclass(frozen=True, kw_only=True)
class Drill:
    """One failure, or two.

    Args:
        kind: What the node does that is killed: ``encoder`` for nothing else than to encode, ``language`` for the
            language model's first stage, ``rank 0``, ``first`` or ``last`` for those stages of a pipeline of several
            nodes; :data:`SHARDED`, :data:`PARALLEL` or :data:`ONE_DEVICE`; :data:`JOINER`; or ``any``.
        phase: Of the next step, or generation, in which it comes to that; :data:`LEAVES` if it is not killed, but asked
            to leave when the generation begins.
        during: What makes there be a generation of which ``phase`` is: another node's loss, a join or a leave; "" for
            phases of steps.
        also: What a second node does, killed in the same phase; "" for none.
        of_loss: The phase in which the other node is lost.
        worker: Which of the node's workers is killed; None for all of the node.
    """

    kind: str
    phase: str
    during: str = ""
    also: str = ""
    of_loss: str = "backward"
    worker: int | None = None

    @property
    def num_lost(self) -> int:
        """Nodes that it costs."""
        return 2 if self.also or self.during in ("loss", "leave") else 1

    def __str__(self) -> str:
        worker = "" if self.worker is None else f"worker {self.worker} of "
        killed = f"{worker}{self.kind}{f' and {self.also}' if self.also else ''}"
        lost = f" in {self.of_loss}" if self.during == "loss" else ""
        return f"{killed} in {self.phase}{f' of a {self.during}' if self.during else ''}{lost}"


def nodes_of(generation: Event, kind: str, unit: str = "") -> list[int]:
    """Return the nodes of a generation that do something, in order; where a unit is told, something for that, too."""
    units: dict[int, set[str]] = {}
    chosen: dict[str, set[int]] = {each: set() for each in ("language", "first", "last", SHARDED, PARALLEL, ONE_DEVICE)}
    for pipeline in generation["pipelines"]:
        for stage in pipeline["stages"]:
            units.setdefault(stage["node"], set()).add(stage.get("lane", LANGUAGE).partition(".")[0])
            chosen[way_of(stage)].add(stage["node"])
        language = (each["node"] for each in pipeline["stages"] if each.get("lane", LANGUAGE).startswith(LANGUAGE))
        chosen["language"].add(next(language))
        if len(pipeline["nodes"]) > 1:
            chosen["first"].add(pipeline["stages"][0]["node"])
            chosen["last"].add(pipeline["stages"][-1]["node"])
    chosen["encoder"] = {node for node, of_node in units.items() if LANGUAGE not in of_node}
    chosen["rank 0"] = {generation["pipelines"][0]["nodes"][0]}
    chosen["any"] = {*units}
    return sorted(node for node in chosen[kind] if not unit or unit in units[node])


def ways_of(generation: Event) -> str:
    """Return who has which part of the pipelines of a generation, and how."""
    pipelines = [
        ", ".join(f"{stage['node']} {stage.get('lane', way_of(stage))}" for stage in pipeline["stages"])
        for pipeline in generation["pipelines"]
    ]
    return "; ".join(pipelines)


def way_of(stage: Event) -> str:
    """Return how a node's workers share a stage."""
    if stage.get("num_workers", 1) == 1:
        return ONE_DEVICE
    return SHARDED if stage.get("sharded", False) else PARALLEL


class Drills:
    """Does drills to a running job.

    Args:
        drills: They, in order.
        num_nodes: Nodes that the job begins with.
        fewest: Nodes that it needs.
        coming: This file is there while somebody is getting ready to join.
        choose: Takes one of several nodes.

    Attributes:
        missed: Drills for which there was no node, or whose moment did not come.
        killed: Nodes that were to be.
    """

    def __init__(
        self, drills: Sequence[Drill], num_nodes: int, fewest: int, coming: Path, choose: Callable[[list[int]], int]
    ) -> None:
        self._left = list(drills)
        self._fewest = fewest
        self._coming = coming
        self._choose = choose
        self._num_nodes = self._num_started = num_nodes
        self._num_ready = self._num_again = 0
        self._there: set[int] = set()
        self._gone: set[int] = set()
        self._pids: set[int] = set()
        self._generation: Event = {}
        self._steps = 0
        self._drill: Drill | None = None
        self._awaited: set[int] = set()
        self._leaving: int | None = None
        self._asked_to_leave: set[int] = set()
        self._is_over = False
        self.missed: list[str] = []
        self.killed: list[int] = []

    def on_event(self, launcher: Launcher, event: Event) -> None:
        """Take in an event of the job."""
        if event["kind"] == "generation":
            self._generation, self._steps = event, 0
            if self._leaving is not None:
                self._ask_to_leave(launcher, self._leaving)
                self._leaving = None
        elif event["kind"] == "node_connected":
            self._there.add(event["node"])
            self._num_started += event["pid"] in self._pids  # it comes back when one of its workers was killed
            self._pids.add(event["pid"])
        elif event["kind"] == "node_ready":
            self._num_ready += 1
            if self._num_ready == self._num_started:
                self._coming.unlink(missing_ok=True)
        elif event["kind"] in ("node_lost", "node_leaving"):
            self._gone.add(event["node"])
        elif event["kind"] == "step" and event["generation"] == self._generation["generation"] and not self._is_over:
            self._steps += 1
            self._go_on(launcher)

    def _go_on(self, launcher: Launcher) -> None:
        standby = {*self._generation["standby"]} - self._gone  # of whose loss no other generation comes
        placed = {*self._generation["nodes"], *standby}
        staying = len(self._there - self._gone)
        coming = self._num_started - len(self._there)
        has_yet_to_join = bool(coming) or not self._there - self._gone <= placed
        if left := self._awaited & placed:
            self._kill_who_does_something_else(launcher, left)
            has_yet_to_change = has_yet_to_join or bool(left & self._asked_to_leave)
            if self._drill is not None and not (self._drill.during and has_yet_to_change):
                self._give_up(launcher, self._drill, left, is_idle=left <= standby)
            return
        if staying + coming < self._fewest + (self._left[0].num_lost if self._left else 0):
            for _ in range(self._num_nodes - staying - coming):
                self._add_node(launcher)
        elif has_yet_to_join:
            return
        elif self._left:
            self._begin(launcher, self._left.pop(0))
        else:
            self._end(launcher)

    def _give_up(self, launcher: Launcher, drill: Drill, left: set[int], *, is_idle: bool) -> None:
        """Kill who was to die in a phase that does not come; do the drill again if the plan left no part for it."""
        if is_idle and self._num_again < _MOST_AGAIN:
            self._num_again += 1
            self._left.insert(0, drill)
        elif is_idle or self._steps > _MOST_STEPS:
            self.missed.append(f"{drill}: its moment did not come")
        else:
            return
        self._drill = None
        for node in left:
            launcher.inject(Injection(node=node))

    def _kill_who_does_something_else(self, launcher: Launcher, left: set[int]) -> None:
        """Kill the second of two, who outlived the first by a moment, if it has no part of the phase any more."""
        if self._drill is None or not self._drill.also or len(left) == len(self._awaited):
            return
        if not left <= set(nodes_of(self._generation, "any", self._drill.phase.rpartition(".")[0])):
            self._drill = None
            for node in left:
                launcher.inject(Injection(node=node))

    def _begin(self, launcher: Launcher, drill: Drill) -> None:
        found = self._victims(drill)
        if found is None:
            self.missed.append(f"{drill}: there is no such node in {ways_of(self._generation)}")
            return
        killed, other = found
        self._drill, self._awaited = drill, {*killed, *other}
        if drill.phase == LEAVES:
            (self._leaving,) = killed
        else:
            self.killed += killed
            for node in killed:
                one = drill.worker is not None
                launcher.inject(Injection(node=node, at_phase=drill.phase, worker_only=one, worker=drill.worker or 0))
        if drill.during == "join":
            self._add_node(launcher)
        for node in other:
            if drill.during == "leave":
                self._ask_to_leave(launcher, node)
            else:
                self.killed.append(node)
                launcher.inject(Injection(node=node, at_phase=drill.of_loss))

    def _victims(self, drill: Drill) -> tuple[list[int], list[int]] | None:
        """Return who is to be killed in the phase, and who is to go so that there is one; all states stay held."""
        if drill.kind == JOINER:
            return [max(self._there) + 1], []
        nodes = nodes_of(self._generation, drill.kind, drill.phase.rpartition(".")[0])
        while nodes:
            first = self._choose(nodes)
            nodes.remove(first)
            if not drill.also and drill.during in ("", "join"):
                return [first], []
            spare = spare_nodes(self._generation, first)
            if drill.also:
                spare = [node for node in nodes_of(self._generation, drill.also) if node in spare]
            if spare:
                second = self._choose(spare)
                return ([first, second], []) if drill.also else ([first], [second])
        return None

    def _ask_to_leave(self, launcher: Launcher, node: int) -> None:
        self._asked_to_leave.add(node)
        launcher.remove_node(node)

    def _add_node(self, launcher: Launcher) -> None:
        self._num_started += 1
        self._coming.touch()
        launcher.add_node()

    def _end(self, launcher: Launcher) -> None:
        self._is_over = True
        launcher.interrupt("enough")


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """A job that was drilled.

    Args:
        run: The run.
        missed: Drills for which there was no node, or whose moment did not come.
        wrong: What must not be; nothing if each failure cost a step at most, no state was lost, nobody was restarted
            and the parameters are those of one process.
    """

    run: Run
    missed: list[str]
    wrong: list[str]


def run_drills(
    directory: Path,
    drills: Sequence[Drill],
    planner: str,
    *arguments: str,
    fewest: int | None = None,
    workers_per_node: int = 1,
    tp: str = "1",
    choose: Callable[[list[int]], int] = lambda nodes: nodes[-1],
) -> Drilled:
    """Run a planned job through drills, then as one process.

    Args:
        directory: Of both runs.
        drills: What is done to it, in order.
        planner: Of the job.
        arguments: Of its script, beside the usual ones.
        fewest: Nodes of the smallest pipelines asked for; of :data:`FEWEST` by default.
        workers_per_node: Of each node.
        tp: How many of them share each microbatch.
        choose: Takes one of several nodes.
    """
    fewest = FEWEST.get(planner, 2) if fewest is None else fewest
    return drill_job(
        directory,
        drills,
        *("--planner", planner, "--min-pipeline-nodes", str(fewest), *JOB, *arguments),
        script=SCRIPT,
        nodes=2 * fewest + 2,
        fewest=2 * fewest,
        choose=choose,
        workers_per_node=workers_per_node,
        tp=tp,
    )


def drill_job(
    directory: Path,
    drills: Sequence[Drill],
    *arguments: str,
    script: Path,
    nodes: int,
    fewest: int,
    choose: Callable[[list[int]], int],
    **options: Any,
) -> Drilled:
    """Run any job through drills, then as one process.

    Args:
        directory: Of both runs.
        drills: What is done to it, in order.
        arguments: Of its script, which takes ``--steps`` and ``--slowly-while`` besides.
        script: The job's.
        nodes: That it begins with.
        fewest: Nodes that it needs.
        choose: Takes one of several nodes.
        options: Of :func:`tests.integration.harness.run_job`.
    """
    coming = directory / "coming"
    told = Drills(drills, nodes, fewest, coming, choose)
    more = ("--slowly-while", str(coming), "--steps", "100000")
    directory.mkdir(parents=True, exist_ok=True)
    run = run_job(directory / "run", *arguments, *more, script=script, nodes=nodes, act=told.on_event, **options)
    if not run.reason.startswith("interrupted (enough)"):
        return Drilled(run=run, missed=told.missed, wrong=[f"it ended: {run.reason}"])
    check_survivors(run)
    recoveries, steps = run.report["recoveries"], max(run.losses)
    wrong = [f"{each['lost_steps']} steps lost in {each['cause']}" for each in recoveries if each["lost_steps"] > 1]
    wrong += [each["text"] for each in run.of_kind("output") if "nobody holds" in each["text"]]
    fired = sorted({failure["node"] for failure in run.failures})  # two workers of a node may be at the place at once
    if fired != sorted(told.killed):
        wrong.append(f"killed were {fired}, not {sorted(told.killed)}")
    run_alone(directory / "alone", *arguments, "--steps", str(steps), script=script)
    _, relative = compare_parameters(run.directory, directory / "alone")
    if not relative <= TOLERANCE:
        wrong.append(f"parameters differ by {relative} after {steps} steps")
    return Drilled(run=run, missed=told.missed, wrong=wrong)
