"""Asks the coordinator of a running job, as the folder of the run says where it listens. Must not import torch."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import typer

from resilient.cli.shared.errors import usage_error
from resilient.cli.shared.run_folder import how_it_ended, read_job, run_folder
from resilient.common.job_certificate import client_context

RunFolder = Annotated[Path | None, typer.Option("--run", help="Folder of the run; the newest by default.")]


def ask(run_dir: Path | None, what: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request to the coordinator of a run; return its answer.

    Args:
        run_dir: Folder of the run; None for the newest.
        what: Path of the request.
        body: To be posted; None to get.
    """
    run = run_folder(run_dir)
    job = read_job(run)
    request = urllib.request.Request(
        f"https://{job.address}/{what}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {job.token}", "Content-Type": "application/json"},
    )
    tls = urllib.request.HTTPSHandler(context=client_context(job.token))
    direct = urllib.request.build_opener(tls, urllib.request.ProxyHandler({}))  # a proxy is for the web
    try:
        with direct.open(request, timeout=10) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise usage_error(error.read().decode()) from None
    except OSError as error:
        end = how_it_ended(run)
        told = f"is over: {end}" if end else f"does not answer at {job.address} ({error})"
        raise usage_error(f"the job of {run} {told}; if another is running, name its folder with --run") from None
