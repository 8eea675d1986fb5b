"""What an error is compared by with one of another node; nothing where it can only be the job's."""

from __future__ import annotations

import json
import os

import pytest

from resilient.data.processes import DataProcesses, RemoteTracebackError
from resilient.data.reader import Cell, Microbatch, Reads
from resilient.errors import (
    ArgumentError,
    CheckpointError,
    DataProcessError,
    NonFiniteError,
    ReplicaError,
    SampleError,
    StateLostError,
)
from resilient.runtime.own_errors import error_kind


def read(text: str) -> object:
    return json.loads(text)


def raised(text: str) -> Exception:
    with pytest.raises(json.JSONDecodeError) as error:
        read(text)
    return error.value


def test_same_line_and_type_are_the_same_whatever_the_message() -> None:
    one, other = raised("["), raised("{}}")
    assert str(one) != str(other)
    assert error_kind(one) == error_kind(other)
    assert error_kind(one).startswith(f"JSONDecodeError at {__file__}:")


def test_another_type_at_the_same_line_is_another() -> None:
    assert error_kind(OSError("no").with_traceback(raised("[").__traceback__)) != error_kind(raised("["))


@pytest.mark.parametrize(
    "error",
    [
        ArgumentError("steps", "be >= 0", -1, "count up"),
        CheckpointError("/c cannot be written"),
        NonFiniteError("the loss is not finite"),
        ReplicaError("copies differ"),
        SampleError("sample 3 is too long"),
        StateLostError("nobody holds it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_that_names_a_mistake_has_no_kind(error: Exception) -> None:
    assert error_kind(error) == ""


def test_error_of_a_data_process_is_known_by_its_place_there() -> None:
    def load(step: int, cell: Cell, reads: Reads) -> Microbatch:
        raise OSError(f"no microbatch {cell.samples}")

    processes = DataProcesses(load, 1)
    try:
        kinds = set()
        for position in (1, 2):
            with pytest.raises(OSError, match=rf"^no microbatch \({position},\)$") as error:
                processes.take(processes.ask(1, Cell.of_chain(position, 1), None))
            assert isinstance(error.value.__cause__, RemoteTracebackError)
            kinds.add(error_kind(error.value))
        (kind,) = kinds
    finally:
        processes.close()
    assert kind == f"OSError at {__file__}:{load.__code__.co_firstlineno + 1}"


def test_data_process_that_was_killed_may_be_this_nodes_error() -> None:
    def load(step: int, cell: Cell, reads: Reads) -> Microbatch:
        os._exit(9)

    processes = DataProcesses(load, 1)
    try:
        with pytest.raises(DataProcessError) as error:
            processes.take(processes.ask(1, Cell.of_chain(0, 1), None))
    finally:
        processes.close()
    assert error_kind(error.value).startswith("DataProcessError at ")
