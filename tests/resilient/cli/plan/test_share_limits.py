"""Limits on the share of every pipeline: what they cost, and which cannot be."""

from __future__ import annotations

import re
from itertools import product

import pytest
from typer.testing import CliRunner, Result

from resilient.cli.app import app
from resilient.cli.plan.share_limits import limited_split
from resilient.errors import ArgumentError
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import Plan, PlanningProblem
from resilient.templates.replan.replan import first_plan
from tests.templates.jobs import profile

SMALL = ("plan", "--model", "gpt3-2.7b", "--device", "a40", "--nodes", "7", "--global-batch", "96", "--microbatch", "2")


def small_plan() -> Plan:
    """Two pipelines of unequal size with 12 microbatches in all."""
    problem = PlanningProblem(profile=profile([1.0] * 5), num_microbatches=12, cluster=Cluster(), min_pipeline_nodes=2)
    return first_plan(problem, range(5))


@pytest.mark.parametrize(
    ("limits", "least", "most", "multiple"),
    [("min=5", 5, 12, 1), ("max=7", 1, 7, 1), ("multiple-of=4", 1, 12, 4), ("min=3, max=9,multiple-of=3", 3, 9, 3)],
)
def test_the_split_is_the_fastest_within_the_limits(limits: str, least: int, most: int, multiple: int) -> None:
    plan = small_plan()
    templates = [pipeline.template for pipeline in plan.pipelines]
    allowed = [share for share in range(least, most + 1) if share % multiple == 0]
    fastest = min(
        max(template.iteration_ms(share) for template, share in zip(templates, shares, strict=True))
        for shares in product(allowed, repeat=len(templates))
        if sum(shares) == 12
    )
    split = limited_split(plan, limits)
    assert sum(split.num_microbatches) == 12
    assert all(share in allowed for share in split.num_microbatches)
    assert split.step_ms == pytest.approx(fastest)


@pytest.mark.parametrize("limits", ["", "min=0", "max=-1", "most=4", "min=2,min=3", "min=2;max=3"])
def test_limits_that_do_not_read_are_refused(limits: str) -> None:
    form = '"min=4,max=16,multiple-of=2", each at most once'
    message = f"share must look like {form}, got {limits!r}; leave out what is not limited"
    with pytest.raises(ArgumentError, match=f"^{re.escape(message)}$"):
        limited_split(small_plan(), limits)


def run(*options: str) -> Result:
    return CliRunner().invoke(app, [*SMALL, *options])


def test_the_command_says_what_limits_cost() -> None:
    ended = run("--share", "multiple-of=8")
    assert ended.exit_code == 0, ended.output
    assert re.search(
        r"^with multiple-of=8: [\dx, ]+ microbatches; [\d.]+ s \(\+\d+\.\d%\)$", ended.output, re.MULTILINE
    )


def test_the_command_names_its_option_where_no_split_is_within_the_limits() -> None:
    ended = run("--share", "multiple-of=7")
    assert ended.exit_code == 2
    assert "--share must allow the plan's 48 microbatches on" in ended.output
