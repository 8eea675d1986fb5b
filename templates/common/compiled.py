"""Compiling loops, when they are first needed: numba takes long to import."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., object])

COMPILING = "compiling the planner's loops (once per installation)"

_waiting: list[Callable[[str], None]] = []
"""Those who are to be told when a loop is compiled, and were not yet."""


def compiled(function: _F) -> _F:
    """Compile a loop for the types that it is called with, and keep the result where there is a place for it.

    Args:
        function: The loop, of a module; asked for again, it is not compiled again.
    """
    return cast(_F, _compile(function))


@contextmanager
def tells_of_compiling(announce: Callable[[str], None]) -> Iterator[None]:
    """Say once that loops are compiled, where some are inside: each takes seconds, all together up to a minute.

    Those that were compiled before, by any process of this installation, are only loaded.

    Args:
        announce: Told, in words, that it takes a moment.
    """
    _waiting.append(announce)
    try:
        yield
    finally:
        if announce in _waiting:
            _waiting.remove(announce)


@cache
def _compile(function: Callable[..., object]) -> Callable[..., object]:
    from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    _listen()
    try:
        return cast("Callable[..., object]", njit(cache=True)(function))
    except RuntimeError:  # there is nowhere to keep what was compiled
        return cast("Callable[..., object]", njit(function))


@cache
def _listen() -> None:
    """Have numba tell when it compiles; it says nothing of what it loads."""
    from numba.core import event  # pyright: ignore[reportMissingTypeStubs]

    numba_events: Any = event

    class Listener(numba_events.Listener):
        def on_start(self, event: object) -> None:
            while _waiting:
                _waiting.pop()(COMPILING)

        def on_end(self, event: object) -> None:
            pass

    numba_events.register("numba:compile", Listener())
