"""Profiles derived from a model's published shape and a device's data sheet: planning without the hardware.

The formulas, for b samples of s tokens in a microbatch at tensor-parallel degree d (Megatron-LM's way of cutting,
without sequence parallelism; attention by a kernel of FlashAttention's kind, which keeps no scores; 2-byte numbers):

- *Products.* A matrix of p parameters costs 2 p b s / d FLOPs forward, and the same again for the gradient of its input
  and for that of its parameters. Attention costs 4 b s^2 (heads x head size) / d forward, half of it where it is
  causal; its backward, all of it for inputs, does 5 products for the forward's 2. A product takes
  max(FLOPs / (efficiency x peak), bytes of its matrix / memory bandwidth).
- *The rest* (norms, residuals, activation function, rotation) takes its memory traffic / memory bandwidth, forward and
  backward for inputs alike.
- *Tensor parallelism.* A block sums b s h numbers over its d devices, twice forward and twice backward for inputs: in a
  ring, 2 (d - 1) / d of the bytes and 2 (d - 1) latencies.
- *Kept for the backward*, bytes per token: inputs of norms and of the matrices after them 8 h, and 2 h of dropout
  masks, on all devices; queries, keys, values, attention's output, its log-sum-exp (4 a head) and the inner values of
  the feed-forward (before and after GELU 4 f, SwiGLU's four 8 f) divided by d. For GPT that is s b h (10 + 24 / d) of
  Korthikanti et al., and the log-sum-exp. The head keeps its norm's and its matrix's inputs, and the logits in fp32.
- *Deferred where a backward is split*, bytes per token: the gradients of what norms and matrices give. In a block 8 h
  on all devices, and 2 for each query, key, value and inner value of the feed-forward's first matrices divided by d.
- *State*, bytes per parameter: see the constants of :mod:`~resilient.templates.inputs.layer_work`.

Not in it: the optimizer's own time, recomputation (the planner adds it where it is used), and imbalance of devices.
Source: Narayanan et al. 2021 (Megatron-LM), appendix; Korthikanti et al. 2023 (MLSys), sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from resilient.errors import ArgumentError
from resilient.templates.common.words import look_up
from resilient.templates.inputs.devices import DEVICES, Device
from resilient.templates.inputs.known_models import MODELS, KnownModel
from resilient.templates.inputs.layer_work import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    PARAMETER_BYTES,
    LayerWork,
    layer_works,
)
from resilient.templates.inputs.profile import LayerCost, LayerProfile, ModelProfile

TP_DEGREES = (1, 2, 4, 8)
"""Tensor-parallel degrees that are considered; those that divide the heads of all blocks are used."""

FLASH_BACKWARD = 2.5
"""FLOPs of attention's backward by its forward's: scores again, and the gradients of values, scores, queries, keys."""


def derive_profile(
    model: str,
    device: str,
    *,
    microbatch: int | None = None,
    seq_len: int | None = None,
    frozen: Collection[str] = (),
) -> ModelProfile:
    """Derive the profile of a known model on a known device.

    Args:
        model: A name in :data:`~resilient.templates.inputs.known_models.MODELS`.
        device: A name in :data:`~resilient.templates.inputs.devices.DEVICES`.
        microbatch: Samples of a microbatch; the model's usual number by default.
        seq_len: Tokens of a sample; the model's usual number by default. Pictures are not affected.
        frozen: Units that are not trained: ``llm`` or, where there is one, ``vision`` (the tower) and ``projector``.

    Returns:
        The profile, for the degrees in :data:`TP_DEGREES` that all blocks can be divided by.

    Raises:
        ValueError: A name is not known (the message lists those that are), or a number does not fit the model.
    """
    known = look_up("model", model, MODELS)
    hardware = look_up("device", device, DEVICES)
    microbatch = known.microbatch if microbatch is None else microbatch
    seq_len = known.seq_len if seq_len is None else seq_len
    works = tuple(layer_works(model, microbatch, seq_len))
    degrees = tuple(degree for degree in TP_DEGREES if all(not heads % degree for heads in _heads(known)))
    layers = tuple(
        LayerProfile(
            name=work.name,
            costs=tuple(_cost(work, hardware, degree) for degree in degrees),
            parameter_bytes=PARAMETER_BYTES * work.parameters,
            optimizer_bytes=OPTIMIZER_BYTES * work.parameters,
            gradient_bytes=GRADIENT_BYTES * work.parameters,
            input_bytes=work.input_bytes,
            shares=work.shares,
        )
        for work in works
    )
    source = f"derived: {model}, {device}, microbatch {microbatch}, {seq_len} tokens"
    if frozen:
        source += f", frozen {', '.join(sorted(frozen))}"
    profile = ModelProfile(layers=layers, tp_degrees=degrees, source=source, microbatch=microbatch)
    return freeze(profile, frozen)


def freeze(profile: ModelProfile, units: Collection[str]) -> ModelProfile:
    """Return a profile with whole units frozen.

    Args:
        profile: The profile; the unit of a layer is what its name begins with.
        units: Units that are not trained. An encoder's projector is a unit of its own, ``projector``.

    Raises:
        ValueError: There is no such unit, or none is left to train.
    """
    by_unit: dict[str, list[str]] = {}
    for layer in profile.layers:
        unit = "projector" if layer.name.endswith(".projector") else layer.name.partition(".")[0]
        by_unit.setdefault(unit, []).append(layer.name)
    names = {name for unit in units for name in look_up("frozen", unit, by_unit)}
    if len(names) == len(profile.layers):
        raise ArgumentError("frozen", "leave a unit to train", ", ".join(units), "leave one out")
    return profile.frozen(names)


def _heads(known: KnownModel) -> Iterator[int]:
    for blocks in (known.blocks, *([known.vision.blocks] if known.vision else [])):
        yield from (blocks.num_heads, blocks.num_kv_heads)


def _cost(work: LayerWork, device: Device, degree: int) -> LayerCost:
    flops_per_ms = device.matmul_efficiency * device.flops_per_s / 1e3
    bytes_per_ms = device.memory_bytes_per_s / 1e3

    def products_ms(flops: float, matrix_bytes: float) -> float:
        return max(flops / degree / flops_per_ms, matrix_bytes / degree / bytes_per_ms)

    reduce_ms = 0.0
    if degree > 1:
        steps = 2 * (degree - 1)
        reduce_ms = steps * device.intra_node.transfer_ms(work.reduce_bytes / degree)
    rest_ms = (work.traffic_bytes + work.sharded_traffic_bytes / degree) / bytes_per_ms
    weight_bytes = PARAMETER_BYTES * work.matrix
    matrix_flops = 2 * work.matrix * work.tokens
    return LayerCost(
        forward_ms=products_ms(work.forward_flops, weight_bytes) + rest_ms + work.forward_reduces * reduce_ms,
        backward_input_ms=products_ms(matrix_flops + FLASH_BACKWARD * work.attention_flops, weight_bytes)
        + rest_ms
        + work.backward_reduces * reduce_ms,
        # The gradient is read, added to, and written.
        backward_weight_ms=products_ms(matrix_flops, 2 * GRADIENT_BYTES * work.matrix)
        + work.lookup_bytes / bytes_per_ms,
        activation_bytes=work.kept_bytes + math.ceil(work.sharded_kept_bytes / degree),
        deferred_bytes=work.deferred_bytes + math.ceil(work.sharded_deferred_bytes / degree),
    )
