"""Where ``resilient`` begins: interrupts end it quietly, those too that come while the commands are imported.

Imports nothing but the standard library before it can.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exit with 130 when interrupted before a command has begun."""
    try:
        from resilient.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
