from __future__ import annotations

import subprocess
import sys

import pytest

_INTERRUPTED = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell begin without it

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from resilient.cli.start import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "resilient.cli.run", "resilient.cli.plan.tables"])
def test_an_interrupt_during_imports_prints_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED.format(module=module), "plan", "--nodes", "4"]
    job = ["--model", "gpt3-2.7b", "--device", "a40"]
    ended = subprocess.run([*command, *job], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout.strip()) == (130, "")
    assert "Traceback" not in ended.stderr


def test_commands_run() -> None:
    command = [sys.executable, "-c", "from resilient.cli.start import main; main()", "--help"]
    assert "simulate" in subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
