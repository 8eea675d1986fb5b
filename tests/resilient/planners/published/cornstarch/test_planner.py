"""Cornstarch: cuts by what stages run, branches side by side, colocated or replicated encoders."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.samples import Lengths, SampleTable
from resilient.planners.evaluation.evaluate import evaluate
from resilient.planners.evaluation.known_batches import simulated
from resilient.planners.planner import Configuration, Encoders, Parallelism, Replica, Setting
from resilient.planners.published.cornstarch.planner import Cornstarch, all_trained
from resilient.planners.published.cornstarch.search import cornstarch_configurations
from resilient.planners.stages.expected_step import parallelism, stage_curves
from resilient.planners.stages.stage_work import exposed_sum_ms, gradient_sum_ms
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.schedules.generators import generate
from resilient.templates.schedules.kind import ScheduleKind
from resilient.templates.schedules.simulator import ActionCosts, simulate

UNAWARE = Cornstarch(frozen_aware=False)


def unit(name: str, layers_ms: list[float], *, projector: bool = False) -> UnitCosts:
    """A unit whose layers take so long for 1000 tokens, each way; two devices need 0.6 of that."""
    layers = [
        UnitLayer(
            name="projector" if projector and index == len(layers_ms) - 1 else str(index),
            curves=tuple(
                LayerCurves(
                    forward=Curve(linear=ms * factor / 1000),
                    backward_input=Curve(linear=ms * factor / 1000),
                    backward_weight=Curve(linear=ms * factor / 1000),
                    activation_bytes=1.0,
                )
                for factor in (1.0, 0.6)
            ),
            parameter_bytes=1000,
            optimizer_bytes=2000,
            gradient_bytes=1000,
        )
        for index, ms in enumerate(layers_ms)
    ]
    return UnitCosts(name=name, layers=tuple(layers), degrees=((1, 1), (2, 1)))


def table(*units: str, count: int = 4) -> SampleTable:
    return SampleTable(units={name: Lengths.of(np.full(count, 1000)) for name in units})


def setting(costs: CostModel, num_devices: int, global_batch: int = 8, memory_bytes: int | None = None) -> Setting:
    cluster = Cluster(devices_per_node=num_devices, memory_bytes=memory_bytes)
    return Setting(costs=costs, cluster=cluster, num_nodes=1, global_batch=global_batch, microbatch=1)


def promising(
    job: Setting, samples: SampleTable, encoders: Encoders = Encoders.PARALLEL, *, aware: bool = True
) -> Configuration:
    """The configuration that promises most; unaware: to those who do not ask what is frozen."""
    costs = job.costs if aware else all_trained(job.costs)
    return cornstarch_configurations(replace(job, costs=costs), samples, encoders, 1)[0]


def simulated_ms(costs: CostModel, configuration: Configuration) -> float:
    """What 1F1B takes on a model with one encoder when every microbatch is one sample of 1000 tokens."""
    curves = [pair for each in costs.units for pair in stage_curves(each, configuration.units[each.name])]
    schedule = generate(ScheduleKind.ONE_F_ONE_B, len(curves), configuration.num_microbatches)
    stages = ActionCosts(
        forward_ms=[forward.call_ms(1000, 0) for forward, _ in curves],
        backward_input_ms=[backward.call_ms(1000, 0) for _, backward in curves],
    )
    return simulate(schedule, stages).iteration_ms


FROZEN = [(), ("vision",), ("vision", "llm"), ("llm",), ("vision", "vision.projector", "llm")]


@pytest.mark.parametrize("frozen", FROZEN, ids=lambda names: "+".join(names) or "nothing")
@pytest.mark.parametrize("num_devices", [4, 6, 8])
@pytest.mark.parametrize("encoder_ms", [0.5, 1.0, 3.0])
def test_cuts_by_what_is_run_are_never_slower_under_the_simulator(
    frozen: tuple[str, ...], num_devices: int, encoder_ms: float
) -> None:
    vision, llm = unit("vision", [encoder_ms] * 8 + [0.1], projector=True), unit("llm", [0.2] + [1.0] * 10 + [0.8])
    costs = CostModel(units=(vision, llm)).frozen(frozen)
    job = setting(costs, num_devices, global_batch=16)
    aware, unaware = (promising(job, table("vision", "llm"), aware=each) for each in (True, False))
    assert simulated_ms(costs, aware) <= simulated_ms(costs, unaware) * 1.0001
    assert sum(spread.num_devices for spread in aware.units.values()) <= num_devices


@pytest.mark.parametrize("frozen", [(), ("vision", "audio"), ("vision", "audio", "llm.0"), ("audio", "llm")])
@pytest.mark.parametrize("num_devices", [6, 8, 12])
def test_cuts_by_what_is_run_are_never_slower_with_two_encoders(frozen: tuple[str, ...], num_devices: int) -> None:
    units = (unit("vision", [2.0] * 6), unit("audio", [1.0] * 8), unit("llm", [0.2] + [1.0] * 10 + [0.8]))
    costs = CostModel(units=units).frozen(frozen)
    job = replace(setting(costs, 1, global_batch=48), num_nodes=num_devices)
    batch = table("vision", "audio", "llm", count=48)
    steps: list[float] = []
    for aware in (True, False):
        configuration = promising(job, batch, aware=aware)
        replicas = [Replica(num_microbatches=configuration.num_microbatches)] * configuration.units["llm"].dp
        assignment = Cornstarch().assign(job, configuration, batch, replicas)
        steps.append(evaluate(job, configuration, assignment, batch, replicas).iteration_ms)
    assert steps[0] <= steps[1] * 1.0001


def test_frozen_encoders_get_fewer_devices_and_the_step_is_faster() -> None:
    costs = CostModel(units=(unit("vision", [1.0] * 12), unit("llm", [1.0] * 12))).frozen(["vision", "llm.0"])
    job = replace(setting(costs, 8, global_batch=64), cluster=Cluster(devices_per_node=1), num_nodes=8)
    aware, unaware = (promising(job, table("vision", "llm"), aware=each) for each in (True, False))
    stages = {
        name: configuration.units["vision"].pp / configuration.units["llm"].pp
        for name, configuration in (("aware", aware), ("unaware", unaware))
    }
    assert stages["aware"] < stages["unaware"] == 1
    assert simulated_ms(costs, aware) < 0.8 * simulated_ms(costs, unaware)


def test_the_same_is_decided_when_nothing_is_frozen() -> None:
    costs = all_trained(CostModel(units=(unit("vision", [1.0, 2.0, 0.5]), unit("llm", [1.0] * 5))))
    job = setting(costs, 6)
    assert Cornstarch().configure(job, table("vision", "llm")) == UNAWARE.configure(job, table("vision", "llm"))


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(np.diff([0, *inner, num_layers]).tolist()) for inner in combinations(range(1, num_layers), num_stages - 1)
    ]


def least_ms(job: Setting) -> float:
    """Over all degrees, all cuts of all units, and all numbers of replicas."""
    spreads = [
        [
            (tp, stages)
            for tp in (1, 2)
            for pp in range(1, len(each.layers) + 1)
            for stages in cuts(len(each.layers), pp)
        ]
        for each in job.costs.units
    ]
    best = np.inf
    for chosen in product(*spreads):
        times = []
        for each, (tp, stages) in zip(job.costs.units, chosen, strict=True):
            curves = stage_curves(each, Parallelism(dp=1, pp=len(stages), tp=tp, stage_layers=stages))
            times.append([forward.call_ms(1000, 0) + backward.call_ms(1000, 0) for forward, backward in curves])
        branch = max((sum(each) for each in times[:-1]), default=0.0) + sum(times[-1])
        slowest = max(max(each) for each in times)
        dp = job.num_devices // sum(tp * len(stages) for tp, stages in chosen)
        for replicas in range(1, min(dp, job.global_batch) + 1):
            best = min(best, branch + (-(-job.global_batch // replicas) - 1) * slowest)
    return best


MS = st.sampled_from([0.25, 0.5, 1.0, 2.0])


@settings(max_examples=25, deadline=None)
@given(
    encoders=st.lists(st.lists(MS, min_size=1, max_size=3), max_size=2),
    language=st.lists(MS, min_size=1, max_size=3),
    num_devices=st.integers(3, 9),
    global_batch=st.integers(1, 9),
    frozen=st.booleans(),
)
def test_predicted_time_is_the_least_of_all(
    encoders: list[list[float]], language: list[float], num_devices: int, global_batch: int, frozen: bool
) -> None:
    names = ["vision", "audio"][: len(encoders)]
    units = tuple(unit(name, ms) for name, ms in zip([*names, "llm"], [*encoders, language], strict=True))
    costs = CostModel(units=units).frozen(names if frozen else [])
    job = setting(costs, num_devices, global_batch)
    configuration = promising(job, table(*names, "llm"))
    assert configuration.predicted_ms == pytest.approx(least_ms(job), abs=1e-5)
    used = sum(spread.num_devices for spread in configuration.units.values())
    assert used <= num_devices


# The encoder is summed within a node: the language model's gradients decide alone.
@example(encoders=[[0.25]], language=[0.25, 0.25, 1.0], num_nodes=7, global_batch=4, bytes_per_s=300000.0)
@settings(max_examples=25, deadline=None)
@given(
    encoders=st.lists(st.lists(MS, min_size=1, max_size=3), max_size=2),
    language=st.lists(MS, min_size=1, max_size=3),
    num_nodes=st.integers(2, 9),
    global_batch=st.integers(1, 9),
    bytes_per_s=st.sampled_from([1e6, 3e5, 1e5]),
)
def test_sums_of_gradients_count_in_what_is_the_least(
    encoders: list[list[float]], language: list[float], num_nodes: int, global_batch: int, bytes_per_s: float
) -> None:
    units = [unit(name, ms) for name, ms in zip(["vision", "audio"], encoders, strict=False)] + [unit("llm", language)]
    cluster = Cluster(devices_per_node=2, inter_node=Link(bytes_per_s=bytes_per_s))
    job = replace(setting(CostModel(units=tuple(units)), 1, global_batch), cluster=cluster, num_nodes=num_nodes)
    if job.num_devices < len(units):
        return
    samples = table(*(each.name for each in units))
    found = promising(job, samples)
    backward_ms = {
        each.name: np.array([backward.call_ms(1000, 0) for _, backward in stage_curves(each, found.units[each.name])])
        for each in units
    }
    # All of this model's sums; the prediction leaves out what backwards hide of them.
    assert found.predicted_ms == pytest.approx(
        without_sums_ms(job, found.units) + exposed_sum_ms(units, found.units, cluster, backward_ms), abs=1e-5
    )
    spreads = [
        [
            parallelism(each, samples.units[each.name], 1, pp, tp)
            for tp in (1, 2)
            for pp in range(1, len(each.layers) + 1)
        ]
        for each in units
    ]
    for chosen in product(*spreads):
        dp = job.num_devices // sum(each.num_devices for each in chosen)
        for replicas in range(1, min(dp, global_batch) + 1):
            spread = {each.name: replace(way, dp=replicas) for each, way in zip(units, chosen, strict=True)}
            sums = max(float(gradient_sum_ms(each, spread[each.name], cluster).max()) for each in units)
            assert found.predicted_ms <= without_sums_ms(job, spread) + sums + 1e-5


def without_sums_ms(job: Setting, spread: Mapping[str, Parallelism]) -> float:
    times = [
        [
            forward.call_ms(1000, 0) + backward.call_ms(1000, 0)
            for forward, backward in stage_curves(each, spread[each.name])
        ]
        for each in job.costs.units
    ]
    branch = max((sum(each) for each in times[:-1]), default=0.0) + sum(times[-1])
    return branch + (-(-job.global_batch // spread["llm"].dp) - 1) * max(map(max, times))


def test_branches_run_side_by_side() -> None:
    costs = all_trained(CostModel(units=(unit("vision", [1.0]), unit("audio", [2.0]), unit("llm", [1.0]))))
    configuration = promising(setting(costs, 3, global_batch=5), table("vision", "audio", "llm"))
    assert configuration.predicted_ms == pytest.approx(6 + 3 + 4 * 6)
    assert configuration.encoders is Encoders.PARALLEL


def test_colocated_encoders_share_devices() -> None:
    costs = all_trained(CostModel(units=(unit("vision", [1.0] * 2), unit("audio", [2.0] * 2), unit("llm", [3.0] * 2))))
    job = replace(setting(costs, 4, global_batch=5), cluster=Cluster(), num_nodes=4)
    configuration = promising(job, table("vision", "audio", "llm"), Encoders.COLOCATED)
    vision, audio, llm = configuration.units.values()
    assert configuration.encoders is Encoders.COLOCATED
    assert vision == audio
    assert (vision.pp + llm.pp) * llm.dp <= 4
    # All stages take 9 ms, those of encoders for both of them.
    number = configuration.num_microbatches
    assert configuration.predicted_ms == pytest.approx(36 + (number - 1) * 18 / vision.pp)


def test_replicated_encoders_are_run_by_every_stage() -> None:
    costs = all_trained(CostModel(units=(unit("vision", [1.0]), unit("llm", [1.0] * 4))))
    job = replace(setting(costs, 2, global_batch=1), cluster=Cluster(memory_bytes=16_000), num_nodes=2)
    configuration = promising(job, table("vision", "llm"), Encoders.REPLICATED)
    assert (configuration.units["vision"].pp, configuration.units["llm"].pp) == (1, 2)
    assert configuration.colocated
    assert configuration.predicted_ms == pytest.approx(3 + 12)


@pytest.mark.parametrize(
    ("num_nodes", "memory_bytes", "best"),
    [(8, None, Encoders.REPLICATED), (8, 30_000, Encoders.COLOCATED), (6, 30_000, Encoders.PARALLEL)],
)
def test_encoders_are_where_known_batches_are_fastest(num_nodes: int, memory_bytes: int | None, best: Encoders) -> None:
    costs = CostModel(units=(unit("vision", [1.0] * 4), unit("audio", [2.0] * 4), unit("llm", [1.0] * 8)))
    job = replace(setting(costs, 1, 16, memory_bytes), num_nodes=num_nodes)
    samples = table("vision", "audio", "llm", count=16)
    found = Cornstarch().configure(job, samples)
    assert found.encoders is best
    (result,) = simulated(Cornstarch(), job, found, [samples])
    assert found.predicted_ms == result.iteration_ms
    for other in Encoders:
        with contextlib.suppress(ValueError):  # it has none that fits
            assert found.predicted_ms <= Cornstarch(encoders=(other,)).configure(job, samples).predicted_ms


def test_devices_share_sequences_where_that_is_fastest() -> None:
    """Of a single sample, which no stages make any faster."""
    units = tuple(replace(unit(name, [1.0, 1.0]), degrees=((1, 1), (1, 2))) for name in ("vision", "llm"))
    job = setting(CostModel(units=units), 3, global_batch=1)
    found = Cornstarch(encoders=(Encoders.PARALLEL,)).configure(job, table("vision", "llm", count=1))
    assert {name: (each.tp, each.cp) for name, each in found.units.items()} == {"vision": (1, 1), "llm": (1, 2)}
    assert found.predicted_ms == pytest.approx(6 + 0.6 * 6)


@pytest.mark.parametrize("encoders", list(Encoders))
def test_memory_is_held(encoders: Encoders) -> None:
    costs = CostModel(units=(unit("vision", [1.0] * 4), unit("llm", [1.0] * 8)))
    times = [
        Cornstarch(encoders=(encoders,))
        .configure(setting(costs, 8, 8, memory_bytes), table("vision", "llm"))
        .predicted_ms
        for memory_bytes in (None, 60_000, 30_000)
    ]
    assert times == sorted(times)
    message = (
        "num_nodes must be enough for 'cornstarch', got 1 of 8 devices; "
        "use more nodes, a smaller microbatch, or another planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Cornstarch(encoders=(encoders,)).configure(setting(costs, 8, 8, 2_000), table("vision", "llm"))


def test_encoders_keep_microbatches_until_the_language_model_is_done_with_them() -> None:
    costs = CostModel(units=(unit("vision", [1.0]), unit("llm", [1.0])))
    samples = table("vision", "llm")
    # A layer of 4000 bytes, and 1000 bytes of each of two microbatches
    apart = Cornstarch(encoders=(Encoders.PARALLEL,))
    assert apart.configure(setting(costs, 2, 8, 6000), samples).units["vision"].pp == 1
    message = (
        "num_nodes must be enough for 'cornstarch', got 1 of 2 devices; "
        "use more nodes, a smaller microbatch, or another planner"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        apart.configure(setting(costs, 2, 8, 5999), samples)


def test_frozen_encoders_keep_no_activations() -> None:
    units = (unit("vision", [1.0] * 3), unit("audio", [1.0] * 3), unit("llm", [1.0] * 2))
    costs = CostModel(units=units).frozen(["vision", "audio"])
    samples = table("vision", "audio", "llm")
    # Three frozen layers of 1000 bytes; two trained ones of 4000, and 1000 of each of a microbatch, on two devices
    found = promising(setting(costs, 4, 8, 6000), samples)
    assert {name: spread.num_devices for name, spread in found.units.items()} == {"vision": 1, "audio": 1, "llm": 2}
    with pytest.raises(ValueError, match=r"^num_nodes must be enough for 'cornstarch', got 1 of 4 devices; "):
        UNAWARE.configure(setting(costs, 4, 8, 6000), samples)


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(0, 30),
    replicas=st.lists(st.builds(Replica, num_microbatches=st.integers(1, 5), speed=st.floats(0.2, 1)), min_size=1),
)
def test_every_sample_has_one_place_on_any_replicas(count: int, replicas: list[Replica]) -> None:
    costs = CostModel(units=(unit("vision", [1.0]), unit("llm", [1.0])))
    job = setting(costs, 2)
    configuration = Configuration(units={}, num_microbatches=1)
    assignment = Cornstarch().assign(job, configuration, table("vision", "llm", count=count), replicas)
    for name in ("vision", "llm"):
        members = [
            assignment.members(name, index, microbatch)
            for index, each in enumerate(replicas)
            for microbatch in range(each.num_microbatches)
        ]
        assert np.concatenate(members).tolist() == list(range(count))
