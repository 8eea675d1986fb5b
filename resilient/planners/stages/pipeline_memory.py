"""What the devices of a pipeline hold as a worker runs it, of all its units: what is planned is what is allocated.

Each device has all of its stages' state, and all of its optimizer: nothing is spread over lanes or pipelines but where
devices divide a copy. Counted are cells of one size by unit, as many of them as the schedule keeps in flight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from resilient.planners.costs.cost_model import UnitCosts
from resilient.planners.costs.samples import LLM, SampleTable
from resilient.planners.planner import Configuration, Encoders, Setting
from resilient.planners.stages.device_layout import DeviceLayout
from resilient.planners.stages.memory_budget import passed_behind, put_off, windows
from resilient.planners.stages.stage_work import first_differentiated, halved
from resilient.planners.stages.unit_memory import LaneCell, StageBytes, stage_bytes
from resilient.planners.stages.virtual_stages import held_together
from resilient.templates.common.arrays import Flags, Ints
from resilient.templates.schedules.kind import ScheduleKind


class CellSize(NamedTuple):
    """Sums of the lengths of a cell, and of their squares."""

    tokens: float
    squares: float


HeldBytes = Mapping[str, Ints]
"""Of each stage of each unit, on each of its devices. ``[num_lanes, num_stages]``"""


def held_bytes(setting: Setting, configuration: Configuration, samples: SampleTable) -> HeldBytes:
    """Return what each stage of one pipeline holds at most, where microbatches are of mean samples.

    Args:
        setting: The job.
        configuration: Of one replica of the language model, or of the devices that divide one.
        samples: Of the data set.
    """
    layout = DeviceLayout(configuration, 1)
    cells = {
        unit.name: CellSize(*(each / len(unit_rows(layout, unit.name)) for each in mean_size(setting, unit, samples)))
        for unit in setting.costs.units
    }
    return _held(setting, configuration, layout, cells, with_activations=True)


def beside_activations(setting: Setting, configuration: Configuration, cells: Mapping[str, CellSize]) -> HeldBytes:
    """Return the same without what layers keep of cells: that of a step is known by its schedule.

    Args:
        setting: As there.
        configuration: As there.
        cells: The largest of a lane, by unit.
    """
    return _held(setting, configuration, DeviceLayout(configuration, 1), cells, with_activations=False)


def most_held(setting: Setting, configuration: Configuration, samples: SampleTable) -> int:
    """Return what the device of a pipeline holds that holds most; as for :func:`held_bytes`."""
    layout, held = DeviceLayout(configuration, 1), held_bytes(setting, configuration, samples)
    of_rows = np.zeros(len(layout.sizes), dtype=np.int64)
    for name, of_unit in held.items():
        np.add.at(of_rows, unit_rows(layout, name), of_unit)
    return int(of_rows.max())


def mean_size(setting: Setting, unit: UnitCosts, samples: SampleTable) -> CellSize:
    """Return the size that samples of a microbatch of the language model have in a unit, on average."""
    lengths = samples.units[unit.name]
    if not len(lengths.tokens):
        return CellSize(0.0, 0.0)
    return CellSize(*(setting.microbatch * float(each.mean()) for each in (lengths.tokens, lengths.squares)))


def unit_rows(layout: DeviceLayout, name: str) -> Ints:
    """Return the rows of a unit's lanes: encoders that every stage of the language model has are lanes of one stage.

    ``[num_lanes, num_stages]``
    """
    rows = layout.rows[layout.host(name)]
    return rows if name in layout.lanes else rows.reshape(-1, 1)


def _held(
    setting: Setting,
    configuration: Configuration,
    layout: DeviceLayout,
    cells: Mapping[str, CellSize],
    *,
    with_activations: bool,
) -> HeldBytes:
    held: dict[str, Ints] = {}
    running: dict[str, Ints] = {}
    rows = {unit.name: unit_rows(layout, unit.name) for unit in setting.costs.units}
    for unit in setting.costs.units:
        spread = configuration.units[unit.name]
        cells_of = [_cell(setting, unit, cells, rows, lane) for lane in range(len(rows[unit.name]))]
        kind = ScheduleKind.ZB_H1 if setting.splits and with_activations else ScheduleKind.ONE_F_ONE_B
        known = {cell: stage_bytes(unit, spread, configuration.shard, cell, kind) for cell in dict.fromkeys(cells_of)}
        of_lanes = [known[cell] for cell in cells_of]
        in_flight = _in_flight(configuration, unit.name, np.stack([lane.kept for lane in of_lanes]))
        before, waiting = (
            np.stack(each)
            for each in (
                [lane.kept if with_activations else lane.handed_on for lane in of_lanes],
                [lane.waiting if with_activations else lane.handed_on_waiting for lane in of_lanes],
            )
        )
        both = halved(unit, spread, configuration.shard) & setting.splits
        late = put_off(in_flight, both, first_differentiated(unit, spread))
        moments = _moments(in_flight, late, configuration.num_microbatches)
        held[unit.name] = _whole_step(of_lanes, configuration.num_microbatches)
        held[unit.name] += np.max([counts[0] * before + counts[1] * waiting for counts in moments], axis=0)
        running[unit.name] = np.stack([lane.running for lane in of_lanes])
    for row in range(len(layout.sizes)):  # of whose stages one runs at a time
        most = {name: np.where(of_unit == row, running[name], -1) for name, of_unit in rows.items()}
        name = max(most, key=lambda name: int(most[name].max()))
        place = np.unravel_index(most[name].argmax(), rows[name].shape)
        held[name][place] += running[name][place]
    return held


def _moments(in_flight: Ints, late: Ints, num_cells: int) -> Sequence[tuple[Ints, Ints]]:
    """Return how many cells stages hold until the first half of their backward is over, and between the halves.

    That is at two moments, at one of which stages hold most: before any first half is over, as far as there are more
    than wait later, and when most wait. [num_lanes, num_stages] each

    Args:
        in_flight: Cells until the first half. [num_lanes, num_stages]
        late: Between the halves, of enough cells. [num_lanes, num_stages]
        num_cells: Cells of a step; windows may be wider.
    """
    before, waiting = np.minimum(in_flight, num_cells), np.minimum(late, num_cells - 1)
    return (before, np.minimum(late, num_cells - before)), (np.minimum(in_flight, num_cells - waiting), waiting)


def _whole_step(lanes: list[StageBytes], num_cells: int) -> Ints:
    return np.stack([lane.state + lane.arriving + num_cells * lane.sent for lane in lanes])


def _in_flight(configuration: Configuration, name: str, kept: Ints) -> Ints:
    """Return how many cells each stage holds when its device holds most. [num_lanes, num_stages]"""
    shape, spread = kept.shape, configuration.units[name]
    if configuration.shard > 1:
        return np.ones(shape, dtype=np.int64)  # each goes through all units of its device before the next one
    if name != LLM and configuration.encoders_come_first:
        return np.full(shape, configuration.num_microbatches)
    if spread.chunks > 1:
        behind = passed_behind(configuration, name)
        return np.stack([held_together(spread, behind, configuration.lead, each) for each in kept])
    ahead = np.zeros(len(kept), dtype=np.int64)
    if name != LLM and configuration.encoders is Encoders.REPLICATED:
        ahead += np.arange(len(ahead))  # of the language model's stage in their row
    return windows(configuration, name) + ahead[:, None]


def _cell(
    setting: Setting, unit: UnitCosts, cells: Mapping[str, CellSize], rows: Mapping[str, Ints], lane: int
) -> LaneCell:
    """Return a cell of a lane with its messages: what units on one device give each other is none."""
    units, language = setting.costs.units, setting.language
    position, own, size = units.index(unit), rows[unit.name][lane], cells[unit.name]

    def part(elsewhere: Flags) -> float:
        """Return what of a unit's cells' features crosses to, or from, lanes that are elsewhere."""
        return float(elsewhere.mean()) / len(rows[unit.name])

    def features(of: UnitCosts) -> float:
        return of.output_bytes * cells[of.name].tokens * len(rows[of.name])

    received = sent = 0.0
    if position < language:
        sent = features(unit) * part(rows[LLM][:, 0] != own[-1])
    elif position == language:
        received = sum(features(each) * part(rows[each.name][:, -1] != own[0]) for each in units[:language])
        sent = sum(features(each) * part(rows[each.name][:, 0] != own[-1]) for each in units[language + 1 :])
    else:
        received = features(unit) * part(rows[LLM][:, -1] != own[0])
    return LaneCell(tokens=size.tokens, squares=size.squares, received_bytes=received, sent_bytes=sent)
