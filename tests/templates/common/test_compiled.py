"""Loops are compiled where there is a place to keep them, and where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from resilient.templates.common.compiled import COMPILING, compiled


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


def test_it_is_told_once_that_loops_are_compiled_and_not_where_they_are_only_loaded(tmp_path: Path) -> None:
    (tmp_path / "loops.py").write_text(
        "from resilient.templates.common.compiled import compiled\n\n\n"
        "@compiled\ndef twice(number):\n    return 2 * number\n"
    )
    code = (
        "from loops import twice\nfrom resilient.templates.common.compiled import tells_of_compiling\n"
        "for number in range(2):\n    with tells_of_compiling(print):\n        twice(number), twice(float(number))\n"
        "print('done')"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": os.pathsep.join(sys.path)}
    told = [
        subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    assert told == [f"{COMPILING}\ndone\n", "done\n"]
