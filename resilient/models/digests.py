"""Digests of what decides a model besides its configuration: the code of functions, and values.

Two workers whose hashes are equal compute the same; two that compute the same have equal hashes if they run the same
version of Python.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from torch import Tensor, nn

from resilient.data.checksums import bytes_of, entry_checksum


def code_text(value: Any) -> str:
    """Describe a function, or any callable, by what it does: its bytecode, and the constants, defaults, variables
    around it and functions of its own module that it uses.

    Args:
        value: The callable. An object counts with its attributes, a module with its parts. Of what is neither numbers,
            text, tensors, arrays, collections of these nor called, the class alone counts; of functions of other
            modules the name; of parameters, which may have been drawn, the shape.
    """
    return _text(value, frozenset())


def _text(value: Any, seen: frozenset[int]) -> str:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if isinstance(value, nn.Parameter):
        return f"{value.dtype}{tuple(value.shape)}"
    if isinstance(value, Tensor | np.ndarray):
        return str(entry_checksum(value))
    if id(value) in seen:
        return "again"  # a function that calls itself
    seen |= {id(value)}
    parts: list[Any]
    if isinstance(value, tuple | list):
        parts = list(value)
    elif isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text(each, seen) for each in value))}}}"  # their order is no content
    elif isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
    elif isinstance(value, types.CodeType):
        parts = [value.co_code, value.co_names, value.co_varnames, value.co_consts]
    elif isinstance(value, types.MethodType):
        parts = [value.__func__, value.__self__]
    elif isinstance(value, types.FunctionType):
        parts = [value.__code__, value.__defaults__, value.__kwdefaults__, *_around(value)]
    elif isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
    elif isinstance(value, type) or not hasattr(value, "__dict__") or not callable(value):
        named = value if hasattr(value, "__qualname__") else type(value)
        return f"{named.__module__}.{named.__qualname__}"
    else:  # an object that is called, nn.CrossEntropyLoss(reduction="sum") for one
        parts = [type(value), getattr(type(value), "forward", type(value).__call__), vars(value)]
    return f"({', '.join(_text(part, seen) for part in parts)})"


def _around(function: types.FunctionType) -> list[Any]:
    """Return what a function uses of the variables around it; functions of other modules by their names."""
    around = inspect.getclosurevars(function)
    return [
        f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.FunctionType) and value.__module__ != function.__module__
        else value
        for value in (*around.nonlocals.values(), *around.globals.values())
    ]


def values_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and bytes of tensors."""
    digest = xxhash.xxh3_128()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(bytes_of(tensor))
    return digest.hexdigest()
