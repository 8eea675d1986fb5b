"""What others have written, as it may be shown on a terminal."""

from __future__ import annotations

import logging

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
_ESCAPED_IN_JSON = {code: f"\\u{code:04x}" for code in range(127, 160)}  # it has none of the others


def printable(text: str) -> str:
    """Return a text without what could move the reader's cursor or change the title of the terminal: its codes stand
    there instead. Ends of lines and tabs stay.
    """
    return text.translate(_ESCAPED)


def printable_json(text: str) -> str:
    """Return JSON of the same content that :func:`printable` would leave as it is."""
    return text.translate(_ESCAPED_IN_JSON)


def log_printably() -> None:
    """Have this process's log, errors and all, be :func:`printable`: it tells what other nodes have said."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
