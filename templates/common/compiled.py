"""Compiling loops, when they are first needed: numba takes long to import."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

_F = TypeVar("_F", bound=Callable[..., object])


def compiled(function: _F) -> _F:
    """Compile a loop for the types that it is called with, and keep the result where there is a place for it.

    Args:
        function: The loop, of a module; asked for again, it is not compiled again.
    """
    return cast(_F, _compile(function))


@cache
def _compile(function: Callable[..., object]) -> Callable[..., object]:
    from numba import njit  # pyright: ignore[reportMissingTypeStubs, reportUnknownVariableType]

    try:
        return cast("Callable[..., object]", njit(cache=True)(function))
    except RuntimeError:  # there is nowhere to keep what was compiled
        return cast("Callable[..., object]", njit(function))
