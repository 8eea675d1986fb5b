"""What papers on multimodal planners report, and what the simulation finds in settings near theirs.

    python benchmarks/headlines.py [--batches 5] [claim ...]

Claims are named by the table's first column. Nothing is fitted to the published numbers: what differs is listed with
what is known of the reasons; "assumed" is what was not tried here. Costs are derived from data sheets, and models and
data sets stand in for those of the papers, as far as all planners find a plan for them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from resilient.planners.cornstarch import Cornstarch
from resilient.planners.derive import derive_costs
from resilient.planners.evaluate import Result, evaluate
from resilient.planners.planner import Planner, Setting
from resilient.planners.registry import planner
from resilient.planners.samples import SampleTable
from resilient.planners.survivors import survivors
from resilient.planners.workloads import workload
from resilient.templates.devices import cluster_of

KNOWN_SAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job.

    Args:
        model: As for ``resilient compare``, as the others.
        workload: The data.
        device: The accelerator.
        nodes: Of eight devices.
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch.
        frozen: What is not trained.
    """

    model: str
    workload: str
    device: str = "a100-80gb"
    nodes: int = 4
    global_batch: int = 256
    microbatch: int = 4
    frozen: tuple[str, ...] = ()

    def __str__(self) -> str:
        frozen = f", frozen {'+'.join(self.frozen)}" if self.frozen else ""
        return f"{self.model}, {self.workload}, {8 * self.nodes} {self.device}, batch {self.global_batch}{frozen}"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Something that was published.

    Args:
        name: What is claimed.
        published: As published.
        low: The range of the gain in it.
        high: Likewise.
        cases: Where it is looked for.
        better: Who is faster: who configures, and who assigns.
        worse: Than whom.
        notes: Why simulated gains may differ.
    """

    name: str
    published: str
    low: float
    high: float
    cases: tuple[Case, ...]
    better: tuple[Planner, Planner]
    worse: tuple[Planner, Planner]
    notes: str


def both(name: str) -> tuple[Planner, Planner]:
    """Return a planner that configures and assigns."""
    return planner(name), planner(name)


SMALL = Case(model="siglip-so400m+llama3.2-3b", workload="laion", microbatch=2)
MIDDLE = Case(model="qwen2-vl-7b", workload="laion")
EVEN = Case(model="qwen2-vl-7b", workload="coco")
FROZEN = ("vision", "llm")

CLAIMS = (
    Claim(
        name="Entrain over DistTrain",
        published="up to 1.40x, std of microbatches down up to 10.6x",
        low=1.0,
        high=1.4,
        cases=(SMALL, MIDDLE),
        better=both("entrain"),
        worse=both("disttrain"),
        notes="DistTrain here searches all its configurations exactly and improves its order of microbatches. Assumed: "
        "so it waits less than the paper's; and SynthChartNet, which the paper used, has other pictures. Where a few "
        "samples take longer than a mean microbatch, none of both can level them.",
    ),
    Claim(
        name="Entrain over DIP",
        published="up to 1.40x",
        low=1.0,
        high=1.4,
        cases=(SMALL, MIDDLE),
        better=both("entrain"),
        worse=both("dip"),
        notes="Where the gain is more with gradient sums than without, DIP has more replicas: its search, and so its "
        "plan, leaves sums out. Assumed: the paper's DIP interleaves more than encoders first.",
    ),
    Claim(
        name="Cornstarch, aware of what is frozen",
        published="1.00x-2.46x",
        low=1.0,
        high=2.46,
        cases=(
            Case(model="qwen2-vl-7b", workload="coco", frozen=FROZEN),
            Case(model="internvit-6b+llama3-8b", workload="coco", nodes=8, microbatch=1, frozen=FROZEN),
            Case(model="siglip-so400m+llama3.2-3b", workload="coco"),
        ),
        better=both("cornstarch"),
        worse=(Cornstarch(frozen_aware=False), planner("cornstarch")),
        notes="The gain is how many devices an unaware cut gives to a frozen encoder. Here both search the number of "
        "stages of each unit; assumed: with the paper's fixed numbers of stages less can be made good for.",
    ),
    Claim(
        name="DistTrain over a uniform plan",
        published="1.3x-2.2x",
        low=1.3,
        high=2.2,
        cases=(MIDDLE, EVEN),
        better=both("disttrain"),
        worse=both("uniform"),
        notes="The paper's models are larger (9B to 72B) and generate pictures, too. The uniform plan leaves gradient "
        "sums out and may choose many replicas of few stages: the column without sums leaves that out of both.",
    ),
    Claim(
        name="DistTrain's reordering",
        published="1.03x-1.11x",
        low=1.03,
        high=1.11,
        cases=(SMALL, MIDDLE),
        better=both("disttrain"),
        worse=(planner("disttrain"), planner("uniform")),
        notes="The other order here is that of the data, which balances neither replicas nor microbatches: with few "
        "samples in a microbatch and sizes this heavy-tailed a few of them stall the pipeline. Assumed: the "
        "paper's microbatches are more alike.",
    ),
    Claim(
        name="DFLOP over a uniform plan",
        published="up to 3.6x",
        low=1.0,
        high=3.6,
        cases=(MIDDLE, EVEN),
        better=both("dflop"),
        worse=both("uniform"),
        notes="DFLOP's objective leaves gradient sums out and chooses many replicas; without sums it is ahead. It takes"
        " the mean microbatch of all, as the uniform plan does, which is itself searched here. Assumed: the "
        "largest published gains are over plans that were not.",
    ),
    Claim(
        name="DHP over static context parallelism",
        published="up to 1.36x",
        low=1.0,
        high=1.36,
        cases=(MIDDLE, Case(model="qwen2-vl-7b", workload="interleaved", nodes=8, microbatch=1)),
        better=both("dhp"),
        worse=both("static-cp"),
        notes="Where samples are short the static plan chooses degree 1, and what is gained is balance. Where they are "
        "long it needs tp 2 x cp 8 for all: a ring between nodes in every microbatch, in encoders too. DHP's encoders "
        "are taken to share out whole pictures without one, on stages of their own: more than the paper compares.",
    ),
    Claim(
        name="OrchMLLM over itself unbalanced",
        published="1.5x-2.0x",
        low=1.5,
        high=2.0,
        cases=(MIDDLE, Case(model="qwen2-vl+whisper-large-v3+qwen2.5-7b", workload="mixed")),
        better=both("orchmllm"),
        worse=(planner("orchmllm"), planner("uniform")),
        notes="Balance counts for more the more replicas there are (2560 devices in the paper): of few the slowest is "
        "less far from the mean. With encoders on stages of their own, as the uniform plan has them, a microbatch "
        "waits for encoders of other replicas.",
    ),
)


def simulate(case: Case, who: tuple[Planner, Planner], num_batches: int) -> list[Result]:
    """Return the steps of some batches."""
    setting = Setting(
        costs=derive_costs(case.model, case.device, frozen=case.frozen),
        cluster=cluster_of(case.device, 8),
        num_nodes=case.nodes,
        global_batch=case.global_batch,
        microbatch=case.microbatch,
    )
    table = workload(case.workload, KNOWN_SAMPLES + num_batches * case.global_batch, 0, case.model)
    configuration = who[0].configure(setting, table[:KNOWN_SAMPLES])
    replicas = survivors(setting, configuration, 0)

    def step(batch: SampleTable) -> Result:
        assignment = who[1].assign(setting, configuration, batch, replicas)
        return evaluate(setting, configuration, assignment, batch, replicas)

    starts = range(KNOWN_SAMPLES, len(table), case.global_batch)
    return [step(table[start : start + case.global_batch]) for start in starts]


def row(claim: Claim, case: Case, num_batches: int) -> tuple[str, ...]:
    """Return a row of the table: the gain, the gain without gradient sums, what it comes from."""
    try:
        better = simulate(case, claim.better, num_batches)
        worse = simulate(case, claim.worse, num_batches)
    except ValueError as error:
        return (str(case), f"no plan: {error}", "", "", "")
    gain = _mean_ms(worse) / _mean_ms(better)
    without = _mean_ms(worse, sums=False) / _mean_ms(better, sums=False)
    bubbles = [100 * float(np.mean([each.bubble for each in results])) for results in (worse, better)]
    spread = "  ".join(
        f"{unit} {np.mean([each.std_ms[unit] for each in worse]):.1f} > "
        f"{np.mean([each.std_ms[unit] for each in better]):.1f}"
        for unit in better[0].std_ms
    )
    where = "below" if gain < 0.995 * claim.low else "above" if gain > 1.005 * claim.high else "within"
    memory = cluster_of(case.device, 8).memory_bytes
    if memory is not None and max(each.peak_bytes for each in (*better, *worse)) > memory:
        where += ", beyond memory"
    return (str(case), f"{gain:.2f}x, {where}", f"{without:.2f}x", f"{bubbles[0]:.0f} > {bubbles[1]:.0f}", spread)


def _mean_ms(results: Sequence[Result], *, sums: bool = True) -> float:
    return float(np.mean([each.iteration_ms - each.sum_ms * (not sums) for each in results]))


def main() -> None:
    """Simulate the claims and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    console = Console(highlight=False, width=150)
    for claim in CLAIMS:
        if options.names and claim.name not in options.names:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for column in ("setting", "gain", "without sums", "bubble %", "std ms of microbatches"):
            table.add_column(column)
        for case in claim.cases:
            table.add_row(*row(claim, case, options.batches))
        console.print(f"\n{claim.name}: published {claim.published}", style="bold")
        console.print(table)
        console.print(claim.notes, style="dim")


if __name__ == "__main__":
    main()
