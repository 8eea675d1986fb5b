"""Profiles are made again when, and only when, the model or the data changed."""

from __future__ import annotations

import numpy as np

from resilient.planners.derive import derive_costs
from resilient.planners.fingerprint import Fingerprint, histogram
from resilient.planners.samples import Lengths, SampleTable
from resilient.planners.workloads import workload

MODEL = "siglip-so400m+llama3.2-1b"


def test_nothing_is_profiled_again_without_a_reason() -> None:
    costs, samples = derive_costs(MODEL, "h100"), workload("coco", 500, 0, MODEL)
    first = Fingerprint.of(costs, samples)
    assert first.changed(None) == ("costs", "data")
    again = Fingerprint.of(derive_costs(MODEL, "h100"), workload("coco", 500, 0, MODEL))
    assert again.changed(first) == ()
    assert again.key == first.key


def test_the_order_of_samples_is_no_change() -> None:
    costs, samples = derive_costs(MODEL, "h100"), workload("mixed", 500, 0, MODEL)
    shuffled = samples[np.random.default_rng(0).permutation(500)]
    assert Fingerprint.of(costs, shuffled) == Fingerprint.of(costs, samples)


def test_what_changed_is_told() -> None:
    costs, samples = derive_costs(MODEL, "h100"), workload("coco", 500, 0, MODEL)
    first = Fingerprint.of(costs, samples)
    frozen = Fingerprint.of(derive_costs(MODEL, "h100", frozen=("vision",)), samples)
    laion = Fingerprint.of(costs, workload("laion", 500, 0, MODEL))
    assert frozen.changed(first) == ("costs",)
    assert laion.changed(first) == ("data",)
    assert len({first.key, frozen.key, laion.key}) == 3


def test_a_histogram_counts_samples_by_their_tokens() -> None:
    table = SampleTable(units={"vision": Lengths.of([[0], [1], [63], [64], [50, 40], [91]])})
    assert histogram(table) == {"vision": [(-1, 1), (0, 1), (11, 1), (12, 2), (13, 1)]}
