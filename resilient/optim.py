"""Optimizers as descriptions: what to build over the flat parameters of whichever layers a worker holds.

The arithmetic is torch's own. The slots are part of the layer states, so that a copied layer brings its optimizer
state along; the step count follows from the state's version.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeVar

import torch

from resilient.common.arguments import check_number, described, kind_of, whole_number
from resilient.errors import ArgumentError, literal
from resilient.state.layer_state import LayerState, UpdatedWindow
from resilient.state.layout import Rates
from resilient.state.whole_vectors import WholeVectors

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
    def groups(self) -> Sequence[ParameterGroup]: ...

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the per-parameter tensors, all zero before the first step."""
        ...

    def rates(self, name: str, num_dims: int) -> Rates:
        """Return the rates of the parameter of this full name, ``<layer>.<parameter>``."""
        ...

    def build(self, states: Iterable[LayerState], num_updates: int) -> torch.optim.Optimizer:
        """Make the torch optimizer over the states' windows, which were updated so many times."""
        ...


def learning_rate(optimizer: Optimizer, step: int) -> float:
    """Return the learning rate of a step (1, 2, ...), of parameters in no group with a rate of its own."""
    return optimizer.lr * _factor(optimizer, step)


def set_learning_rates(optimizer: Optimizer, built: torch.optim.Optimizer, step: int) -> None:
    """Give each parameter group of the optimizer that was built its learning rate of a step (1, 2, ...)."""
    for group in built.param_groups:
        group["lr"] = group["initial_lr"] * _factor(optimizer, step)


def _factor(optimizer: Optimizer, step: int) -> float:
    return optimizer.lr_schedule(step) if optimizer.lr_schedule else 1.0


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are trained at rates of their own, in ``groups`` of an optimizer: the first that fits counts.

    Args:
        pattern: Of full names, ``<layer>.<parameter>`` (:attr:`resilient.Trainer.parameter_names`): ``*`` stands for
            anything, ``?`` for one character, ``[0-9]`` for one of these, as in :mod:`fnmatch`.
        lr: Learning rate, which the optimizer's schedule multiplies as well; None for the optimizer's.
        weight_decay: Also of norms and biases; None for the optimizer's, and none of norms and biases.

    Raises:
        ArgumentError: A rate cannot be, or nothing is said.
    """

    pattern: str
    _: KW_ONLY
    lr: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        whose = f" of ParameterGroup({self.pattern!r})"
        if self.lr is None and self.weight_decay is None:
            fix = f"write ParameterGroup({literal(repr(self.pattern))}, lr=1e-5), say"
            raise ArgumentError("lr or weight_decay" + whose, "be given", "neither", fix)
        if self.lr is not None:
            _check_lr(self.lr, whose)
        if self.weight_decay is not None:
            _check_weight_decay(self.weight_decay, whose)


def check_groups(optimizer: Optimizer, names: Sequence[str]) -> None:
    """Check that every group has parameters.

    Args:
        optimizer: With the groups.
        names: Full names of all parameters that are trained.

    Raises:
        ArgumentError: One has none; the message says whether its pattern fits no name, or comes too late.
    """
    left = list(names)
    for position, group in enumerate(optimizer.groups):
        fitting = [name for name in names if fnmatchcase(name, group.pattern)]
        if not fitting:
            few = ", ".join(names[:3])
            fix = f"names are {few}, ... (Trainer.parameter_names); a tied parameter has its owner's name"
            constraint = "fit the name of a parameter that is trained"
            raise ArgumentError(f"groups[{position}]", constraint, repr(group.pattern), literal(fix))
        if not set(fitting) & set(left):
            constraint = "have parameters that no group before it takes"
            fix = "put the special pattern before the general one"
            raise ArgumentError(f"groups[{position}]", constraint, repr(group.pattern), fix)
        left = [name for name in left if name not in set(fitting)]


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


def _check_lr(lr: float, whose: str = "") -> None:
    check_number(f"lr{whose}", lr, "pass a positive learning rate")


def _check_weight_decay(weight_decay: float, whose: str = "") -> None:
    check_number(f"weight_decay{whose}", weight_decay, "pass 0.0 for none", or_zero=True)


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
    """What descriptions of optimizers have in common: their groups, and arguments by name, one of which
    once had another."""

    lr: float
    weight_decay: float
    lr_schedule: LearningRateSchedule | None
    groups: Sequence[ParameterGroup]

    def __new__(cls: type[_T], *unnamed: Any, **arguments: Any) -> _T:
        if unnamed:
            lr = unnamed[0] if isinstance(unnamed[0], float) else "3e-4"
            fix = f"write {cls.__name__}(lr={lr}); the trainer tells it of the parameters"
            raise ArgumentError(f"arguments of {cls.__name__}", "be named", described(unnamed[0]), fix)
        if "schedule" in arguments:
            fix = f"write {cls.__name__}({{lr_schedule}}=...), the trainer's schedule is the pipeline's"
            raise ArgumentError("schedule", "be called {lr_schedule}", arguments["schedule"], fix)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _check_weight_decay(self.weight_decay)
        _check_schedule(self.lr_schedule)
        for group in self.groups:
            if not isinstance(group, ParameterGroup):
                fix = 'write groups=[resilient.ParameterGroup("vision.*", lr=1e-5)]'
                raise ArgumentError("groups", "hold ParameterGroups", kind_of(group), fix)
        object.__setattr__(self, "groups", tuple(self.groups))

    def rates(self, name: str, num_dims: int) -> Rates:
        group = next((group for group in self.groups if fnmatchcase(name, group.pattern)), None)
        lr = self.lr if group is None or group.lr is None else group.lr
        if group is not None and group.weight_decay is not None:
            return Rates(lr=lr, weight_decay=group.weight_decay)
        return Rates(lr=lr, weight_decay=self.weight_decay if num_dims > 1 else 0.0)


def _by_rates(windows: Iterable[UpdatedWindow]) -> list[dict[str, Any]]:
    """Return the parameter groups of torch's optimizer: it wants one at least, be it of an empty parameter."""
    together: dict[Rates, list[torch.nn.Parameter]] = {}
    for window in windows:
        together.setdefault(window.rates, []).append(window.parameter)
    nothing = {Rates(lr=0.0, weight_decay=0.0): [torch.nn.Parameter(torch.empty(0))]}
    return [
        {"params": parameters, "lr": rates.lr, "initial_lr": rates.lr, "weight_decay": rates.weight_decay}
        for rates, parameters in (together or nothing).items()
    ]


class _Eager(torch.optim.Optimizer):
    """Has torch's methods without their decorators for ``torch.compile``.

    These import torch._dynamo, which takes longer than torch itself, in each process of a job that compiles nothing.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class _AdamW(_Eager, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class _SGD(_Eager, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


def _hook(optimizer: torch.optim.Optimizer, vectors: WholeVectors) -> None:
    optimizer.register_step_pre_hook(vectors.gather)
    optimizer.register_step_post_hook(vectors.scatter)


@dataclass(frozen=True, kw_only=True)
class AdamW(_Description):
    """Adam with decoupled weight decay (``torch.optim.AdamW``).

    Args:
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Share of the parameters, times the learning rate, that each step takes away; not of norms and
            biases (parameters of one dimension or none).
        lr_schedule: Step (1, 2, ...) -> factor on all learning rates, as :class:`WarmupCosine`; None for 1 always.
        groups: Parameters with rates of their own, :class:`ParameterGroup`; the first that fits counts.

    Raises:
        ArgumentError: A rate is negative, or ``lr`` 0.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    lr_schedule: LearningRateSchedule | None = None
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self.betas)
        check_number("eps", self.eps, "leave it out for 1e-8", or_zero=True)

    @property
    def slots(self) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def build(self, states: Iterable[LayerState], num_updates: int) -> torch.optim.Optimizer:
        vectors = WholeVectors(window for state in states for window in state.windows)
        optimizer = _AdamW(_by_rates(vectors.windows), betas=self.betas, eps=self.eps, fused=True)
        _hook(optimizer, vectors)
        for window in vectors.windows:
            step = torch.tensor(float(num_updates), dtype=torch.float32, device=window.parameter.device)
            optimizer.state[window.parameter] = {"step": step, **window.slots}
        return optimizer


@dataclass(frozen=True, kw_only=True)
class SGD(_Description):
    """Stochastic gradient descent with optional momentum (``torch.optim.SGD``).

    Args:
        lr: Learning rate.
        momentum: Of the gradients summed up; 0 for none.
        nesterov: Look ahead along the momentum.
        weight_decay: Factor of the parameters added to the gradient; not of norms and biases (parameters of one
            dimension or none).
        lr_schedule: Step (1, 2, ...) -> factor on all learning rates, as :class:`WarmupCosine`; None for 1 always.
        groups: Parameters with rates of their own, :class:`ParameterGroup`; the first that fits counts.

    Raises:
        ArgumentError: A rate is negative, or ``lr`` 0.
        ValueError: ``nesterov`` has no momentum.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lr_schedule: LearningRateSchedule | None = None
    groups: Sequence[ParameterGroup] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("momentum", self.momentum, "pass 0.0 for none", or_zero=True)
        if self.nesterov and not self.momentum > 0:
            raise ValueError(f"momentum must be > 0 with nesterov, got {self.momentum}; pass e.g. momentum=0.9")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.momentum else ()

    def build(self, states: Iterable[LayerState], num_updates: int) -> torch.optim.Optimizer:
        vectors = WholeVectors(window for state in states for window in state.windows)
        groups = _by_rates(vectors.windows)
        optimizer = _SGD(groups, momentum=self.momentum, nesterov=self.nesterov, fused=True)
        _hook(optimizer, vectors)
        for window in vectors.windows:
            optimizer.state[window.parameter] = dict(window.slots)
        return optimizer
