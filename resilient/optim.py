"""Optimizers as descriptions: what to build over the flat parameters of whichever layers a worker holds.

The arithmetic is torch's own. The slots are part of the layer states, so that a copied layer brings its optimizer
state along; the step count is the state's version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from resilient.common.arguments import check_number, described, whole_number
from resilient.errors import ArgumentError
from resilient.state.layer_state import LayerState

_T = TypeVar("_T")

LearningRateSchedule = Callable[[int], float]
"""Step (1, 2, ...) -> factor on the learning rate."""


class Optimizer(Protocol):
    """What the runtime needs of an optimizer description."""

    @property
    def lr(self) -> float: ...

    @property
    def lr_schedule(self) -> LearningRateSchedule | None: ...

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the per-parameter tensors, all zero before the first step."""
        ...

    def build(self, states: Iterable[LayerState], version: int) -> torch.optim.Optimizer:
        """Make the torch optimizer over the states' flat parameters, ``version`` steps after the beginning."""
        ...


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of a step (1, 2, ...)."""
    return optimizer.lr * (optimizer.lr_schedule(step) if optimizer.lr_schedule else 1.0)


@dataclass(frozen=True)
class WarmupCosine:
    """Learning-rate schedule: rises linearly over ``warmup_steps``, then falls along a cosine to ``floor``.

    Args:
        warmup_steps: Steps until the factor is 1.
        total_steps: Steps until it is ``floor``, where it stays.
        floor: Share of the learning rate that is left at the end.

    Raises:
        ValueError: The warm-up is no part of the whole.

    Source: Loshchilov and Hutter, SGDR, ICLR 2017, equation 5, after a linear warm-up.
    """

    warmup_steps: int
    total_steps: int
    floor: float = 0.0

    def __post_init__(self) -> None:
        whole_number("warmup_steps", self.warmup_steps, 0, "0 for none")
        whole_number("total_steps", self.total_steps, 1, "give the steps of the whole job")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps must be in 0 .. total_steps - 1 = {self.total_steps - 1}, got {self.warmup_steps}; "
                "warm up for fewer steps"
            )

    def __call__(self, step: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def _trained(states: Iterable[LayerState]) -> tuple[list[LayerState], list[torch.nn.Parameter]]:
    """Return the states with something to train, and their parameters: torch wants one at least, be it empty."""
    held = [state for state in states if state.layout.num_trainable]
    return held, [state.flat for state in held] or [torch.nn.Parameter(torch.empty(0))]


def _check_lr(lr: float) -> None:
    check_number("lr", lr, "pass a positive learning rate")


def _check_schedule(schedule: LearningRateSchedule | None) -> None:
    """Check that a schedule gives factors: torch's schedulers, which change a live optimizer, do not."""
    if schedule is None:
        return
    if isinstance(schedule, type) or not callable(schedule):
        constraint = "be a function from step (1, 2, ...) to factor"
        fix = "write resilient.WarmupCosine(100, 2000) or lambda step: 0.99**step"
        raise ArgumentError("lr_schedule", constraint, described(schedule), fix)
    check_number("lr_schedule(1)", schedule(1), "return the factor on the learning rate", or_zero=True)


def _check_betas(betas: Any) -> None:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        got = betas if isinstance(betas, tuple | list) else described(betas)
        raise ArgumentError("betas", "be two numbers", got, "write (0.9, 0.999)")
    for position, beta in enumerate(betas):
        check_number(f"betas[{position}]", beta, "write (0.9, 0.999)", or_zero=True)
        if beta >= 1:
            raise ArgumentError(f"betas[{position}]", "be < 1", beta, "write (0.9, 0.999)")


class _Description:
    """What descriptions of optimizers have in common: arguments by name, one of which once had another."""

    def __new__(cls: type[_T], *unnamed: Any, **arguments: Any) -> _T:
        if unnamed:
            lr = unnamed[0] if isinstance(unnamed[0], float) else "3e-4"
            fix = f"write {cls.__name__}(lr={lr}); the trainer tells it of the parameters"
            raise ArgumentError(f"arguments of {cls.__name__}", "be named", described(unnamed[0]), fix)
        if "schedule" in arguments:
            fix = f"write {cls.__name__}({{lr_schedule}}=...), the trainer's schedule is the pipeline's"
            raise ArgumentError("schedule", "be called {lr_schedule}", arguments["schedule"], fix)
        return object.__new__(cls)


@dataclass(frozen=True, kw_only=True)
class AdamW(_Description):
    """Adam with decoupled weight decay (``torch.optim.AdamW``).

    Args:
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Share of the parameters, times the learning rate, that each step takes away.
        lr_schedule: Step (1, 2, ...) -> factor on ``lr``, as :class:`WarmupCosine`; None for 1 always.

    Raises:
        ValueError: ``lr`` is not positive.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    lr_schedule: LearningRateSchedule | None = None

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_betas(self.betas)
        check_number("eps", self.eps, "leave it out for 1e-8", or_zero=True)
        check_number("weight_decay", self.weight_decay, "pass 0.0 for none", or_zero=True)
        _check_schedule(self.lr_schedule)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def build(self, states: Iterable[LayerState], version: int) -> torch.optim.Optimizer:
        held, parameters = _trained(states)
        optimizer = torch.optim.AdamW(
            parameters,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,
        )
        for state in held:
            step = torch.tensor(float(version), dtype=torch.float32, device=state.flat.device)
            optimizer.state[state.flat] = {"step": step, **state.slots}
        return optimizer


@dataclass(frozen=True, kw_only=True)
class SGD(_Description):
    """Stochastic gradient descent with optional momentum (``torch.optim.SGD``).

    Args:
        lr: Learning rate.
        momentum: Of the gradients summed up; 0 for none.
        nesterov: Look ahead along the momentum.
        weight_decay: Factor of the parameters added to the gradient.
        lr_schedule: Step (1, 2, ...) -> factor on ``lr``, as :class:`WarmupCosine`; None for 1 always.

    Raises:
        ValueError: ``lr`` is not positive, or ``nesterov`` has no momentum.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_schedule: LearningRateSchedule | None = None

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        check_number("momentum", self.momentum, "pass 0.0 for none", or_zero=True)
        check_number("weight_decay", self.weight_decay, "pass 0.0 for none", or_zero=True)
        _check_schedule(self.lr_schedule)
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"momentum must be > 0 with nesterov, got {self.momentum}; pass e.g. momentum=0.9")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def build(self, states: Iterable[LayerState], version: int) -> torch.optim.Optimizer:
        held, parameters = _trained(states)
        optimizer = torch.optim.SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,
        )
        for state in held:
            optimizer.state[state.flat] = dict(state.slots)
        return optimizer
