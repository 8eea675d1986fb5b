"""A small model with everything that makes stages hard (tied, frozen, random, passed through), and its data."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from resilient.errors import SampleError
from resilient.models.layer import Activations, Batch, Layer, LayerSpec, Model, WholeModel, initialize_layer
from resilient.optim import AdamW
from resilient.profiling.cache import job_profile
from resilient.profiling.degree_passes import tensor_degrees
from resilient.profiling.layer_passes import layout_rows, layout_segments
from resilient.profiling.profiler import draw_samples
from resilient.runtime.job import Job
from resilient.state.layer_state import LayerState
from resilient.templates.common.byte_intervals import ByteIntervals
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile
from resilient.templates.plan import Pipeline, Plan
from resilient.templates.template import PipelineTemplate, StageSpec

VOCABULARY, WIDTH = 11, 6
CPU = torch.device("cpu")


class Embed(Layer):
    """Tokens to vectors; also passes on integers, which want no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        return {"hidden": self.weight[batch["tokens"]], "odd": batch["tokens"] % 2}


class Block(Layer):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        hidden = activations["hidden"]
        return {**activations, "hidden": hidden + self.dropout(torch.tanh(self.linear(hidden)))}


class Head(Layer):
    """Vectors to logits, with the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))
        self.shift = nn.Parameter(torch.empty(VOCABULARY))

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        return {"logits": activations["hidden"] @ self.weight.T + self.shift * activations["odd"].unsqueeze(-1)}


class TiedModel:
    """Embedding, blocks, and a head that shares the embedding's matrix."""

    def __init__(self, num_blocks: int = 4, dropout: float = 0.0, frozen: Sequence[str] = ()) -> None:
        self._text = repr((num_blocks, dropout, tuple(frozen)))

        def spec(name: str, make: type[Layer], *arguments: float, **tied: tuple[str, str]) -> LayerSpec:
            def build() -> nn.Module:
                return make(*arguments).requires_grad_(name not in frozen)

            return LayerSpec(name=name, unit="llm", build=build, initialize=draw, tied=tied)

        blocks = [spec(f"block.{i}", Block, dropout) for i in range(num_blocks)]
        self.layers = (spec("embed", Embed), *blocks, spec("head", Head, weight=("embed", "weight")))

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        return nn.functional.cross_entropy(
            activations["logits"].flatten(0, 1), batch["labels"].flatten(), reduction="sum"
        )

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        if int(sample["tokens"].max()) >= VOCABULARY:
            raise SampleError(f"{name}: tokens must be < {VOCABULARY}, got {int(sample['tokens'].max())}; fix the data")

    def digest(self) -> str:
        return hashlib.sha256(self._text.encode()).hexdigest()


def draw(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)


class Tokens:
    """Samples of one length; sample ``bad`` holds a token outside the vocabulary."""

    def __init__(self, num_samples: int = 24, length: int = 5, bad: int | None = None) -> None:
        self._num_samples, self._length, self._bad = num_samples, length, bad

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self._num_samples:
            raise IndexError(index)
        text = torch.tensor([(7 * index + 3 * k * k) % VOCABULARY for k in range(self._length + 1)])
        return {"tokens": text[:-1] + (100 if index == self._bad else 0), "labels": text[1:]}

    def num_targets(self, index: int) -> int:
        return self._length


def split_decay(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of torch's optimizer with which norms and biases do not decay."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in parameters:
        groups[parameter.dim() > 1].append(parameter)
    return [{"params": held, "weight_decay": weight_decay * decays} for decays, held in groups.items()]


def make_job(**changes: Any) -> Job:
    arguments: dict[str, Any] = {
        "model": TiedModel(),
        "dataset": Tokens(),
        "optimizer": AdamW(lr=0.01),
        "global_batch": 16,
        "microbatch": 2,
        "max_failures": 1,
        "min_pipeline_nodes": 1,
        "seed": 3,
        "precision": "fp64",
        "clip_grad_norm": None,
        "checkpoint_every": 0,
        "schedule": "1f1b",
        "device": CPU,
        "comm_timeout_s": 600.0,  # beyond the time limit of a test
        **changes,
    }
    return Job(**arguments)


def profiled(job: Job, announce: Callable[[str], None]) -> ModelProfile:
    """Measure a job's profile, or find it, as training does."""
    return job_profile(job, draw_samples(job), announce)


def make_profile(job: Job) -> ModelProfile:
    """Return a profile with the job's real sizes and made-up times."""
    layers: list[LayerProfile] = []
    layouts = job.layouts()
    degrees, undivided = tensor_degrees(job.model, layouts)
    cost = LayerCost(forward_ms=1.0, backward_input_ms=1.0, backward_weight_ms=1.0)
    for spec in job.model.layers:
        layout = layouts[spec.name]
        layers.append(
            LayerProfile(
                name=spec.name,
                costs=(cost,) * len(degrees),
                parameter_bytes=layout.num_bytes(0, job.dtype.itemsize),
                optimizer_bytes=layout.num_trainable * len(job.optimizer.slots) * job.dtype.itemsize,
                segments=layout_segments(job, layout),
                rows=layout_rows(job, layout),
                shares=tuple(owner for owner, _ in spec.tied.values()),
            )
        )
    return ModelProfile(layers=tuple(layers), tp_degrees=degrees, undivided=undivided)


def all_of(states: Iterable[LayerState]) -> list[tuple[LayerState, ByteIntervals]]:
    """What a checkpoint of these states is written of by who holds them alone."""
    return [(state, state.held) for state in states]


def make_plan(*pipelines: tuple[Sequence[int], int]) -> Plan:
    """Make a plan from each pipeline's borders (0, ..., number of layers) and number of microbatches."""
    made: list[Pipeline] = []
    for cut, num_microbatches in pipelines:
        stages = tuple(
            StageSpec(first_layer=first, end_layer=end, node_index=i, forward_ms=0.3, backward_ms=0.7)
            for i, (first, end) in enumerate(pairwise(cut))
        )
        first_node = sum(len(pipeline.nodes) for pipeline in made)
        made.append(
            Pipeline(
                template=PipelineTemplate(num_nodes=len(stages), stages=stages),
                nodes=tuple(range(first_node, first_node + len(stages))),
                num_microbatches=num_microbatches,
            )
        )
    return Plan(pipelines=tuple(made))


def assemble(model: Model, seed: int, dtype: torch.dtype = torch.float32) -> WholeModel:
    """The whole model in this process, with the values every worker's layers start from."""
    return WholeModel(model, {spec.name: initialize_layer(spec, seed, dtype) for spec in model.layers})
