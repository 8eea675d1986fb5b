"""Errors say what is wrong, in the words of whoever asked."""

from __future__ import annotations

import pickle

from resilient.errors import ArgumentError, CommunicationError, ResilientError, SampleError

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
