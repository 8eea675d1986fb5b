"""Measured layers of a published model beside what planning without the hardware takes them for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from benchmarks.parts.gpu.part import Row, Setting
from benchmarks.parts.steps import JOBS
from resilient.profiling import profiler
from resilient.profiling.script import job_of
from resilient.templates.inputs.derive import derive_profile
from resilient.templates.inputs.devices import DEVICES
from resilient.templates.inputs.profile import LayerProfile

if TYPE_CHECKING:
    from benchmarks.jobs.llama_model import Shape

MODEL = "llama3.2-1b"
_NUM_BLOCKS = 2
_MICROBATCH, _SEQ_LEN = 2, 2048
_REHEARSED = ("--shape", "small", "--blocks", "1", "--seq", "16")
_PARTS = ("forward", "backward")


def measure(setting: Setting) -> list[Row]:
    """Measure embedding, two blocks and head in bfloat16, one after the other, as a job's first run does."""
    from benchmarks.jobs.llama_model import shape_of  # late: it loads transformers, which other parts do without

    torch.set_num_threads(1)
    arguments = ["--device", setting.device, "--precision", "bf16", "--microbatch", str(_MICROBATCH)]
    arguments += ["--batch", str(2 * _MICROBATCH)]
    sized = ("--shape", MODEL, "--blocks", str(_NUM_BLOCKS), "--seq", str(_SEQ_LEN))
    job = job_of(str(JOBS / "llama.py"), [*arguments, *(_REHEARSED if setting.is_rehearsal else sized)])
    measured = profiler.measure(job, job.layouts(), profiler.draw_samples(job), on_layer=lambda _: None)
    known = data_sheet_of(job.device_name)
    derived: dict[str, LayerProfile] = {}
    if known and not setting.is_rehearsal:
        profile = derive_profile(MODEL, known, microbatch=_MICROBATCH, seq_len=_SEQ_LEN)
        derived = {layer.name: layer for layer in profile.layers}
    shape = shape_of("small", 1) if setting.is_rehearsal else shape_of(MODEL, _NUM_BLOCKS)
    missing = "" if derived else f"no data sheet of {job.device_name} is known"
    seq_len = 16 if setting.is_rehearsal else _SEQ_LEN
    rows = [row for layer in measured.layers for row in layer_rows(layer, derived.get(layer.name))]
    return [*rows, flops_row(measured.layers, shape, seq_len, missing)]


def layer_rows(measured: LayerProfile, derived: LayerProfile | None) -> list[Row]:
    """Return times and activations of a layer, beside the derived ones and by which factor they are off."""
    found = {
        f"{measured.name} forward": (measured.costs[0].forward_ms, "ms"),
        f"{measured.name} backward": (measured.backward_ms(), "ms"),
        f"{measured.name} activations": (measured.costs[0].activation_bytes / 2**20, "MiB"),
    }
    expected = None
    if derived is not None:
        cost = derived.costs[0]
        expected = [cost.forward_ms, derived.backward_ms(), cost.activation_bytes / 2**20]
    rows: list[Row] = []
    for number, (what, (value, unit)) in enumerate(found.items()):
        beside = ""
        if expected is not None and expected[number]:
            beside = f"derived {expected[number]:.4g} {unit}, measured is {value / expected[number]:.2f} of it"
        rows.append(Row(what=what, value=value, unit=unit, beside=beside))
    return rows


def flops_row(layers: tuple[LayerProfile, ...], shape: Shape, seq_len: int, missing: str) -> Row:
    """Return the model FLOP/s of all layers, one after the other."""
    took_ms = sum(layer.costs[0].forward_ms + layer.backward_ms() for layer in layers)
    flops = shape.model_flops(_MICROBATCH, seq_len)
    return Row(what="layers one by one", value=flops / took_ms / 1e9, unit="TFLOP/s", beside=missing)


def data_sheet_of(device_name: str) -> str:
    """Return the name under which a device is planned for, by the name that its driver gives; "" for none."""
    words = device_name.lower().replace("-", " ").split()
    found = [name for name in DEVICES if name.partition("-")[0] in words]
    # of variants by memory, the one whose size the driver's name tells; else the largest
    return next((name for name in found if name.partition("-")[2] in words), found[-1] if found else "")
