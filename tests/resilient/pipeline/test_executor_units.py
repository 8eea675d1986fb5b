"""Lanes of units, run by real ranks, compute what one process does, whatever rows they are on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from resilient.models.layer import Activations, Batch, Layer, LayerSpec, Model
from resilient.pipeline.executor import Executor, StepWork
from resilient.pipeline.gradient_sync import GradientSync
from resilient.pipeline.p2p import Channel, Downstream, Upstream
from resilient.pipeline.row_actions import RowActions
from resilient.pipeline.stage import Stage, StageLayer
from resilient.pipeline.stage_timer import StageTimer
from resilient.protocol.fault_injection import Faults
from resilient.state.binding import bind
from resilient.state.layer_state import LayerState
from resilient.state.layout import BufferLayout
from resilient.templates.common.byte_intervals import Piece
from resilient.templates.schedules.graph import Backward, Flow, LaneName, StepGraph, UnitLane
from resilient.templates.schedules.unit_generator import generate_units
from resilient.templates.schedules.validator import validate
from tests.resilient.ranks import as_threads, join
from tests.resilient.small import CPU

WIDTH, TARGETS = 3, 8
VISION, AUDIO, LLM = LaneName("vision"), LaneName("audio"), LaneName("llm")
NAMES = ("vision.in", "vision.out", "audio", "llm.in", "llm.out")
"""Each is a stage of its unit's lane."""

HEARD = (0, 1, 3)
"""Microbatches with sounds."""


class Branch(Layer):
    """One layer of any unit: what it is given, times a matrix."""

    def __init__(self, name: str, frozen: bool) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH), requires_grad=not frozen)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        given = {
            "vision.in": lambda: batch["pictures"],
            "vision.out": lambda: activations["features"],
            "audio": lambda: batch["sounds"],
            "llm.in": lambda: batch["tokens"] + sum(activations.values()) ** 2,
            "llm.out": lambda: activations["hidden"],
        }[self.name]()
        made = {"vision.in": "features", "vision.out": "features", "audio": "sounds"}.get(self.name, "hidden")
        return {made: torch.tanh(given @ self.weight)}


class Branches:
    """Two encoders and what they feed."""

    def __init__(self, frozen: tuple[str, ...]) -> None:
        def spec(name: str) -> LayerSpec:
            def build() -> nn.Module:
                return Branch(name, name in frozen)

            return LayerSpec(name=name, unit=name.partition(".")[0], build=build, initialize=draw)

        self.layers = tuple(map(spec, NAMES))

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        return (activations["hidden"] ** 2).sum()


def draw(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


def step_graph(rows: tuple[int, ...], frozen: tuple[str, ...], num_cells: int) -> StepGraph:
    kinds: dict[str, Backward] = {}
    for unit in (NAMES[:2], NAMES[2:3], NAMES[3:]):
        wanted = unit[0] == "llm.in" and {"vision.in", "vision.out", "audio"} - set(frozen) != set[str]()
        for name in unit:
            kinds[name] = Backward.ALL if name not in frozen else Backward.INPUTS if wanted else Backward.NONE
            wanted = wanted or kinds[name] is not Backward.NONE
    kind = [kinds[name] for name in NAMES]
    heard = tuple(cell for cell in HEARD if cell < num_cells)
    return StepGraph(
        lanes=(
            UnitLane(name=VISION, rows=rows[:2], cells=tuple(range(num_cells)), backwards=tuple(kind[:2])),
            UnitLane(name=AUDIO, rows=rows[2:3], cells=heard, backwards=(kind[2],)),
            UnitLane(name=LLM, rows=rows[3:], cells=tuple(range(num_cells)), backwards=tuple(kind[3:])),
        ),
        flows=(
            *(Flow(VISION, cell, LLM, cell) for cell in range(num_cells)),
            *(Flow(AUDIO, cell, LLM, cell) for cell in heard),
        ),
        num_rows=max(rows) + 1,
    )


def load(position: int) -> Batch:
    generator = torch.Generator().manual_seed(position)
    names = ("pictures", "sounds", "tokens")
    return {name: torch.randn(2 + position % 2, WIDTH, generator=generator, dtype=torch.float64) for name in names}


def initial(model: Model) -> dict[str, LayerState]:
    states = {spec.name: LayerState(spec, BufferLayout.of(spec), (), torch.float64, CPU) for spec in model.layers}
    for state in states.values():
        state.initialize(3)
    return states


def in_one_process(model: Model, states: dict[str, LayerState], num_cells: int) -> tuple[float, dict[str, Tensor]]:
    modules = {spec.name: bind(spec, states, CPU) for spec in model.layers}
    for state in states.values():
        state.grad.zero_()
    total = torch.zeros((), dtype=torch.float64)
    for cell in range(num_cells):
        batch = load(cell)
        given = modules["vision.out"](modules["vision.in"]({}, batch), batch)
        given |= modules["audio"]({}, batch) if cell in HEARD else {}
        hidden = modules["llm.out"](modules["llm.in"](given, batch), batch)
        total = total + model.loss(hidden, batch)
    (total / TARGETS).backward()
    return total.item(), {name: state.grad.clone() for name, state in states.items()}


ROWS = {"apart": (0, 1, 2, 3, 4), "encoders together": (0, 1, 0, 2, 3), "shared": (0, 1, 0, 1, 2), "alone": (0,) * 5}
FROZEN = {"all trained": (), "an encoder frozen": NAMES[:2], "language model frozen": NAMES[3:], "one stage": NAMES[:1]}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN.keys())
def test_gradients_of_units_equal_those_of_one_process_in_every_step(
    rows: tuple[int, ...], frozen: tuple[str, ...], tmp_path: Path
) -> None:
    model = cast(Model, Branches(frozen))
    states = initial(model)
    steps = [(4, 1), (4, 2), (3, 1), (0, 1)]  # cells and lead: each step has a schedule of its own
    graphs = [step_graph(rows, frozen, num_cells) for num_cells, _ in steps]
    held = [[index] if name not in frozen else [] for index, name in enumerate(NAMES)]
    schedules = [generate_units(graph, lead=lead, states=held) for graph, (_, lead) in zip(graphs, steps, strict=True)]
    for schedule in schedules:
        validate(schedule)
    borders = [(0, 1), (1, 3), (2, 3), (3, 4)]

    def run(rank: int, address: str) -> list[tuple[float, dict[str, Tensor]]]:
        comm = join(address, rank, max(rows) + 1, [])
        own = {name: copy(spec, states[name]) for spec, name in zip(model.layers, NAMES, strict=True)}
        mine = [stage for stage, row in enumerate(rows) if row == rank]
        trained = {stage: own[NAMES[stage]] for stage in mine if NAMES[stage] not in frozen}
        sync = GradientSync(comm, trained, {index: [Piece((rank,), state.held)] for index, state in trained.items()})
        crossing = [(index, *pair) for index, pair in enumerate(borders) if rows[pair[0]] != rows[pair[1]]]
        stages = {stage: real_stage(model, stage, own) for stage in mine}
        executor = Executor(
            row=rank,
            generation=1,
            stages=stages,
            gradient_sync=sync,
            comm=comm,
            upstream={
                (source, target): Upstream(comm, rows[source], CPU, Channel(index, len(borders)))
                for index, source, target in crossing
                if rows[target] == rank
            },
            downstream={
                (source, target): Downstream(comm, rows[target], Channel(index, len(borders)))
                for index, source, target in crossing
                if rows[source] == rank
            },
            faults=Faults(str(tmp_path)),
            stage_timer=StageTimer(CPU, 4),
        )
        found: list[tuple[float, dict[str, Tensor]]] = []
        for schedule in schedules:
            work = StepWork(step=1, schedule=schedule, num_targets=TARGETS, positions=tuple(range(4)), batch=load)
            loss = executor.run(work).item()
            comm.all_reduce(torch.zeros(1), tuple(range(comm.size))).wait()  # the barrier of every step
            kept = [(stage._in_flight, stage._deferred) for stage in stages.values()]
            assert kept == [({}, {})] * len(kept), "what has no backward, or no second half of one, is not kept for it"
            found.append((loss, {NAMES[stage]: state.grad.clone() for stage, state in trained.items()}))
        sync.close()
        return found

    results = as_threads(max(rows) + 1, run)
    for number, (num_cells, _) in enumerate(steps):
        loss, expected = in_one_process(model, states, num_cells) if num_cells else (0.0, None)
        assert sum(result[number][0] for result in results) == pytest.approx(loss, rel=1e-12)
        found = {name: gradient for result in results for name, gradient in result[number][1].items()}
        assert set(found) == set(NAMES) - set(frozen)
        for name, gradient in found.items():
            wanted = torch.zeros_like(gradient) if expected is None else expected[name]
            torch.testing.assert_close(gradient, wanted, rtol=1e-11, atol=1e-13)


def copy(spec: LayerSpec, state: LayerState) -> LayerState:
    made = LayerState(spec, state.layout, (), torch.float64, CPU)
    made.buffer.copy_(state.buffer)
    return made


def real_stage(model: Model, number: int, states: dict[str, LayerState]) -> Stage:
    layer = StageLayer(index=number, module=bind(model.layers[number], states, CPU))
    return Stage(model, [layer], is_last=number == len(NAMES) - 1, device=CPU, autocast=None, seed=3)


@pytest.mark.parametrize(("cells", "got"), [((1,), "llm.0:0F1 of vision.0:0"), ((0, 1), "vision.0:1B0.1 for llm.0:1")])
def test_deferral_and_parts_of_a_backward_are_refused_by_the_action(cells: tuple[int, ...], got: str) -> None:
    graph = step_graph(ROWS["apart"], (), 2)
    changed = StepGraph(lanes=graph.lanes, flows=tuple(Flow(VISION, 0, LLM, cell) for cell in cells), num_rows=5)
    message = (
        f"schedule must feed each cell from those of the same number, and have one backward of each, got {got}; "
        "place the samples of a microbatch together in every unit"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RowActions(generate_units(changed), 0)
