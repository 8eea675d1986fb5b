"""What Prometheus is told of a running job, counted from its events. Must not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from resilient.observability.event_log import Event, loss_of, was_skipped

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STEP_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_RECOVERY_S = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class JobMetrics:
    """Counts one job's events. Feed every event in order to :meth:`apply`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._step = Gauge("resilient_step", "Last committed step.", registry=self._registry)
        self._loss = Gauge("resilient_loss", "Loss of the last committed step.", registry=self._registry)
        self._loss.set(math.nan)  # until one is known
        self._generation = Gauge("resilient_generation", "Generation in force.", registry=self._registry)
        self._pipelines = Gauge("resilient_pipelines", "Pipelines of the generation in force.", registry=self._registry)
        self._training = Gauge("resilient_training_nodes", "Nodes that have a place.", registry=self._registry)
        self._standby = Gauge("resilient_standby_nodes", "Nodes that stand by.", registry=self._registry)
        self._samples = Counter("resilient_samples", "Samples of committed steps.", registry=self._registry)
        self._skipped = Counter("resilient_skipped_steps", "Steps that updated nothing.", registry=self._registry)
        self._step_s = Histogram(
            "resilient_step_seconds", "Time of a committed step.", buckets=_STEP_S, registry=self._registry
        )
        self._lost_nodes = Counter("resilient_lost_nodes", "Nodes that were lost.", registry=self._registry)
        self._lost_steps = Counter("resilient_lost_steps", "Steps done again.", registry=self._registry)
        self._changes = Counter(
            "resilient_generations", "Generations, by what they began for.", ["cause"], registry=self._registry
        )
        self._recovery_s = Histogram(
            "resilient_recovery_seconds",
            "From the detection of a failure to the first step committed after it.",
            buckets=_RECOVERY_S,
            registry=self._registry,
        )
        self._checkpoints = Counter("resilient_checkpoints", "Whole checkpoints.", registry=self._registry)
        self._failed_at: float | None = None
        self._handlers: Mapping[str, Callable[[Event], None]] = {
            "step": self._on_step,
            "generation": self._on_generation,
            "detected": self._on_detected,
            "node_lost": lambda _: self._lost_nodes.inc(),
            "checkpoint": lambda _: self._checkpoints.inc(),
        }

    def apply(self, event: Event) -> None:
        """Take in one event."""
        handler = self._handlers.get(event["kind"])
        if handler is not None:
            handler(event)

    def text(self) -> bytes:
        """Return all in Prometheus's text format."""
        return generate_latest(self._registry)

    def _on_step(self, event: Event) -> None:
        self._step.set(event["step"])
        self._loss.set(loss_of(event))
        self._samples.inc(event["num_samples"])
        self._step_s.observe(event["step_ms"] / 1e3)
        if was_skipped(event):
            self._skipped.inc()
        if self._failed_at is not None:
            self._recovery_s.observe(max(0.0, event["time"] - self._failed_at))
            self._failed_at = None

    def _on_generation(self, event: Event) -> None:
        self._generation.set(event["generation"])
        self._pipelines.set(len(event["pipelines"]))
        self._training.set(len(event["nodes"]))
        self._standby.set(len(event["standby"]))
        self._lost_steps.inc(event["lost_steps"])
        self._changes.labels(event["cause"]).inc()

    def _on_detected(self, event: Event) -> None:
        self._failed_at = self._failed_at if self._failed_at is not None else event["time"]
