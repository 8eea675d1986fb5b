"""All cuts of small jobs with several stages on each device, one by one and in plain words."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, pairwise

from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import ModelProfile
from resilient.templates.plan import PlanningProblem
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import SPLIT_KINDS, ScheduleKind, chunks_of, rows_of_stages
from resilient.templates.schedules.schedule import Op
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.templates.jobs import cost, layer
from tests.templates.search.exhaustive import gradient_sum_ms
from tests.templates.search.stage_bytes import StageBytes


def uneven_job(
    draw: random.Random, kind: ScheduleKind, most_layers: int = 11, *, partly_frozen: bool = False
) -> PlanningProblem:
    """Make a job for exactly its ``min_pipeline_nodes`` nodes of one device.

    Some have little memory, slow links, or frozen first layers; with ``partly_frozen`` all have some among the others.
    """
    num_nodes, num_chunks = draw.choice([(2, 2), (2, 3), (3, 2), (4, 2)])
    num_chunks = chunks_of(kind, num_chunks)
    num_layers = draw.randint(num_nodes * num_chunks + 1, most_layers)
    layers = tuple(
        layer(
            i,
            [cost(draw.choice([1.0, 2.0, 3.0, 7.0]), draw.randint(1, 40), draw.randint(0, 30))],
            draw.randint(3, 90),
            input_bytes=draw.choice([2, 2, 6]),
        )
        for i in range(num_layers)
    )
    profile = ModelProfile(layers=layers)
    if partly_frozen:
        profile = profile.frozen([f"l{i}" for i in range(num_layers) if draw.random() < 0.4])
    elif draw.random() < 0.3:
        profile = profile.frozen([f"l{i}" for i in range(draw.randint(1, num_layers // 2))])
    return PlanningProblem(
        profile=profile,
        num_microbatches=draw.randint(1, 12),
        cluster=Cluster(
            memory_bytes=draw.choice([None, draw.randint(180, 660)]),
            inter_node=Link(latency_ms=draw.choice([0.0, 0.1, 0.3]), bytes_per_s=draw.choice([1e3, 1e4, 1e6])),
        ),
        max_failures=0,
        min_pipeline_nodes=num_nodes,
        activation_checkpointing=draw.random() < 0.7,
        schedule=kind,
        num_chunks=num_chunks,
    )


@cache
def moments(kind: ScheduleKind, num_rows: int, num_chunks: int, num_microbatches: int) -> list[set[tuple[int, ...]]]:
    """What each row has of its chunks while it runs an action but a backward for weights.

    How many before their backward, or the first part of it, is over, and how many between the parts.
    """
    schedule = generate(kind, num_rows, num_microbatches, num_chunks=num_chunks)
    of_rows: list[set[tuple[int, ...]]] = []
    for actions in schedule.rows:
        counts, seen = [0] * (2 * num_chunks), set[tuple[int, ...]]()
        for action in actions:
            chunk = action.stage // num_rows
            counts[chunk] += action.op is Op.FORWARD
            if action.op in (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT):
                seen.add(tuple(counts))
            counts[chunk] -= action.op in (Op.BACKWARD, Op.BACKWARD_INPUT)
            counts[num_chunks + chunk] += (action.op is Op.BACKWARD_INPUT) - (action.op is Op.BACKWARD_WEIGHT)
        of_rows.append(seen)
    return of_rows


def row_bytes(stages: list[StageBytes], seen: set[tuple[int, ...]], *, again: bool, turns: bool, splits: bool) -> int:
    """What a row holds at the moment at which that is most, beside the state and the largest workspace.

    Where it turns the first of two stages hands on to the second, which keeps that.
    """
    held, size = sum(each.held for each in stages) - turns * stages[-1].arriving, len(stages)
    passed = turns * stages[0].handed_on
    each = [(x.each_again, x.waiting_again) if again else (x.each, x.waiting) for x in stages]
    moving = max(
        sum(n * kept + waits * between for n, waits, (kept, between) in zip(counts, counts[size:], each, strict=False))
        - counts[0] * passed
        for counts in seen
    )
    workspaces = [x.split_workspace if splits else x.workspace for x in stages]
    return held + moving + max([x.largest for x in stages] if again else workspaces)


def every_cut(problem: PlanningProblem, *, alone: bool = False) -> Iterator[PipelineTemplate]:
    """Yield the templates of all cuts for ``min_pipeline_nodes`` nodes that fit into memory.

    Args:
        problem: The job.
        alone: Whether the pipeline has all microbatches, and not any number.
    """
    num_rows, num_chunks, layers = problem.min_pipeline_nodes, problem.num_chunks, problem.profile.layers
    row_of = rows_of_stages(problem.schedule, num_rows, num_chunks)
    numbers = range(problem.num_microbatches if alone else 1, problem.num_microbatches + 1)
    by_number = [moments(problem.schedule, num_rows, num_chunks, number) for number in numbers]
    seen = [set[tuple[int, ...]]().union(*(of_rows[row] for of_rows in by_number)) for row in range(num_rows)]
    limit = problem.cluster.memory_bytes

    @cache
    def stage(index: int, first: int, end: int, again: bool) -> tuple[StageSpec, StageBytes]:
        own = layers[first:end]
        forward = sum(x.costs[0].forward_ms for x in own)
        of_inputs = sum(x.costs[0].backward_input_ms for x in own if x.input_gradient)
        of_inputs += again * forward * any(x.trainable or x.input_gradient for x in own)
        of_weights = sum(x.costs[0].backward_weight_ms for x in own if x.trainable)
        crosses = index > 0 and row_of[index] != row_of[index - 1]
        message = problem.cluster.inter_node.transfer_ms(own[0].input_bytes) * (1 + own[0].input_gradient)
        spec = StageSpec(
            first_layer=first,
            end_layer=end,
            node_index=row_of[index],
            forward_ms=forward,
            backward_ms=of_inputs + of_weights,
            weights_ms=of_weights * (problem.schedule in SPLIT_KINDS and not again),
            send_ms=message * crosses,
        )
        return spec, StageBytes(problem.profile, first, end)

    for inner in combinations(range(1, len(layers)), num_rows * num_chunks - 1):
        spans = list(enumerate(pairwise([0, *inner, len(layers)])))
        plain, again = [[stage(index, *span, checkpoints) for index, span in spans] for checkpoints in (False, True)]
        taken: list[tuple[int, int]] = []
        for row in range(num_rows if limit is not None else 0):
            of_row = [plain[index][1] for index, at in enumerate(row_of) if at == row]
            turns = (row, row) in pairwise(row_of)
            splits = problem.schedule in SPLIT_KINDS
            kept, inputs = (
                row_bytes(of_row, seen[row], again=again, turns=turns, splits=splits) for again in (False, True)
            )
            taken.append((kept, inputs))
        fits = [True] * num_rows if limit is None else [kept <= limit for kept, _ in taken]
        if limit is not None and not all(
            fit or (problem.activation_checkpointing and inputs <= limit)
            for fit, (_, inputs) in zip(fits, taken, strict=True)
        ):
            continue
        stages = tuple((plain if fits[row] else again)[index][0] for index, row in enumerate(row_of))
        yield PipelineTemplate(num_nodes=num_rows, stages=stages, sync_ms=gradient_sum_ms(problem, stages[0]))
