"""What Prometheus is told: counted from events, as a scraper reads it."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from resilient.observability.metrics import JobMetrics


def _values(metrics: JobMetrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        sample.name + "".join(f"/{value}" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def _event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "generation": 2, **fields}


def _step(time: float, step: int, loss: float | None) -> dict[str, Any]:
    return _event("step", time, step=step, loss=loss, num_samples=8, step_ms=250.0, skipped=loss is None)


def test_failure_counts_once_and_recovery_lasts_until_the_next_step() -> None:
    metrics = JobMetrics()
    generation = {"pipelines": [{}, {}], "nodes": [0, 1, 2], "standby": [3], "cause": "failure", "lost_steps": 1}
    for event in (
        _step(10.0, 1, 0.5),
        _event("detected", 11.0),
        _event("node_lost", 11.0),
        _event("detected", 11.1),
        _event("generation", 11.2, **generation),
        _step(11.5, 2, None),
        _step(12.0, 3, 0.25),
        _event("checkpoint", 12.1),
        _event("output", 12.2, text="nothing to count"),
    ):
        metrics.apply(event)
    values = _values(metrics)
    assert values["resilient_step"] == 3
    assert values["resilient_loss"] == 0.25
    assert values["resilient_samples_total"] == 24
    assert values["resilient_skipped_steps_total"] == 1
    assert values["resilient_step_seconds_sum"] == 0.75
    assert (values["resilient_recovery_seconds_count"], values["resilient_recovery_seconds_sum"]) == (1, 0.5)
    assert values["resilient_recovery_seconds_bucket/0.3"] == 0
    assert (values["resilient_lost_nodes_total"], values["resilient_lost_steps_total"]) == (1, 1)
    assert values["resilient_generations_total/failure"] == 1
    assert (values["resilient_pipelines"], values["resilient_training_nodes"]) == (2, 3)
    assert (values["resilient_standby_nodes"], values["resilient_checkpoints_total"]) == (1, 1)


def test_loss_that_is_no_number_is_told_as_none() -> None:
    metrics = JobMetrics()
    metrics.apply(_step(1.0, 1, None))
    assert math.isnan(_values(metrics)["resilient_loss"])
