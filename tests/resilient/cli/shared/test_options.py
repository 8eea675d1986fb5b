"""A command is made of a dataclass: its fields are the options, and arrive as one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from resilient.cli.shared.options import command_of


@dataclass(frozen=True, kw_only=True)
class Size:
    nodes: Annotated[int, typer.Option(min=1)] = 4


@dataclass(frozen=True, kw_only=True)
class Job(Size):
    model: Annotated[str, typer.Option("--model")]


def test_fields_are_options_and_those_without_a_default_are_required() -> None:
    taken: list[Job] = []

    @command_of(Job)
    def train(ctx: typer.Context, options: Job) -> None:
        """Train it."""
        taken.append(options)

    app = typer.Typer()
    app.command()(train)
    assert "Train it." in CliRunner().invoke(app, ["--help"]).stdout
    assert CliRunner().invoke(app, ["--nodes", "2"]).exit_code == 2
    assert CliRunner().invoke(app, ["--model", "gpt2", "--nodes", "0"]).exit_code == 2
    assert not taken
    assert CliRunner().invoke(app, ["--model", "gpt2"]).exit_code == 0
    assert CliRunner().invoke(app, ["--model", "bert", "--nodes", "2"]).exit_code == 0
    assert taken == [Job(model="gpt2", nodes=4), Job(model="bert", nodes=2)]
