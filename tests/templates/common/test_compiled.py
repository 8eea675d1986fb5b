"""Loops are compiled where there is a place to keep them, and where there is none."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from resilient.templates.common.compiled import compiled


def test_a_loop_is_compiled_where_nothing_can_be_kept() -> None:
    # Code without a file has no place beside it.
    made: dict[str, Any] = {}
    exec("def total(items):\n    found = 0\n    for item in items:\n        found += item\n    return found", made)
    loop = compiled(made["total"])
    assert loop is not made["total"]
    assert loop((1, 2, 4)) == 7


def test_a_loop_is_compiled_once() -> None:
    def twice(number: int) -> int:
        return 2 * number

    assert compiled(twice) is compiled(twice)


def test_planning_imports_no_heavy_library() -> None:
    modules = (
        "plan, template, composition.batch_split, composition.compose, inputs.profile, replan.replan, replan.transfer, "
        "schedules.schedule, search.partition, search.template_sizes"
    )
    code = (
        f"import sys, {', '.join(f'resilient.templates.{module}' for module in modules.split(', '))}; "
        f"print({{'torch', 'scipy', 'numba', 'pyomo', 'matplotlib'}} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
