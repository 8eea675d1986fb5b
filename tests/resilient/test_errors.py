"""Errors say what is wrong, in the words of whoever asked."""

from __future__ import annotations

import pickle

from resilient.errors import ArgumentError

ERROR = ArgumentError("microbatch", "divide {global_batch} = 64", 5, "try 4, or raise {global_batch}")


def test_an_argument_error_reads_as_a_sentence_with_the_fix() -> None:
    assert str(ERROR) == "microbatch must divide global_batch = 64, got 5; try 4, or raise global_batch"


def test_a_command_names_its_options_instead() -> None:
    told = ERROR.told(lambda name: "--" + name.replace("_", "-"))
    assert told == "--microbatch must divide --global-batch = 64, got 5; try 4, or raise --global-batch"


def test_the_value_is_never_taken_for_a_name() -> None:
    error = ArgumentError("script", "be a file, not {{x}}", "'{nodes}'", "check the path")
    assert error.told(str.upper) == "SCRIPT must be a file, not {x}, got '{nodes}'; check the path"


def test_an_argument_error_survives_a_process_boundary() -> None:
    assert str(pickle.loads(pickle.dumps(ERROR))) == str(ERROR)
