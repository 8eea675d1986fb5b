"""The rules of the source tree: who may import whom, what stays light, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import resilient

ROOT = Path(__file__).parents[1]
FOLDERS = ("resilient", "agent", "templates", "examples", "benchmarks", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
"""Each file once: links from ``resilient/`` to other folders are not followed."""

NOT_PURE = {
    "torch", "socket", "asyncio", "aiohttp", "subprocess", "threading", "multiprocessing", "os", "pathlib", "io",
    "time", "datetime", "random", "secrets", "uuid", "requests", "urllib", "http",
}  # fmt: skip
KNOWS_THE_AGENT = {"cli.py", "demo.py", "live.py", "report.py"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[str]:
    """Yield the full names of all modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: imports are absolute"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def files(folder: str) -> list[Path]:
    return [path for path in SOURCES if name(path).startswith(f"{folder}/")]


def test_all_parts_are_looked_at() -> None:
    assert {folder: bool(files(folder)) for folder in FOLDERS} == dict.fromkeys(FOLDERS, True)


@pytest.mark.parametrize("path", files("templates"), ids=name)
def test_planning_imports_only_itself_and_is_pure(path: Path) -> None:
    for module in imports(path):
        if within(module, "resilient"):
            allowed = within(module, "resilient.templates") or within(module, "resilient.errors")
            assert allowed, f"planning must not import {module}"
        assert module.partition(".")[0] not in NOT_PURE, f"planning must be a function of its arguments: {module}"
        assert not within(module, "numpy.random")


def test_multimodal_planners_import_themselves_and_planning_and_no_torch() -> None:
    allowed = ("resilient.planners", "resilient.templates")
    for path in files("resilient/planners"):
        for module in imports(path):
            if within(module, "resilient"):
                assert any(within(module, package) for package in allowed), f"{name(path)} must not import {module}"
            assert not within(module, "torch"), f"{name(path)} must not import {module}"


@pytest.mark.parametrize("path", files("resilient"), ids=name)
def test_workers_never_import_the_agent(path: Path) -> None:
    if path.name not in KNOWS_THE_AGENT:
        assert not [module for module in imports(path) if within(module, "resilient.agent")]


@pytest.mark.parametrize("path", files("agent"), ids=name)
def test_the_agent_never_imports_torch(path: Path) -> None:
    assert not [module for module in imports(path) if within(module, "torch")]


def test_one_namespace() -> None:
    bare = {name(path): m for path in SOURCES for m in imports(path) if m.partition(".")[0] in ("agent", "templates")}
    assert bare == {}


def test_importing_planning_agent_and_command_line_does_not_load_torch() -> None:
    light = ["resilient", "resilient.cli"]
    light += [f"resilient.{folder}.{path.stem}" for folder in ("templates", "agent") for path in files(folder)]
    script = (
        "import importlib, sys\n"
        f"for name in {[module.removesuffix('.__init__') for module in light]}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_public_names_resolve_to_what_is_documented() -> None:
    assert sorted(resilient.__all__) == sorted(resilient._HOMES)
    for public in resilient.__all__:
        value = getattr(resilient, public)
        assert value.__doc__
        assert value.__module__ == resilient._HOMES[public], "imported from where it is defined"
    with pytest.raises(AttributeError, match=r"^module 'resilient' has no attribute 'Trainr'$"):
        _ = resilient.Trainr  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_are_short(path: Path) -> None:
    length = len(path.read_text().splitlines())
    assert length <= 400, "split it"
