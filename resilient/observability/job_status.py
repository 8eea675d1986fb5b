"""Follows a running job by its events: nodes, pipelines, progress, and in words what happened.

Pure: events in, state and messages out; no console, no clock. Must not import torch.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from resilient.observability.event_log import Event, killed_worker, loss_of, was_skipped
from resilient.observability.run_report import build_run_report
from resilient.observability.wording import duration, lost_work, recovery_parts, schedule_in_words, standby_in_words
from resilient.templates.common.words import counted, listed

_KEPT_MESSAGES = 64
_KEPT_LOSSES = 400
_MAX_CAUSE = 120
_MOST_NODES = 64
"""Whose places are told in a line; of more, only how many there are."""
_MEASURED = ("generation", "installed", "detected", "node_lost", "injected")


@dataclass(frozen=True, kw_only=True)
class Message:
    """A notable event in words. ``tone``: "bad" (failures), "good" (joins, recoveries, the end), "note" or "plain"."""

    time: float
    text: str
    tone: str = "plain"


@dataclass(kw_only=True)
class NodeStatus:
    """The state of a node. ``state``: joining, ready, training, standby, leaving, left or lost."""

    node: int
    host: str = ""
    device: str = ""
    state: str = "joining"
    pipeline_index: int | None = None
    layers: str = ""


@dataclass(kw_only=True)
class JobStatus:
    """The state of a running job. Feed every event to :meth:`apply` in the order of the file.

    Args:
        phase: starting, training, recovering, changing (a planned change at the next boundary), finished or stopped.
        num_skipped: Steps of this run that updated nothing.
        samples_per_s: Of the last few steps, 0 before the second.
        losses: The newest losses, oldest first.
        ending: Why the job stopped before its last step, and the command that goes on; "" if it did not.
    """

    job: dict[str, Any] = field(default_factory=dict)
    phase: str = "starting"
    generation: int = 0
    step: int = 0
    loss: float | None = None
    num_skipped: int = 0
    samples_per_s: float = 0.0
    started_at: float | None = None
    now: float = 0.0
    nodes: dict[int, NodeStatus] = field(default_factory=dict)
    pipelines: list[dict[str, Any]] = field(default_factory=list)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_LOSSES))
    messages: deque[Message] = field(default_factory=lambda: deque(maxlen=_KEPT_MESSAGES))
    ending: str = ""
    _window: list[Event] = field(default_factory=list)
    _told: int = 0
    _recent: deque[Event] = field(default_factory=lambda: deque(maxlen=10))

    def apply(self, event: Event) -> list[Message]:
        """Take in one event and return what is worth telling a person about it, most often nothing."""
        self.now = max(self.now, event["time"])
        self.started_at = event["time"] if self.started_at is None else self.started_at
        if event["kind"] in _MEASURED:
            self._window.append(event)
        handler = getattr(self, f"_on_{event['kind']}", None)
        messages = [
            Message(time=event["time"], text=text, tone=tone) for tone, text in (handler(event) if handler else ())
        ]
        self.messages.extend(messages)
        return messages

    def layer_range(self, first_layer: int, end_layer: int) -> str:
        """Name the layers ``first_layer .. end_layer - 1`` by the first and the last."""
        names = self.job.get("layers") or [str(index) for index in range(end_layer)]
        first, last = names[first_layer], names[end_layer - 1]
        return first if first == last else f"{first} – {last}"

    # Each handler yields (tone, text) pairs.

    def _on_job(self, event: Event) -> Iterator[tuple[str, str]]:
        self.job = dict(event)
        yield (
            "note",
            f"job {event['script']}: {counted(event['num_steps'], 'step')} of "
            f"{counted(event['global_batch'], 'sample')}, {counted(event['num_layers'], 'layer')}, "
            f"{counted(event['num_nodes'], 'node')}, "
            f"survives {counted(event['max_failures'], 'failure')} at a time",
        )

    def _on_schedule(self, event: Event) -> Iterator[tuple[str, str]]:
        yield "note", schedule_in_words(event)

    def _on_listening(self, event: Event) -> Iterator[tuple[str, str]]:
        command = f"resilient agent --join {event['address']} --run RUN"
        yield (
            "note",
            f"another machine joins with: {command} (RUN is the folder of the run; or --token-file, see there)",
        )
        host = event["address"].rpartition(":")[0]
        yield "note", f"what workers send each other is not encrypted: the network of {host} must be private"

    def _on_node_connected(self, event: Event) -> Iterator[tuple[str, str]]:
        self.nodes[event["node"]] = NodeStatus(node=event["node"], host=event["host"])
        if self.generation:
            yield "good", f"node {event['node']} connected from {event['host']} and starts its workers"

    def _on_node_refused(self, event: Event) -> Iterator[tuple[str, str]]:
        yield "bad", f"an agent on {event['host']} was refused: {event['reason']}"

    def _on_not_joined(self, event: Event) -> Iterator[tuple[str, str]]:
        self.nodes.pop(event["node"], None)  # it was never of the job
        yield "bad", f"node {event['node']} cannot join: {event['cause']}"

    def _on_node_ready(self, event: Event) -> Iterator[tuple[str, str]]:
        node = self._node(event["node"])
        node.state, node.device = "ready", event["device"]
        if self.generation:
            yield "good", f"node {event['node']} is ready ({event['device']})"

    def _on_node_leaving(self, event: Event) -> Iterator[tuple[str, str]]:
        self._node(event["node"]).state = "leaving"
        yield "bad", f"node {event['node']} is going to leave: {event['reason']}"

    def _on_injected(self, event: Event) -> Iterator[tuple[str, str]]:
        what, where = _injection(event)
        yield "bad", f"{what} was killed on purpose{where}"

    def _on_not_injected(self, event: Event) -> Iterator[tuple[str, str]]:
        what, where = _injection(event)
        yield "bad", f"{what} was never killed{where}, as was wanted: the job ended before it came to that"

    def _on_detected(self, event: Event) -> Iterator[tuple[str, str]]:
        self.phase = "recovering"
        if not event["nodes"]:
            yield "bad", f"failure suspected: {textwrap.shorten(event['cause'], _MAX_CAUSE)}"
        for node in event["nodes"]:
            yield from self._lose(node, event["cause"])

    def _on_node_failed(self, event: Event) -> Iterator[tuple[str, str]]:
        for tone, text in self._lose(event["node"], event["error"]):
            yield tone, f"{text}; the others go on without it"

    def _on_node_lost(self, event: Event) -> Iterator[tuple[str, str]]:
        yield from self._lose(event["node"], event["cause"])

    def _lose(self, node: int, cause: str) -> Iterator[tuple[str, str]]:
        if self._node(node).state != "lost":
            self.nodes[node] = NodeStatus(node=node, host=self.nodes[node].host, state="lost")
            yield "bad", f"node {node} failed: {cause}"

    def _on_replica_dropped(self, event: Event) -> Iterator[tuple[str, str]]:
        layers = textwrap.shorten(", ".join(event["states"]), _MAX_CAUSE)
        yield "bad", f"node {event['node']} has dropped damaged copies of {layers}"

    def _on_difference_allowed(self, event: Event) -> Iterator[tuple[str, str]]:
        yield "note", f"another {event['what']} is allowed on node {event['node']}: {event['difference']}"

    def _on_waiting(self, event: Event) -> Iterator[tuple[str, str]]:
        missing = counted(event["num_missing"], "node") + " that did not connect" if event["num_missing"] else ""
        late = [text for text in (_nodes(event["nodes"]) if event["nodes"] else "", missing) if text]
        if late and event["waited_s"]:
            yield "note", f"still waiting, after {event['waited_s']} s, for {' and '.join(late)}; see the logs"
        elif late:
            yield "note", f"waiting for {counted(event['num_missing'], 'node')} to join"

    def _on_too_few(self, event: Event) -> Iterator[tuple[str, str]]:
        missing = counted(event["num_missing"], "more node")
        coming = f" ({_nodes(event['coming'])} getting ready)" if event["coming"] else ""
        yield "bad", f"too few nodes are left: waiting {event['wait_s']:g} s for {missing}{coming}"

    def _on_interrupted(self, event: Event) -> Iterator[tuple[str, str]]:
        self.phase = "changing"
        yield (
            "bad",
            f"{event['reason']}: the job ends after this step, with a checkpoint, within {event['grace_s']:g} s; "
            "again: at once",
        )

    def _on_boundary(self, event: Event) -> Iterator[tuple[str, str]]:
        self.phase = "changing"
        for word, nodes in (("join", event["joining"]), ("leave", event["leaving"])):
            if nodes:
                does = word if len(nodes) > 1 else f"{word}s"
                yield "good" if word == "join" else "note", f"{_nodes(nodes)} {does} at the next step boundary"

    def _on_generation(self, event: Event) -> Iterator[tuple[str, str]]:
        self.generation, self.pipelines = event["generation"], event["pipelines"]
        self.phase = "recovering" if event["cause"] == "failure" else "changing"
        for node in self.nodes.values():
            node.pipeline_index, node.layers = None, ""
            if node.state in ("training", "leaving", "standby"):
                node.state = "left"
        for index, pipeline in enumerate(self.pipelines):
            for name in pipeline["nodes"]:
                stages = [stage for stage in pipeline["stages"] if stage["node"] == name]
                node = self._node(name)
                node.state, node.pipeline_index = "training", index
                node.layers = ", ".join(self.layer_range(first, end) for first, end in _ranges(stages))
        for name in event["standby"]:
            self._node(name).state = "standby"
        yield "note", f"generation {self.generation}: {self._pipelines_in_words()}{self._continuation(event)}"
        for name, factor in event.get("slowdowns", {}).items():
            if int(name) not in event["standby"]:
                yield "note", f"node {name} is slower than others, {factor:g} times: its pipeline gets less to do"
        for sentence in standby_in_words(event):
            yield "note", sentence

    def _pipelines_in_words(self) -> str:
        pipelines = [
            f"{'-'.join(str(node) for node in pipeline['nodes'])} x{pipeline['num_microbatches']}"
            for pipeline in self.pipelines
        ]
        total = counted(len(pipelines), "pipeline")
        num_nodes = sum(len(pipeline["nodes"]) for pipeline in self.pipelines)
        if num_nodes > _MOST_NODES:
            return f"{total} on {num_nodes} nodes"
        return f"{total} ({', '.join(pipelines)} microbatches)"

    def _continuation(self, generation: Event) -> str:
        if generation["cause"] == "resume":
            return f", resumed after step {generation['version']}"
        if generation["cause"] != "failure":
            return ""
        if generation["version"] == self.job.get("num_steps"):
            return ", all steps are done"
        word = "redoes" if generation["lost_steps"] else "goes on with"
        return f", {word} step {generation['interrupted_step']}"

    def _on_step(self, event: Event) -> Iterator[tuple[str, str]]:
        self.step, self.loss, self.phase = event["step"], loss_of(event), "training"
        self.losses.append(self.loss)
        if was_skipped(event):
            self.num_skipped += 1
            why = "its loss or gradient is not finite"
            yield "bad", f"step {self.step} was skipped, as {why}: {self.num_skipped} so far"
        self._recent.append(event)
        seconds = event["time"] - self._recent[0]["time"]
        if seconds > 0:
            self.samples_per_s = sum(step["num_samples"] for step in list(self._recent)[1:]) / seconds
        yield from self._finish_change(event)

    def _finish_change(self, step: Event) -> Iterator[tuple[str, str]]:
        """Tell what a recovery or planned change took, once a step of its generation is committed.

        Measured as the report measures it, from the events since the last step of the generation before.
        """
        generations = [event for event in self._window if event["kind"] == "generation"]
        if not generations or step["generation"] < generations[-1]["generation"] or self._told == self.generation:
            self._window = [event for event in self._window if event["kind"] != "step"] + [step]
            return
        report = build_run_report([*self._window, step])
        for recovery in report["recoveries"]:
            yield "good", recovery_in_words(recovery)
        for change, word in [(j, "joined") for j in report["joins"]] + [(d, "left") for d in report["departures"]]:
            if change["generation"] > self._told:
                yield "good", f"{_nodes(change['nodes'])} {word}, training paused for {_pause(change)}"
        self._told = self.generation
        heard_before = self._window[self._window.index(generations[-1]) :]  # of a failure after this step
        failures = [event for event in heard_before if event["kind"] in ("detected", "node_lost", "injected")]
        self._window = [generations[-1], step, *failures]

    def _on_checkpoint(self, event: Event) -> Iterator[tuple[str, str]]:
        yield "note", f"checkpoint of step {event['step']} written to {event['path']}"

    def _on_checkpoint_failed(self, event: Event) -> Iterator[tuple[str, str]]:
        where = "" if event["node"] is None else f" on node {event['node']}"
        newest = f"the newest checkpoint is {event['newest']}" if event["newest"] else "there is no checkpoint"
        yield "bad", f"no checkpoint of step {event['step']}{where}: {event['error']}; {newest}"

    def _on_note(self, event: Event) -> Iterator[tuple[str, str]]:
        value = event["value"]
        yield "note", f"{event['name']} = {value:.4g}" if isinstance(value, float) else f"{event['name']} = {value}"

    def _on_failed(self, event: Event) -> Iterator[tuple[str, str]]:
        self.phase = "stopped"
        yield "bad", f"the script failed on node {event['node']}: {event['error']}"

    def _on_finished(self, event: Event) -> Iterator[tuple[str, str]]:
        self.phase = "finished"
        yield "good", f"finished after {counted(event['step'], 'step')}"

    def _on_stopped(self, event: Event) -> Iterator[tuple[str, str]]:
        if self.phase == "finished" and event["exit_code"] == 0:
            return  # the script has ended, too
        self.phase = "stopped"
        self.ending = f"stopped with exit code {event['exit_code']}: {event['reason']}"
        yield "bad", self.ending

    def _node(self, name: int) -> NodeStatus:
        return self.nodes.setdefault(name, NodeStatus(node=name))


def recovery_in_words(recovery: dict[str, Any]) -> str:
    """Write one of a report's recoveries as a sentence."""
    lost, total = _nodes(recovery["nodes"]), duration(recovery["total_ms"])
    return f"recovered from the loss of {lost} in {total}, {lost_work(recovery)} ({recovery_parts(recovery)})"


def _injection(event: Event) -> tuple[str, str]:
    """Return who is killed by an injection, and where."""
    worker = killed_worker(event)
    what = f"node {event['node']}" if worker is None else f"worker {worker} of node {event['node']}"
    where = f" in phase {event['phase']}" if event["phase"] else ""
    if event["step"]:
        where += f" {'of' if where else 'in'} step {event['step']}"
    return what, where


def _ranges(stages: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return the first and end layers of stages in order, neighbours as one."""
    ranges: list[tuple[int, int]] = []
    for stage in stages:
        if ranges and ranges[-1][1] == stage["first_layer"]:
            ranges[-1] = ranges[-1][0], stage["end_layer"]
        else:
            ranges.append((stage["first_layer"], stage["end_layer"]))
    return ranges


def _nodes(nodes: Sequence[int]) -> str:
    if not nodes:
        return "a connection"
    return f"node{'s' if len(nodes) > 1 else ''} {listed(nodes)}"


def _pause(change: dict[str, Any]) -> str:
    return "an unknown time" if change["pause_ms"] is None else duration(change["pause_ms"])
