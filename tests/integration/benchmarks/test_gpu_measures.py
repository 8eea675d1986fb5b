"""What is measured on a GPU is measured here on the CPU, in the smallest size: each part runs, and finds mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.jobs.llama_model import shape_of
from benchmarks.parts.gpu import cuda_tests, groups, leaks, profiles, runs, speed
from benchmarks.parts.gpu.part import Row, Setting
from resilient.templates.inputs.derive import derive_profile
from tests.integration.recoveries import EARLY, PLACES, Usage


def setting(folder: Path, num_devices: int = 1) -> Setting:
    return Setting(device="cpu", num_devices=num_devices, folder=folder, limit_s=150.0, is_rehearsal=True)


def wrong(rows: list[Row]) -> dict[str, str]:
    return {row.what: row.wrong for row in rows if row.wrong}


def test_results_of_tests_are_told(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_good(): pass\n"
        "@pytest.mark.gpu\ndef test_bad(): assert 1 == 2, 'one is not two'\n"
        "@pytest.mark.gpu\ndef test_wanting(): pytest.skip('needs two')\n"
        "def test_other(): raise ValueError\n"
    )
    rows = cuda_tests.run_tests(tmp_path / "test_some.py", "gpu", tmp_path, 100.0)
    assert [(row.what, row.value) for row in rows] == [
        ("tests passed", 1),
        ("test_some: test_bad", "failed"),
        ("tests skipped", 1),
    ]
    assert wrong(rows) == {"test_some: test_bad": "AssertionError: one is not two"}
    assert rows[2].beside == "needs two"
    assert any(cuda_tests.TESTS.glob("test_*.py"))


def test_demos_verdict_is_told() -> None:
    change = {"total_ms": 50.0, "restarted_workers": 0, "lost_steps": 1}
    report: dict[str, Any] = {
        "exit": {"code": 0, "reason": "done"},
        "recoveries": [change],
        "joins": [{**change, "lost_steps": 0}],
        "same_steps_and_samples": True,
        "max_loss_abs_diff": 0.0,
        "max_param_rel_diff": 1e-12,
    }
    rows = runs.demo_rows(report, [])
    assert [(row.what, row.value) for row in rows] == [
        ("demo", "passed"), ("recovery", 50.0), ("parameters differ by", 1e-12),
    ]  # fmt: skip
    assert wrong(rows) == {}
    failed = runs.demo_rows({**report, "joins": []}, ["workers computed on the CPU"])
    assert "a node must join, got none" in failed[0].wrong
    assert failed[0].wrong.endswith("; workers computed on the CPU")


def test_kill_is_recovered_from(tmp_path: Path) -> None:
    (row,) = runs.kill_in(setting(tmp_path), [["backward"]], num_nodes=2, pipeline_nodes=1, max_failures=0)
    assert row.wrong == ""
    assert isinstance(row.value, float)
    events = [{"kind": "node_ready", "device": "cpu of this host"}]
    assert runs.wrong_devices(setting(tmp_path), events) == []
    on_gpu = Setting(device="cuda", num_devices=1, folder=tmp_path, limit_s=1.0)
    assert runs.wrong_devices(on_gpu, events)


def test_survivors_are_watched(tmp_path: Path) -> None:
    rows = leaks.measure(setting(tmp_path))
    what = {row.what for row in rows}
    assert {"recoveries", "node 0: threads", "node 1: communicators", "node 0: reserved on the device"} <= what
    # so few recoveries say nothing of memory
    assert {each: text for each, text in wrong(rows).items() if not each.endswith("host memory")} == {}


def test_growth_is_found() -> None:
    usages = [Usage(threads=5, descriptors=20, memory_mb=100.0)] * EARLY.stop
    grown = Usage(threads=5 + PLACES + 1, descriptors=20 + PLACES + 1, memory_mb=103.0)
    assert wrong(leaks.process_rows(1, [*usages, usages[0]])) == {}
    assert set(wrong(leaks.process_rows(1, [*usages, grown]))) == {
        "node 1: threads", "node 1: descriptors", "node 1: host memory",
    }  # fmt: skip
    told = [{"communicators": 1, "allocated_bytes": 2**20 * (step // 10), "reserved_bytes": 0} for step in range(30)]
    assert wrong(leaks.device_rows(0, told)) == {"node 0: allocated on the device": "it has grown from 1"}


def test_layers_are_measured_beside_derived_ones(tmp_path: Path) -> None:
    rows = profiles.measure(setting(tmp_path))
    assert [row.what for row in rows[3:6]] == [f"llm.block.0 {part}" for part in ("forward", "backward", "activations")]
    assert all(isinstance(row.value, float) and row.value > 0 for row in rows[3:6])
    assert rows[-1].what == "layers one by one"
    block = derive_profile("llama3.2-1b", "h100").layers[1]
    compared = profiles.layer_rows(block, block)
    assert all(row.beside.endswith("measured is 1.00 of it") for row in compared)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", ""),
        ("AMD EPYC 7B13", ""),
    ],
)
def test_data_sheet_is_known_by_the_drivers_name(told: str, expected: str) -> None:
    assert profiles.data_sheet_of(told) == expected


def test_sums_and_abort_of_two_workers() -> None:
    rows = groups.sum_rows("cpu", 2, 1 << 12)
    assert wrong(rows) == {}
    assert [row.what for row in rows] == ["sum over two devices", "abort of a receipt that waits"]


def test_training_speed_is_compared(tmp_path: Path) -> None:
    rows = speed.measure(setting(tmp_path))
    assert [row.what for row in rows] == [
        f"step, not compiled, {who}" for who in ("resilient", "plain PyTorch", "ratio")
    ]
    assert rows[2].value == pytest.approx(float(rows[0].value) / float(rows[1].value))


def test_speed_is_told_in_model_flops() -> None:
    shape = shape_of("llama3.2-1b", num_blocks=1)
    blocks = shape.blocks
    matrices = blocks.hidden * (2 * blocks.hidden + 2 * blocks.num_kv_heads * blocks.head_size + 3 * blocks.ffn)
    attention = 4 * 2048 * blocks.hidden / 2  # of a token, half of it masked
    per_token = 3 * (2 * (matrices + blocks.hidden * shape.vocabulary) + attention)
    assert shape.model_flops(4, 2048) == pytest.approx(4 * 2048 * per_token)
    sizes: speed.Sizes = {"--batch": 4, "--seq": 2048}
    ours, theirs, ratio = speed_rows = speed.speed_rows(100.0, 50.0, shape, sizes, "NVIDIA H100", compiled=True)
    assert [row.value for row in speed_rows] == [100.0, 50.0, 2.0]
    assert "81,920 tokens/s" in ours.beside
    assert theirs.beside.endswith("of h100's")
    assert json.dumps(ratio.value) == "2.0"
