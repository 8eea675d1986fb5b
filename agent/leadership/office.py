"""Who leads a job and where, as the coordinator leaves it in the run's folder (``job.json``); imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from resilient.common.files import replacing
from resilient.common.job_certificate import certificate_of
from resilient.errors import ArgumentError


class Office(msgspec.Struct, frozen=True, kw_only=True):
    """Who leads a job, and where.

    Args:
        address: Where the coordinator listens, host:port.
        token: What everybody has to present to it.
        pid: Its process.
        term: Its number among the job's coordinators (:mod:`resilient.agent.journal.term`).
        store: Where those who follow it stand for election, as ``--store`` names it; "" where they do not.
    """

    address: str
    token: str
    pid: int
    term: int
    store: str = ""

    @property
    def host(self) -> str:
        """Where it listens."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """On which port."""
        return int(self.address.rpartition(":")[2])


def read_office(run_directory: str | Path) -> Office | None:
    """Return who leads a job, as far as can be seen from here; None when nothing is to be seen."""
    try:
        return msgspec.json.decode((Path(run_directory) / "job.json").read_bytes(), type=Office)
    except (OSError, msgspec.DecodeError):
        return None


def write_office(run_directory: str | Path, office: Office) -> None:
    """Leave it where nodes, and other commands, look for it; only the owner of the file may read it.

    Beside it, in ``coordinator.pem``, is the certificate by which others know the coordinator.

    Raises:
        ArgumentError: The folder cannot be written.
    """
    path = Path(run_directory) / "job.json"
    try:
        with replacing(path.with_name("coordinator.pem")) as partial:
            partial.write_text(certificate_of(office.token))
        with replacing(path) as partial:
            partial.unlink(missing_ok=True)
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(msgspec.json.encode(office))
    except OSError as error:
        got = f"{path.parent} ({error.strerror})"
        raise ArgumentError("run_directory", "be a folder that can be written", got, "give another") from error
