"""Which devices units are on."""

from __future__ import annotations

import pytest

from resilient.planners.planner import Configuration, Encoders, Parallelism
from resilient.planners.stages.device_layout import DeviceLayout, groups, lanes_of_pipelines, used_devices

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
    layout = DeviceLayout(configuration(Encoders.COLOCATED), 2)
    assert groups(configuration(Encoders.COLOCATED)) == (("vision", "audio"), ("llm",))
    assert layout.rows["vision"].tolist() == [[0], [2]]
    assert layout.rows["audio"].tolist() == [[0, 1], [2, 3]]
    assert layout.rows["llm"].tolist() == [[4, 5, 6], [7, 8, 9]]
    assert layout.pipelines.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert layout.sizes.tolist() == [1] * 4 + [2] * 6


def test_replicated_encoders_are_on_every_stage_of_the_language_model() -> None:
    units = {"vision": VISION, "llm": LLM}
    layout = DeviceLayout(Configuration(units=units, num_microbatches=1, encoders=Encoders.REPLICATED), 1)
    assert list(layout.rows) == ["llm"]
    assert layout.rows["llm"].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("replicas", "pipelines", "lanes"),
    [
        (4, 2, [[0, 2], [2, 4]]),
        (3, 2, [[0, 1], [1, 3]]),
        (1, 2, [[0, 1], [0, 1]]),
        (2, 3, [[0, 1], [0, 1], [1, 2]]),
        (5, 3, [[0, 1], [1, 3], [3, 5]]),
    ],
)
def test_lanes_are_whole_and_all_of_them_are_used(replicas: int, pipelines: int, lanes: list[list[int]]) -> None:
    spread, language = (Parallelism(dp=dp, pp=1, stage_layers=(1,)) for dp in (replicas, pipelines))
    assert lanes_of_pipelines(spread, language, pipelines).tolist() == lanes


def test_rows_of_shared_lanes_are_of_the_first_pipeline_that_they_work_for() -> None:
    units = {"vision": Parallelism(dp=2, pp=1, stage_layers=(1,)), "llm": Parallelism(dp=3, pp=1, stage_layers=(1,))}
    layout = DeviceLayout(Configuration(units=units, num_microbatches=1), 3)
    assert layout.pipelines.tolist() == [0, 2, 0, 1, 2]
    assert layout.rows["vision"].tolist() == [[0], [1]]
