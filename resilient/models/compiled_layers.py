"""What layers that ``torch.compile`` made need from those who run them; nothing where nothing has been compiled.

Nothing of torch's compiler is imported here: that takes a second. Its setting is the one that torch's error message
names, in a module that is not public. Tried with torch 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., object])


def keep_saved_tensors() -> None:
    """Have compiled layers keep what they saved, so that the graph around them can be kept; before they first run.

    What they save for their backward they would use as scratch space there. They refuse to where a graph is kept, as
    the first part of a split backward does for the weights of other layers.
    """
    settings = sys.modules.get("torch._functorch.config")
    if hasattr(settings, "donated_buffer"):
        setattr(settings, "donated_buffer", False)  # noqa: B010


def as_it_is(function: _Function) -> _Function:
    """Return a function that is not compiled along with the layer that calls it: a hook on what layers save."""
    if "torch._dynamo" not in sys.modules:
        return function
    return cast(_Function, torch.compiler.disable(function))
