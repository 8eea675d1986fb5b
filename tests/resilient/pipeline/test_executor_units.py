"""Lanes of units, run by real ranks, compute what one process does, wherever each unit places its samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from resilient.models.layer import Activations, Batch, Layer, LayerSpec, Model
from resilient.models.summed_loss import loss_units
from resilient.pipeline.executor import Executor
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.p2p import Channel, Downstream, Upstream
from resilient.pipeline.row_actions import CellPart
from resilient.pipeline.stage import Stage, StageLayer
from resilient.pipeline.stage_timer import StageTimer
from resilient.pipeline.step_work import StepWork
from resilient.protocol.fault_injection import Faults
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import Piece
from resilient.templates.schedules.graph import Backward, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.schedule import Schedule
from resilient.templates.schedules.step_cells import StepCells
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import CPU

WIDTH, TARGETS, NUM_SAMPLES = 3, 8, 9
LAYERS = {
    "vision": ("vision.in", "vision.out"),
    "audio": ("audio",),
    "llm": ("llm.in", "llm.out"),
    "speech": ("speech",),
}
"""Each is a stage of its unit's lanes."""
FEEDS = [("vision", "llm"), ("audio", "llm"), ("llm", "speech")]
FROZEN = [(), ("vision.in", "vision.out"), ("llm.in", "llm.out"), ("vision.in",), ("vision.in", "vision.out", "audio")]


class Branch(Layer):
    """One layer of any unit: what it is given, times a matrix."""

    def __init__(self, name: str, frozen: bool) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=not frozen)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        unit, _, rest = self.name.partition(".")
        if self.name == "llm.in":
            given = batch["llm"]
            for encoder in ("vision", "audio"):
                features = activations.get(encoder, torch.zeros(0, WIDTH, dtype=given.dtype))
                of_sample = _owners(batch, encoder)
                summed = torch.zeros(len(batch["counts.llm"]), WIDTH, dtype=given.dtype)
                given = given + summed.index_add(0, of_sample, features**2)[_owners(batch, "llm")]
        else:
            given = batch[unit] if rest == "in" or unit == "audio" else activations["llm" if unit == "speech" else unit]
        made = torch.tanh(given @ self.weight)
        return {unit: made, "said": made} if self.name == "llm.out" else {unit: made}


def _owners(batch: Batch, unit: str) -> Tensor:
    """Return of which of the batch's samples each of a unit's rows is."""
    counts = batch[f"counts.{unit}"]
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


class Branches:
    """Two encoders, what they feed, which has a loss of its own, and what that feeds, if anything."""

    def __init__(self, units: tuple[str, ...], frozen: tuple[str, ...]) -> None:
        def spec(name: str) -> LayerSpec:
            def build() -> nn.Module:
                return Branch(name, name in frozen)

            said = frozenset({"said"} if name == "llm.out" else ())
            return LayerSpec(name=name, unit=name.partition(".")[0], build=build, initialize=draw, for_loss=said)

        self.layers = tuple(spec(name) for unit in units for name in LAYERS[unit])

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        read = [activations[name] for name in ("said", "speech") if name in activations]
        return torch.stack([(each**2).sum() for each in read]).sum()


def draw(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def num_rows(unit: str, sample: int) -> int:
    """Return how many rows a unit makes of a sample: the language model some of every one."""
    found = random.Random(f"{unit} {sample}").choice({"vision": (0, 1, 2, 3), "audio": (0, 0, 2)}.get(unit, (1, 2, 3)))
    return num_rows("llm", sample) if unit == "speech" else found


def load(samples: tuple[int, ...]) -> Batch:
    batch: dict[str, Tensor] = {}
    for unit in ("vision", "audio", "llm"):
        rows = [
            torch.randn(
                num_rows(unit, sample), WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(sample)
            )
            for sample in samples
        ]
        batch[unit] = torch.cat(rows)
        batch[f"counts.{unit}"] = torch.tensor([len(each) for each in rows])
    return batch


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step drawn at random."""

    units: tuple[str, ...]
    frozen: tuple[str, ...]
    cells: StepCells
    graph: StepGraph
    layer_of: list[int]  # of each stage
    schedule: Schedule
    spoken: tuple[int, ...]  # samples that are in the last unit, too


def case(seed: int) -> Case:
    chosen = random.Random(seed)
    units = tuple(LAYERS)[: 3 + seed % 2]
    frozen = chosen.choice(FROZEN)
    spoken = tuple(sample for sample in range(NUM_SAMPLES) if units[-1] == "llm" or chosen.random() < 0.7)
    placed: dict[LaneName, dict[int, tuple[int, ...]]] = {}
    for unit in units:
        lanes = [LaneName(unit, number) for number in range(chosen.randint(1, 2))]
        cells: dict[LaneName, dict[int, tuple[int, ...]]] = {lane: {} for lane in lanes}
        samples = [sample for sample in (spoken if unit == "speech" else range(NUM_SAMPLES)) if num_rows(unit, sample)]
        chosen.shuffle(samples)
        for sample in samples:
            of_lane, cell = cells[chosen.choice(lanes)], chosen.randrange(4)
            of_lane[cell] = (*of_lane.get(cell, ()), sample)
        placed |= {lane: dict(sorted(each.items())) for lane, each in cells.items()}
    whole = frozenset(lane for lane in placed if chosen.random() < 0.4)
    step = StepCells(samples=placed, feeds=FEEDS[: len(units) - 1], whole=whole)
    kinds = _backwards(units, frozen)
    names = [name for unit in units for name in LAYERS[unit]]
    num_rows_ = chosen.randint(1, 4)
    lanes = tuple(
        UnitLane(
            name=lane,
            rows=tuple(chosen.randrange(num_rows_) for _ in LAYERS[lane.unit]),
            cells=tuple(cells),
            backwards=tuple(kinds[name] for name in LAYERS[lane.unit]),
            whole=lane in whole,
        )
        for lane, cells in placed.items()
    )
    graph = StepGraph(lanes=lanes, flows=step.flows, num_rows=num_rows_)
    layer_of = [names.index(name) for lane in placed for name in LAYERS[lane.unit]]
    held = [[layer] if names[layer] not in frozen else [] for layer in layer_of]
    schedule = generate_units(
        graph,
        pace="llm",
        lead=chosen.randint(1, 2),
        split=chosen.random() < 0.4,
        apart=chosen.random() < 0.3,
        states=held,
    )
    validate(schedule)
    return Case(
        units=units, frozen=frozen, cells=step, graph=graph, layer_of=layer_of, schedule=schedule, spoken=spoken
    )


def _backwards(units: tuple[str, ...], frozen: tuple[str, ...]) -> dict[str, Backward]:
    kinds: dict[str, Backward] = {}
    for unit in units:
        wanted = any(kinds[LAYERS[source][-1]] for source, target in FEEDS if target == unit)
        for name in LAYERS[unit]:
            kinds[name] = Backward.ALL if name not in frozen else Backward.INPUTS if wanted else Backward.NONE
            wanted = wanted or kinds[name] is not Backward.NONE
    return kinds


def initial(model: Model) -> dict[str, LayerState]:
    states = {spec.name: LayerState(spec, BufferLayout.of(spec), (), torch.float64, CPU) for spec in model.layers}
    for state in states.values():
        state.initialize(3)
    return states


def in_one_process(model: Model, states: dict[str, LayerState], step: Case) -> tuple[float, dict[str, Tensor]]:
    modules = {spec.name: bind(spec, states, CPU) for spec in model.layers}
    for state in states.values():
        state.grad.zero_()
    total = torch.zeros((), dtype=torch.float64)
    for sample in range(NUM_SAMPLES):
        batch, made = load((sample,)), dict[str, Tensor]()
        for module in modules.values():
            made |= module(made, batch)
        if sample not in step.spoken:
            made.pop("speech")
        total = total + model.loss(made, batch)
    (total / TARGETS).backward()
    return total.item(), {name: state.grad.clone() for name, state in states.items()}


def work(step: Case, row: int) -> StepWork:
    def samples(part: CellPart) -> tuple[int, ...]:
        return step.cells.part(*part)

    return StepWork(
        step=1,
        schedule=step.schedule,
        row=row,
        num_targets=TARGETS,
        position=lambda part: samples(part)[0],
        batch=lambda part: load(samples(part)),
        samples=samples,
        num_features=lambda source, target, sample: num_rows(source, sample),
    )


Ran = tuple[float, dict[int, Tensor]]
"""The loss of a rank, and the gradients it has summed, by layer."""


def rank_of(step: Case, model: Model, states: dict[str, LayerState], faults: Faults) -> Callable[[int, str], Ran]:
    graph, specs = step.graph, model.layers
    holders = {
        layer: tuple(sorted({row for row, of in zip(graph.row_of, step.layer_of, strict=True) if of == layer}))
        for layer in range(len(specs))
    }
    within = [
        (s, s + 1)
        for s, (one, other) in enumerate(zip(graph.stages, graph.stages[1:], strict=False))
        if one[0] == other[0]
    ]
    between = [(int(source), int(target)) for source, _, _, target, _ in graph.tables.flows]
    borders = list(dict.fromkeys((*within, *between)))

    def run(rank: int, address: str) -> Ran:
        comm = join(address, rank, graph.num_rows, [group for group in set(holders.values()) if len(group) > 1])
        mine = [stage for stage, row in enumerate(graph.row_of) if row == rank]
        own = {specs[step.layer_of[stage]].name for stage in mine}
        copies = {spec.name: copy(spec, states[spec.name]) for spec in specs if spec.name in own}
        trained = {
            layer: copies[specs[layer].name]
            for layer in sorted({step.layer_of[stage] for stage in mine})
            if specs[layer].name not in step.frozen
        }
        pieces = {layer: [Piece(holders[layer], state.held)] for layer, state in trained.items()}
        sync = GradientSync(comm, trained, pieces)
        stages = {stage: real_stage(model, step.layer_of[stage], copies) for stage in mine}
        crossing = [(n, *pair) for n, pair in enumerate(borders) if graph.row_of[pair[0]] != graph.row_of[pair[1]]]
        name, channel = graph.stages, partial(Channel, count=len(borders))
        executor = Executor(
            generation=1,
            stages={name[number]: stage for number, stage in stages.items()},
            gradient_sync=sync,
            comm=comm,
            upstream={
                (name[source], name[target]): Upstream(comm, graph.row_of[source], CPU, channel(number))
                for number, source, target in crossing
                if graph.row_of[target] == rank
            },
            downstream={
                (name[source], name[target]): Downstream(comm, graph.row_of[target], channel(number))
                for number, source, target in crossing
                if graph.row_of[source] == rank
            },
            faults=faults,
            stage_timer=StageTimer(CPU),
            num_losses=len(loss_units(model)),
        )
        loss = executor.run(work(step, rank)).sum().item()
        comm.all_reduce(torch.zeros(1), tuple(range(comm.size))).wait()  # the barrier of every step
        kept = [(stage._in_flight, stage._deferred) for stage in stages.values()]
        assert kept == [({}, {})] * len(kept), "what has no backward, or no second half of one, is not kept for it"
        sync.close()
        return loss, {layer: state.grad.clone() for layer, state in trained.items()}

    return run


def copy(spec: LayerSpec, state: LayerState) -> LayerState:
    made = LayerState(spec, state.layout, (), torch.float64, CPU)
    made.buffer.copy_(state.buffer)
    return made


def real_stage(model: Model, layer: int, states: dict[str, LayerState]) -> Stage:
    module = StageLayer(index=layer, module=bind(model.layers[layer], states, CPU))
    return Stage(model, [module], device=CPU, autocast=None, seed=3)


@pytest.mark.parametrize("seed", range(40))
def test_gradients_of_units_equal_those_of_one_process(seed: int, tmp_path: Path) -> None:
    step = case(seed)
    model = cast(Model, Branches(step.units, step.frozen))
    states = initial(model)
    results = as_threads(step.graph.num_rows, rank_of(step, model, states, Faults(str(tmp_path))))
    loss, expected = in_one_process(model, states, step)
    assert sum(loss for loss, _ in results) == pytest.approx(loss, rel=1e-12)
    names = [spec.name for spec in model.layers]
    for _, gradients in results:
        for layer, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[names[layer]], rtol=1e-11, atol=1e-13)
    assert {layer for _, gradients in results for layer in gradients} == {
        layer for layer in set(step.layer_of) if names[layer] not in step.frozen
    }


def test_steps_drawn_defer_split_backwards_and_join_what_several_lanes_make() -> None:
    flows = [
        (flow, part)
        for seed in range(40)
        for step in [case(seed).graph]
        for flow, part in zip(step.flows, step.part_of, strict=True)
    ]
    assert any(flow.cell < flow.target_cell for flow, _ in flows)
    assert any(part for _, part in flows)
    assert any(flow.source.number for flow, _ in flows)
    assert any(flow.source.unit == "llm" and part for flow, part in flows)
    whole = [(unit, lane.whole) for seed in range(40) for lane in case(seed).graph.lanes for unit in [lane.name.unit]]
    assert {("vision", True), ("vision", False), ("llm", True), ("llm", False)} <= set(whole)
