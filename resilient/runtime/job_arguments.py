"""Checks that model, data set and optimizer of a job are what it can train, and says what to pass instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from resilient.common.arguments import described, kind_of
from resilient.data.dataset import Dataset
from resilient.errors import ArgumentError
from resilient.models.layer import Model
from resilient.models.packing import why_padded
from resilient.planners.registry import AUTO, PLANNERS
from resilient.templates.common.words import look_up
from resilient.templates.schedules.kind import ScheduleKind

PLANNED_SCHEDULES = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1)
"""Beside a planner: whether backwards for the weights stand apart. The rest of the order is the planner's."""


def check_model(model: Any) -> None:
    """Check that a model is made of layers.

    Raises:
        ArgumentError: It is not: a module, the name of one, or a class.
    """
    if isinstance(model, type) and hasattr(model, "digest"):
        raise ArgumentError("model", "be cut into layers", described(model), "make one of it")
    if not hasattr(model, "digest"):
        fix = "make it a resilient.Chain of modules or a resilient.MultimodalModule"
        raise ArgumentError("model", "be cut into layers", kind_of(model), fix)


def check_dataset(dataset: Any) -> None:
    """Check that a data set has what the runtime asks of it, and samples.

    Raises:
        ArgumentError: It is something else, a loader or an iterable for example, or empty.
    """
    constraint = "be a map from index to sample, with __len__ and __getitem__"
    if isinstance(dataset, type):
        raise ArgumentError("dataset", constraint, described(dataset), "make one of it")
    if isinstance(dataset, torch.utils.data.DataLoader):
        fix = "pass its .dataset: the trainer orders, batches and collates samples itself"
        raise ArgumentError("dataset", constraint, kind_of(dataset), fix)
    if isinstance(dataset, Mapping) and 0 not in dataset:
        fix = f"pass one of its entries ({', '.join(map(repr, list(dataset)[:3]))}) or a list of samples"
        raise ArgumentError("dataset", constraint, f"{kind_of(dataset)} of names", fix)
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(type(dataset), name)]
    if missing:
        fix = "read what it yields into a list, or give its class both methods"
        raise ArgumentError("dataset", constraint, f"{kind_of(dataset)} without {' and '.join(missing)}", fix)
    for name, form in (("num_targets", "num_targets(self, index) -> int"), ("collate", "collate(self, samples)")):
        if not callable(getattr(dataset, name, len)):
            got = described(getattr(dataset, name))
            raise ArgumentError(f"the data set's {name}", "be a method", got, f"write def {form}, or rename it")
    if len(dataset) == 0:
        raise ArgumentError("dataset", "hold at least one sample", 0, "check how it is built")


def check_optimizer(optimizer: Any) -> None:
    """Check that an optimizer is a description.

    Raises:
        ArgumentError: It is torch's, its name, or a class.
    """
    fix = "each worker builds torch's own for the layers it holds"
    if isinstance(optimizer, torch.optim.Optimizer):
        got = f"torch's {type(optimizer).__name__}"
    elif isinstance(optimizer, type):
        is_torch = issubclass(optimizer, torch.optim.Optimizer)
        got = f"the class {'torch.optim.' if is_torch else ''}{optimizer.__name__}"
        fix = fix if is_torch else f"write {optimizer.__name__}(lr=3e-4)"
    elif hasattr(optimizer, "slots"):
        return
    else:
        got, fix = described(optimizer), "resilient has AdamW and SGD"
    raise ArgumentError("optimizer", "be a description such as resilient.AdamW(lr=3e-4)", got, fix)


def check_planner(name: str, model: Model, dataset: Dataset, schedule: str) -> None:
    """Check that a planner can place the samples of a job.

    Raises:
        ArgumentError: There is none of that name, or samples of this job are padded, or what else is chosen rules
            planners out.
    """
    look_up("planner", name, dict.fromkeys((AUTO, *PLANNERS)))
    why = why_padded(model, dataset)
    if why is not None:
        fix = "leave {planner} out, to train a chain of padded microbatches, or change that"
        raise ArgumentError("planner", "be None where samples cannot be packed", f"{name!r}, but {why}", fix)
    if schedule not in PLANNED_SCHEDULES:
        known = " or ".join(repr(each.value) for each in PLANNED_SCHEDULES)
        got, fix = f"{schedule!r} beside planner {name!r}", "leave it out: the planner decides the order"
        raise ArgumentError("schedule", f"be {known} beside a planner", got, fix)
