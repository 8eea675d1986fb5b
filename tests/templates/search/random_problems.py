"""Problems with few templates, drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import PlanningProblem, Sharding
from tests.templates.jobs import KINDS

EVERY_DEGREES = [(1,), (2,), (1, 2), (1, 3), (2, 4), (1, 2, 3), (1, 2, 4)]

MEMORY = (
    "entered_bytes",
    "given_bytes",
    "workspace_bytes",
    "ending_workspace_bytes",
    "split_workspace_bytes",
    "again_bytes",
    "ending_again_bytes",
    "deferred_bytes",
    "viewed_bytes",
)


@st.composite
def small_problems(draw: st.DrawFn) -> tuple[PlanningProblem, int]:
    """Problems with few templates, and a number of nodes: memory that may bind, links, frozen and tied layers."""
    devices = draw(st.integers(1, 4))
    degrees = draw(st.sampled_from([degrees for degrees in EVERY_DEGREES if degrees[0] <= devices]))
    most_nodes = draw(st.integers(1, 4 if devices < 3 else 2))
    times = st.sampled_from([0.0, 1e-6, 2e-6, 1.0, 1.5]) if draw(st.booleans()) else st.just(1.0)
    sizes = st.sampled_from([0, 2, 5, 9])
    shares = st.sampled_from(draw(st.sampled_from([[(), (), (), ("l0",)], [(), ("l0",)]])))  # with few users or many

    def make_layer(index: int) -> LayerProfile:
        ms, activations = draw(times), draw(sizes)
        costs = tuple(
            LayerCost(
                forward_ms=ms / degree * draw(st.sampled_from([1, 1.25, degree])),
                backward_input_ms=ms / degree,
                backward_weight_ms=draw(times),
                activation_bytes=activations // draw(st.sampled_from([1, degree])),
                **{name: draw(sizes) for name in MEMORY},
            )
            for degree in degrees
        )
        return LayerProfile(
            name=f"l{index}",
            costs=costs,
            parameter_bytes=draw(sizes),
            optimizer_bytes=draw(sizes),
            gradient_bytes=draw(sizes),
            input_bytes=draw(st.integers(0, 2)),
            read_bytes=draw(st.integers(0, 2)),
            loaded_bytes=draw(st.integers(0, 3)),
            keeps_nothing=draw(st.booleans()),
            shares=draw(shares) if index else (),
        )

    model = ModelProfile(layers=tuple(make_layer(i) for i in range(draw(st.integers(1, 7)))), tp_degrees=degrees)
    if draw(st.booleans()):
        model = model.frozen(draw(st.sets(st.sampled_from([x.name for x in model.layers]))))
    links = st.sampled_from([Link(), Link(latency_ms=0.05), Link(latency_ms=1e-6, bytes_per_s=1e6)])
    f = draw(st.integers(0, 1))
    problem = PlanningProblem(
        profile=model,
        num_microbatches=draw(st.integers(f + 1, 40)),
        cluster=Cluster(
            devices_per_node=devices,
            memory_bytes=draw(st.none() | st.integers(5, 90)),
            intra_node=draw(links),
            inter_node=draw(links),
            cards_per_node=draw(st.none() | st.integers(1, 4)),
        ),
        max_failures=f,
        min_pipeline_nodes=draw(st.integers(1, 2)),
        activation_checkpointing=draw(st.booleans()),
        schedule=draw(st.sampled_from(KINDS)),
        sharding=draw(st.sampled_from(Sharding)) if degrees[0] == 1 else Sharding.OFF,
    )
    return problem, most_nodes * (f + 1)
