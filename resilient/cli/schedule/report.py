"""Computes what ``resilient schedule`` shows: the time, the waiting and the memory of a pipeline's schedules.

Owns the computations; :mod:`resilient.cli.schedule.tables` prints them, :mod:`resilient.observability.figures.gantt`
draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from resilient.errors import ArgumentError
from resilient.templates.halves import Halves
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, Timeline, simulate
from resilient.templates.schedules.validator import validate
from resilient.templates.search.partition import plan_templates


@dataclass(frozen=True, kw_only=True)
class PipelineWork:
    """The times, messages and memory of a pipeline's stages.

    Args:
        costs: Of the stages, in their order.
        held_bytes: Per stage, states and gradients, which are there for the whole step.
        stages: For people, what lies on each stage; empty where nothing is known of it.
    """

    costs: ActionCosts
    held_bytes: tuple[int, ...]
    stages: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScheduleReport:
    """A simulated schedule of a pipeline.

    Args:
        kind: Which.
        timeline: When everything happens.
        in_flight: Per worker, the most microbatches between forward and backward; of those on one of its chunks, the
            chunk's part of one.
        memory_bytes: Per worker, the most it holds; empty where the sizes are not known.
        stages: Per worker, what lies on it; empty where nothing is known of it.
    """

    kind: ScheduleKind
    timeline: Timeline
    in_flight: tuple[float, ...]
    memory_bytes: tuple[int, ...] = ()
    stages: tuple[str, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Stages of each worker."""
        return self.timeline.schedule.graph.num_stages // self.timeline.schedule.graph.num_rows

    @property
    def busy_ms(self) -> tuple[float, ...]:
        """Per worker, the time in which it computes."""
        return tuple(self.timeline.iteration_ms - idle_ms for idle_ms in self.timeline.bubble_ms)

    @property
    def ideal_ms(self) -> float:
        """The iteration's time if the busiest worker never waited."""
        return max(self.busy_ms)

    @property
    def bubble(self) -> float:
        """The part of all workers' time in which they wait."""
        total_ms = len(self.busy_ms) * self.timeline.iteration_ms
        return sum(self.timeline.bubble_ms) / total_ms if total_ms else 0.0


def even_work(
    num_stages: int, *, forward_ms: float, backward_input_ms: float, backward_weight_ms: float, send_ms: float
) -> PipelineWork:
    """Return the work of stages that all cost the same, and hold nothing that is known."""
    costs = ActionCosts(
        forward_ms=forward_ms,
        backward_input_ms=backward_input_ms,
        backward_weight_ms=backward_weight_ms,
        transfer_ms=send_ms,
    )
    return PipelineWork(costs=costs, held_bytes=(0,) * num_stages)


def profiled_work(profile: ModelProfile, cluster: Cluster, num_stages: int, num_microbatches: int) -> PipelineWork:
    """Return the work of the stages into which a model is best cut, each on one device of a node of its own.

    Args:
        profile: The model's.
        cluster: For its links; its memory does not limit the cut, so that all schedules are compared on the same one.
        num_stages: Stages.
        num_microbatches: Of the step.

    Raises:
        ValueError: The model cannot be cut into so many stages.
    """
    if num_stages > len(profile.layers):
        raise ArgumentError(
            "stages", f"be <= {len(profile.layers)}, one for each layer of the model", num_stages, "use fewer"
        )
    problem = PlanningProblem(
        profile=profile,
        num_microbatches=num_microbatches,
        cluster=Cluster(inter_node=cluster.inter_node),
        max_failures=0,
        min_pipeline_nodes=num_stages,
    )
    stages = plan_templates(problem, num_stages).best(num_stages, num_microbatches).stages
    cuts = [profile.layers[stage.first_layer : stage.end_layer] for stage in stages]
    halves = [_halves_ms(cut) for cut in cuts]
    link = cluster.inter_node
    latency_ms = link.transfer_ms(0)
    return PipelineWork(
        costs=ActionCosts(
            forward_ms=[sum(layer.costs[0].forward_ms for layer in cut) for cut in cuts],
            backward_input_ms=[first for first, _ in halves],
            backward_weight_ms=[second for _, second in halves],
            latency_ms=latency_ms,
            transfer_ms=[link.transfer_ms(cut[0].input_bytes) - latency_ms for cut in cuts[1:]],
            activation_bytes=[sum(layer.costs[0].activation_bytes for layer in cut) for cut in cuts],
            deferred_bytes=[_deferred_bytes([layer.costs[0] for layer in cut]) * cut[0].input_gradient for cut in cuts],
        ),
        held_bytes=tuple(_held_bytes(profile, stage.first_layer, stage.end_layer) for stage in stages),
        stages=tuple(_names(cut) for cut in cuts),
    )


def _deferred_bytes(layers: Sequence[LayerCost]) -> int:
    """Return what waits between the halves of a stage's backward."""
    twice = sum(layer.deferred_with(before) for before, layer in pairwise(layers))
    return sum(layer.deferred_bytes for layer in layers) - twice


def _halves_ms(layers: Sequence[LayerProfile]) -> tuple[float, float]:
    """Return what the halves of a stage's backward take."""
    trains, wanted = any(layer.trainable for layer in layers), layers[0].input_gradient
    of_inputs = sum(layer.costs[0].backward_input_ms for layer in layers if layer.input_gradient)
    of_weights = sum(layer.costs[0].backward_weight_ms for layer in layers if layer.trainable)
    return Halves.of(trains=trains, wanted=wanted).divide(of_inputs, of_weights)


def _held_bytes(profile: ModelProfile, first_layer: int, end_layer: int) -> int:
    held = (profile.layers[profile.index(name)] for name in profile.states(first_layer, end_layer))
    return sum(layer.state_bytes + layer.gradient_bytes for layer in held)


def _names(layers: Sequence[LayerProfile]) -> str:
    return layers[0].name if len(layers) == 1 else f"{layers[0].name} - {layers[-1].name}"


def schedule_report(
    kind: ScheduleKind,
    num_workers: int,
    num_microbatches: int,
    num_chunks: int,
    work: Callable[[int], PipelineWork],
    *,
    memory_bytes: int | None = None,
    max_in_flight: int | None = None,
) -> ScheduleReport:
    """Generate a schedule, check it, and run it in simulation.

    Args:
        kind: Which.
        num_workers: Workers of the pipeline.
        num_microbatches: Of the step.
        num_chunks: Stages of each worker.
        work: Returns the work of a number of stages; a model's is known with its sizes.
        memory_bytes: Of a worker; eager-1f1b keeps as many microbatches in flight as it holds.
        max_in_flight: For eager-1f1b, how many it may be at most.

    Raises:
        ValueError: A number is out of its range, or does not belong to the kind.
        ScheduleError: The schedule cannot run.
    """
    made = work(num_workers * num_chunks)
    limits = (
        _limits(made, num_workers, num_microbatches, memory_bytes, max_in_flight)
        if kind is ScheduleKind.EAGER
        else None
    )
    schedule = generate(kind, num_workers, num_microbatches, num_chunks=num_chunks, max_in_flight=limits)
    validate(schedule)
    timeline = simulate(schedule, made.costs)
    counts = simulate(schedule, replace(made.costs, activation_bytes=1, deferred_bytes=0)).peak_bytes
    workers = range(num_workers)
    of_workers = [[stage for stage, row in enumerate(schedule.graph.row_of) if row == worker] for worker in workers]
    held = [sum(made.held_bytes[stage] for stage in stages) for stages in of_workers]
    return ScheduleReport(
        kind=kind,
        timeline=timeline,
        in_flight=tuple(count / num_chunks for count in counts),
        memory_bytes=tuple(map(sum, zip(held, timeline.peak_bytes, strict=True))) if made.stages else (),
        stages=tuple(", ".join(made.stages[each] for each in stages) for stages in of_workers) if made.stages else (),
    )


def _limits(
    work: PipelineWork, num_workers: int, num_microbatches: int, memory_bytes: int | None, max_in_flight: int | None
) -> list[int]:
    """Return how many microbatches each worker may have in flight."""
    most = num_microbatches if max_in_flight is None else max_in_flight
    if memory_bytes is None or not work.stages:
        return [most] * num_workers
    activation_bytes = work.costs.activation_bytes
    assert isinstance(activation_bytes, list), "a model's activations are known by stage"
    return [
        min(most, max(1, (memory_bytes - held) // max(1, int(each))))  # one that holds none does not fit in any case
        for held, each in zip(work.held_bytes, activation_bytes, strict=True)
    ]
