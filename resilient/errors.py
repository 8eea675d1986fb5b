"""The exceptions of this package. Wrong arguments raise ``ValueError``, this package's own
:class:`ArgumentError` where a command line may have to name them; what the world does raises the others."""

from __future__ import annotations

import logging
import string
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class ArgumentError(ValueError):
    """An argument that cannot be, told as ``<field> must <constraint>, got <value>; <fix>``.

    ``constraint`` and ``fix`` name other arguments in braces, ``"divide {global_batch}"``: in Python they print as they
    are called, on the command line as its options (:meth:`told`). What is no argument's name is put in before, by an
    f-string; braces of its own are doubled (:func:`literal`).

    Args:
        field: The argument's name; where several are wrong together, theirs in braces: ``"{steps} times {nodes}"``.
        constraint: What it must be or do, after the word "must".
        value: What it was, as it is to be printed: ``repr`` for text of users.
        fix: What to do instead.
    """

    def __init__(self, field: str, constraint: str, value: object, fix: str) -> None:
        super().__init__(field, constraint, value, fix)
        self.field = field
        self.constraint = constraint
        self.value = value
        self.fix = fix

    def told(self, named: Callable[[str], str]) -> str:
        """Return the message with every argument called what ``named`` calls it."""
        field = _filled(self.field, named) if "{" in self.field else named(self.field)
        constraint, fix = _filled(self.constraint, named), _filled(self.fix, named)
        return f"{field} must {constraint}, got {self.value}; {fix}"

    def __str__(self) -> str:
        return self.told(str)


def literal(text: str) -> str:
    """Return text of users as it stands in the ``constraint`` or ``fix`` of an :class:`ArgumentError`."""
    return text.replace("{", "{{").replace("}", "}}")


def _filled(text: str, named: Callable[[str], str]) -> str:
    """Return a text with names of arguments put in, or as it stands where somebody's own braces were left single."""
    try:
        return _Names(named).format(text)
    except ValueError:
        return text


class _Names(string.Formatter):
    """Fills names of arguments in."""

    def __init__(self, named: Callable[[str], str]) -> None:
        self._named = named

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[str, str]:
        return self._named(field_name), field_name


def note(error: Exception, text: str) -> None:
    """Add a line of what was going on to an error of the job's own code, which keeps its type and its message."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:  # an error takes no notes yet
        logger.error("%s", text)


def place_text(
    *, node: int | None = None, generation: int | None = None, step: int | None = None, action: str | None = None
) -> str:
    """Return what is known of a place in a job as it ends a message: `` (node 2, step 17)``, or nothing."""
    parts = {"node": node, "generation": generation, "step": step, "action": action}
    known = ", ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    return f" ({known})" if known else ""


class ResilientError(Exception):
    """Base of all errors that are not the caller's; ends with where it happened, as far as that is known.

    Args:
        message: What happened, and what to do.
        node: Number of the node where it happened.
        generation: The generation that was running.
        step: The step that was being trained, 1 for the first.
        action: What the worker's schedule was at, and in which row: ``1RECV_F0 of row 1``.
    """

    def __init__(
        self,
        message: str = "",
        *,
        node: int | None = None,
        generation: int | None = None,
        step: int | None = None,
        action: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.node = node
        self.generation = generation
        self.step = step
        self.action = action

    def locate(
        self,
        *,
        node: int | None = None,
        generation: int | None = None,
        step: int | None = None,
        action: str | None = None,
    ) -> None:
        """Add where it happened, for whoever knows more than the one who raised it; what is known already stays."""
        self.node = node if self.node is None else self.node
        self.generation = generation if self.generation is None else self.generation
        self.step = step if self.step is None else self.step
        self.action = action if self.action is None else self.action

    def __str__(self) -> str:
        place = place_text(node=self.node, generation=self.generation, step=self.step, action=self.action)
        return f"{self.message}{place}"


class CommunicationError(ResilientError):
    """A peer of this generation is gone, or the generation was aborted; the worker goes into recovery.

    Args:
        message: What happened.
        generation: The generation.
        peer: Global rank at the other end of the connection that broke, where that is known.
    """

    def __init__(self, message: str = "", *, generation: int | None = None, peer: int | None = None) -> None:
        super().__init__(message, generation=generation)
        self.peer = peer


class CheckpointError(ResilientError):
    """A checkpoint cannot be read or does not fit the job."""

    damaged = ""
    """Its folder, if it is not what was written."""
    sound = ""
    """Folder of the newest checkpoint beside a damaged one of which all bytes are right."""


class ReplicaError(ResilientError):
    """The copies of a layer's state differ, and nobody can tell which is right: the job stops, and saves none."""


class SampleError(ResilientError, ValueError):
    """A sample of the data set cannot be trained on; the message names it."""


class DataProcessError(ResilientError):
    """A process that reads samples for a worker is gone; the message says how it ended."""


class NonFiniteError(ResilientError):
    """The loss or gradient of a step is not finite; the message names where that began."""


class ControlError(ResilientError):
    """The connection to the node agent is gone or spoke out of turn."""


class StateLostError(ResilientError):
    """No live node holds some layer's state any more, and there is no checkpoint to take it from."""
