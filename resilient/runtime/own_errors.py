"""Tells errors that one node alone may have from those that can only be the job's."""

from __future__ import annotations

from resilient.common.places import place_of
from resilient.data.processes import RemoteTracebackError
from resilient.errors import ArgumentError, DataProcessError, ResilientError


def error_kind(error: Exception) -> str:
    """Return what an error is compared by with one of another node: its type and its place in the code.

    Messages will not do: they carry addresses, paths and numbers.

    Returns:
        "" for an error that can only be the job's: those of this package name a mistake in it.
    """
    if isinstance(error, ArgumentError | ResilientError) and not isinstance(error, DataProcessError):
        return ""
    cause = error.__cause__
    place = cause.place if isinstance(cause, RemoteTracebackError) else place_of(error)
    return f"{type(error).__qualname__} at {place}"
