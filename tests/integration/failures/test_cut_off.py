"""Connections between agents and coordinator break: that costs a connection, and neither a node nor anything said."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient.agent.launch import Launcher
from tests.integration.harness import Event, Run, check_equal, run_job
from tests.integration.proxy import Connection, Proxy

NODES = 4
STEPS = range(1, 13)
DAMAGED_AFTER = (2, 5, 9)
HELD_BYTES = 400
"""A few steps' worth of what their reporter says."""
HELD_STEPS = 4
"""More than were heard of before, and the one that any survivor knows the outcome of."""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The failure-free run."""
    run = run_job(tmp_path_factory.mktemp("reference"), nodes=NODES)
    assert run.exit_code == 0, run.reason
    return run


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The proxy that all agents go through."""
    proxy = Proxy()
    proxy.install(monkeypatch)
    return proxy


def check_untouched(run: Run, reference: Run) -> None:
    """Check that nobody was lost, and that everything was heard, in order and once."""
    check_equal(run, reference)
    assert [event["kind"] for event in run.events if event["kind"] in ("detected", "node_lost")] == []
    assert len(run.generations) == 1
    assert [(event["generation"], event["step"]) for event in run.of_kind("step")] == [(1, step) for step in STEPS]
    assert all(event["step_ms"] > 0 for event in run.of_kind("step"))


@pytest.mark.parametrize(
    "damage",
    [Connection.reset, Connection.garble, Connection.half_close_to_coordinator, Connection.half_close_to_agent],
)
def test_damaged_connections_cost_no_node(
    damage: Callable[[Connection], None], proxy: Proxy, reference: Run, tmp_path: Path
) -> None:
    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] in DAMAGED_AFTER:
            for connection in [connection for connection in proxy.connections if connection.is_open]:
                damage(connection)

    run = run_job(tmp_path, nodes=NODES, act=act)
    check_untouched(run, reference)
    assert len(proxy.connections) > 2 * NODES


def test_steps_done_while_nothing_comes_through_are_told_once_it_does(
    proxy: Proxy, reference: Run, tmp_path: Path
) -> None:
    """What was under way is lost with the old connections."""

    def on_held(connection: Connection) -> None:
        if connection.num_held_bytes > HELD_BYTES:
            for each in proxy.connections:
                each.reset()

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "step" and event["step"] == STEPS[1]:
            for connection in proxy.connections:
                connection.hold()

    proxy.on_held = on_held
    run = run_job(tmp_path, nodes=NODES, act=act)
    check_untouched(run, reference)
    assert len(proxy.connections) == 2 * NODES


def test_steps_that_a_lost_node_was_to_tell_are_told_by_the_others(reference: Run, tmp_path: Path) -> None:
    """Its agent stands still, while its worker and the job go on."""
    agents: dict[int, int] = {}

    def act(launcher: Launcher, event: Event) -> None:
        if event["kind"] == "node_connected":
            agents[event["node"]] = event["pid"]
        elif event["kind"] == "step" and event["step"] == STEPS[1]:
            reporter = launched[0]["pipelines"][0]["nodes"][0]
            os.kill(agents[reporter], signal.SIGSTOP)
        elif event["kind"] == "generation":
            launched.append(event)

    launched: list[Event] = []
    run = run_job(tmp_path, nodes=NODES, heartbeat_s=2.0, act=act)
    check_equal(run, reference)
    (lost,) = run.of_kind("node_lost")
    assert (lost["node"], lost["cause"]) == (launched[0]["pipelines"][0]["nodes"][0], "heartbeat missed")
    assert [event["step"] for event in run.of_kind("step")] == list(STEPS)
    assert sum(event["generation"] == 1 for event in run.of_kind("step")) > HELD_STEPS
    assert all(event["step_ms"] > 0 for event in run.of_kind("step"))
