from __future__ import annotations

from resilient.agent.leadership.audience import Audience


def passed(audience: Audience, seconds: int, *, has_nodes: bool = True) -> list[bool]:
    return [audience.is_gone(1.0, has_nodes=has_nodes) for _ in range(seconds)]


def test_leader_that_no_node_is_heard_at_any_more_has_no_audience() -> None:
    audience = Audience(3.0)
    audience.hear()
    assert passed(audience, 2) == [False, False]
    audience.hear()
    assert passed(audience, 4) == [False, False, True, True]


def test_leader_that_no_node_was_heard_at_yet_waits_for_them() -> None:
    assert True not in passed(Audience(3.0), 100)


def test_leader_without_nodes_has_none_to_lose() -> None:
    audience = Audience(3.0)
    audience.hear()
    assert True not in passed(audience, 100, has_nodes=False)
    assert passed(audience, 3) == [False, False, True]
