"""The planners there are, by the names people type; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from resilient.planners.planner import Planner
from resilient.templates.names import look_up

BASELINE = "uniform"
"""What others are compared with: one uniform plan for the whole model."""

PLANNERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "uniform": ("uniform", "Uniform"),
        "random": ("baselines", "RandomOrder"),
        "fsdp": ("baselines", "FullySharded"),
        "dip": ("baselines", "EncoderFirst"),
        "static-cp": ("baselines", "StaticContext"),
        "cornstarch": ("cornstarch", "Cornstarch"),
        "disttrain": ("disttrain", "DistTrain"),
        "dflop": ("dflop", "Dflop"),
        "dhp": ("dhp", "DHP"),
        "orchmllm": ("orchmllm", "OrchMLLM"),
        "entrain": ("entrain", "Entrain"),
    }
)
"""By name, in the order they are shown: the module in this package, and its class."""


def planner(name: str) -> Planner:
    """Return a planner with its usual settings.

    Raises:
        ValueError: There is none of that name; the message lists those there are.
    """
    module, kind = look_up("planner", name, PLANNERS)
    return cast(Planner, getattr(import_module(f"resilient.planners.{module}"), kind)())
