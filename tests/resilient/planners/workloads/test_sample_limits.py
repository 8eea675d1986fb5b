"""The most tokens that a job has room for."""

from __future__ import annotations

from resilient.planners.costs.derived_costs import derive_costs
from resilient.planners.workloads.sample_limits import most_tokens
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.inputs.devices import cluster_of

MODEL, DEVICE = "qwen2-vl-7b", "l4"


def test_no_configuration_has_room_for_more_than_the_most() -> None:
    costs, cluster = derive_costs(MODEL, DEVICE), cluster_of(DEVICE, 8)
    assert cluster.memory_bytes is not None
    most = most_tokens(costs, cluster, 1)
    assert most == {"vision": 130816, "llm": 7904}
    for unit in costs.units:
        for tp, cp in unit.degrees:
            for num_stages in range(1, 8 // (tp * cp) + 1):
                # Even stages: what the state leaves, by what a token keeps.
                free = cluster.memory_bytes - unit.state_bytes / (tp * num_stages)
                assert free / (unit.activation_bytes(tp, cp) / num_stages) < most[unit.name] + 1


def test_what_runs_no_backward_keeps_nothing_and_what_does_not_fit_has_no_limit() -> None:
    costs, cluster = derive_costs(MODEL, DEVICE, frozen=("encoder", "llm")), cluster_of(DEVICE, 1)
    trained = most_tokens(derive_costs(MODEL, DEVICE), cluster, 1)
    assert "llm" not in trained
    assert most_tokens(costs, cluster, 1)["vision"] > 100 * trained["vision"]
    assert most_tokens(costs, Cluster(), 1) == {}
