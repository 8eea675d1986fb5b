"""A job in one process, without agents: the same worker, answered by the simplest possible coordinator."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from resilient.manifest import Manifest, SavedState, folder, read_manifest, write_manifest
from resilient.messages import (
    INIT,
    Arm,
    Failed,
    Finish,
    Finished,
    FromWorkerMessage,
    Generation,
    Note,
    Output,
    Ready,
    Regroup,
    Saved,
    StepDone,
    ToWorkerMessage,
)
from resilient.templates.cluster import Cluster
from resilient.templates.plan import Problem
from resilient.templates.replan import first_plan

logger = logging.getLogger(__name__)


class SoloClient:
    """Gives the only worker its only generation.

    Args:
        run_directory: Where checkpoints go.
        resume: A checkpoint to begin from.
    """

    def __init__(self, run_directory: str, resume: str | None) -> None:
        self.run_directory = run_directory
        self.on_regroup: Callable[[Regroup], None] | None = None
        self.on_arm: Callable[[Arm], None] | None = None
        self._resume = resume
        self._digest = ""
        self._inbox: deque[ToWorkerMessage] = deque()

    def send(self, message: FromWorkerMessage) -> None:
        """Answer the worker's message."""
        if isinstance(message, Ready):
            self._inbox.append(self._generation(message))
        elif isinstance(message, StepDone):
            outcome = message.outcome
            logger.info("step %d: loss %.4f, %.0f ms", outcome.step, outcome.loss, message.step_ms)
        elif isinstance(message, Saved):
            self._finish_checkpoint(message)
        elif isinstance(message, Note):
            logger.info("%s: %s", message.name, message.value)
        elif isinstance(message, Output):
            logger.info("%s", message.text)
        elif isinstance(message, Finished | Failed):
            self._inbox.append(Finish())

    def receive(self) -> ToWorkerMessage:
        """Return the next answer."""
        return self._inbox.popleft()

    def _generation(self, ready: Ready) -> Generation:
        job = ready.job
        self._digest = job.digest
        alone = Problem(
            profile=job.profile,
            num_microbatches=job.global_batch // job.microbatch,
            cluster=Cluster(memory_bytes=job.memory_bytes),
            max_failures=0,
            schedule=job.schedule,
            num_chunks=job.num_chunks,
        )
        return Generation(
            generation=1,
            rank=0,
            plan=first_plan(alone, [0]),
            version=read_manifest(self._resume).step if self._resume else 0,
            roll_forward=None,
            transfers=(),
            source=self._resume or INIT,
            store_address=ready.store_address,
        )

    def _finish_checkpoint(self, message: Saved) -> None:
        states = {
            name: SavedState(file=file, fingerprint=message.fingerprints[name]) for name, file in message.files.items()
        }
        write_manifest(
            folder(self.run_directory, message.step), Manifest(step=message.step, digest=self._digest, states=states)
        )
