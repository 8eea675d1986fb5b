"""Words what is wrong with a command line before a command sees it: as all other errors, in one line.

Which classes these errors are of depends on the release of typer, so they are told by what they have.
"""

from __future__ import annotations

import re
from typing import Any

_NUMBERS = {
    "integer": ("be a whole number", "give one such as 4"),
    "number": ("be a number", "give one such as 2.5"),
    "float": ("be a number", "give one such as 2.5"),
}
"""What an option must be and what to give, by the word that says so in the message of the library."""

_NOT_VALID = re.compile(r"\bvalid (integer|number|float)\b")
_QUOTED = re.compile(r"^(?:Value error, )?'(.*)' is not ")
_NOT_ONE = re.compile(r"is not one of (.*?)\.?$")


def told_usage(error: Exception, command: str) -> str | None:
    """Return what is wrong with a command line, and what to do; None where an error says nothing of that.

    Args:
        error: What reading a command's arguments raised.
        command: What was called, where the error does not say it.
    """
    message: str | None = getattr(error, "message", None)
    ctx: Any = getattr(error, "ctx", None)
    if message is None or not hasattr(error, "ctx") or getattr(error, "exit_code", None) != 2:
        return None
    if type(error).__name__ == "NoArgsIsHelpError":
        return None
    fix = f"see `{command if ctx is None else ctx.command_path} --help`"
    param: Any = getattr(error, "param", None)
    name = param.opts[0] if param is not None and param.opts else None
    if name is None:
        message, _, similar = message.partition(" Did you mean ")
        similar = similar or " or ".join(sorted(getattr(error, "possibilities", None) or ())) + "?"
        fix = fix if similar == "?" else f"did you mean {similar}"
        return f"{message[:1].lower()}{message[1:].rstrip('.')}; {fix}"
    if type(error).__name__ == "MissingParameter":
        return f"{name} must be given, got none; {fix}"
    given = _given(error, message)
    if given is not None and (known := _NOT_ONE.search(message)):
        return f"{name} must be one of {known[1]}, got {given!r}; choose one of these"
    if given is not None and (wrong := _NOT_VALID.search(message)):
        constraint, fix = _NUMBERS[wrong[1]]
        return f"{name} must {constraint}, got {given!r}; {fix}"
    return f"{name}: {message.rstrip('.')}; {fix}"


def _given(error: Exception, message: str) -> object:
    """Return the value that could not be read."""
    quoted = _QUOTED.match(message)
    if quoted is not None:
        return quoted[1]
    cause: Any = error.__cause__
    return cause.errors()[0].get("input") if hasattr(cause, "errors") else None
