"""The options that say what of the workers' output is shown, called as torchrun's are and checked as they are read."""

from __future__ import annotations

from typing import Annotated

import typer

from resilient.cli.shared.errors import told, usage_error
from resilient.errors import ArgumentError
from resilient.protocol.shown_streams import ShownStreams

_FIELDS = {"tee": "tee", "redirects": "redirects", "local_ranks_filter": "local_ranks"}


def _checked(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    try:
        ShownStreams(**{_FIELDS[param.name or ""]: value})
    except ArgumentError as error:
        raise usage_error(told(error, ctx)) from None
    return value


Tee = Annotated[
    str,
    typer.Option(
        "--tee",
        "-t",
        metavar="0|1|2|3|RANK:N,...",
        callback=_checked,
        help="Show nothing (0), stdout (1), stderr (2) or both (3) of the workers started here, which are logged too; "
        'of all, or by local rank: "0:1,1:3".',
    ),
]
Redirects = Annotated[
    str,
    typer.Option(
        "--redirects",
        "-r",
        metavar="0|1|2|3|RANK:N,...",
        callback=_checked,
        help="Have nothing (0), stdout (1), stderr (2) or both (3) go to the logs alone; what does not is shown.",
    ),
]
LocalRanksFilter = Annotated[
    str,
    typer.Option(
        "--local-ranks-filter",
        metavar="RANKS",
        callback=_checked,
        help='Show only workers with these local ranks, "0,1"; all by default.',
    ),
]
