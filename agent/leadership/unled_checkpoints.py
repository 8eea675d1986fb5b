"""Makes checkpoints whole while no coordinator does: whoever's part is the last writes the manifest.

Workers train on when their coordinator is gone, and write their parts of checkpoints. Each agent leaves what its
workers have said of theirs in the checkpoint's folder, and looks whether all parts are there. A coordinator that takes
over hears the same from the agents, and writes the same manifest again. Must not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec

from resilient.agent.membership.parts.checkpoints import Parts
from resilient.common.files import write_whole
from resilient.errors import CheckpointError
from resilient.protocol.messages import FromWorkerMessage, JobSpec, Ready, Saved
from resilient.state.manifest import MANIFEST, Manifest, folder, write_manifest

logger = logging.getLogger(__name__)

_PREFIX = ".saved-"
"""Of the files with what was said; a manifest's writer clears what begins with a dot."""


class UnledCheckpoints:
    """Knows what one node's workers have saved last.

    Args:
        node: Its number.
        run_directory: Folder of the run.
    """

    def __init__(self, node: int, run_directory: str) -> None:
        self._node = node
        self._run_directory = run_directory
        self._job: JobSpec | None = None
        self._saved: dict[int, Saved] = {}
        self._is_led = True

    def hear(self, local_rank: int, message: FromWorkerMessage) -> None:
        """Take in what a worker says."""
        if isinstance(message, Ready):
            self._job = message.job
        elif isinstance(message, Saved) and not message.held:  # of the last one, a coordinator compares the copies
            self._saved[local_rank] = message
            if not self._is_led:
                self._leave(local_rank, message)

    def note_led(self, *, is_led: bool) -> None:
        """Take in whether a coordinator hears what workers say; of what they said last, the one before may not have."""
        if self._is_led and not is_led:
            for local_rank, message in self._saved.items():
                self._leave(local_rank, message)
        self._is_led = is_led

    def _leave(self, local_rank: int, message: Saved) -> None:
        path = folder(self._run_directory, message.step)
        if self._job is None or (path / MANIFEST).exists():
            return
        try:
            write_whole(path / f"{_PREFIX}{self._node}-{local_rank}", msgspec.json.encode(message))
            parts = Parts()
            for node, saved in _left(path, message.generation):
                parts.add(saved, node)
            if not parts.lacking(message.step, self._job.profile):
                states = parts.states(message.step)
                manifest = Manifest(step=message.step, recipe=self._job.recipe, states=states, skipped=message.skipped)
                write_manifest(path, manifest, parts.nodes(message.step))
                logger.info("node %d: the checkpoint of step %d is whole", self._node, message.step)
        except (OSError, CheckpointError) as error:
            logger.warning("node %d: the checkpoint of step %d is not whole: %s", self._node, message.step, error)


def _left(path: Path, generation: int) -> Iterator[tuple[int, Saved]]:
    """Yield what was left of the parts that one generation has written, and by which node."""
    for file in sorted(path.glob(f"{_PREFIX}*")):
        try:
            saved = msgspec.json.decode(file.read_bytes(), type=Saved)
        except (FileNotFoundError, msgspec.DecodeError):  # another agent clears them, for it was the last
            continue
        if saved.generation == generation:
            yield int(file.name.removeprefix(_PREFIX).partition("-")[0]), saved
