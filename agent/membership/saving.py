"""The parts of checkpoints that workers report, until they make a whole."""

from __future__ import annotations

from resilient.protocol.messages import Saved
from resilient.state.manifest import SavedState


class Parts:
    """What workers have saved so far, by step."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, SavedState]] = {}

    def add(self, message: Saved) -> None:
        """Take in one worker's part."""
        states = self._states.setdefault(message.step, {})
        for name, file in message.files.items():
            states[name] = SavedState(file=file, fingerprint=message.fingerprints.get(name, ""))

    def states(self, step: int) -> dict[str, SavedState]:
        """Return what is saved of a step."""
        return self._states.get(step, {})

    def drop(self, step: int) -> None:
        """Forget a step that is whole, and those before it that never will be."""
        self._states = {later: states for later, states in self._states.items() if later > step}
