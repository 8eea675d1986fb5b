"""The planners there are, by the names people type; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import cast

from resilient.errors import ArgumentError
from resilient.planners.costs.cost_model import CostModel
from resilient.planners.costs.samples import LLM
from resilient.planners.planner import Planner
from resilient.templates.common.words import look_up

BASELINE = "uniform"
"""What others are compared with: one uniform plan for the whole model."""

AUTO = "auto"
"""All planners, of whose answers the best is taken (:mod:`resilient.planners.own.best`)."""

PLANNERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "uniform": ("published.baselines.uniform", "Uniform"),
        "uniform-sorted": ("published.baselines.uniform", "UniformSorted"),
        "random": ("published.baselines.balanced", "RandomOrder"),
        "fsdp": ("published.baselines.balanced", "FullySharded"),
        "dip": ("published.baselines.balanced", "EncoderFirst"),
        "static-cp": ("published.baselines.balanced", "StaticContext"),
        "cornstarch": ("published.cornstarch.planner", "Cornstarch"),
        "disttrain": ("published.disttrain.planner", "DistTrain"),
        "dflop": ("published.dflop.planner", "Dflop"),
        "dhp": ("published.dhp.planner", "DHP"),
        "dhp-across-nodes": ("published.dhp.planner", "dhp_across_nodes"),
        "orchmllm": ("published.orchmllm.planner", "OrchMLLM"),
        "entrain": ("published.entrain.planner", "Entrain"),
        "resilient": ("own.planner", "ResilientPlanner"),
    }
)
"""By name, in the order they are shown: the module in :mod:`resilient.planners`, and what makes it."""


PLACES_GENERATORS = ("uniform", "uniform-sorted", "disttrain", "resilient", AUTO)
"""Planners of models with a unit after the language model: of those that decide by the order of units in simulation."""


def check_generators(name: str, costs: CostModel) -> None:
    """Refuse a planner that cannot place the samples of a model's generators.

    Args:
        name: The planner's.
        costs: Of the model's units.

    Raises:
        ArgumentError: It is none of :data:`PLACES_GENERATORS`, and the model has one.
    """
    units = [unit.name for unit in costs.units]
    after = units[units.index(LLM) + 1 :] if LLM in units else []
    if after and name not in PLACES_GENERATORS:
        told = ", ".join(PLACES_GENERATORS)
        got = f"{name!r}, which knows nothing of {', '.join(after)}"
        raise ArgumentError("planner", "place what comes after the language model", got, f"choose one of {told}")


def planner(name: str) -> Planner:
    """Return a planner with its usual settings.

    Raises:
        ValueError: There is none of that name; the message lists those there are.
    """
    module, kind = look_up("planner", name, PLANNERS)
    return cast(Planner, getattr(import_module(f"resilient.planners.{module}"), kind)())
