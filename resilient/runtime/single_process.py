"""Answers the worker of a job that runs in one process, without agents: the simplest possible coordinator."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from resilient.observability.event_log import losses_in_words
from resilient.protocol.checkpoint_pace import AUTO_CHECKPOINTS, CheckpointPace
from resilient.protocol.messages import (
    INIT,
    Arm,
    Failed,
    Finish,
    Finished,
    FromWorkerMessage,
    Generation,
    Installed,
    Note,
    NotSaved,
    Output,
    Ready,
    Regroup,
    Report,
    Save,
    Saved,
    StepDone,
    Suspect,
    ToWorkerMessage,
)
from resilient.state.manifest import Manifest, check_recipe, folder, read_resumed, write_manifest
from resilient.state.recipe import Recipe
from resilient.state.skipped import NONE_SKIPPED
from resilient.templates.inputs.cluster import Cluster
from resilient.templates.plan import PlanningProblem
from resilient.templates.replan.replan import first_plan

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXIT_INTERRUPTED = 130
_GENERATION = 1
"""The only one; the last checkpoint of an interrupted training is said to be of the next."""


class SingleProcessClient:
    """Gives the only worker its only generation.

    Args:
        run_directory: Where checkpoints go.
        resume: A checkpoint to begin from.

    Attributes:
        losses: Step -> loss, of the steps committed so far.
    """

    def __init__(self, run_directory: str, resume: str | None) -> None:
        self.run_directory = run_directory
        self.on_regroup: Callable[[Regroup], None] | None = None
        self.on_arm: Callable[[Arm], None] | None = None
        self.losses: dict[int, float] = {}
        self._resume = resume
        self._recipe: Recipe | None = None
        self._interrupted = ""
        self._saved = ""
        self._skipped = NONE_SKIPPED
        self._inbox: deque[ToWorkerMessage] = deque()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Have SIGINT and SIGTERM end the training after the running step, with a checkpoint; the second one at once.

        Raises:
            SystemExit: It was ended.
        """
        if threading.current_thread() is not threading.main_thread():  # signals are not its own
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def on_signal(number: int, frame: FrameType | None) -> None:
            restore()
            # It is ignored in a shell's background: the second one is to count, too.
            if before[signal.Signals(number)] is signal.SIG_IGN:
                signal.signal(number, signal.default_int_handler)
            self._interrupt(signal.Signals(number).name)

        for number in _SIGNALS:
            signal.signal(number, on_signal)
        try:
            yield
        except Exception:
            if self._saved:
                logger.warning("training failed; go on with fit(num_steps, resume=%r)", self._saved)
            raise
        finally:
            restore()
        if self._interrupted:
            logger.warning("interrupted (%s); go on with fit(num_steps, resume=%r)", self._interrupted, self._saved)
            raise SystemExit(_EXIT_INTERRUPTED)

    def send(self, message: FromWorkerMessage) -> None:
        """Answer the worker's message."""
        if isinstance(message, Ready):
            self._inbox.append(self._generation(message))
            self._recipe = message.job.recipe
        elif isinstance(message, StepDone):
            outcome = message.outcome
            self.losses[outcome.step], self._skipped = outcome.loss, outcome.skipped
            if not outcome.is_finite:
                logger.warning("step %d was skipped: gradient norm %g", outcome.step, outcome.grad_norm)
            of_units = losses_in_words({"losses": outcome.losses})
            logger.info("step %d: loss %.4f%s, %.0f ms", outcome.step, outcome.loss, of_units, message.step_ms)
        elif isinstance(message, Saved):
            self._finish_checkpoint(message)
        elif isinstance(message, NotSaved):
            logger.warning("the newest checkpoint is %s", self._saved or self._resume or "none")
        elif isinstance(message, Note):
            logger.info("%s: %s", message.name, message.value)
        elif isinstance(message, Output):
            logger.info("%s", message.text)
        elif isinstance(message, Report):
            self._inbox.append(self._save(message))
        elif isinstance(message, Finished):
            self._inbox.append(Finish(is_main=True))
        elif isinstance(message, Failed):
            self._inbox.append(self._after_failure())
        elif not isinstance(message, Installed | Suspect):  # of those nothing follows where there is nobody else
            raise TypeError(f"message must be known in a single process, got a {type(message).__name__}")

    def receive(self) -> ToWorkerMessage:
        """Return the next answer."""
        return self._inbox.popleft()

    def _generation(self, ready: Ready) -> Generation:
        job = ready.job
        resumed = read_resumed(self._resume) if self._resume else None
        if self._resume and resumed:
            check_recipe(self._resume, resumed, job.recipe)
            self._skipped = resumed.skipped
        kind, num_chunks = job.first_schedule  # the only worker waits for nobody, whatever the schedule
        alone = PlanningProblem(
            profile=job.profile,
            num_microbatches=job.global_batch // job.microbatch,
            cluster=Cluster(memory_bytes=job.memory_bytes),
            max_failures=0,
            schedule=kind,
            num_chunks=num_chunks,
        )
        return Generation(
            generation=_GENERATION,
            rank=0,
            plan=first_plan(alone, [0]),
            version=resumed.step if resumed else 0,
            roll_forward=None,
            transfers=(),
            source=self._resume or INIT,
            store_address=ready.store_address,
            skipped=self._skipped,
            pace=CheckpointPace(risk_s=alone.failure_interval_s) if job.checkpoint_every == AUTO_CHECKPOINTS else None,
        )

    def _interrupt(self, name: str) -> None:
        """Ask for the next step boundary; runs between any two instructions of the training."""
        if self._recipe is None:  # it has not begun
            raise KeyboardInterrupt
        self._interrupted = name
        os.write(2, f"{name}: training ends after this step, with a checkpoint; again: at once\n".encode())
        regroup = Regroup(generation=_GENERATION + 1, at_boundary=True)
        self._inbox.append(regroup)
        if self.on_regroup is not None:
            self.on_regroup(regroup)

    def _after_failure(self) -> ToWorkerMessage:
        """Have the last committed step saved, unless it is."""
        done = max(self.losses, default=0)
        if not done or self._saved == str(folder(self.run_directory, done)):
            return Finish()
        return Regroup(generation=_GENERATION + 1, at_boundary=True)

    def _save(self, report: Report) -> Save:
        progress = report.progress
        return Save(
            generation=report.generation,
            version=progress.version,
            roll_forward=None,
            states=(*progress.current, *progress.retained),
            path=str(folder(self.run_directory, progress.version)),
            skipped=self._skipped,
        )

    def _finish_checkpoint(self, message: Saved) -> None:
        assert self._recipe is not None
        path = folder(self.run_directory, message.step)
        write_manifest(
            path, Manifest(step=message.step, recipe=self._recipe, states=message.states, skipped=message.skipped)
        )
        self._saved = str(path)
        if message.generation > _GENERATION:
            self._inbox.append(Finish())
