"""Makes commands whose options are the fields of a dataclass, so that they are passed on as one thing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Options = TypeVar("Options", bound=DataclassInstance)
else:
    Options = TypeVar("Options")


def command_of(options: type[Options]) -> Callable[[Callable[[typer.Context, Options], None]], Callable[..., None]]:
    """Return a decorator that makes a command of a function of its context and its options.

    Args:
        options: A dataclass. Each field is an option, described as parameters of commands are:
            ``Annotated[type, typer.Option(...)]``, with its default.
    """
    hints = get_type_hints(options, include_extras=True)
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for field in sorted(fields(options), key=lambda field: field.default is not MISSING):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name]))

    def decorate(function: Callable[[typer.Context, Options], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            function(ctx, options(**values))

        command.__doc__ = function.__doc__
        command.__name__ = function.__name__
        command.__dict__["__signature__"] = inspect.Signature(parameters)
        return command

    return decorate
