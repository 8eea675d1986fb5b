"""A script that is run for its job and has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resilient.script import job_of


@pytest.mark.parametrize(
    ("text", "how"), [("", ""), ("raise SystemExit", ""), ("import sys; sys.exit(2)", " (exit code 2)")]
)
def test_script_that_ends_without_training_is_named(text: str, how: str, tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(text)
    message = f"script must call Trainer.fit, got {script}, which ended without it{how}; check its arguments"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        job_of(str(script), ())
