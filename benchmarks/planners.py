"""How long multimodal planners take: per step (assignments) and once per job (configurations).

    python benchmarks/planners.py [--repeats 7] [name ...]

Medians after a call that compiles. Names are those of the table's first column; all rows where none is given.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
from parts.timing import median_s
from rich.console import Console

from resilient.cli.shared.printing import plain_table
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.packing.balance import by_speed, loads, longest_first
from resilient.planners.packing.kernels import descending, spread
from resilient.planners.packing.microbatch_order import reorder
from resilient.planners.planner import Configuration, Parallelism, Replica, Setting
from resilient.planners.published.cornstarch.planner import Cornstarch
from resilient.planners.published.dflop.search import dflop_configurations
from resilient.planners.published.dflop.vector_packing import pack_vectors
from resilient.planners.published.dhp.groups import pack, plan_groups
from resilient.planners.published.dhp.planner import DHP, dhp_across_nodes, ranks_of, sequences_of
from resilient.planners.published.disttrain.search import disttrain_configurations
from resilient.planners.published.orchmllm.nodewise import rearrange
from resilient.planners.published.orchmllm.planner import OrchMLLM
from resilient.planners.published.orchmllm.post_balance import balance_padded, balance_quadratic
from resilient.planners.registry import PLANNERS, planner
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.stages.one_pipeline import pipeline_configurations
from resilient.planners.workloads.workload import workload
from resilient.templates.common.arrays import Floats, Ints
from resilient.templates.common.compiled import compiled
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.devices import cluster_of


@dataclass(frozen=True, kw_only=True)
class Row:
    """What is timed.

    Args:
        name: Of the planner or step, as in ``resilient/planners``.
        case: How much it is given.
        call: Does it once; its inputs are made beforehand.
        published: What others report for it.
        target: What is asked for.
    """

    name: str
    case: str
    call: Callable[[], object]
    published: str = ""
    target: str = ""


def balance() -> list[Row]:
    """Steps that planners share."""
    draw = np.random.default_rng(0)
    weights = draw.lognormal(6.0, 1.0, 60 * 2560).astype(np.int64)
    slowdowns = np.ones(2560)
    slowdowns[::40] = 0.8
    return [
        Row(
            name="longest_first",
            case="153,600 samples over 2,560 bins",
            call=lambda: longest_first(weights, np.ones(2560)),
            published="54 ms, OrchMLLM's whole balance",
            target="20 ms, with OrchMLLM's balance",
        ),
        Row(
            name="longest_first",
            case="the same, a 40th of the bins slower",
            call=lambda: longest_first(weights, slowdowns),
        ),
    ]


@compiled
def heap_spread(items: Floats, order: Ints, speeds: Floats, members: Ints, starts: Ints) -> Ints:
    """Do what ``spread`` does, with a standard heap of the bins of each speed instead of a tournament."""
    heaps = [[(0.0, each) for each in members[starts[speed] : starts[speed + 1]]] for speed in range(len(speeds))]
    chosen = np.full(len(items), -1)
    for item in order:
        best, finish = 0, np.inf
        for speed in range(len(speeds)):
            done = (heaps[speed][0][0] + items[item]) / speeds[speed]
            if done < finish or (done == finish and heaps[speed][0][1] < heaps[best][0][1]):
                best, finish = speed, done
        load, chosen[item] = heaps[best][0]
        heapq.heapreplace(heaps[best], (load + float(items[item]), chosen[item]))
    return chosen


def kernels() -> list[Row]:
    """The two loops that sort by hand, and the standard library's in their place."""
    draw = np.random.default_rng(0)
    weights, speeds = draw.lognormal(6.0, 1.0, 60 * 2560).astype(np.int64).astype(np.float64), np.ones(2560)
    speeds[::40] = 0.8
    order, bins = descending(weights), by_speed(speeds)
    case, target = "153,600 samples over 2,560 bins", "a part of 20 ms"
    return [
        Row(name="kernels", case="153,600 samples: descending", call=lambda: descending(weights), target=target),
        Row(name="kernels", case="with numpy's stable sort", call=lambda: np.argsort(-weights, kind="stable")),
        Row(name="kernels", case=f"{case}: spread", call=lambda: spread(weights, order, *bins), target=target),
        Row(name="kernels", case="with heapq, compiled", call=lambda: heap_spread(weights, order, *bins)),
    ]


def cornstarch() -> list[Row]:
    """Stages of a model with two frozen encoders."""
    draw = np.random.default_rng(0)
    vision, audio = draw.integers(256, 4096, 2000), draw.integers(100, 1500, 2000)
    samples = SampleTable(
        units={
            "vision": Lengths.of(vision),
            "audio": Lengths.of(audio),
            "llm": Lengths.of(vision // 4 + audio // 2 + draw.integers(50, 1000, 2000)),
        }
    )
    setting = Setting(
        costs=derive_costs("internvit-6b+whisper-large-v3+llama3-8b", "a100-80gb", frozen=("vision", "audio")),
        cluster=Cluster(devices_per_node=8, memory_bytes=75 * 2**30),
        num_nodes=16,
        global_batch=512,
        microbatch=1,
    )
    return [
        Row(
            name="cornstarch",
            case="two encoders and an 8B model on 128 devices, once",
            call=lambda: Cornstarch().configure(setting, samples),
        )
    ]


def orchestration() -> list[Row]:
    """Configurations of the paper's largest job: encoder, 70B language model, generator."""
    device = "a100-80gb"
    model = derive_costs("internvit-6b+llama3-70b", device)
    generator = replace(derive_costs("siglip-so400m+llama3-8b", device).units[0], name="generator")
    draw = np.random.default_rng(0)
    vision = draw.lognormal(8.0, 0.7, 1000).astype(np.int64)
    lengths = {"vision": vision, "llm": np.full(1000, 8192), "generator": vision // 2}
    samples = SampleTable(units={name: Lengths.of(each) for name, each in lengths.items()})
    three = Setting(
        costs=CostModel(units=(*model.units, generator)),
        cluster=cluster_of(device, 8),
        num_nodes=162,
        global_batch=1920,
        microbatch=1,
    )
    two = replace(three, costs=model)
    return [
        Row(
            name="disttrain",
            case="three units on 1,296 devices, batch 1,920, by its formulas",
            call=lambda: disttrain_configurations(three, samples),
            published="922 ms",
            target="50 ms",
        ),
        Row(name="dflop", case="two units on the same", call=lambda: dflop_configurations(two, samples)),
    ]


def every_planner() -> list[Row]:
    """Steps of all planners on 64 and 1,024 devices, and their configurations for 4,096, of Qwen2-VL 7B."""
    model, device, data = "qwen2-vl-7b", "a100-80gb", "laion+coco"
    costs, known = derive_costs(model, device), workload(data, 3 * 4096, 0, model)

    def job(nodes: int, batch: int) -> Setting:
        cluster = cluster_of(device, 8)
        return Setting(costs=costs, cluster=cluster, num_nodes=nodes, global_batch=batch, microbatch=2)

    @cache
    def configured(name: str, nodes: int, batch: int) -> tuple[Configuration, SampleTable, Sequence[Replica]]:
        found = planner(name).configure(job(nodes, batch), known)
        return found, workload(data, batch, 1, model), degraded_replicas(job(nodes, batch), found, 0)

    def assign(name: str, nodes: int, batch: int) -> object:
        return planner(name).assign(job(nodes, batch), *configured(name, nodes, batch))

    rows: list[Row] = []
    for name in PLANNERS:
        for nodes, batch, target in ((8, 512, "20 ms"), (128, 8192, "150 ms")):
            case = f"{batch:,} samples on {8 * nodes:,} devices, a step"
            rows.append(Row(name=name, case=case, call=partial(assign, name, nodes, batch), target=target))
        call = partial(planner(name).configure, job(512, 8192), known)
        rows.append(Row(name=name, case="8,192 samples on 4,096 devices, once", call=call, target="5 s"))
    return rows


def pipelines() -> list[Row]:
    """One pipeline on each number of nodes, for every planner."""
    model = "siglip-so400m+llama3.2-1b"
    setting = Setting(
        costs=derive_costs(model, "h200"),
        cluster=cluster_of("h200", 1),
        num_nodes=16,
        global_batch=64,
        microbatch=1,
    )
    samples, case = workload("laion", 1024, 0, model), "one pipeline on 1 to 16 nodes of one device, once"
    return [
        Row(
            name=name,
            case=case,
            call=partial(pipeline_configurations, planner(name), setting, samples, range(1, 17)),
            target="5 s for each number",
        )
        for name in PLANNERS
    ]


def vector_packing() -> list[Row]:
    """DFLOP's scheduler: exchanges alone, and HiGHS after them."""
    draw = np.random.default_rng(0)
    many = np.stack([draw.lognormal(0, 1, 2048), draw.lognormal(0, 0.5, 2048)])
    few = draw.lognormal(0, 0.5, (2, 64))
    return [
        Row(name="vector_packing", case="2,048 items, 128 buckets", call=lambda: pack_vectors(many, np.ones(128))),
        Row(name="vector_packing", case="64 items, 16 buckets", call=lambda: pack_vectors(few, np.ones(16))),
        Row(
            name="vector_packing",
            case="the same, HiGHS for 0.2 s",
            call=lambda: pack_vectors(few, np.ones(16), time_limit_s=0.2),
            target="200 ms, its time limit",
        ),
    ]


def order() -> list[Row]:
    """DistTrain's order of the microbatches of one pipeline."""
    draw = np.random.default_rng(0)
    forward = np.concatenate([10 * draw.lognormal(0, 0.6, (2, 64)), np.full((8, 64), 12.0)])
    return [
        Row(name="microbatch_order", case="64 on 10 stages", call=lambda: reorder(forward, 2 * forward)),
    ]


def groups() -> list[Row]:
    """DHP's two stages for one microbatch."""
    job = Setting(
        costs=derive_costs("siglip-so400m+llama3.2-3b", "h200"),
        cluster=cluster_of("h200", 8),
        num_nodes=8,
        global_batch=512,
        microbatch=8,
    )
    batch = workload("laion", 512, 0, "siglip-so400m+llama3.2-3b")
    units = {unit.name: Parallelism(dp=1, pp=1, cp=64, stage_layers=(len(unit.layers),)) for unit in job.costs.units}
    configuration = Configuration(units=units, num_microbatches=1)
    sequences, ranks = sequences_of(job, configuration, batch), ranks_of(job, configuration, 64)
    one = [Replica(num_microbatches=1)]
    found = DHP().configure(job, batch)
    own = [Replica(num_microbatches=found.num_microbatches)]
    return [
        Row(
            name="groups",
            case="512 sequences, 64 ranks",
            call=lambda: plan_groups(sequences, ranks, *pack(sequences.kept)),
            published="86 ms",
            target="5 ms",
        ),
        Row(name="dhp", case="the same, with costs", call=lambda: DHP().assign(job, configuration, batch, one)),
        Row(name="dhp", case="512 samples to its own microbatches", call=lambda: DHP().assign(job, found, batch, own)),
        Row(name="dhp", case="Llama 3.2 3B with SigLIP on 64 devices, once", call=lambda: DHP().configure(job, batch)),
    ]


def large() -> list[Row]:
    """DHP and OrchMLLM for Qwen2-VL 7B: a step on 64 and 1024 devices, the configuration on 4096."""
    model = "qwen2-vl-7b"
    costs, samples = derive_costs(model, "h100"), workload("laion+coco", 4096, 0, model)

    def job(nodes: int, batch: int) -> Setting:
        return Setting(costs=costs, cluster=cluster_of("h100", 8), num_nodes=nodes, global_batch=batch, microbatch=2)

    rows: list[Row] = []
    for each in (DHP(), dhp_across_nodes(), OrchMLLM()):
        for nodes, size, target in ((8, 512, "20 ms"), (128, 8192, "150 ms")):
            setting, batch = job(nodes, size), workload("laion+coco", size, 1, model)
            found = each.configure(setting, samples)
            replicas = degraded_replicas(setting, found, 0)
            rows.append(
                Row(
                    name=each.name,
                    case=f"{size} samples on {8 * nodes} devices, a step",
                    call=lambda each=each, job=(setting, found, batch, replicas): each.assign(*job),
                    target=target,
                )
            )
        rows.append(
            Row(
                name=each.name,
                case="Qwen2-VL 7B on 4096 devices, once",
                call=lambda each=each: each.configure(job(512, 8192), samples),
                target="5 s",
            )
        )
    return rows


def post_balance() -> list[Row]:
    """OrchMLLM's balancing of one phase, and its node-wise rearrangement."""
    draw = np.random.default_rng(0)
    lengths, even = draw.lognormal(6.0, 1.0, 60 * 2560).astype(np.int64), np.ones(2560)
    read_on = np.repeat(np.arange(2560), 60) // 8
    batches = longest_first(lengths, even)
    volumes = loads(lengths, batches * 320 + read_on, 2560 * 320).reshape(2560, 320)
    nodes, kinds = np.arange(2560) // 8, np.zeros(2560, dtype=np.int64)
    case, published, target = "153,600 samples, 2,560 instances", "54 ms, all of it", "20 ms"
    return [
        Row(
            name="post_balance",
            case=f"padded, {case}",
            call=lambda: balance_padded(lengths, even),
            published=published,
            target=target,
        ),
        Row(
            name="post_balance",
            case=f"quadratic, {case}",
            call=lambda: balance_quadratic(lengths, even, 665.0),
            published=published,
            target=target,
        ),
        Row(
            name="nodewise",
            case="2,560 instances on 320 nodes",
            call=lambda: rearrange(volumes, nodes, kinds),
            target="1000 ms",
        ),
    ]


ROWS: tuple[Callable[[], list[Row]], ...] = (
    balance,
    kernels,
    orchestration,
    order,
    every_planner,
    pipelines,
    vector_packing,
    cornstarch,
    groups,
    large,
    post_balance,
)
"""Makers of rows, in the order of the table."""


def main() -> None:
    """Measure the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    words = ("name", "case", "published", "target")
    title = f"planners, median of {options.repeats}"
    table = plain_table("name", "case", "measured", "published", "target", left=words, title=title)
    for row in (row for make in ROWS for row in make()):
        if not options.names or row.name in options.names:
            measured = f"{1e3 * median_s(row.call, options.repeats):.1f} ms"
            table.add_row(row.name, row.case, measured, row.published, row.target)
    Console().print(table)


if __name__ == "__main__":
    main()
