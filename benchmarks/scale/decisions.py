"""How long decisions take at a thousand nodes and at sixteen thousand, and how much memory.

    python benchmarks/scale/decisions.py [--nodes 1024,16384] [--day 4000]

Processor time, so that what else the machine does counts little: the median of nine calls, and the longest of them, in
a process for each row, whose peak memory with all that it has loaded is shown. As in a coordinator everything is loaded
and compiled before, and garbage is looked for in calm times (:class:`.Sweeper`), not while it decides. Templates are at
hand, and compositions of up to 256 nodes more or less, as a coordinator prepares them (:func:`.replan.prepare`);
composing has rows of its own.
Layers are 96 blocks of GPT-3 6.7B, all different by a few per cent, on nodes of eight A100s; those of the copies, as
jobs run them, on nodes of one device.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.common.memory import Sweeper
from resilient.simulation.availability.spot_market import spot_trace
from resilient.simulation.scenario import Scenario
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.composition.batch_split import lines, split_microbatches
from resilient.templates.composition.compose import compose
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import cluster_of
from resilient.templates.plan import Holdings, Plan, PlanningProblem
from resilient.templates.replan.replan import (
    first_plan,
    prepare,
    replan,
    replan_candidates,
    templates_for,
    warm_up,
)
from resilient.templates.replan.transfer import plan_transfers

sys.path.insert(0, str(Path(__file__).parents[1]))
from parts.planning_jobs import job

_REPEATS = 9
_SWEEP_S = 60.0  # as a coordinator has it

Calls = Iterator[Callable[[], object]]
"""What is to be measured, one call after the other."""


def _problem(num_nodes: int, devices: int = 8, smallest: int = 6) -> PlanningProblem:
    return job(96, devices, num_microbatches=num_nodes, max_failures=1, min_pipeline_nodes=smallest)


def _waves(
    num_nodes: int, lost: float, joined: float, problem: PlanningProblem | None = None
) -> Iterator[tuple[PlanningProblem, Plan, list[int]]]:
    """Yield a plan and the nodes after a part of them was lost and others joined, again and again."""
    problem, draw = problem or _problem(num_nodes), random.Random(0)
    live, following = list(range(num_nodes)), num_nodes
    prepare(problem, num_nodes)
    plan = first_plan(problem, live)
    for _ in range(_REPEATS + 1):
        gone = set(draw.sample(live, max(1, round(lost * len(live)))))
        joiners = range(following, following + round(joined * num_nodes))
        live, following = [node for node in live if node not in gone] + [*joiners], joiners.stop
        yield problem, plan, live
        plan = replan(problem, plan, live)


def _one_loss(num_nodes: int) -> Calls:
    for problem, plan, live in _waves(num_nodes, 0, 0):
        yield lambda problem=problem, plan=plan, live=live: replan(problem, plan, live)


def _wave(num_nodes: int) -> Calls:
    for problem, plan, live in _waves(num_nodes, 0.1, 0.08):
        yield lambda problem=problem, plan=plan, live=live: replan(problem, plan, live)


def _all_ways(num_nodes: int) -> Calls:
    for problem, plan, live in _waves(num_nodes, 0.1, 0.08):
        yield lambda problem=problem, plan=plan, live=live: list(replan_candidates(problem, plan, live))


def _slow(num_nodes: int, num_slow: int, lost: float = 0, joined: float = 0) -> Calls:
    """Other nodes turn out to be slow each time."""
    draw = random.Random(1)
    for problem, plan, live in _waves(num_nodes, lost, joined):
        slow = {node: draw.uniform(1.2, 6) for node in draw.sample(live, num_slow)}
        yield lambda problem=problem, plan=plan, live=live, slow=slow: replan(problem, plan, live, slowdowns=slow)


def _with_every_node(num_nodes: int, num_slow: int) -> Calls:
    """What is said of nodes that stand by because a step is shorter without them, after it is decided."""
    draw = random.Random(1)
    for problem, plan, live in _waves(num_nodes, 0.1, 0.08):
        slow = {node: draw.uniform(1.2, 6) for node in draw.sample(live, num_slow)}
        candidate = next(replan_candidates(problem, plan, live, slowdowns=slow))
        yield lambda candidate=candidate: candidate.with_more_ms


def _slow_in_zones(num_nodes: int) -> Calls:
    draw = random.Random(1)
    for problem, plan, live in _waves(num_nodes, 0.1, 0.08):
        slow = {node: draw.uniform(1.2, 6) for node in draw.sample(live, 16)}
        zones = {node: f"zone{node % 3}" for node in live}
        yield lambda problem=problem, plan=plan, live=live, slow=slow, zones=zones: replan(
            problem, plan, live, domains=zones, slowdowns=slow
        )


def _domains(num_nodes: int, problem: PlanningProblem | None = None, num_slow: int = 0) -> Calls:
    """Each place of the pipelines in a zone of its own: every state is in one zone alone."""
    draw = random.Random(1)
    for given, plan, live in _waves(num_nodes, 0.01, 0.008, problem):
        slow = {node: draw.uniform(1.2, 6) for node in draw.sample(live, num_slow)}
        zones = {node: f"zone{place % 16}" for each in plan.pipelines for place, node in enumerate(each.nodes)}
        yield lambda problem=given, plan=plan, live=live, slow=slow, zones=zones: replan(
            problem, plan, live, domains=zones, slowdowns=slow
        )


def _four_domains(num_nodes: int) -> Calls:
    """Every state is to be in four of them, and slow nodes had better stay where they are."""
    problem = job(96, 8, num_microbatches=num_nodes // 2, max_failures=3, min_pipeline_nodes=16)
    yield from _domains(num_nodes, problem, num_slow=4)


def _scarce_domain(num_nodes: int) -> Calls:
    """A zone of three nodes beside one of all others, which cannot hold everything."""
    for problem, plan, live in _waves(num_nodes, 0.01, 0.008):
        zones = {node: "small" if index < 3 else "large" for index, node in enumerate(live)}
        yield lambda problem=problem, plan=plan, live=live, zones=zones: replan(problem, plan, live, domains=zones)


def _drawn(num_nodes: int) -> Calls:
    """Fifteen jobs of other pipelines, microbatches, redundancy and zones, and four decisions of each."""
    draw = random.Random(0)
    for _ in range(15):
        problem = job(
            96,
            8,
            num_microbatches=num_nodes * draw.choice([1, 2, 4, 8]) // 2,
            max_failures=draw.randrange(4),
            min_pipeline_nodes=draw.choice([1, 2, 6, 12, 16, 32]),
        )
        num_zones, live, following = draw.choice([0, 3, 16]), list(range(num_nodes)), num_nodes
        zones = {node: f"zone{node % num_zones}" for node in range(2 * num_nodes) if num_zones}
        plan = first_plan(problem, live, domains=zones)
        for _ in range(4):
            prepare(problem, len(live))
            gone = set(draw.sample(live, round(len(live) * draw.choice([0, 0.001, 0.01, 0.1, 0.5]))))
            joiners = range(following, following + round(num_nodes * draw.choice([0, 0, 0.001, 0.08])))
            live, following = [node for node in live if node not in gone] + [*joiners], joiners.stop
            most = draw.choice([1.3, 2, 6])
            slow = {node: draw.uniform(1.2, most) for node in draw.sample(live, draw.choice([0, 1, 4, 16, 64]))}
            yield lambda given=(problem, plan, live), zones=zones, slow=slow: replan(
                *given, domains=zones, slowdowns=slow
            )
            plan = replan(problem, plan, live, domains=zones, slowdowns=slow)


def _composition(num_nodes: int, num_microbatches: int) -> Calls:
    problem = _problem(num_nodes, smallest=1)
    templates = templates_for(problem, num_nodes)
    for nodes in range(num_nodes, num_nodes - _REPEATS - 1, -1):
        yield lambda nodes=nodes: compose(templates, nodes, num_microbatches, 2)


def _split(num_nodes: int) -> Calls:
    templates = templates_for(_problem(num_nodes), num_nodes)
    by_size = [lines(layouts) for layouts in templates.layouts]
    pipelines = [by_size[index % len(by_size)] for index in range(num_nodes // 6)]
    for _ in range(_REPEATS + 1):
        yield lambda: split_microbatches(pipelines, 4 * num_nodes)


def _sources(num_nodes: int) -> Calls:
    problem, draw = _problem(num_nodes, devices=1, smallest=32), random.Random(0)
    before, following = first_plan(problem, range(num_nodes)), num_nodes
    for _ in range(_REPEATS + 1):
        gone = set(draw.sample(range(num_nodes), num_nodes // 10))
        joiners = range(following, following + num_nodes * 8 // 100)
        live = [*(node for node in range(num_nodes) if node not in gone), *joiners]
        after = replan(problem, before, live)
        held = _survivors(problem, before, after)  # as workers have said it
        yield lambda after=after, held=held: plan_transfers(problem, after, held)


def _survivors(problem: PlanningProblem, before: Plan, after: Plan) -> Holdings:
    had = {slot.node: slot.intervals(problem.profile) for slot in before.slots}
    held: dict[str, dict[int, ByteIntervals]] = {layer.name: {} for layer in problem.profile.layers}
    for slot in after.slots:
        for state, intervals in had.get(slot.node, {}).items():
            held[state][slot.rank] = intervals
    return held


def _day(num_nodes: int) -> Calls:
    """A day of a made-up spot market, from nothing planned."""
    problem = PlanningProblem(
        profile=derive_profile("gpt3-6.7b", "a40"), num_microbatches=512, cluster=cluster_of("a40", 1)
    )
    trace = spot_trace("ec2-p3", num_nodes, 24.0)
    for nodes in (64, num_nodes):
        scenario = Scenario(problem=problem, batch=1024, max_nodes=trace.max_nodes)
        replayed = trace if nodes == num_nodes else spot_trace("ec2-p3", nodes, 24.0)
        yield lambda scenario=scenario, replayed=replayed: scenario.run(replayed, "resilient")


CASES: dict[str, tuple[str, Callable[[int], Calls]]] = {
    "loss": ("replan, one loss", _one_loss),
    "wave": ("replan, 10 % lost and 8 % joined", _wave),
    "ways": ("all candidates of the same", _all_ways),
    "slow": ("replan, one loss and a slow node", lambda num_nodes: _slow(num_nodes, 1)),
    "slow-4": ("replan, one loss and four slow nodes", lambda num_nodes: _slow(num_nodes, 4)),
    "slow-wave": ("the same wave and sixteen slow nodes", lambda num_nodes: _slow(num_nodes, 16, 0.1, 0.08)),
    "slow-64": ("the same wave and 64 slow nodes", lambda num_nodes: _slow(num_nodes, 64, 0.1, 0.08)),
    "slow-100": ("the same wave and a hundred slow nodes", lambda num_nodes: _slow(num_nodes, 100, 0.1, 0.08)),
    "every": ("what a step would take with every node, then", lambda num_nodes: _with_every_node(num_nodes, 100)),
    "slow-zones": ("the same wave, sixteen slow nodes and three zones", _slow_in_zones),
    "domains": ("replan, every state in one zone", _domains),
    "domains-4": ("the same with f = 3, pipelines of 16 and four slow", _four_domains),
    "scarce": ("replan, a zone too small for all states", _scarce_domain),
    "drawn": ("sixty of which all is drawn at random", _drawn),
    "compose": ("composition", lambda num_nodes: _composition(num_nodes, 4 * num_nodes)),
    "limited": ("composition, half as many microbatches as nodes", lambda nodes: _composition(nodes, nodes // 2)),
    "split": ("batch split, 4 microbatches for each node", _split),
    "sources": ("sources of copies, 10 % lost and 8 % joined", _sources),
    "day": ("a day of a spot market", _day),
}


def _measure(name: str, num_nodes: int) -> dict[str, float]:
    times: list[float] = []
    warm_up()
    sweeper = Sweeper(_SWEEP_S)
    for call in CASES[name][1](num_nodes):
        sweeper.pass_time(time.monotonic(), is_calm=True)
        started = time.process_time()
        call()
        times.append(time.process_time() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"s": statistics.median(times[1:]), "longest_s": max(times[1:]), "peak_mb": peak}


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="1024,16384")
    parser.add_argument("--day", type=int, default=4000, help="nodes of the replayed day")
    parser.add_argument("--case", choices=CASES, action="append", help="only this; may be given several times")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        sys.stdout.write(json.dumps(_measure(options.measure[0], int(options.measure[1]))))
        return
    table = plain_table("nodes", "what", "s", "longest", "GB", left=("what",), title="planning, processor time")
    for name in options.case or CASES:
        for nodes in [options.day] if name == "day" else map(int, options.nodes.split(",")):
            command = [sys.executable, __file__, "--measure", name, str(nodes)]
            found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            times = f"{found['s']:.3f}", f"{found['longest_s']:.3f}"
            table.add_row(f"{nodes:,}", CASES[name][0], *times, f"{found['peak_mb'] / 1e3:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
