"""What all tests, and the processes they start, have in common."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

# Examples take as long as they take: machines that run tests are shared, and each test has a limit.
_SHARED_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
_SEARCH_TIMES, _SEARCH_LIMIT_S = 10, 1800

# By default every run tries the same examples, whatever earlier ones found. `pytest --hypothesis-profile=search` looks
# for new ones, ten times as many as a test asks for, and begins with those that failed before.
settings.register_profile("fixed", _SHARED_MACHINE, derandomize=True, database=None)
settings.register_profile(
    "search",
    _SHARED_MACHINE,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    max_examples=_SEARCH_TIMES * 100,
)
settings.load_profile("fixed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; have the profile "search" look further."""
    _skip_without_gpu([item for item in items if item.get_closest_marker("gpu")])
    _search_further(items)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    if not items:
        return
    import torch  # its files have imported it already; others' tests go without

    if not torch.cuda.is_available():
        for item in items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _search_further(items: list[pytest.Item]) -> None:
    """Have tests that say themselves how many examples they try look at more of them."""
    if settings().derandomize:
        return
    for test, same in groupby(items, key=lambda item: cast(Any, getattr(item, "obj", None))):
        if not getattr(test, "is_hypothesis_test", False):
            continue
        for item in same:
            item.add_marker(pytest.mark.timeout(_SEARCH_LIMIT_S))
        own: settings | None = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples < settings().max_examples:
            test._hypothesis_internal_use_settings = settings(own, max_examples=_SEARCH_TIMES * own.max_examples)


# Commands print as into a file, whatever the log that the tests run into is made to look like. Consoles that are made
# when modules are imported look as well: it must be before that.
for _name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GITHUB_ACTIONS", "COLUMNS", "LINES"):
    os.environ.pop(_name, None)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep what jobs remember of models out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have nothing remembered of models and files; return the folder that would hold it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "resilient"


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have trainers train in the test's process, as a script run by itself does, into ``tmp_path / "run"``."""
    monkeypatch.delenv("RESILIENT_AGENT", raising=False)
    monkeypatch.setenv("RESILIENT_RUN_DIR", str(tmp_path / "run"))
