"""What papers on multimodal planners report, and what the simulation finds in settings near theirs.

    python benchmarks/headlines.py [--batches 5] [--lengths FOLDER] [claim ...]

Claims are named by their titles. Nothing is fitted to the published numbers. Below each setting are the same two
planners with something else about them or about the setting: what a gain comes from, and what makes it more or less
than the published one. Costs are derived from data sheets. ``--lengths`` takes pictures and captions from tables of
real ones instead of generators.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from headline_claims import CLAIMS, MEASURED, Case, Claim, Instead, Who
from rich.console import Console
from rich.table import Table

from resilient.planners.costs.cost_model import CostModel, Curve, LayerCurves, UnitCosts, UnitLayer
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.evaluate import Result, evaluate
from resilient.planners.planner import Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.devices import cluster_of

KNOWN_SAMPLES = 2000
FILES = {"laion": "derived_laion_aesthetics_sizes.csv", "coco": "derived_coco_val2017.csv"}


def measured(encoders: Sequence[float]) -> CostModel:
    """Return what Cornstarch's authors measured with all but projectors frozen, in layers of equal times.

    Forward and backward are 44 ms and 0.5 ms of an encoder and 138 ms and 285 ms of the language model; with
    everything trained 44 ms and 121 ms, 140 ms and 376 ms.

    Args:
        encoders: For each its time, relative to that.
    """
    units = [
        _measured_unit(f"encoder-{number}", 24, 44 * each, 82 * each, 38.5 * each, 0.5)
        for number, each in enumerate(encoders)
    ]
    costs = CostModel(units=(*units, _measured_unit(LLM, 32, 140, 285, 91, None)))
    return costs.frozen([unit.name for unit in costs.units])


def _measured_unit(
    name: str, num_layers: int, forward: float, inputs: float, weights: float, projector: float | None
) -> UnitCosts:
    rows = [(str(index), forward, inputs, weights) for index in range(num_layers)]
    layers = [(each[0], *(ms / num_layers for ms in each[1:])) for each in rows]
    if projector is not None:
        layers.append(("projector", 0.0, 0.0, projector))
    return UnitCosts(
        name=name,
        layers=tuple(
            UnitLayer(
                name=layer,
                curves=(
                    LayerCurves(
                        forward=Curve(linear=ahead),
                        backward_input=Curve(linear=back),
                        backward_weight=Curve(linear=own),
                    ),
                ),
            )
            for layer, ahead, back, own in layers
        ),
    )


@lru_cache(maxsize=8)
def _samples(case: Case, count: int, lengths: Path | None) -> SampleTable:
    if case.model == MEASURED:
        names = [unit.name for unit in measured(case.encoders).units]
        return SampleTable(units=dict.fromkeys(names, Lengths.of(np.ones(count, np.int64))))
    name = case.workload
    if lengths is not None and name in FILES:
        name = "+".join(str(lengths / FILES[each]) for each in dict.fromkeys((name, "coco")))
    table = workload(name, int(np.ceil(count / case.short)), 0, case.model, bad="drop")
    table = table[np.sort(np.argsort(table.units[LLM].tokens, kind="stable")[:count])]
    if not case.even:
        return table
    means = {
        unit: [np.full(count, np.rint(values.mean())) for values in (each.tokens, each.squares, each.longest)]
        for unit, each in table.units.items()
    }
    return SampleTable(
        units={
            unit: Lengths(tokens=each[0].astype(int), squares=each[1].astype(int), longest=each[2].astype(int))
            for unit, each in means.items()
        }
    )


def simulate(case: Case, who: Who, num_batches: int, lengths: Path | None = None) -> list[Result]:
    """Return the steps of some batches."""
    cluster = cluster_of(case.device, 8)
    if case.free:
        cluster = replace(cluster, intra_node=Link(), inter_node=Link())
    costs = measured(case.encoders) if case.model == MEASURED else None
    setting = Setting(
        costs=costs or derive_costs(case.model, case.device, frozen=case.frozen),
        cluster=cluster,
        num_nodes=case.nodes,
        global_batch=case.global_batch,
        microbatch=case.microbatch,
    )
    table = _samples(case, KNOWN_SAMPLES + num_batches * case.global_batch, lengths)
    configuration = who[0].configure(setting, table[:KNOWN_SAMPLES])
    replicas = degraded_replicas(setting, configuration, 0)

    def step(batch: SampleTable) -> Result:
        assignment = who[1].assign(setting, configuration, batch, replicas)
        return evaluate(setting, configuration, assignment, batch, replicas)

    starts = range(KNOWN_SAMPLES, len(table), case.global_batch)
    return [step(table[start : start + case.global_batch]) for start in starts]


def row(claim: Claim, case: Case, instead: Instead | None, num_batches: int, lengths: Path | None) -> tuple[str, ...]:
    """Return a row of the table: the gain, the gain without gradient sums, what it comes from."""
    label = str(case) if instead is None else f"  {instead.what}"
    better, worse = claim.better, claim.worse
    if instead is not None:
        better, worse, case = instead.better or better, instead.worse or worse, replace(case, **instead.change)
    try:
        ours, theirs = (simulate(case, who, num_batches, lengths) for who in (better, worse))
    except ValueError as error:
        return (label, f"no plan: {error}" if instead is None else "no plan", "", "", "")
    gain = _mean_ms(theirs) / _mean_ms(ours)
    without = _mean_ms(theirs, sums=False) / _mean_ms(ours, sums=False)
    bubbles = [100 * float(np.mean([each.bubble for each in results])) for results in (theirs, ours)]
    spread = "  ".join(
        f"{unit} {np.mean([each.std_ms[unit] for each in theirs]):.1f} > "
        f"{np.mean([each.std_ms[unit] for each in ours]):.1f}"
        for unit in ours[0].std_ms
    )
    found = f"{gain:.2f}x"
    if instead is None:
        found += ", below" if gain < 0.995 * claim.low else ", above" if gain > 1.005 * claim.high else ", within"
    memory = cluster_of(case.device, 8).memory_bytes
    if memory is not None and max(each.peak_bytes for each in (*ours, *theirs)) > memory:
        found += ", beyond memory"
    return (label, found, f"{without:.2f}x", f"{bubbles[0]:.0f} > {bubbles[1]:.0f}", spread)


def _mean_ms(results: Sequence[Result], *, sums: bool = True) -> float:
    return float(np.mean([each.iteration_ms - each.sum_ms * (not sums) for each in results]))


def main() -> None:
    """Simulate the claims and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--lengths", type=Path, help=f"folder of {' and '.join(FILES.values())}")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    console = Console(highlight=False, emoji=False, width=170)
    for claim in CLAIMS:
        if options.names and claim.name not in options.names:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("setting, and what is tried", "gain", "without sums", "bubble %", "std ms of microbatches"):
            table.add_column(column)
        for case in claim.cases:
            for instead in (None, *(claim.reasons if case.model != MEASURED else ())):
                found = row(claim, case, instead, options.batches, options.lengths)
                table.add_row(*found, style="" if instead is None else "dim")
        console.print(f"\n{claim.name}: published {claim.published}", style="bold")
        console.print(table)


if __name__ == "__main__":
    main()
