"""Cost models derived from published shapes and data sheets: planning multimodal jobs without the hardware.

The formulas are those of :mod:`resilient.templates.inputs.derive`, as functions of the sequence lengths, and one more:

- *Context parallelism.* A call's tokens are split evenly over cp devices, with causal masks in a way that divides
  attention evenly too. Before attention each device gathers the keys and values of all others, (cp - 1) / cp of them
  and cp - 1 latencies, not hidden behind anything; the backward gathers them again and scatters their gradients. So
  the gathering alone is ``linear(tp, cp) - linear(tp, 1) / cp`` of a block's forward.

Where a few tokens take as long as reading the matrix does, the curve has the time of many tokens exactly and, as fixed
time, what fits :data:`FITTED` best. Sources: as there; for gathering: Grattafiori et al. 2024, section 3.3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from resilient.planners.costs.cost_model import CostModel, UnitCosts, UnitLayer
from resilient.planners.costs.curves import Curve, LayerCurves
from resilient.planners.costs.encoder_models import Encoder, units_of
from resilient.planners.costs.samples import LLM
from resilient.templates.common.words import look_up
from resilient.templates.inputs.cluster import Link
from resilient.templates.inputs.derive import FLASH_BACKWARD, TP_DEGREES
from resilient.templates.inputs.devices import DEVICES, Device
from resilient.templates.inputs.known_models import Blocks, KnownModel
from resilient.templates.inputs.layer_work import (
    GRADIENT_BYTES,
    OPTIMIZER_BYTES,
    PARAMETER_BYTES,
    LayerWork,
    block_works,
    embed_work,
    head_work,
    projector_work,
)

CP_DEGREES = (1, 2, 4, 8)
"""Context-parallel degrees that are considered."""

DEVICES_PER_NODE = 8
"""Devices that are connected inside a node (assumed): groups of more speak over the network."""

FITTED = (64, 256, 1024, 4096, 16384)
"""Tokens of the calls that curves are fitted to."""

_TOKENS = FITTED[-1]
"""Of the sequence that a layer's work is counted for, before it is divided by them."""


def derive_costs(model: str, device: str, *, frozen: Collection[str] = ()) -> CostModel:
    """Derive the cost model of a known multimodal model on a known device.

    Args:
        model: A name in :data:`~resilient.planners.costs.encoder_models.SHORT`, such as ``qwen2-vl-7b``; or names of
            :data:`~resilient.planners.costs.encoder_models.ENCODERS` and a language model of
            :data:`~resilient.templates.inputs.known_models.MODELS`: ``siglip-so400m+llama3.2-3b``.
        device: A name in :data:`~resilient.templates.inputs.devices.DEVICES`.
        frozen: What is not trained, as for :meth:`CostModel.frozen`.

    Returns:
        The model's units: encoders (``vision``, ``audio``) with layers ``embed``, ``block.0`` to the last and
        ``projector``, and ``llm`` with ``embed``, its blocks and ``head``. Lengths of an encoder are counted in its own
        tokens. Each unit has the degrees in :data:`~resilient.templates.inputs.derive.TP_DEGREES` that divide its
        heads, with all of :data:`CP_DEGREES`.

    Raises:
        ValueError: A name is not known; the message lists those that are.
    """
    encoders, language = units_of(model)
    hardware = look_up("device", device, DEVICES)
    hidden = language.blocks.hidden
    units = [
        _unit(
            encoder.unit,
            _encoder_works(encoder, hidden),
            encoder.blocks,
            hardware,
            output_bytes=2 * hidden / encoder.tokens_per_output,
            padded=encoder.padded,
        )
        for encoder in encoders.values()
    ]
    units.append(_unit(LLM, _language_works(language), language.blocks, hardware, output_bytes=0.0))
    source = f"derived: {model}, {device}" + (f", frozen {', '.join(sorted(frozen))}" if frozen else "")
    return CostModel(units=tuple(units), source=source).frozen(frozen)


def _encoder_works(encoder: Encoder, hidden: int) -> Iterator[LayerWork]:
    width = encoder.blocks.hidden
    entering = 2 * _TOKENS * encoder.input_values
    yield LayerWork(
        name=f"{encoder.unit}.embed",
        parameters=encoder.embed_parameters,
        matrix=encoder.embed_matrix,
        tokens=_TOKENS,
        kept_bytes=entering,
        reduce_bytes=2 * _TOKENS * width,
        forward_reduces=1,
        backward_reduces=1,
        input_bytes=entering,
    )
    yield from block_works(encoder.unit, encoder.blocks, 1, _TOKENS)
    outputs = _TOKENS // encoder.tokens_per_output
    yield projector_work(encoder.unit, encoder.widths(hidden), outputs, norm=width)


def _language_works(language: KnownModel) -> Iterator[LayerWork]:
    yield embed_work(language, 1, _TOKENS)
    yield from block_works(LLM, language.blocks, 1, _TOKENS)
    yield head_work(language, 1, _TOKENS)


def _unit(
    name: str,
    works: Iterable[LayerWork],
    blocks: Blocks,
    device: Device,
    *,
    output_bytes: float,
    padded: bool = False,
) -> UnitCosts:
    degrees = tuple(
        (tp, cp) for tp in TP_DEGREES if not blocks.num_heads % tp and not blocks.num_kv_heads % tp for cp in CP_DEGREES
    )
    gathered = 2 * PARAMETER_BYTES * blocks.num_kv_heads * blocks.head_size * _TOKENS
    curves: dict[LayerWork, tuple[LayerCurves, ...]] = {}  # blocks are equal but for their names
    layers = list[UnitLayer]()
    for work in works:
        nameless = dataclasses.replace(work, name="")
        if nameless not in curves:
            keys = gathered if work.attention_flops else 0
            curves[nameless] = tuple(_curves(nameless, keys, device, tp, cp) for tp, cp in degrees)
        layers.append(
            UnitLayer(
                name=work.name.removeprefix(f"{name}."),
                curves=curves[nameless],
                parameter_bytes=PARAMETER_BYTES * work.parameters,
                optimizer_bytes=OPTIMIZER_BYTES * work.parameters,
                gradient_bytes=GRADIENT_BYTES * work.parameters,
            )
        )
    return UnitCosts(
        name=name,
        layers=tuple(layers),
        degrees=degrees,
        boundary_bytes=2.0 * blocks.hidden,
        output_bytes=output_bytes,
        padded=padded,
    )


def _curves(work: LayerWork, gathered: int, device: Device, tp: int, cp: int) -> LayerCurves:
    flops_per_ms = device.matmul_efficiency * device.flops_per_s / 1e3
    bytes_per_ms = device.memory_bytes_per_s / 1e3
    products = 2 * work.matrix * work.tokens / _TOKENS / flops_per_ms / tp / cp
    attention = Curve(attention=work.attention_flops / _TOKENS**2 / flops_per_ms / tp / cp)
    rest = Curve(
        linear=(work.traffic_bytes + work.sharded_traffic_bytes / tp) / bytes_per_ms / _TOKENS / cp,
    )
    matrix_ms = PARAMETER_BYTES * work.matrix / bytes_per_ms / tp
    reduce = _messages(device.intra_node, 2 * (tp - 1), work.reduce_bytes / tp / cp)
    link = device.intra_node if tp * cp <= DEVICES_PER_NODE else device.inter_node
    gather = _messages(link, cp - 1, gathered / tp / cp)
    return LayerCurves(
        forward=_at_least(products, matrix_ms) + attention + rest + reduce * work.forward_reduces + gather,
        backward_input=_at_least(products, matrix_ms)
        + attention * FLASH_BACKWARD
        + rest
        + reduce * work.backward_reduces
        + gather * 2,
        # The gradient is read, added to, and written.
        backward_weight=_at_least(products, 2 * GRADIENT_BYTES * work.matrix / bytes_per_ms / tp)
        + Curve(linear=work.lookup_bytes / bytes_per_ms / _TOKENS / cp),
        activation_bytes=(work.kept_bytes + work.sharded_kept_bytes / tp) / _TOKENS / cp,
        deferred_bytes=(work.deferred_bytes + work.sharded_deferred_bytes / tp) / _TOKENS / cp,
    )


def _messages(link: Link, steps: int, num_bytes: float) -> Curve:
    """Time that many messages one after the other, of that many bytes at :data:`_TOKENS` tokens."""
    transfer = link.transfer_ms(num_bytes) - link.latency_ms
    return Curve(linear=steps * transfer / _TOKENS, fixed=steps * link.latency_ms)


def _at_least(per_token_ms: float, least_ms: float) -> Curve:
    """Fit ``max(per_token_ms * tokens, least_ms)``, with the least relative error of the fixed time."""
    weights = [1 / max(per_token_ms * tokens, least_ms) ** 2 if least_ms else 1.0 for tokens in FITTED]
    missing = [max(least_ms - per_token_ms * tokens, 0.0) for tokens in FITTED]
    fixed = sum(weight * each for weight, each in zip(weights, missing, strict=True)) / sum(weights)
    return Curve(linear=per_token_ms, fixed=fixed)
