from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resilient.common.printable import printable


def test_codes_for_the_terminal_are_shown_and_not_obeyed() -> None:
    assert printable("\x1b[2Jgone\r\a \x9b1A") == r"\x1b[2Jgone\x0d\x07 \x9b1A"


@given(st.text())
def test_nothing_but_ends_of_lines_and_tabs_moves_the_cursor(text: str) -> None:
    shown = printable(text)
    assert not {each for each in shown if each not in "\t\n" and (ord(each) < 32 or 127 <= ord(each) < 160)}
    assert printable(shown) == shown
    assert shown.count("\n") == text.count("\n")
