"""Models, samples and jobs for Entrain."""

from __future__ import annotations

from dataclasses import replace

from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.planner import Setting
from resilient.templates.inputs.cluster import Cluster, Link
from tests.resilient.planners.jobs_of_planners import COSTS, table, unit

AUDIO = unit("audio", 3, 0.003, 0.0)
MODELS = {
    "two": COSTS,
    "frozen": COSTS.frozen(["vision", "llm"]),
    "three": CostModel(units=(COSTS.units[0], AUDIO, COSTS.units[1])),
    "alone": CostModel(units=COSTS.units[1:]),
}
NETWORK = Link(latency_ms=0.01, bytes_per_s=1e7)


def drawn(costs: CostModel, count: int, seed: int = 0) -> SampleTable:
    of = table(count, seed)
    lengths = {"audio": Lengths.of(table(count, seed + 1).units["vision"].tokens), **of.units}
    return SampleTable(units={each.name: lengths[each.name] for each in costs.units})


def job(costs: CostModel, num_nodes: int, *, batch: int = 16, memory: int | None = None) -> Setting:
    cluster = Cluster(
        devices_per_node=2,
        memory_bytes=memory,
        intra_node=NETWORK,
        inter_node=replace(NETWORK, bytes_per_s=1e6),
    )
    return Setting(costs=costs, cluster=cluster, num_nodes=num_nodes, global_batch=batch, microbatch=2)
