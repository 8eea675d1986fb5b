"""What a model is to the runtime: named layers in execution order, a summed loss, and a check of samples.

Owns the contract between models and the executor, initial values that depend on (seed, layer) alone, and the
one-process model that debugging, held-out evaluation and tests use. Knows nothing of stages or processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from resilient.models.compiled_layers import keep_saved_tensors
from resilient.models.tensor_parallel.devices import TensorDevices

Activations = dict[str, Tensor]
"""What flows from layer to layer, by name; the tensors that cross a stage border are these."""

Batch = Mapping[str, Tensor]
"""A collated microbatch, available to every stage."""

Shapes = Mapping[str, tuple[int, ...]]
"""Of a microbatch's entries, by name."""

_JOB_TYPES = (torch.float32, torch.float64)
"""What jobs train in: layers are made in the first one, and become the job's type."""


class Layer(nn.Module):
    """One indivisible unit of the model: reads the activations and the microbatch, returns those of the next layer.

    A layer must return every entry of its activations that a later layer needs, must not change them in place, and
    must not depend on other samples of the microbatch. Frozen parameters have ``requires_grad=False``; of another type
    than float32 or float64 they keep it (see :func:`own_types`).
    """

    def forward(self, activations: Activations, batch: Batch) -> Activations:
        raise NotImplementedError(f"{type(self).__name__} must define forward(activations, batch)")


@dataclass(frozen=True, kw_only=True)
class TensorParallel:
    """How several devices run a layer together, each with its part of the parameters in :attr:`LayerSpec.cut`.

    Args:
        build: Make the structure of one device's part; its parameters have the names that the whole layer's have.
        tokens: Given the shapes of a microbatch, return how many tokens there are of those activations that enter the
            layer, ``[..., tokens, ...]``, of which each device has some. Others all have whole, and their gradients are
            addends.
        divisible: What a degree must divide, in words -> how many of it there are.
        why_not: Why no number of devices can, in words; "" if some can.
    """

    build: Callable[[TensorDevices], nn.Module]
    tokens: Callable[[Shapes], Mapping[str, int]]
    divisible: Mapping[str, int] = field(default_factory=dict)
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """How to make one layer, wherever the plan puts it.

    Args:
        name: Stable name, unique in the model (``vision.block.3``).
        unit: The part of the model the layer belongs to (``vision``, ``llm``).
        build: Make the layer's structure; called under ``torch.device("meta")`` to size it and on the real device
            to run it. Parameters mean nothing until ``initialize``; buffers are constants that ``build`` sets.
        initialize: Fill the parameters, on CPU in float32, from torch's global generator (seeded from
            (seed, name) before the call) or from a checkpoint on disk.
        reads: Entries of the microbatch that the layer reads, or the loss taken behind it; None for all. Workers load
            none that no layer of theirs reads: where the layer is, others have a shape, but no values.
        for_loss: Entries of what it returns that the loss alone reads: it is taken right behind the layer, and they go
            no further. Of the model's last layer that is all there is.
        tied: Parameter name in this layer -> (owner layer, parameter name there). The owner holds the state.
        cut: Name of a parameter, or of a part of the layer with all of its parameters -> the dimension in which
            tensor-parallel devices cut them (1 for a linear layer whose inputs are cut), and which is stored first.
            What has no such dimension, and all others, each device has whole.
        tensor_parallel: How several devices run the layer together; None where that is not known.
    """

    name: str
    unit: str
    build: Callable[[], nn.Module]
    initialize: Callable[[nn.Module], None]
    reads: frozenset[str] | None = None
    for_loss: frozenset[str] = frozenset()
    tied: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    cut: Mapping[str, int] = field(default_factory=dict)
    tensor_parallel: TensorParallel | None = None

    def cut_of(self, name: str, num_dims: int) -> int | None:
        """Return in which dimension a parameter is cut; None where it is not."""
        for part, dimension in self.cut.items():
            if (name == part or name.startswith(f"{part}.")) and 0 <= dimension < num_dims:
                return dimension
        return None

    def tokens(self, shapes: Shapes) -> Mapping[str, int]:
        """Return :attr:`TensorParallel.tokens` of what enters the layer."""
        return {} if self.tensor_parallel is None else self.tensor_parallel.tokens(shapes)

    def why_not(self, degree: int) -> str:
        """Return why so many devices cannot share the layer, in words; "" if they can."""
        how = self.tensor_parallel
        if how is None:
            return f"no rule is known by which devices divide layer {self.name!r}"
        if how.why_not:
            return f"devices cannot divide layer {self.name!r}, {how.why_not}"
        uneven = next((f"{number} {what}" for what, number in how.divisible.items() if number % degree), "")
        return f"{degree} devices cannot divide the {uneven} of layer {self.name!r} evenly" if uneven else ""


class Model(Protocol):
    """A model the runtime can train; see :class:`resilient.models.chain.Chain` for the smallest.

    Four more methods are optional. ``collate(samples) -> dict[str, Tensor]`` joins samples to a microbatch where the
    data set does not. ``num_targets(sample) -> int | None`` counts the targets that a sample adds to the loss, None
    where that cannot be told: what the data set says of its samples is compared with it.
    ``check_first(samples)`` raises :class:`resilient.errors.SampleError` for what only several samples show, given
    those of the first microbatches by name. ``values_digest() -> str`` is a content hash of initial values that come
    with the model and are not drawn: they must be equal on all workers.
    """

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers in execution order; an owner of tied parameters precedes their users."""
        ...

    def loss(self, activations: Activations, batch: Batch) -> Tensor:
        """Return the loss of what is in the activations, SUMMED over the microbatch's targets (a scalar).

        Those are what the last layer returns. Where other layers have entries :attr:`LayerSpec.for_loss`, it is called
        for each such layer with these alone, and for all in one process with everything; the sums are added.
        """
        ...

    def check(self, sample: Mapping[str, Any], name: str) -> None:
        """Raise :class:`resilient.errors.SampleError` that names the sample if it cannot be trained on."""
        ...

    def digest(self) -> str:
        """Return a content hash of the configuration; equal on two workers exactly when they train the same model."""
        ...


@runtime_checkable
class FromFiles(Protocol):
    """A model that takes values from files: what differs between two workers is then told by name."""

    def contents(self) -> dict[str, str]:
        """Return a digest of each file's contents, by a name that says which part of the model it is for."""
        ...


def initialize_layer(spec: LayerSpec, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build a layer on CPU with its initial values, a function of (seed, layer name) alone.

    Values are drawn in float32 and cast afterwards, so that jobs of different precision start at the same point.
    The global random state of the caller is left as it was. Tied parameters are filled as if they were the
    layer's own; whoever joins the layers replaces them by the owner's.

    Args:
        spec: The layer.
        seed: The job's seed.
        dtype: Of the returned parameters and floating-point buffers, but those with a type of their own.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        module = spec.build()
        own = own_types(module)
        module.to(torch.float32)
        digest = hashlib.sha256(f"{seed}/{spec.name}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        with torch.no_grad():
            spec.initialize(module)
    module.to(dtype)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = tensor.data.to(own.get(name, tensor.dtype))
    keep_saved_tensors()
    return module


def own_types(module: nn.Module) -> dict[str, torch.dtype]:
    """Return what of a layer as it was built has a type of its own, which is not to become the job's, by name.

    Of its parameters those that are frozen, in bfloat16 or in integers for example. Of its floating-point buffers those
    of a type that such a parameter has: they are used together.
    """
    own = {
        name: parameter.dtype
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad and parameter.dtype not in _JOB_TYPES
    }
    types = set(own.values())
    return own | {
        name: buffer.dtype
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and buffer.dtype in types
    }


def tie(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Make ``parameter`` the parameter called ``name`` of ``module``."""
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, parameter)


class WholeModel(nn.Module):
    """All layers in one process, tied parameters really tied.

    Args:
        model: What the layers belong to.
        modules: The layers' modules by layer name.
    """

    def __init__(self, model: Model, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.names = tuple(spec.name for spec in model.layers)
        self.stack = nn.ModuleList([modules[name] for name in self.names])
        for spec in model.layers:
            for name, (owner, owned) in spec.tied.items():
                tie(modules[spec.name], name, modules[owner].get_parameter(owned))

    def layer(self, name: str) -> nn.Module:
        """Return the module of the layer called ``name``."""
        return self.stack[self.names.index(name)]

    def forward(self, batch: Batch) -> Activations:
        """Run all layers on a microbatch and return the last one's activations."""
        activations: Activations = {}
        for layer in self.stack:
            activations = layer(activations, batch)
        return activations

    def loss(self, batch: Batch) -> Tensor:
        """Return the microbatch's summed loss."""
        return self.model.loss(self(batch), batch)
