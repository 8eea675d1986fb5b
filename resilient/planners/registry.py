"""The planners there are, by the names people type; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from resilient.planners.planner import Planner
from resilient.templates.common.words import look_up

BASELINE = "uniform"
"""What others are compared with: one uniform plan for the whole model."""

PLANNERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "uniform": ("baselines.uniform", "Uniform"),
        "uniform-sorted": ("baselines.uniform", "UniformSorted"),
        "random": ("baselines.balanced", "RandomOrder"),
        "fsdp": ("baselines.balanced", "FullySharded"),
        "dip": ("baselines.balanced", "EncoderFirst"),
        "static-cp": ("baselines.balanced", "StaticContext"),
        "cornstarch": ("cornstarch.planner", "Cornstarch"),
        "disttrain": ("disttrain.planner", "DistTrain"),
        "dflop": ("dflop.planner", "Dflop"),
        "dhp": ("dhp.planner", "DHP"),
        "orchmllm": ("orchmllm.planner", "OrchMLLM"),
        "entrain": ("entrain.planner", "Entrain"),
    }
)
"""By name, in the order they are shown: the module in :mod:`resilient.planners.published`, and its class."""


def planner(name: str) -> Planner:
    """Return a planner with its usual settings.

    Raises:
        ValueError: There is none of that name; the message lists those there are.
    """
    module, kind = look_up("planner", name, PLANNERS)
    return cast(Planner, getattr(import_module(f"resilient.planners.published.{module}"), kind)())
