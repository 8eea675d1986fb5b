"""How well curves fitted to a few lengths predict others: real blocks of transformers, on this machine's device.

    python benchmarks/cost_model.py [--device cpu] [--repeats 15] [--json]

Forward, backward for inputs and backward for weights of a block are measured on one sequence each; the curves are
fitted to lengths four times apart and must predict those in between, and one beyond, twice the longest, where the curve
is compared with keeping the time per token of the longest. A time is the least of rounds that visit all lengths in
turn, so that what else the machine does falls on all alike. Backward for weights is the whole backward less that for
inputs, and is fitted without attention. The target is the mean error in between that DHP reports, 8 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import LlamaConfig, SiglipVisionConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

from resilient.cli.shared.printing import plain_table
from resilient.planners.costs.cost_model import Curve

LENGTHS = {"cpu": (64, 256, 1024), "cuda": (64, 256, 1024, 4096, 16384)}
"""Fitted, by device."""

PARTS = ("forward", "backward for inputs", "backward for weights")

Forward = Callable[[Tensor], Tensor]


def llama(device: torch.device, hidden: int) -> tuple[nn.Module, Forward, int]:
    """A causal block with grouped queries; heads of 64."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
    )
    config._attn_implementation = "sdpa"
    block, rotary = LlamaDecoderLayer(config, 0).to(device), LlamaRotaryEmbedding(config).to(device)

    def forward(hidden_states: Tensor) -> Tensor:
        positions = torch.arange(hidden_states.shape[1], device=device)[None]
        rotated = rotary(hidden_states, positions)
        return block(hidden_states, position_embeddings=rotated)

    return block, forward, hidden


def siglip(device: torch.device, hidden: int) -> tuple[nn.Module, Forward, int]:
    """A block with full attention; heads of 64."""
    config = SiglipVisionConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 64,
    )
    config._attn_implementation = "sdpa"
    block = SiglipEncoderLayer(config).to(device)
    return block, lambda hidden_states: block(hidden_states, attention_mask=None), hidden


def measured(
    block: nn.Module, forward: Forward, hidden: int, lengths: list[int], device: torch.device, repeats: int
) -> dict[int, tuple[float, ...]]:
    """Return the times of the three parts by length, in ms."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    block.to(dtype)

    def timed(call: Callable[[], object]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        # One thread's processor time is the time it takes on a machine that does nothing else.
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        started = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * (clock() - started)

    def once(length: int) -> tuple[float, ...]:
        states = torch.randn(1, length, hidden, dtype=dtype, device=device, requires_grad=True)
        kept: list[Tensor] = []
        block.requires_grad_(True)
        forward_ms = timed(lambda: kept.append(forward(states)))
        gradient = torch.ones_like(kept[0])
        both_ms = timed(lambda: kept[0].backward(gradient))
        block.requires_grad_(False)
        kept[0] = forward(states)
        inputs_ms = timed(lambda: kept[0].backward(gradient))
        return forward_ms, inputs_ms, both_ms

    for length in lengths:
        once(length)
    rounds = [[once(length) for length in lengths] for _ in range(repeats)]
    times: dict[int, tuple[float, ...]] = {}
    for index, length in enumerate(lengths):
        forward_ms, inputs_ms, both_ms = (min(each[index][part] for each in rounds) for part in range(3))
        times[length] = (forward_ms, inputs_ms, max(both_ms - inputs_ms, 1e-6))
    return times


def main() -> None:
    """Measure, fit, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(LENGTHS), default="cpu")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the measured times instead")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device, fitted = torch.device(options.device), LENGTHS[options.device]
    between, beyond = [2 * length for length in fitted[:-1]], 2 * fitted[-1]
    columns = (*(f"{length} tokens" for length in between), "mean error", f"{beyond} tokens", "error", "kept per token")
    title = f"blocks {options.hidden} wide on {options.device}, fitted to {fitted}"
    table = plain_table("block", "part", *columns, left=("block", "part"), title=title)
    errors: list[float] = []
    everything: dict[str, dict[int, tuple[float, ...]]] = {}
    for name, make in {"Llama": llama, "SigLIP": siglip}.items():
        lengths = sorted([*fitted, *between, beyond])
        times = measured(*make(device, options.hidden), lengths, device, options.repeats)
        everything[name] = times
        for part, label in enumerate(PARTS):
            curve = Curve.fit(fitted, [times[length][part] for length in fitted], attention=label != PARTS[-1])
            actual = {length: times[length][part] for length in (*between, beyond)}
            predicted = {length: curve.call_ms(length, length**2) for length in actual}
            error = {length: abs(predicted[length] / actual[length] - 1) for length in actual}
            cells = {length: f"{predicted[length]:.2f} of {actual[length]:.2f} ms" for length in actual}
            mine = [error[length] for length in between]
            kept = abs(2 * times[fitted[-1]][part] / actual[beyond] - 1)
            table.add_row(
                name,
                label,
                *(cells[length] for length in between),
                f"{statistics.mean(mine):.1%}",
                cells[beyond],
                f"{error[beyond]:.1%}",
                f"{kept:.1%}",
            )
            errors += mine
    console = Console(width=150)
    if options.json:
        print(json.dumps(everything))  # noqa: T201
        return
    console.print(table)
    console.print(f"mean error in between: {statistics.mean(errors):.1%}, target 8 %")


if __name__ == "__main__":
    main()
