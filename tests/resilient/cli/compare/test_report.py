"""Why a planner is said to be the best: the times that are named add up, whatever fits and whatever is lost."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import pytest
from rich.console import Console

from resilient.cli.compare.report import Comparison, PlannerRow, compare_planners
from resilient.cli.compare.tables import show_comparison
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import SampleTable
from resilient.planners.planner import Assignment, Configuration, Parallelism, Place, Planner, Replica, Setting
from resilient.planners.published.baselines.uniform import Uniform
from resilient.planners.registry import planner
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.devices import cluster_of

MODEL = "siglip-so400m+llama3.2-1b"
NAMES = ("uniform", "dip", "cornstarch", "orchmllm")


@dataclass(frozen=True)
class SomeReplicas(Uniform):
    """So many replicas of one stage for each unit, a sample in each microbatch."""

    name: str = "some"
    dp: int = 1

    def configure(self, setting: Setting, samples: SampleTable) -> Configuration:
        units = {
            unit.name: Parallelism(dp=self.dp, pp=1, stage_layers=(len(unit.layers),)) for unit in setting.costs.units
        }
        return Configuration(units=units, num_microbatches=setting.global_batch // self.dp)


def compared(
    *planners: Planner, lost_nodes: int = 0, frozen: tuple[str, ...] = (), memory_bytes: int | None = None
) -> Comparison:
    cluster = cluster_of("a100-80gb", 4)
    setting = Setting(
        costs=derive_costs(MODEL, "a100-80gb", frozen=frozen),
        cluster=cluster if memory_bytes is None else replace(cluster, memory_bytes=memory_bytes),
        num_nodes=3,
        global_batch=24,
        microbatch=1,
    )
    table, clock = workload("laion", 148, 0, MODEL), count()
    return compare_planners(
        planners or [planner(name) for name in NAMES],
        setting,
        table[:100],
        [table[100:124], table[124:]],
        lost_nodes=lost_nodes,
        baseline="uniform",
        reason=str,
        clock=lambda: float(next(clock)),
        done=lambda: None,
    )


def parts(row: PlannerRow) -> dict[str, float]:
    computing = (1 - row.bubble) * row.iteration_ms
    return {
        "computes": computing,
        "waits": row.iteration_ms - computing - row.sum_ms,
        "sums gradients": row.sum_ms,
    }


@pytest.mark.parametrize(
    ("lost_nodes", "frozen"), [(0, ()), (1, ()), (0, ("vision", "llm")), (1, ("vision",))], ids=lambda each: str(each)
)
def test_the_reason_is_the_largest_part_of_the_difference(lost_nodes: int, frozen: tuple[str, ...]) -> None:
    found = compared(lost_nodes=lost_nodes, frozen=frozen)
    best, rows = found.best, {row.name: row for row in found.rows}
    assert best is not None
    assert best.iteration_ms == min(row.iteration_ms for row in found.rows if row.fits)
    claims = re.findall(
        r"([\d.]+)x as fast (?:in simulation as|as the next,) ([\w-]+), mostly as it ([a-z ]+) (\d+) ms less",
        found.reason(),
    )
    assert claims
    for gain, name, what, ms in claims:
        other = rows[name]
        saved = {part: value - parts(best)[part] for part, value in parts(other).items()}
        assert gain == f"{other.iteration_ms / best.iteration_ms:.2f}"
        assert (what, ms) == (max(saved, key=lambda part: saved[part]), f"{max(saved.values()):.0f}")
        assert min(*parts(best).values(), *parts(other).values()) > -1e-9
        assert sum(saved.values()) == pytest.approx(other.iteration_ms - best.iteration_ms)


def test_devices_that_are_not_used_count_as_idle() -> None:
    rows = compared(SomeReplicas("two", dp=2), SomeReplicas("four", dp=4)).rows
    assert [row.num_devices for row in rows] == [4, 8]
    # Both compute as much, taken over all twelve devices.
    assert parts(rows[0])["computes"] == pytest.approx(parts(rows[1])["computes"])


@dataclass(frozen=True)
class Greedy(SomeReplicas):
    """Called as the baseline, with all samples in one microbatch."""

    name: str = "uniform"

    def assign(
        self, setting: Setting, configuration: Configuration, batch: SampleTable, replicas: Sequence[Replica]
    ) -> Assignment:
        none = np.zeros(len(batch), np.int64)
        return Assignment(units=dict.fromkeys(batch.units, Place(replica=none, microbatch=none)))


def test_a_baseline_that_does_not_fit_is_not_what_speed_ups_are_relative_to() -> None:
    memory = 30 * 10**9
    found = compared(planner("entrain"), Greedy(dp=2), planner("dip"), memory_bytes=memory)
    rows = {row.name: row for row in found.rows}
    assert {name: row.fits for name, row in rows.items()} == {"entrain": True, "uniform": False, "dip": True}
    assert found.base is rows["entrain"]
    assert found.speed_up(rows["dip"]) == rows["entrain"].iteration_ms / rows["dip"].iteration_ms
    assert found.to_dict()["baseline"] == "entrain"
    console = Console(file=io.StringIO(), width=120)
    show_comparison(found, console)
    assert isinstance(console.file, io.StringIO)
    assert "\nuniform does not fit: speed-ups are relative to entrain\n" in console.file.getvalue()
    assert compared(planner("dip"), memory_bytes=memory).base is None


def test_the_reason_says_so_where_nothing_fits() -> None:
    nothing = compared(memory_bytes=10**9)
    assert not nothing.rows
    assert set(nothing.refused) == set(NAMES)
    assert nothing.best is None
    assert nothing.reason() == "no planner found a plan; use more nodes or a smaller microbatch"
