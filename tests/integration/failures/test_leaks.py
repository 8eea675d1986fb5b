"""Whoever lives through many recoveries keeps nothing of them."""

from __future__ import annotations

from pathlib import Path

from tests.integration.recoveries import EARLY, PLACES, recover

RECOVERIES = 15
"""Ten after the early ones: more than :data:`PLACES`, whatever each of them would keep."""
LARGEST_GROWTH_MB = 1
"""Over ten recoveries: among the first ones allocators still fill up."""


def test_survivors_keep_no_threads_descriptors_and_memory_of_recoveries(tmp_path: Path) -> None:
    for node, usages in recover(tmp_path / "run", RECOVERIES).items():
        early, last = usages[EARLY], usages[-1]
        assert last.threads <= max(PLACES + usage.threads for usage in early), (node, usages)
        assert last.descriptors <= max(PLACES + usage.descriptors for usage in early), (node, usages)
        assert last.memory_mb - early[-1].memory_mb < LARGEST_GROWTH_MB, (node, usages)
