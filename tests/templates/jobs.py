"""Small jobs with round numbers, and random ones, for the tests of planning."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from resilient.templates.plan import Plan, Problem
from resilient.templates.profile import LayerProfile, ModelProfile
from resilient.templates.template import PipelineTemplate, StageSpec

MIB = 2**20


def profile(times_ms: Sequence[float], state_bytes: int = MIB, shares: dict[int, tuple[int, ...]] | None = None):
    """Layers l0, l1, ... that compute for the given times, a third of it forward; ``shares``: layer -> owners."""
    return ModelProfile(
        layers=tuple(
            LayerProfile(
                name=f"l{i}",
                forward_ms=ms / 3,
                backward_ms=ms - ms / 3,
                state_bytes=state_bytes,
                shares=tuple(f"l{owner}" for owner in (shares or {}).get(i, ())),
            )
            for i, ms in enumerate(times_ms)
        )
    )


def template(*stages_ms: float) -> PipelineTemplate:
    """A template with one node, and one layer, for each stage time."""
    return PipelineTemplate(
        num_nodes=len(stages_ms),
        stages=tuple(
            StageSpec(first_layer=i, end_layer=i + 1, node_index=i, device_index=0, stage_ms=ms)
            for i, ms in enumerate(stages_ms)
        ),
    )


def layout(plan: Plan) -> list[tuple[tuple[int, ...], int]]:
    """Each pipeline's nodes and number of microbatches."""
    return [(pipeline.nodes, pipeline.num_microbatches) for pipeline in plan.pipelines]


def survivors(problem: Problem, before: Plan, after: Plan) -> dict[str, list[int]]:
    """Per state, the ranks of ``after`` whose worker held it in ``before``."""
    states = problem.profile.states
    had = {(s.node, s.local_rank): states(s.stage.first_layer, s.stage.end_layer) for s in before.slots}
    held: dict[str, list[int]] = {layer.name: [] for layer in problem.profile.layers}
    for slot in after.slots:
        for state in had.get((slot.node, slot.local_rank), ()):
            held[state].append(slot.rank)
    return held


@st.composite
def problems(draw: st.DrawFn, min_layers: int = 1) -> Problem:
    """Random jobs, with uneven layers, tied states, and up to two devices per node."""
    devices = draw(st.integers(1, 2))
    min_pipeline_nodes = draw(st.integers(1, 3))
    max_failures = draw(st.integers(0, 2))
    smallest = max(min_layers, min_pipeline_nodes * devices)
    sizes = draw(st.lists(st.integers(0, 10 * MIB), min_size=smallest, max_size=16))
    times = draw(st.lists(st.integers(1, 9), min_size=len(sizes), max_size=len(sizes)))
    tied = draw(st.booleans())
    return Problem(
        profile=ModelProfile(
            layers=tuple(
                LayerProfile(
                    name=f"l{i}",
                    forward_ms=ms,
                    backward_ms=2 * ms,
                    state_bytes=size,
                    shares=("l0",) if tied and i and i == len(sizes) - 1 else (),
                )
                for i, (ms, size) in enumerate(zip(times, sizes, strict=True))
            )
        ),
        num_microbatches=draw(st.integers(max_failures + 1, 24)),
        devices_per_node=devices,
        max_failures=max_failures,
        min_pipeline_nodes=min_pipeline_nodes,
    )
