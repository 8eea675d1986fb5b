"""One worker's training speed against plain PyTorch on the same device: bfloat16, with compiled blocks and without."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.parts.gpu.part import Row, Setting, SkippedError
from benchmarks.parts.gpu.profiles import MODEL, data_sheet_of
from benchmarks.parts.steps import WARM_UP_STEPS, run_steps
from resilient.templates.inputs.devices import DEVICES

if TYPE_CHECKING:
    from benchmarks.jobs.llama_model import Shape

PEER = Path(__file__).parents[2] / "peers" / "one_device.py"
_MARGIN_S = 5.0
_LARGE_BYTES = 40 * 10**9
"""A device with as much holds the activations of a microbatch of four."""
_NUM_BLOCKS = 2
_VOCABULARY = 8192
"""Drawing initial values, on the host, and writing the final checkpoint take far longer than the steps: so few."""

Sizes = dict[str, object]


def sizes_for(setting: Setting) -> Sizes:
    """Return the job's options: a model and a batch that the device holds."""
    if setting.is_rehearsal:
        small: Sizes = {"--shape": "small", "--blocks": 1, "--seq": 16, "--batch": 4, "--microbatch": 2}
        return {**small, "--steps": WARM_UP_STEPS + 3}
    memory_bytes = torch.cuda.mem_get_info()[1] if setting.device == "cuda" else 0
    microbatch = 4 if memory_bytes >= _LARGE_BYTES else 1
    sized: Sizes = {"--shape": MODEL, "--blocks": _NUM_BLOCKS, "--vocabulary": _VOCABULARY, "--seq": 2048}
    return {**sized, "--batch": 32, "--microbatch": microbatch, "--steps": WARM_UP_STEPS + 10}


def measure(setting: Setting) -> list[Row]:
    """Train both ways, one after the other."""
    return _measure(setting, compiled=False)


def measure_compiled(setting: Setting) -> list[Row]:
    """The same with compiled blocks, which take the compiler a minute or more where it has compiled nothing yet."""
    if setting.is_rehearsal:
        raise SkippedError("a rehearsal has no time for the compiler")
    return _measure(setting, compiled=True)


def _measure(setting: Setting, *, compiled: bool) -> list[Row]:
    from benchmarks.jobs.llama_model import shape_of  # late: it loads transformers, which other parts do without

    sizes = {**sizes_for(setting), "--precision": "bf16", "--device": setting.device}
    shape = shape_of(str(sizes["--shape"]), int(str(sizes["--blocks"])), int(str(sizes.get("--vocabulary", 0))))
    options = {**sizes, **({"--compile": None} if compiled else {})}
    ours = run_steps("llama.py", {**options, "--max-failures": 0}, num_nodes=1)
    theirs_ms = statistics.median(theirs(options, setting.limit_s))
    return speed_rows(statistics.median(ours.step_ms), theirs_ms, shape, sizes, ours.devices[0], compiled=compiled)


def theirs(options: Sizes, limit_s: float) -> list[float]:
    """Run plain PyTorch; return what its steps took, in ms."""
    words = [str(part) for pair in options.items() for part in pair if part is not None]
    done = subprocess.run(
        [sys.executable, str(PEER), *words], stdout=subprocess.PIPE, text=True, timeout=limit_s - _MARGIN_S, check=True
    )
    return [1e3 * each for each in json.loads(done.stdout.strip().splitlines()[-1])][WARM_UP_STEPS:]


def speed_rows(
    ours_ms: float, theirs_ms: float, shape: Shape, sizes: Sizes, device_name: str, *, compiled: bool
) -> list[Row]:
    """Return the steps, their ratio and model FLOP/s, and these as a share of the data sheet's, where it is known."""
    num_samples, seq_len = int(str(sizes["--batch"])), int(str(sizes["--seq"]))
    flops = shape.model_flops(num_samples, seq_len)
    known = data_sheet_of(device_name)
    label = "compiled" if compiled else "not compiled"
    rows: list[Row] = []
    for name, took_ms in (("resilient", ours_ms), ("plain PyTorch", theirs_ms)):
        tflops = flops / took_ms / 1e9
        share = f", {1e12 * tflops / DEVICES[known].flops_per_s:.0%} of {known}'s" if known else ""
        tokens = f"{1e3 * num_samples * seq_len / took_ms:,.0f} tokens/s"
        beside = f"{tokens}, {tflops:.3g} model TFLOP/s{share}"
        rows.append(Row(what=f"step, {label}, {name}", value=took_ms, unit="ms", beside=beside))
    return [*rows, Row(what=f"step, {label}, ratio", value=ours_ms / theirs_ms, beside="at most 1.0 is as fast")]
