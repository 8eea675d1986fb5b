"""An error's place is a line of the user's code, wherever in a library it was raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from resilient.common import arguments
from resilient.common.arguments import whole_number
from resilient.common.places import place_of
from resilient.errors import ArgumentError


def read(text: str) -> object:
    return json.loads(text)


def line_of(words: str) -> int:
    """Return the first line of this file with these words."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if words in line)


def test_place_is_the_users_line_that_called_a_library() -> None:
    places = set()
    for text in ("[1,", "{"):
        with pytest.raises(json.JSONDecodeError) as error:
            read(text)
        places.add(place_of(error.value))
    assert places == {f"{__file__}:{line_of('return json.loads(text)')}"}


def test_other_lines_are_other_places() -> None:
    places = set()
    for call in (lambda: read(""), lambda: json.loads("")):
        with pytest.raises(json.JSONDecodeError) as error:
            call()
        places.add(place_of(error.value))
    assert len(places) == 2


def test_place_of_what_no_user_wrote_is_where_it_was_raised() -> None:
    with pytest.raises(ArgumentError) as error:
        whole_number("steps", -1, 0, "count up")
    trace = error.value.__traceback__
    assert trace is not None
    inner = error.value.with_traceback(trace.tb_next)  # without the frame of this test
    assert place_of(inner).startswith(f"{arguments.__file__}:")
    assert place_of(ValueError("never raised")) == ":0"
