"""Which devices units are on."""

from __future__ import annotations

import pytest

from resilient.planners.planner import Configuration, Encoders, Parallelism
from resilient.planners.stages.device_layout import DeviceLayout, groups, used_devices

VISION, AUDIO, LLM = (Parallelism(dp=2, pp=pp, tp=tp, stage_layers=(1,) * pp) for pp, tp in ((1, 1), (2, 1), (3, 2)))


def configuration(encoders: Encoders = Encoders.PARALLEL, *, colocated: bool = False) -> Configuration:
    units = {"vision": VISION, "audio": AUDIO, "llm": LLM}
    return Configuration(units=units, num_microbatches=1, encoders=encoders, colocated=colocated)


@pytest.mark.parametrize(
    ("encoders", "colocated", "devices"),
    [
        (Encoders.PARALLEL, False, 2 * (1 + 2 + 6)),
        (Encoders.COLOCATED, False, 2 * (2 + 6)),
        (Encoders.REPLICATED, False, 2 * 6),
        (Encoders.PARALLEL, True, 2 * 6),
        (Encoders.COLOCATED, True, 2 * 6),
    ],
)
def test_devices_are_counted_once_however_many_units_are_on_them(
    encoders: Encoders, colocated: bool, devices: int
) -> None:
    assert used_devices(configuration(encoders, colocated=colocated)) == devices


def test_units_of_a_group_share_rows_stage_by_stage() -> None:
    layout = DeviceLayout(configuration(Encoders.COLOCATED), ["vision", "audio", "llm"], 2)
    assert groups(configuration(Encoders.COLOCATED)) == (("vision", "audio"), ("llm",))
    rows = {
        (lane.unit, lane.pipeline, lane.stage): int(row) for lane, row in zip(layout.lanes, layout.row, strict=True)
    }
    assert [rows["vision", pipeline, 0] for pipeline in (0, 1)] == [0, 2]
    assert [rows["audio", pipeline, stage] for pipeline in (0, 1) for stage in (0, 1)] == [0, 1, 2, 3]
    assert [rows["llm", 0, stage] for stage in range(3)] == [4, 5, 6]


def test_replicated_encoders_are_on_every_stage_of_the_language_model() -> None:
    units = {"vision": VISION, "llm": LLM}
    layout = DeviceLayout(
        Configuration(units=units, num_microbatches=1, encoders=Encoders.REPLICATED, colocated=True), list(units), 1
    )
    assert [(lane.unit, lane.stage) for lane in layout.lanes][:3] == [("vision", stage) for stage in range(3)]
    assert layout.row.tolist() == [0, 1, 2, 0, 1, 2]
    assert not layout.turns


def test_stages_of_more_devices_lie_on_more() -> None:
    layout = DeviceLayout(configuration(colocated=True), ["vision", "audio", "llm"], 1)
    assert layout.on_devices().tolist() == [[0, -1, -1, -1, -1, -1], [1, 2, -1, -1, -1, -1], [3, 3, 4, 4, 5, 5]]
