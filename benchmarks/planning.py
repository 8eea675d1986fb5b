"""How long planning takes: templates, composition, batch split, the decision after a failure.

    python benchmarks/planning.py [--repeats 7]

Medians after a warm-up that compiles. Layers are blocks of GPT-3 6.7B on A100s, once all equal and once all different
by a few per cent, as measured ones are; memory, links and activation checkpointing count. ZB-H2 is planned for A40s:
what its stages hold grows with their number, and there it binds. Beside ours stand what was published or measured for
others: Oobleck's table of planning latencies for one template (SOSP'23), its C++ planner on two shared cores, and its
later restricted search (a stage is a node).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from parts.planning_jobs import job
from parts.timing import median_s
from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.templates.composition.batch_split import Lines, lines, split_microbatches
from resilient.templates.composition.batch_split_model import split_with_constraints
from resilient.templates.composition.compose import compose
from resilient.templates.plan import Sharding
from resilient.templates.replan.replan import first_plan, prepare, replan, templates_for
from resilient.templates.schedules.kind import CHUNK_KINDS, ScheduleKind
from resilient.templates.search.partition import plan_templates
from resilient.templates.template import PipelineTemplate, StageSpec, TemplateSet


@dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured, beside what is asked for and what others take."""

    what: str
    measured: str
    target: str = ""
    others: str = ""


def one_size(num_layers: int, num_nodes: int, devices: int, *, equal: bool) -> Callable[[], TemplateSet]:
    """Search for the templates of one number of nodes only."""
    problem = job(num_layers, devices, equal=equal, min_pipeline_nodes=num_nodes)
    return lambda: plan_templates(problem, num_nodes)


def all_sizes(num_layers: int, num_nodes: int, devices: int, *, equal: bool) -> Callable[[], TemplateSet]:
    """Search for the templates of all numbers of nodes up to one."""
    problem = job(num_layers, devices, equal=equal)
    return lambda: plan_templates(problem, num_nodes)


def zero_bubble(num_layers: int, num_nodes: int, devices: int, *, equal: bool) -> Callable[[], TemplateSet]:
    """Search for the templates of all sizes where what stages hold depends on how many there are."""
    problem = job(num_layers, devices, equal=equal, device="a40", schedule=ScheduleKind.ZB_H2)
    return lambda: plan_templates(problem, num_nodes)


def several_stages(schedule: ScheduleKind, num_layers: int, memory: str) -> Callable[[], TemplateSet]:
    """Search for the templates of up to 60 devices with two stages each; memory as it is, or no limit."""
    problem = job(num_layers, 1, schedule=schedule, num_chunks=2)
    if memory == "no limit":
        problem = replace(problem, cluster=replace(problem.cluster, memory_bytes=None))
    return lambda: plan_templates(problem, 60)


def sharded(num_layers: int, num_nodes: int, devices: int, *, equal: bool) -> Callable[[], TemplateSet]:
    """Search for the templates of all sizes where stages may be sharded as well."""
    problem = job(num_layers, devices, equal=equal, sharding=Sharding.AUTO)
    return lambda: plan_templates(problem, num_nodes)


def searches(repeats: int) -> list[Row]:
    """Measure the template search."""
    rows: list[Row] = []
    for equal in (True, False):
        kind = "equal" if equal else "different"
        for what, call, target, others in (
            (
                f"one template, 32 {kind} layers x 24 nodes x 4 devices",
                one_size(32, 24, 4, equal=equal),
                "0.05 s",
                "45.8 s published; 95 to 183 s on two cores",
            ),
            (
                f"one template, 96 {kind} layers x 24 nodes x 8 devices",
                one_size(96, 24, 8, equal=equal),
                "1 s",
                "3297.92 s published",
            ),
            (
                f"all templates of 1 to 64 nodes x 8 devices, 96 {kind} layers",
                all_sizes(96, 64, 8, equal=equal),
                "5 s",
                "10.1 s restricted search on two cores",
            ),
            (
                f"the same for ZB-H2 on A40s, 96 {kind} layers",
                zero_bubble(96, 64, 8, equal=equal),
                "",
                "",
            ),
            (
                f"the same with sharded stages, 96 {kind} layers",
                sharded(96, 64, 8, equal=equal),
                "5 s",
                "",
            ),
        ):
            rows.append(Row(what=what, measured=f"{median_s(call, repeats):.3f} s", target=target, others=others))
    return rows


def chunk_searches(repeats: int) -> list[Row]:
    """Measure the search for schedules with several stages on each device."""
    return [
        Row(
            what=f"all templates of 1 to 60 nodes, {num_layers} different layers, {kind.value}, memory: {memory}",
            measured=f"{median_s(several_stages(kind, num_layers, memory), repeats):.1f} s",
            target="5 s",
        )
        for num_layers in (130, 400)
        for kind in CHUNK_KINDS
        for memory in ("no limit", "80 GB")
    ]


def large(repeats: int) -> list[Row]:
    """Measure what comes after the templates, on 1024 nodes."""
    problem = job(96, 8, num_microbatches=4096, max_failures=1, min_pipeline_nodes=2)
    started = time.perf_counter()
    templates = templates_for(problem, 1024)
    templates_s = time.perf_counter() - started
    sizes = templates.sizes
    composed_s = median_s(lambda: compose(templates, 1024, 4096, 2), repeats)
    few_s = median_s(lambda: compose(templates, 1024, 500, 2), repeats)

    prepare(problem, 1024)
    plan = first_plan(problem, range(1024))
    victims = iter(range(0, 1024, 1024 // (repeats + 2)))

    def lose_one() -> None:
        victim = next(victims)
        replan(problem, plan, [node for node in range(1024) if node != victim])

    layouts = sum(map(len, templates.layouts))
    return [
        Row(what=f"templates of {sizes[0]} to {sizes[-1]} nodes ({layouts} layouts)", measured=f"{templates_s:.3f} s"),
        Row(what=f"composition, 1024 nodes, {len(sizes)} sizes", measured=ms(composed_s), target="50 ms"),
        Row(
            what=f"the same, room for {1024 // sizes[0]} pipelines, but 500 microbatches",
            measured=ms(few_s),
            target="50 ms",
        ),
        Row(
            what=f"decision after a failure, 1024 nodes, {len(plan.pipelines)} pipelines",
            measured=ms(median_s(lose_one, repeats)),
            target="50 ms",
        ),
    ]


def splits(repeats: int) -> list[Row]:
    """Measure the batch split, direct and as a model."""
    templates = plan_templates(job(32, 4), 24)
    by_size = [lines(layouts) for layouts in templates.layouts]

    def pipelines(count: int) -> list[Lines]:
        return [by_size[i % len(by_size)] for i in range(count)]

    many, few = pipelines(128), pipelines(8)
    return [
        Row(
            what="batch split, 128 pipelines, 4096 microbatches",
            measured=ms(median_s(lambda: split_microbatches(many, 4096), repeats)),
            target="1 ms",
        ),
        Row(
            what="Pyomo split with memory caps, 8 pipelines, 256 microbatches",
            measured=ms(median_s(lambda: split_with_constraints(few, 256, max_microbatches=[48] * 8), repeats)),
        ),
    ]


def first_calls() -> dict[str, float]:
    """Return by how many seconds first calls take longer than second ones."""
    took: dict[str, float] = {}
    search = one_size(8, 4, 4, equal=False)
    templates = template_set_of_one()
    for name, call in (("search", search), ("composition", lambda: compose(templates, 8, 64, 2))):
        times: list[float] = []
        for _ in range(2):
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        took[name] = times[0] - times[1]
    return took


def template_set_of_one() -> TemplateSet:
    """Make templates without the search."""
    stage = StageSpec(first_layer=0, end_layer=1, node_index=0, forward_ms=1.0, backward_ms=2.0)
    return TemplateSet(problem_digest="", layouts=((PipelineTemplate(num_nodes=1, stages=(stage,)),),))


def compilation() -> list[Row]:
    """Measure first calls in fresh processes: the first fills the compiler's cache, the second finds it filled."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--first-calls"]
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        empty, filled = (
            json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        )
    return [
        Row(
            what=f"first {name} of a process, over later ones",
            measured=f"{empty[name]:.2f} s, {filled[name]:.2f} s where compiled before",
        )
        for name in empty
    ]


def ms(seconds: float) -> str:
    """Write milliseconds."""
    return f"{seconds * 1e3:.2f} ms"


def main() -> None:
    """Measure everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--first-calls", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_calls:
        sys.stdout.write(json.dumps(first_calls()))
        return
    rows = [
        *searches(options.repeats),
        *chunk_searches(options.repeats),
        *large(options.repeats),
        *splits(options.repeats),
        *compilation(),
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    rows.append(Row(what="peak memory of all of the above", measured=f"{peak:.2f} GB", target="1 GB"))
    title = f"planning, median of {options.repeats}"
    table = plain_table("what", "measured", "target", "others", left=("what",), title=title)
    for row in rows:
        table.add_row(row.what, row.measured, row.target, row.others)
    Console().print(table)


if __name__ == "__main__":
    main()
