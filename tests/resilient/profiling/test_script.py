"""A script is run for its job, and nothing is trained."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from resilient.models.chain import Chain
from resilient.profiling.script import job_of

TRAINS = """
    import torch
    import resilient as rs

    class Points:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"input": torch.ones(3)}

    chain = rs.Chain([lambda: torch.nn.Linear(3, 1)], lambda output, batch: output.sum())
    trainer = rs.Trainer(chain, Points(), optimizer=rs.SGD(lr=0.1), global_batch=8, microbatch=2)
"""


def write_script(folder: Path, *parts: str) -> str:
    path = folder / "job.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in parts))
    return str(path)


@pytest.mark.parametrize("text", ["", "raise SystemExit", "import sys; sys.exit(0)"])
def test_script_that_ends_without_training_is_named(text: str, tmp_path: Path) -> None:
    script = write_script(tmp_path, text)
    message = f"script must call Trainer.fit, got {script}, which ended without it; check its arguments"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        job_of(script, ())


def test_script_that_says_itself_what_is_wrong_keeps_its_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        job_of(write_script(tmp_path, "import sys; sys.exit(2)"), ())
    assert end.value.code == 2


def test_fit_ends_the_script_and_leaves_the_job(tmp_path: Path) -> None:
    after = f"""
        try:
            trainer.fit(7)
        except Exception:
            open({str(tmp_path / "caught")!r}, "w")
        open({str(tmp_path / "trained")!r}, "w")
    """
    assert job_of(write_script(tmp_path, TRAINS, after), ()).num_steps == 7
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_script_that_goes_on_whatever_fit_raises_is_described_too(tmp_path: Path) -> None:
    after = """
        for num_steps in (7, 8):
            try:
                trainer.fit(num_steps)
            except BaseException:
                pass
    """
    assert job_of(write_script(tmp_path, TRAINS, after), ()).num_steps == 7


def test_modules_of_a_script_have_the_values_they_have_in_workers(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINS.replace("lambda: torch.nn.Linear", "torch.nn.Linear"), "    trainer.fit(7)")
    models = [job_of(script, ()).model for _ in range(2)]
    assert all(isinstance(model, Chain) for model in models)
    one, other = (model.values_digest() for model in models if isinstance(model, Chain))
    assert one == other
