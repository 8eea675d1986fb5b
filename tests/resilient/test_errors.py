"""Errors say what is wrong, in the words of whoever asked."""

from __future__ import annotations

import logging
import pickle
import sys

import pytest

import resilient
from resilient.errors import ArgumentError, CommunicationError, ResilientError, SampleError, note

ERROR = ArgumentError("microbatch", "divide {global_batch} = 64", 5, "try 4, or raise {global_batch}")


def test_an_argument_error_reads_as_a_sentence_with_the_fix() -> None:
    assert str(ERROR) == "microbatch must divide global_batch = 64, got 5; try 4, or raise global_batch"


def test_a_command_names_its_options_instead() -> None:
    told = ERROR.told(lambda name: "--" + name.replace("_", "-"))
    assert told == "--microbatch must divide --global-batch = 64, got 5; try 4, or raise --global-batch"


def test_the_value_is_never_taken_for_a_name() -> None:
    error = ArgumentError("script", "be a file, not {{x}}", "'{nodes}'", "check the path")
    assert error.told(str.upper) == "SCRIPT must be a file, not {x}, got '{nodes}'; check the path"


def test_arguments_that_are_wrong_together_are_all_named() -> None:
    error = ArgumentError("{steps} times {nodes}", "be at most 9", 10, "lower {steps}")
    assert str(error) == "steps times nodes must be at most 9, got 10; lower steps"
    assert error.told(str.upper) == "STEPS times NODES must be at most 9, got 10; lower STEPS"


@pytest.mark.parametrize("text", ["{", "give }", "{x!z}", "{'a': 1}", "{a:{b}}"])
def test_a_brace_that_nobody_doubled_stays_as_it_is(text: str) -> None:
    assert str(ArgumentError("nodes", text, 3, "see {steps}")) == f"nodes must {text}, got 3; see steps"
    assert str(ArgumentError("nodes", "be of {steps}", 3, text)) == f"nodes must be of steps, got 3; {text}"


def test_the_package_itself_has_what_its_arguments_raise() -> None:
    assert resilient.ArgumentError is ArgumentError


def test_a_note_is_shown_with_the_error_or_logged_where_errors_take_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if sys.version_info >= (3, 11):
        error = ValueError("nan")
        note(error, "while measuring layer 'a'")
        assert error.__notes__ == ["while measuring layer 'a'"]
    monkeypatch.setattr(sys, "version_info", (3, 10))
    with caplog.at_level(logging.ERROR):
        note(ValueError("nan"), "while measuring layer 'b'")
    assert caplog.messages == ["while measuring layer 'b'"]


def test_an_argument_error_survives_a_process_boundary() -> None:
    assert str(pickle.loads(pickle.dumps(ERROR))) == str(ERROR)


def test_an_error_of_the_runtime_ends_with_where_it_happened() -> None:
    assert str(ResilientError("no room; free some", node=2, generation=3, step=17)) == (
        "no room; free some (node 2, generation 3, step 17)"
    )
    assert str(ResilientError("no room; free some")) == "no room; free some"


def test_what_is_known_first_of_a_place_stays() -> None:
    error = CommunicationError("rank 1: closed", generation=3)
    error.locate(generation=4, step=17, action="1RECV_F0 of row 1")
    assert str(error) == "rank 1: closed (generation 3, step 17, action 1RECV_F0 of row 1)"


def test_an_error_of_the_runtime_survives_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(SampleError("sample 3: empty", step=2)))
    assert (type(error), str(error)) == (SampleError, "sample 3: empty (step 2)")
