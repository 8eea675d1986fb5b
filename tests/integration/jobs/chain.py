"""A small chain that learns a smooth function, in milliseconds a step; options for the scenarios of the tests."""

from __future__ import annotations

import argparse
import gc
import os
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

import resilient as rs
from resilient.comm import grid
from resilient.data.sampler import StepSampler
from resilient.models.layer import Activations, Batch, LayerSpec
from resilient.runtime import worker
from resilient.runtime.generation_guard import GenerationGuard

WIDTH = 24
NUM_LAYERS = 10
NUM_SAMPLES = 4096
BREAKING_LAYER = 4
BREAKING_POSITION = 9
"""Of the sample, within its step."""
DELAY_S = 0.02
UNLIKE = os.environ.get("UNLIKE", "")
"""What this process does otherwise than the others, as if its code or files were others: data, schedule or loss."""


class Waves:
    """Points and the waves through them; sample i is a function of i alone.

    Args:
        raising: Samples that cannot be read.
        held: Samples that cannot be read before all this is true.
        breaking: Samples of which something in the model is not finite.
    """

    def __init__(
        self,
        raising: frozenset[int],
        held: Mapping[int, Sequence[Callable[[], bool]]],
        breaking: frozenset[int] = frozenset(),
    ) -> None:
        self._raising = raising
        self._held = held
        self._breaking = breaking

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        if index in self._raising:
            raise RuntimeError(f"sample {index} is not to be had")
        while not all(is_over() for is_over in self._held.get(index, ())):
            time.sleep(0.005)
        point = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)) + (UNLIKE == "data")
        breaks = torch.tensor([float(index in self._breaking)])
        return {"input": point, "target": point.sum().sin()[None], "breaks": breaks}


class KnownGuard(GenerationGuard):
    """The worker's guard, which tells the data set what the worker was told.

    That the launcher has asked for a change does not mean that a worker has heard of it: the job may be over before.
    """

    last: ClassVar[KnownGuard]

    def open(self, generation: int) -> queue.SimpleQueue[object]:
        KnownGuard.last, self._generation = self, generation
        return super().open(generation)

    def ends(self) -> bool:
        """Tell whether this worker knows that its generation ends, with this step or at once."""
        return max(self._pause_for, self._announced) > self._generation


class Delay(nn.Module):
    """Passes its input on, after a while on one of the nodes."""

    def __init__(self, slow_node: int | None) -> None:
        super().__init__()
        self._slow = slow_node is not None and os.environ.get("RESILIENT_NODE") == str(slow_node)

    def forward(self, hidden: Tensor) -> Tensor:
        if self._slow:
            time.sleep(DELAY_S)
        return hidden


class HalfFrozen(nn.Module):
    """A frozen encoder in bfloat16, a frozen table of integers with a trained scale, and a trained adapter."""

    column: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH).bfloat16())
        self.table = nn.Parameter(torch.zeros(WIDTH, 3, dtype=torch.int8), requires_grad=False)
        self.register_buffer("column", torch.tensor(1))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.01))
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        encoded = self.encoder(hidden.bfloat16()) + self.shift
        assert encoded.dtype is torch.bfloat16
        assert self.table.dtype is torch.int8
        return self.adapter(encoded.to(self.scale.dtype)) + self.scale * self.table[:, self.column]


def half_frozen() -> HalfFrozen:
    """Return one with values of its own."""
    made = HalfFrozen()
    made.table.data = torch.randint(-100, 100, made.table.shape, dtype=torch.int8)
    return made


def frozen_in_bfloat16() -> nn.Module:
    """Return a module of which nothing is trained."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).bfloat16().requires_grad_(False)


def squared_error(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss summed over the samples."""
    return ((output - batch["target"]) ** 2).sum()


def absolute_error(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return another loss summed over the samples."""
    return (output - batch["target"]).abs().sum()


def infinite_error(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss, infinite for the samples that break."""
    return squared_error(output, batch) / (1 - batch["breaks"].max())


class InfiniteGradient(torch.autograd.Function):
    """Passes its input on; the gradient is infinite for the samples that break."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, breaks: Tensor) -> Tensor:
        ctx.save_for_backward(breaks)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / (1 - ctx.saved_tensors[0]), None


def breaking(spec: LayerSpec, what: str) -> LayerSpec:
    """Return a layer whose output or gradient is infinite for the samples that break."""

    def hook(_: nn.Module, arguments: tuple[Activations, Batch], output: Activations) -> Activations:
        hidden, breaks = output["hidden"], arguments[1]["breaks"]
        return {
            "hidden": hidden / (1 - breaks) if what == "output" else cast(Any, InfiniteGradient.apply(hidden, breaks))
        }

    def build() -> nn.Module:
        module = spec.build()
        module.register_forward_hook(hook)
        return module

    return replace(spec, build=build, reads=frozenset({"breaks"}))


def build_model(num_layers: int, slow_node: int | None = None, breaks: str = "", *, frozen: bool = False) -> rs.Chain:
    """Return a chain of ``num_layers`` layers of different sizes; of some samples, one in the middle may break.

    With ``frozen`` two of three layers have frozen parts of types of their own.
    """
    hidden: list[Callable[[], nn.Module]] = [
        lambda inner=WIDTH * (1 + i % 3): nn.Sequential(
            nn.Linear(WIDTH, inner), nn.Tanh(), nn.Linear(inner, WIDTH), Delay(slow_node)
        )
        for i in range(num_layers - 1)
    ]
    if frozen:
        hidden[::3] = [half_frozen] * len(hidden[::3])
        hidden[1::3] = [frozen_in_bfloat16] * len(hidden[1::3])
    loss = infinite_error if breaks == "loss" else absolute_error if UNLIKE == "loss" else squared_error
    chain = rs.Chain([*hidden, lambda: nn.Linear(WIDTH, 1)], loss)
    if breaks in ("output", "gradient"):
        layers = list(chain.layers)
        layers[BREAKING_LAYER] = breaking(layers[BREAKING_LAYER], breaks)
        chain.layers = tuple(layers)
    return chain


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=28)
    parser.add_argument("--microbatch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--frozen", action="store_true", help="parts of types of their own")
    parser.add_argument("--precision", default="fp64")
    parser.add_argument("--optimizer", choices=("adamw", "sgd", "groups"), default="adamw")
    parser.add_argument("--max-failures", type=int, default=1)
    parser.add_argument("--min-pipeline-nodes", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=lambda text: text if text == "auto" else int(text), default=0)
    parser.add_argument("--compare-replicas-every", type=int, default=100)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--raise-in", type=int, metavar="STEP", help="the samples of this step cannot be read")
    parser.add_argument(
        "--hold-in", type=int, action="append", default=[], metavar="STEP", help="this step waits until --gate exists"
    )
    parser.add_argument("--gate", type=Path, action="append", default=[], help="one for each --hold-in, in order")
    parser.add_argument(
        "--change-after",
        type=int,
        action="append",
        default=[],
        metavar="STEP",
        help="this step waits until its worker was told of the change of membership after it",
    )
    parser.add_argument("--unless", type=Path, metavar="FILE", help="no --change-after waits once this exists")
    parser.add_argument("--break-in", type=int, action="append", default=[], metavar="STEP", help="of one sample")
    parser.add_argument("--breaks", choices=("output", "gradient", "loss"), default="", help="what is not finite then")
    parser.add_argument("--on-nonfinite", default="stop")
    parser.add_argument("--comm-timeout-s", type=float, default=30.0)
    parser.add_argument("--num-workers", type=int, default=0, help="none where samples wait for what a worker is told")
    parser.add_argument("--stay-until", type=Path, metavar="FILE", help="when the main script ends")
    parser.add_argument("--slow-node", type=int, metavar="NODE", help="computes slowly")
    parser.add_argument("--late-node", type=int, metavar="NODE", help="does not begin before --begin exists")
    parser.add_argument("--begin", type=Path, metavar="FILE")
    parser.add_argument("--widest", type=int, metavar="RANKS", help="as many may all be connected by gloo")
    parser.add_argument("--no-collector", action="store_true", help="what refers to itself stays in memory")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = parse_arguments()
    torch.set_num_threads(1)
    while os.environ.get("RESILIENT_NODE") == str(args.late_node) and not args.begin.exists():
        time.sleep(0.005)
    if args.widest is not None:
        grid.WIDEST = args.widest
    if args.no_collector:
        gc.disable()
    worker.GenerationGuard = KnownGuard
    sampler = StepSampler(num_samples=NUM_SAMPLES, global_batch=max(args.batch, 1), seed=0)

    def changes() -> bool:
        return KnownGuard.last.ends() or (args.unless is not None and args.unless.exists())

    def samples_of(step: int | None) -> frozenset[int]:
        return frozenset() if step is None else frozenset(map(int, sampler.indices(step)))

    held = [(step, gate.exists) for step, gate in zip(args.hold_in, args.gate, strict=True)]
    held += [(step, changes) for step in args.change_after]
    conditions = {
        index: [is_over for at, is_over in held if at == step] for step, _ in held for index in samples_of(step)
    }
    groups = [rs.ParameterGroup("*.bias", weight_decay=0.1), rs.ParameterGroup("layer.[0-4].*", lr=1e-3)]
    optimizers = {
        "adamw": rs.AdamW(lr=3e-3, lr_schedule=(lambda step: 2.0) if UNLIKE == "schedule" else None),
        "sgd": rs.SGD(lr=1e-2, momentum=0.9),
        "groups": rs.AdamW(lr=3e-3, groups=groups),
    }
    trainer = rs.Trainer(
        build_model(args.layers, args.slow_node, args.breaks, frozen=args.frozen),
        Waves(
            samples_of(args.raise_in),
            conditions,
            frozenset(int(sampler.indices(step)[BREAKING_POSITION]) for step in args.break_in),
        ),
        optimizer=optimizers[args.optimizer],
        global_batch=args.batch,
        microbatch=args.microbatch,
        max_failures=args.max_failures,
        min_pipeline_nodes=args.min_pipeline_nodes,
        precision=args.precision,
        clip_grad_norm=1.0,
        on_nonfinite=args.on_nonfinite,
        checkpoint_every=args.checkpoint_every,
        compare_replicas_every=args.compare_replicas_every,
        schedule=args.schedule,
        comm_timeout_s=args.comm_timeout_s,
        num_workers=args.num_workers,
    )
    result = trainer.fit(num_steps=args.steps)
    if result.is_main:
        print(f"trained {result.step} steps")  # noqa: T201
        while args.stay_until is not None and not args.stay_until.exists():
            time.sleep(0.005)


if __name__ == "__main__":
    main()
