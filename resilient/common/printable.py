"""What others have written, as it may be shown on a terminal."""

from __future__ import annotations

_ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def printable(text: str) -> str:
    """Return a text without what could move the reader's cursor or change the title of the terminal: its codes stand
    there instead. Ends of lines and tabs stay.
    """
    return text.translate(_ESCAPED)
