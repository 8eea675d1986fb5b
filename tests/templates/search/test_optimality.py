from __future__ import annotations

import statistics

from tests.templates.search.exhaustive import all_templates
from tests.templates.simulated_steps import KINDS, random_case, ratio_to_best, shortest_ns, simulate_template


def test_plans_are_within_two_percent_of_the_best_simulated_templates() -> None:
    ratios = [ratio_to_best(random_case(kind, seed)) for kind in KINDS for seed in range(10)]
    found = [ratio for ratio in ratios if ratio is not None]
    assert len(found) >= 30
    assert min(found) >= 1
    assert statistics.median(found) <= 1.02


def test_templates_that_are_not_simulated_cannot_be_the_shortest() -> None:
    for seed in range(4):
        case = random_case("uneven layers", seed)
        every = list(all_templates(case.problem, case.num_nodes, with_sync=True))
        simulated = [simulate_template(template, case.num_microbatches).iteration_ns for template in every]
        assert shortest_ns(every, case.num_microbatches) == min(simulated)
