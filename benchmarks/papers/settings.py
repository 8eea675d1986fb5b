"""The settings in which planners are compared: models, data and devices, and the simulation of steps in them.

Models and data sets stand in for those of the papers. Costs are derived from data sheets, but for one setting whose
times were published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.costs.samples import LLM, Lengths, SampleTable
from resilient.planners.evaluation.bound import bound_ms
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.planner import Planner, Setting
from resilient.planners.stages.degraded_replicas import degraded_replicas
from resilient.planners.workloads.workload import workload
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.devices import cluster_of

MEASURED = "measured"
KNOWN_SAMPLES = 2000
FILES = {"laion": "derived_laion_aesthetics_sizes.csv", "coco": "derived_coco_val2017.csv"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A job.

    Args:
        name: In tables.
        model: As for ``resilient compare``; or :data:`MEASURED` for costs as Cornstarch's authors measured them.
        workload: The data.
        device: The accelerator.
        nodes: Of eight devices.
        global_batch: Samples of a step.
        microbatch: Samples of a microbatch.
        frozen: What is not trained.
        encoders: Of measured costs: for each its time, relative to the published.
        even: Whether all samples are like the mean one.
        short: Part of the samples that is kept: those with the longest text and pictures are not.
        free: Whether messages and sums of gradients take no time.
        max_failures: Nodes that may be lost at the same time.
    """

    name: str
    model: str = "qwen2-vl-7b"
    workload: str = "laion"
    device: str = "a100-80gb"
    nodes: int = 4
    global_batch: int = 256
    microbatch: int = 4
    frozen: tuple[str, ...] = ()
    encoders: tuple[float, ...] = ()
    even: bool = False
    short: float = 1.0
    free: bool = False
    max_failures: int = 0

    def __str__(self) -> str:
        if self.model == MEASURED:
            times = " and ".join(f"{44 * each:.0f}" for each in self.encoders)
            return f"encoders of {times} ms, language model of 140 ms, {8 * self.nodes} devices, frozen"
        frozen = f", frozen {' and '.join(self.frozen)}" if self.frozen else ""
        data = f"{self.workload}, {8 * self.nodes} {self.device}"
        return f"{self.model}, {data}, batch {self.global_batch} of microbatches of {self.microbatch}{frozen}"

    def setting(self) -> Setting:
        """Return what planners are given."""
        cluster = cluster_of(self.device, 8)
        if self.free:
            cluster = replace(cluster, intra_node=Link(), inter_node=Link())
        costs = measured(self.encoders) if self.model == MEASURED else None
        return Setting(
            costs=costs or derive_costs(self.model, self.device, frozen=self.frozen),
            cluster=cluster,
            num_nodes=self.nodes,
            global_batch=self.global_batch,
            microbatch=self.microbatch,
            max_failures=self.max_failures,
        )


SMALL = Case(name="3B", model="siglip-so400m+llama3.2-3b", microbatch=2)
MIDDLE = Case(name="7B")
COCO = Case(name="7B even", workload="coco")
SOUND = Case(name="7B sound", model="qwen2-vl+whisper-large-v3+qwen2.5-7b", workload="mixed")
SEVERAL = Case(name="7B several", workload="interleaved", device="h200", nodes=8, microbatch=1)
VIDEO = Case(name="7B video", workload="video", device="h200", nodes=8, global_batch=128, microbatch=1)
NARROW = replace(VIDEO, name="7B video 80 GB", device="h100")
LARGE = Case(name="38B", model="internvl2.5-38b", device="h100", nodes=8, microbatch=1)
HUGE = Case(name="72B", model="qwen2-vl-72b", device="h100", nodes=16, global_batch=512, microbatch=1)
HUGE_SEVERAL = Case(
    name="72B several", model="qwen2-vl-72b", workload="interleaved", device="h200", nodes=16, microbatch=1
)
FROZEN = replace(COCO, name="7B frozen", frozen=("vision", "llm"))
FROZEN_LARGE = replace(FROZEN, name="14B frozen", model="internvit-6b+llama3-8b", nodes=8, microbatch=1)
FROZEN_HUGE = replace(FROZEN, name="72B frozen", model="qwen2-vl-72b", device="h100", nodes=16, microbatch=1)

TIMES = ((1.0,), (1.0, 1.0), (140 / 44, 140 / 44), (560 / 44, 560 / 44))
"""Of encoders: as published, as costly as the language model, four times that."""
MEASURED_TIMES = tuple(
    Case(name="+".join(f"{44 * each:.0f} ms" for each in times), model=MEASURED, nodes=8, microbatch=1, encoders=times)
    for times in TIMES
)

CASES = (SMALL, MIDDLE, COCO, SOUND, SEVERAL, VIDEO, NARROW, LARGE, HUGE, HUGE_SEVERAL, FROZEN, FROZEN_LARGE)


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


def samples(case: Case, num_batches: int, lengths: Path | None = None) -> tuple[SampleTable, list[SampleTable]]:
    """Return what planners know, and batches of other samples that they are judged by.

    Args:
        case: The job.
        num_batches: How many.
        lengths: Folder of :data:`FILES`, for pictures and captions of real data sets.
    """
    table = _samples(case, KNOWN_SAMPLES + num_batches * case.global_batch, lengths)
    starts = range(KNOWN_SAMPLES, len(table), case.global_batch)
    return table[:KNOWN_SAMPLES], [table[start : start + case.global_batch] for start in starts]


@lru_cache(maxsize=8)
def _samples(case: Case, count: int, lengths: Path | None) -> SampleTable:
    if case.model == MEASURED:
        names = [unit.name for unit in measured(case.encoders).units]
        return SampleTable(units=dict.fromkeys(names, Lengths.of(np.ones(count, np.int64))))
    name = case.workload
    if lengths is not None and name in FILES:
        name = "+".join(str(lengths / FILES[each]) for each in dict.fromkeys((name, "coco")))
    drawn, known = (int(np.ceil(each / case.short)) for each in (count, KNOWN_SAMPLES))
    table = workload(name, drawn, 0, case.model, bad="drop", known=known)
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


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What was simulated of some steps: means over the batches.

    Args:
        step_ms: Of a step; endless where there is no plan.
        idle_ms: Of that, in which a device computes nothing.
        std_ms: By unit, standard deviation of microbatches.
        fits: Whether there is memory for them.
    """

    step_ms: float = np.inf
    idle_ms: float = np.inf
    std_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    fits: bool = True


def simulate(
    case: Case,
    configures: Planner,
    assigns: Planner,
    num_batches: int,
    lengths: Path | None = None,
    lost: Sequence[int] = (0,),
) -> list[Steps]:
    """Return the steps of some batches, for each number of lost nodes.

    Args:
        case: The job.
        configures: Who configures it, once.
        assigns: Who deals each batch.
        num_batches: How many.
        lengths: As for :func:`samples`.
        lost: Nodes that were lost since it was configured.
    """
    setting = case.setting()
    known, batches = samples(case, num_batches, lengths)
    try:
        configuration = configures.configure(setting, known)
    except ValueError:
        return [Steps()] * len(lost)

    def steps(lost_nodes: int) -> Steps:
        try:
            replicas = degraded_replicas(setting, configuration, lost_nodes)
            assigned = [(batch, assigns.assign(setting, configuration, batch, replicas)) for batch in batches]
            results = [evaluate(setting, configuration, each, batch, replicas) for batch, each in assigned]
        except ValueError:
            return Steps()
        memory = setting.cluster.memory_bytes
        return Steps(
            step_ms=float(np.mean([each.iteration_ms for each in results])),
            idle_ms=float(np.mean([each.bubble * each.iteration_ms for each in results])),
            std_ms={unit: float(np.mean([each.std_ms[unit] for each in results])) for unit in results[0].std_ms},
            fits=memory is None or max(each.peak_bytes for each in results) <= memory,
        )

    return [steps(each) for each in lost]


def least_ms(case: Case, num_batches: int, lengths: Path | None = None, lost_nodes: int = 0) -> float:
    """Return below which no step can be, mean over the batches; arguments as for :func:`simulate`."""
    setting = case.setting()
    return float(np.mean([bound_ms(setting, batch, lost_nodes) for batch in samples(case, num_batches, lengths)[1]]))
