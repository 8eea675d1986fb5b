"""A planner's pipelines are planned once for the same costs, job and sources; what cannot be read is no obstacle."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from resilient.planners.planner import Setting
from resilient.profiling import pipeline_cache
from resilient.profiling.pipeline_cache import Pipelines, kept_pipelines
from resilient.templates.schedules.graph import LaneName
from resilient.templates.template import PipelineTemplate, StageSpec
from tests.resilient.planners.jobs_of_planners import setting, table

SETTING, SAMPLES = setting(), table(20)
STAGE = StageSpec(lane=LaneName("llm"), first_layer=0, end_layer=4, node_index=0, forward_ms=1.5, backward_ms=3.0)
PIPELINES = (PipelineTemplate(num_nodes=1, stages=(STAGE,), sync_ms=0.1, decision='{"a": 1}'),)


class Planned:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Pipelines:
        self.count += 1
        return PIPELINES

    def kept(self, planner: str = "entrain", setting: Setting = SETTING, sizes: range = range(1, 4)) -> Pipelines:
        return kept_pipelines(planner, setting, SAMPLES, sizes, self)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "resilient" / "pipelines"


def test_pipelines_are_planned_once() -> None:
    planned = Planned()
    assert planned.kept() == PIPELINES
    assert planned.kept() == PIPELINES
    assert planned.count == 1


def test_pipelines_of_anything_else_are_planned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Planned()
    costs = replace(SETTING.costs, units=SETTING.costs.units[:1])
    planned.kept()
    planned.kept(planner="dflop")
    planned.kept(sizes=range(2, 4))
    planned.kept(setting=replace(SETTING, global_batch=SETTING.global_batch * 2))
    planned.kept(setting=replace(SETTING, costs=costs))
    monkeypatch.setattr(pipeline_cache, "package_digest", lambda: "another")
    planned.kept()
    assert planned.count == 6


def test_what_cannot_be_read_is_planned_anew(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    planned = Planned()
    planned.kept()
    (file,) = folder.glob("*.json")
    file.write_text("{")
    with caplog.at_level(logging.WARNING):
        assert planned.kept() == PIPELINES
    assert "pipelines are planned again" in caplog.text
    assert planned.kept() == PIPELINES
    assert planned.count == 2


def test_what_cannot_be_planned_is_not_kept(folder: Path) -> None:
    def refuses() -> Pipelines:
        raise ValueError("nothing fits")

    with pytest.raises(ValueError, match="nothing fits"):
        kept_pipelines("entrain", SETTING, SAMPLES, range(1, 4), refuses)
    assert not list(folder.glob("*.json"))
