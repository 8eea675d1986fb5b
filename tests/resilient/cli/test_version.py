"""``resilient --version``."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from resilient.cli import app

_SHOWN = """
import sys
from resilient.cli.start import main

try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def test_versions_are_shown_without_an_import_of_torch() -> None:
    command = [sys.executable, "-c", _SHOWN, "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    package, torch = (metadata.version(name) for name in ("resilient-train", "torch"))
    assert shown == f"resilient {package}, torch {torch}\n"


def test_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(app.metadata, "version", version)
    done = CliRunner().invoke(app.app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, "resilient (not installed), torch (not installed)\n")
