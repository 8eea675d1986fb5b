"""The log of everything the membership machine was told: ``stimuli.jsonl`` in the folder of a run.

Its first line holds the settings, each further one a stimulus and its time. Every worker that comes up tells the whole
job, tens of kilobytes for a large model: equal ones are written once, then only their digest. The machine is pure: fed
to a fresh one, they lead to the same decisions (:mod:`resilient.agent.journal.replay`). Must not import torch.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from resilient.agent.membership.parts.context import Settings
from resilient.agent.membership.parts.events import Stimulus, WorkerSaid
from resilient.protocol.messages import JobSpec, Ready

logger = logging.getLogger(__name__)

_VERSION = 2
_INFINITE_OR_NONE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""In what is packed, a number that JSON has not begins so; others may look like one."""
_KINDS: dict[str, type] = {kind.__name__: kind for kind in Stimulus.__args__}


class _Head(msgspec.Struct, omit_defaults=True):
    """The first line; ``packed`` in place of ``settings`` where JSON cannot say them."""

    version: int
    settings: msgspec.Raw = msgspec.Raw(b"null")
    packed: str = ""


class _Line(msgspec.Struct, omit_defaults=True):
    """Any other line; ``job`` is the digest of a job that is told, which only the first line with it holds."""

    at: float
    kind: str
    job: str = ""
    stimulus: msgspec.Raw = msgspec.Raw(b"null")
    packed: str = ""
    heard: tuple[int, int] | None = None


class _Heard(msgspec.Struct):
    """Of a line, which agent's message it is, and how many of it were heard with this one."""

    heard: tuple[int, int] | None = None


class _ReadyAgain(msgspec.Struct):
    """What a worker said with a job that an earlier line holds."""

    node: int
    local_rank: int
    message: dict[str, Any]


class StimulusLog:
    """Writes the log. What cannot be written is given up with a warning: no job ends for want of it.

    Lines are kept until :meth:`flush`, which is to be called before anything is recorded that follows from them. So
    what the event log says can be replayed, even if the process is killed.

    Args:
        path: The file; it is made by the first flush.
        settings: Of the job. Nothing in them is secret. None to go on with the log that is there.
        guard: Entered while lines are written; raises if they must not be.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings | None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._path = path
        self._guard = guard
        self._lines: list[bytes] = []
        self._jobs: set[str] = set()
        self._last_job: tuple[JobSpec | None, str] = None, ""
        self._given_up = False
        if settings is None:
            _cut_to_whole_lines(path)
        else:
            self._add(lambda: _Head(version=_VERSION, **_content("settings", settings)))

    def write(self, stimulus: Stimulus, at: float, heard: tuple[int, int] | None = None) -> None:
        """Take in a stimulus, before it is handled.

        Args:
            stimulus: What happened.
            at: When.
            heard: An agent whose message it may be, and how many messages of it were heard with this one.
        """
        self._add(lambda: self._line(stimulus, at, heard))

    def drop_last(self) -> None:
        """Forget the stimulus that was taken in last, of which nothing came; no job was told by it."""
        if self._lines:
            self._lines.pop()

    def flush(self) -> None:
        """Write what was taken in; all of it or nothing. What the guard raises passes through."""
        if not self._lines:
            return
        data, self._lines = b"".join(self._lines), []
        try:
            with self._guard():
                append_whole(self._path, data)
        except OSError as error:
            self._give_up(error)

    def _line(self, stimulus: Stimulus, at: float, heard: tuple[int, int] | None) -> _Line:
        job, kind = "", type(stimulus).__name__
        if isinstance(stimulus, WorkerSaid) and isinstance(stimulus.message, Ready):
            job = self._digest(stimulus.message.job)
            if job in self._jobs:
                stimulus = replace(stimulus, message=msgspec.structs.replace(stimulus.message, job=None))
            self._jobs.add(job)
        return _Line(at=at, kind=kind, job=job, heard=heard, **_content("stimulus", stimulus))

    def _digest(self, job: JobSpec) -> str:
        if job is not self._last_job[0]:  # mostly it is
            self._last_job = job, hashlib.sha256(msgspec.msgpack.encode(job)).hexdigest()
        return self._last_job[1]

    def _add(self, line: Any) -> None:
        if self._given_up:
            return
        try:
            self._lines.append(msgspec.json.encode(line()) + b"\n")
        except (TypeError, ValueError) as error:  # text that is not Unicode, such as a file name can be
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Write nothing more, and leave nothing: a log with a gap would lead to other decisions."""
        logger.error("cannot write %s, the run cannot be replayed: %s", self._path, error)
        with contextlib.suppress(OSError):
            if self._path.is_file():
                self._path.replace(self._path.with_suffix(".incomplete"))
        self._given_up, self._lines = True, []


def read_stimuli(path: Path) -> tuple[Settings, Iterator[tuple[float, Stimulus]]]:
    """Read the log of a run: its settings, and each stimulus with its time. A last line cut short is left out.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not such a log; of a later line, while it is iterated over.
    """
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    try:
        if not lines:
            raise ValueError("nothing recorded; choose another run")
        head = msgspec.json.decode(lines[0], type=_Head)
        if head.version != _VERSION:
            raise ValueError(f"version {head.version}; replay it with the release that wrote it")
        settings = _decoded(head.settings, head.packed, Settings)
    except ValueError as error:
        raise ValueError(f"line 1 of {path} must hold a job's settings, version {_VERSION}, got {error}") from None
    return settings, _read_lines(path, lines[1:])


def heard_counts(path: Path) -> dict[int, int]:
    """Return how many messages of each agent were heard before the end of the log of a run.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not such a log.
    """
    decode = msgspec.json.Decoder(_Heard).decode
    told = (decode(line).heard for line in path.read_bytes().splitlines()[1:])
    return dict(filter(None, told))


def _cut_to_whole_lines(path: Path) -> None:
    """Take away what a process that was killed has begun to write."""
    with path.open("r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _read_lines(path: Path, lines: list[bytes]) -> Iterator[tuple[float, Stimulus]]:
    jobs: dict[str, JobSpec] = {}
    for number, text in enumerate(lines, start=2):
        try:
            line = msgspec.json.decode(text, type=_Line)
            yield line.at, _stimulus(line, jobs)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {path} must be a stimulus, got {error}") from None


def _stimulus(line: _Line, jobs: dict[str, JobSpec]) -> Stimulus:
    """Return what a line tells, with the job that an earlier one holds; take in the job that it holds itself."""
    if line.kind not in _KINDS:
        raise ValueError(f"kind {line.kind!r}")
    if line.job in jobs:
        again: _ReadyAgain = _decoded(line.stimulus, line.packed, _ReadyAgain)
        message = msgspec.convert({**again.message, "job": jobs[line.job]}, Ready)
        return WorkerSaid(node=again.node, local_rank=again.local_rank, message=message)
    stimulus = _decoded(line.stimulus, line.packed, _KINDS[line.kind])
    if line.job and isinstance(stimulus, WorkerSaid) and isinstance(stimulus.message, Ready):
        jobs[line.job] = stimulus.message.job
    return stimulus


def append_whole(path: Path, data: bytes) -> None:
    """Add to a file, all or nothing.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("ab", buffering=0) as file:
        written = file.write(data)
        if written < len(data):
            file.truncate(file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _content(name: str, value: object) -> dict[str, Any]:
    """Return the fields of a line: the value as JSON, or packed where it has numbers that JSON has not."""
    text = msgspec.json.encode(value)
    if b"null" in text:
        packed = msgspec.msgpack.encode(value)
        if _INFINITE_OR_NONE.search(packed) and not _is_finite(msgspec.to_builtins(value)):
            return {"packed": base64.b64encode(packed).decode()}
    return {name: msgspec.Raw(text)}


def _decoded(text: msgspec.Raw, packed: str, kind: type) -> Any:
    if packed:
        return msgspec.msgpack.decode(base64.b64decode(packed), type=kind)
    return msgspec.json.decode(text, type=kind)


def _is_finite(value: Any) -> bool:
    """Return whether no number in a value of plain data is infinite or none at all."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(_is_finite(each) for each in value.values())
    return not isinstance(value, (list, tuple)) or all(_is_finite(each) for each in value)
