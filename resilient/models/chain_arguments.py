"""Checks what a chain is made of, before any of it is built, and says what to pass instead."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from resilient.common.arguments import described, kind_of
from resilient.errors import ArgumentError

_LOSS_FORM = 'lambda output, batch: torch.nn.functional.mse_loss(output, batch["target"], reduction="sum")'


def check_layers(layers: Any) -> tuple[Any, ...]:
    """Return the modules and factories that a chain is to be made of.

    Raises:
        ArgumentError: One is neither, or a factory that wants arguments.
    """
    constraint = "be a list of modules or of functions that build them"
    if not isinstance(layers, Iterable) or isinstance(layers, str):
        raise ArgumentError("layers", constraint, described(layers), "pass a list, of one layer if need be")
    items = tuple(layers)
    if not items:
        fix = "pass factories such as lambda: nn.Linear(8, 8)"
        raise ArgumentError("layers", "hold at least one layer", "none", fix)
    for position, item in enumerate(items):
        if isinstance(item, nn.Module):
            continue
        if not callable(item):
            fix = "pass factories such as lambda: nn.Linear(8, 8)"
            raise ArgumentError(f"layers[{position}]", "be a module or build one", described(item), fix)
        if not _takes(item):
            got = described(item) if isinstance(item, type) else f"{_name(item)}, which wants arguments"
            fix = f"write lambda: {_name(item)}(...)" if isinstance(item, type) else "make a module of it"
            constraint = "be a module or build one without arguments"
            raise ArgumentError(f"layers[{position}]", constraint, got, fix)
    return items


def check_names(names: Any, num_layers: int) -> Sequence[str]:
    """Return the layers' names.

    Raises:
        ArgumentError: They are no texts, not as many as layers, or not unique.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise ArgumentError("names", "be a list of texts", described(names), "write one for each layer")
    given = list(names)
    if len(given) != num_layers or len(set(given)) != num_layers or not all(isinstance(name, str) for name in given):
        raise ArgumentError("names", f"be unique, one per layer ({num_layers})", given, "rename them")
    return given


def check_loss(loss: Any) -> None:
    """Check that a loss can be called with output and batch.

    Raises:
        ArgumentError: It cannot, or is one of torch's, which want the target.
    """
    constraint = "be a function of (output, batch)"
    if isinstance(loss, type) or not callable(loss):
        got = described(loss)
    elif isinstance(loss, nn.modules.loss._Loss):
        got = f"torch's {type(loss).__name__}"
    elif getattr(loss, "__module__", "") == "torch.nn.functional":
        got = f"torch's {_name(loss)}"
    elif not _takes(loss, "output", "batch"):
        got = f"{_name(loss)}{inspect.signature(loss)}"
    else:
        return
    raise ArgumentError("loss", constraint, got, f"write {_LOSS_FORM}")


def built(module: Any, name: str) -> nn.Module:
    """Return what a factory built.

    Raises:
        ArgumentError: It is no module.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"the factory of layer {name!r}", "return a module", kind_of(module), "have it build one")
    return module


def _takes(function: Any, *arguments: str) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # one of C, such as torch.relu: it wants tensors
        return bool(arguments)
    return True


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
