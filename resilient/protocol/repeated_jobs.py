"""Reads what agents say. Every worker that comes up tells the whole job, tens of kilobytes: equal ones are read once.

A thousand that come at once would keep the coordinator for a second otherwise. Must not import torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from resilient.protocol.messages import FromWorker, JobSpec, Ready

_LARGE_BYTES = 2048
"""Smaller messages are read in no time."""

_MOST_JOBS = 8
"""That are known at a time: of a run, there is one."""


class _ReadyAhead(msgspec.Struct, tag=Ready.__name__, forbid_unknown_fields=True):
    """A :class:`Ready` whose job has not been read; with anything else in it, it is read in the usual way."""

    job: msgspec.Raw
    store_address: str
    pid: int
    device: str


class _SaidAhead(msgspec.Struct, tag=FromWorker.__name__, forbid_unknown_fields=True):
    local_rank: int
    message: _ReadyAhead


_decode_ahead = msgspec.msgpack.Decoder(_SaidAhead).decode


class JobReader:
    """Decodes messages; equal jobs in them are one object.

    Args:
        messages: The union of what they may be, with :class:`FromWorker`.
    """

    def __init__(self, messages: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(messages).decode
        self._jobs: dict[bytes, JobSpec] = {}

    def decode(self, data: bytes) -> Any:
        """Return a message.

        Raises:
            msgspec.DecodeError: It is none.
        """
        if len(data) < _LARGE_BYTES:
            return self._decode(data)
        try:
            said = _decode_ahead(data)
        except msgspec.DecodeError:
            return self._decode(data)  # it is none, or of another kind
        packed, ready = bytes(said.message.job), said.message
        if packed not in self._jobs:
            read = self._decode(data)
            if len(self._jobs) == _MOST_JOBS:
                self._jobs.clear()
            self._jobs[packed] = read.message.job
            return read
        job = self._jobs[packed]
        told = Ready(job=job, store_address=ready.store_address, pid=ready.pid, device=ready.device)
        return FromWorker(local_rank=said.local_rank, message=told)
