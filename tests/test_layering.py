"""The rules of the source tree: who may import whom, what stays light, and how long a file may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import resilient

ROOT = Path(__file__).parents[1]
FOLDERS = ("resilient", "agent", "templates", "examples", "benchmarks", "tests")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
"""Each file once: links from ``resilient/`` to other folders are not followed."""

ROOMS: dict[str, str] = {
    "errors": "",
    "common": "errors",
    "templates": "errors common",
    "planners": "templates common errors",
    "simulation": "templates errors",
    "data": "common errors",
    "comm": "common errors",
    "models": "data errors common",
    "state": "comm models templates errors common",
    "optim": "state errors common",
    "protocol": "state templates errors common",
    "observability": "state templates errors common",
    "pipeline": "comm models state protocol observability templates errors",
    "runtime": "comm data models state optim protocol observability pipeline planners templates errors common",
    "emulation": "data models errors common",
    "profiling": "comm data emulation planners errors models state pipeline runtime protocol templates common",
    "trainer": "data models state optim protocol observability runtime profiling errors common",
    "agent": "state protocol observability templates errors common",
    "rendezvous": "common",
    "testing": "agent emulation trainer protocol observability errors",
    "cli": "agent planners simulation profiling protocol observability templates errors common",
}
"""Each room of the package, a folder or a file at its top, and the rooms it may import, itself aside."""

LIGHT = (
    "templates",
    "planners",
    "simulation",
    "protocol",
    "observability",
    "agent",
    "cli",
    "testing",
    "errors",
    "common",
)
"""Rooms that are imported without torch."""

NOT_PURE = {
    "torch", "socket", "asyncio", "aiohttp", "subprocess", "threading", "multiprocessing", "os", "pathlib", "io",
    "time", "datetime", "random", "secrets", "uuid", "requests", "urllib", "http",
}  # fmt: skip

MOST_FILES = 14
"""On one level, ``__init__`` aside."""


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


def module(path: Path) -> str:
    """Return the name a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((*(() if parts[0] == "resilient" else ("resilient",)), *parts)).removesuffix(".__init__")


MODULES = {module(path): path for path in SOURCES if name(path).startswith(("resilient/", "agent/", "templates/"))}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of this package that a file imports: of packages, those that are named."""
    named = {each for each in imports(path) if each in MODULES}
    return {each for each in named if not any(other.startswith(f"{each}.") for other in named)} - {module(path)}


def room(module: str) -> str:
    """Return the room a module lies in; nothing for the package's face."""
    return module.split(".")[1] if "." in module else ""


def check_no_circle(arrows: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        pytest.fail(f"imports go in a circle: {' -> '.join(error.args[1])}")


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
            allowed = any(within(module, f"resilient.{room}") for room in ("templates", "errors", "common.extras"))
            assert allowed, f"planning must not import {module}"
        assert module.partition(".")[0] not in NOT_PURE, f"planning must be a function of its arguments: {module}"
        assert not within(module, "numpy.random")


@pytest.mark.parametrize("path", MODULES.values(), ids=name)
def test_rooms_import_only_those_below(path: Path) -> None:
    own = room(module(path))
    if own:
        found = {room(each) for each in imported_modules(path)} - {own}
        assert found <= set(ROOMS[own].split()), f"{own} may import {ROOMS[own] or 'nothing'}"


def test_the_table_of_rooms_is_up_to_date() -> None:
    rooms = {room(each) for each in MODULES} - {""}
    assert rooms == ROOMS.keys()
    used: dict[str, set[str]] = {own: set() for own in rooms | {""}}
    for each, path in MODULES.items():
        used[room(each)] |= {room(other) for other in imported_modules(path)}
    stale = {own: set(ROOMS[own].split()) - used[own] for own in rooms}
    assert {own: names for own, names in stale.items() if names} == {}, "nothing is allowed that nobody does"


def test_no_circles_between_files() -> None:
    check_no_circle({each: imported_modules(path) for each, path in MODULES.items()})


def test_no_circles_between_folders() -> None:
    def folder(module: str) -> str:
        inside = module.rpartition(".")[0]
        return module if inside == "resilient" or MODULES[module].name == "__init__.py" else inside

    arrows: dict[str, set[str]] = {}
    for each, path in MODULES.items():
        arrows.setdefault(folder(each), set()).update(folder(other) for other in imported_modules(path))
    check_no_circle({each: others - {each} for each, others in arrows.items()})


def test_published_planners_import_no_other_but_the_baselines() -> None:
    for path in files("resilient/planners/published"):
        own = module(path).split(".")[3] if module(path).count(".") > 2 else ""
        found = [each.split(".") for each in imported_modules(path)]
        others = {parts[3] for parts in found if parts[1:3] == ["planners", "published"]}
        assert others <= {own, "baselines"}, name(path)


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=name)
def test_folders_are_small(folder: Path) -> None:
    found = [path.name for path in SOURCES if path.parent == folder and path.name != "__init__.py"]
    assert len(found) <= MOST_FILES, "make a room of those that belong together"


def test_every_folder_says_what_it_is() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        face = folder / "__init__.py"
        text = ast.get_docstring(ast.parse(face.read_text())) if face.exists() else None
        assert text, f"{name(folder)}/__init__.py must say in a sentence what belongs there"


def test_tests_lie_as_the_code_does() -> None:
    folders = {*(name(path.parent) for path in MODULES.values()), "examples"}
    models = ("integration", "agent/membership/checker")  # of no folder alone
    for path in files("tests"):
        inside = name(path.parent).removeprefix("tests").removeprefix("/")
        assert not inside or inside.startswith(models) or inside in folders, f"{name(path)} tests no folder"


@pytest.mark.parametrize("path", files("agent"), ids=name)
def test_the_agent_never_imports_torch(path: Path) -> None:
    assert not [module for module in imports(path) if within(module, "torch")]


def test_one_namespace() -> None:
    bare = {name(path): m for path in SOURCES for m in imports(path) if m.partition(".")[0] in ("agent", "templates")}
    assert bare == {}


def test_importing_planning_agent_and_command_line_does_not_load_torch() -> None:
    light = ["resilient", *(each for each in MODULES if room(each) in LIGHT)]
    script = (
        "import importlib, sys\n"
        f"for name in {light}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_public_names_resolve_to_what_is_documented() -> None:
    assert sorted(resilient.__all__) == sorted([*resilient._HOMES, "__version__"])
    for public in resilient._HOMES:
        value = getattr(resilient, public)
        assert value.__doc__
        assert value.__module__ == resilient._HOMES[public], "imported from where it is defined"
    with pytest.raises(AttributeError, match=r"^module 'resilient' has no attribute 'Trainr'$"):
        _ = resilient.Trainr  # pyright: ignore[reportAttributeAccessIssue]


def test_names_that_were_not_used_yet_are_listed_too() -> None:
    listed = "import resilient; print(*(name for name in resilient.__all__ if name not in dir(resilient)))"
    ended = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"


def test_version_is_that_of_the_distribution() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{resilient.__version__}"\n' in text


def public_names(path: Path) -> Iterator[str]:
    """Yield what a file defines at its top, for others to import."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_a_public_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for path in MODULES.values():
        for public in public_names(path):
            if not public.startswith("_") and public not in ("logger", "main"):
                homes.setdefault(public, []).append(name(path))
    assert {public: where for public, where in homes.items() if len(where) > 1} == {}


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_files_are_short(path: Path) -> None:
    length = len(path.read_text().splitlines())
    assert length <= 400, "split it"
