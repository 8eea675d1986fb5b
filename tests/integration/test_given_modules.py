"""Modules that a script makes have the same values on all nodes, or the job says that they have not."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from tests.integration.harness import check_recovered, run_job

SCRIPT = """
    import os
    import sys
    import torch
    from torch import nn
    import resilient as rs

    torch.set_num_threads(1)
    if "--seeds-of-their-own" in sys.argv:
        torch.manual_seed(int(os.environ["RANK"]))

    class Points:
        def __len__(self):
            return 64

        def __getitem__(self, index):
            point = torch.randn(8, generator=torch.Generator().manual_seed(index))
            return {"input": point, "target": point.sum().sin()[None]}

    reduction = "mean" if "--mean" in sys.argv else "sum"
    model = rs.Chain(
        nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)], nn.Linear(8, 1)),
        lambda output, batch: nn.functional.mse_loss(output, batch["target"], reduction=reduction),
    )
    trainer = rs.Trainer(
        model, Points(), optimizer=rs.SGD(lr=0.1), global_batch=8, microbatch=2, precision="fp64", min_pipeline_nodes=1
    )
    trainer.fit(6)
"""


def script(folder: Path) -> Path:
    path = folder / "job.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_unseeded_modules_are_equal_on_all_nodes_and_in_all_runs(tmp_path: Path) -> None:
    reference = run_job(tmp_path / "reference", script=script(tmp_path), nodes=2)
    failing = run_job(tmp_path / "failing", script=script(tmp_path), nodes=3, inject=["node=1,step=3,phase=backward"])
    check_recovered(failing, reference)


def test_modules_of_other_values_are_refused(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", "--seeds-of-their-own", script=script(tmp_path), nodes=2)
    assert (run.exit_code, run.losses) == (1, {})
    message = (
        r"node (\d): values must be the same on all nodes, got initial values [0-9a-f]{12} on node \1 \(\S+\) and "
        r"[0-9a-f]{12} on node \d \(\S+\); read them from the same files, or draw them from the same seed "
        r"\(torch\.manual_seed\) on all nodes"
    )
    assert re.fullmatch(message, run.reason), run.reason


def test_mean_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", "--mean", script=script(tmp_path), nodes=2)
    assert (run.exit_code, run.losses) == (1, {})
    assert "ArgumentError: loss must be summed over the microbatch's targets, got a mean (" in run.reason
    assert "use reduction='sum'" in run.reason
