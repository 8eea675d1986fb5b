"""Writes this worker's parts of checkpoints, and tells the coordinator of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from resilient.errors import CheckpointError
from resilient.protocol.fault_injection import Faults
from resilient.protocol.messages import FromWorkerMessage, NotSaved, Saved
from resilient.runtime.commit import Ledger
from resilient.state import checkpoint
from resilient.state.checkpoint import HeldPart
from resilient.state.witnesses import HeldCopy

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 15.0
"""Before the last checkpoint is tried again; every pause is twice as long as the one before."""


class Saver:
    """Writes states of the version that a ledger is at.

    Args:
        send: Tells the coordinator.
        ledger: The worker's.
        retry_s: For how long the last checkpoint is tried again.
        faults: Told when a part is to be written.
    """

    def __init__(
        self, send: Callable[[FromWorkerMessage], None], ledger: Ledger, retry_s: float, faults: Faults
    ) -> None:
        self._send = send
        self._ledger = ledger
        self._retry_s = retry_s
        self._faults = faults

    def try_write(self, generation: int, parts: Sequence[HeldPart], path: Path) -> None:
        """Write a part of a checkpoint on the way, without which training goes on."""
        try:
            self._write(generation, parts, path, {})
        except CheckpointError as error:
            self._tell(str(error))

    def write_last(
        self,
        generation: int,
        parts: Sequence[HeldPart],
        path: Path,
        *,
        check: Callable[[], None] = lambda: None,
        held: Mapping[str, HeldCopy] | None = None,
    ) -> None:
        """Write a part of the last checkpoint, again and again for as long as one waits for a peer: room may be made.

        Args:
            generation: That it is of.
            parts: What is written.
            path: The checkpoint's folder.
            check: Raises when this worker is wanted elsewhere.
            held: All states that are held here, where the coordinator compares them.

        Raises:
            CheckpointError: It cannot be written.
        """
        deadline, pause_s = time.monotonic() + self._retry_s, _FIRST_PAUSE_S
        while True:
            try:
                self._write(generation, parts, path, held or {})
                return
            except CheckpointError as error:
                left_s = deadline - time.monotonic()
                if left_s < pause_s:
                    raise
                self._tell(f"{error}; trying again for {left_s:.0f} s")
            time.sleep(pause_s)
            check()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _tell(self, error: str) -> None:
        logger.warning("no checkpoint of step %d: %s", self._ledger.version, error)
        self._send(NotSaved(step=self._ledger.version, error=error))

    def _write(self, generation: int, parts: Sequence[HeldPart], path: Path, held: Mapping[str, HeldCopy]) -> None:
        self._faults.reach("save", self._ledger.version)
        saved = checkpoint.save(path, parts) if parts else {}
        step, skipped = self._ledger.version, self._ledger.skipped
        self._send(Saved(generation=generation, step=step, skipped=skipped, states=saved, held=dict(held)))
