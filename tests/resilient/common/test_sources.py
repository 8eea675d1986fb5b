"""Digests of sources tell the user's own modules, and this package, by what is in their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import resilient

SCRIPT = """
import json, sys
import helpers
from resilient.common.sources import keep_sources, package_digest, user_sources
if "keep" in sys.argv:
    keep_sources()
for path in sys.argv[2:]:
    open(path, "a").write("# edited")
print(json.dumps([user_sources(), package_digest()]))
"""


def told(script: Path, *arguments: str, package: Path | None = None) -> tuple[dict[str, str], str]:
    folder = package or Path(resilient.__file__).parents[1]
    environment = {"PYTHONPATH": str(folder), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    sources, digest = json.loads(done.stdout)
    return sources, digest


def write(folder: Path) -> tuple[Path, Path]:
    script, helpers = folder / "train.py", folder / "helpers.py"
    script.write_text(SCRIPT)
    helpers.write_text("FACTOR = 1")
    return script, helpers


def test_script_and_its_modules_are_told_each_by_name_and_content(tmp_path: Path) -> None:
    script, helpers = write(tmp_path)
    before, package = told(script)
    assert before.keys() == {"train.py", "helpers"}
    assert told(script) == (before, package)
    helpers.write_text("FACTOR = 2")
    after, _ = told(script)
    assert [name for name in before if before[name] != after[name]] == ["helpers"]


def test_modules_that_were_imported_before_a_fork_are_told_as_they_were_then(tmp_path: Path) -> None:
    """The script is read again by every process, its modules are not."""
    script, helpers = write(tmp_path)
    before, _ = told(script)
    after, _ = told(script, "keep", str(helpers), str(script))
    assert [name for name in before if before[name] != after[name]] == ["train.py"]


def test_process_that_goes_on_with_the_job_of_a_script_tells_what_the_script_would(tmp_path: Path) -> None:
    """It may have imported multiprocessing, which gives a name of its own to what it was started by."""
    script, _ = write(tmp_path)
    describing = tmp_path / "describing.py"
    describing.write_text(
        f"""
import contextlib, io, json, multiprocessing, runpy
from resilient.common.sources import count_as_main, package_digest, user_sources
with contextlib.redirect_stdout(io.StringIO()):
    runpy.run_path({str(script)!r}, run_name="__main__")
count_as_main({str(script)!r})
print(json.dumps([user_sources(), package_digest()]))
"""
    )
    assert told(describing) == told(script)


def test_package_differs_by_any_of_its_files_wherever_it_lies(tmp_path: Path) -> None:
    script, _ = write(tmp_path)
    _, here = told(script)
    own = Path(resilient.__file__).parent
    shutil.copytree(own, tmp_path / "copy" / "resilient", ignore=shutil.ignore_patterns("__pycache__"))
    assert told(script, package=tmp_path / "copy")[1] == here
    with (tmp_path / "copy" / "resilient" / "optim.py").open("a") as file:
        file.write("# edited")
    assert told(script, package=tmp_path / "copy")[1] != here
