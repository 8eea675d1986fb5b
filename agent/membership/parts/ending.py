"""Why the job ends before its last step, with which exit code, and how it can be started again."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from resilient.agent.membership.parts.context import EXIT_FAILED, EXIT_LOST, EXIT_RESUMABLE, Context


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """Why the job ends early, how, since when, and until when the running step and the checkpoint may take."""

    reason: str
    exit_code: int
    at: float
    step_deadline: float
    deadline: float


class Ending:
    """Remembers a failure of the job's own code or an interruption: the job ends as soon as its progress is saved."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._failure = ""
        self._is_damaged = False
        self._interruption: Interruption | None = None
        self._needed_nodes = context.settings.num_nodes

    @property
    def failure(self) -> str:
        """What failed; "" if nothing did."""
        return self._failure

    @property
    def is_damaged(self) -> bool:
        """Whether the states may be wrong: nothing of them is to be saved."""
        return self._is_damaged

    @property
    def interruption(self) -> Interruption | None:
        """By whom and until when, if the job was interrupted."""
        return self._interruption

    @property
    def needed_nodes(self) -> int:
        """How many nodes the job needs to go on, as far as it is known."""
        return self._needed_nodes

    @property
    def reason(self) -> str:
        """Why no further generation is to begin; "" if one may."""
        return self._failure or (self._interruption.reason if self._interruption is not None else "")

    def note_failure(self, text: str) -> None:
        """Take in that the job has failed."""
        self._failure = text

    def note_damage(self) -> None:
        """Take in that states are damaged, and nobody knows which are right."""
        self._is_damaged = True

    def interrupt(self, reason: str, exit_code: int) -> Interruption:
        """Give the running step and the checkpoint until now; return how long they have."""
        now, grace_s = self._context.now, self._context.settings.grace_s
        self._interruption = Interruption(
            reason=f"interrupted ({reason})",
            exit_code=exit_code,
            at=now,
            step_deadline=now + grace_s / 2,
            deadline=now + grace_s,
        )
        self._needed_nodes = max(self._needed_nodes, self._context.settings.num_nodes)
        self._context.record("interrupted", reason=reason, grace_s=grace_s)
        return self._interruption

    def need(self, num_nodes: int) -> None:
        """Take in how many nodes the job needs to go on, as far as it is known."""
        self._needed_nodes = num_nodes

    def resumable(self, reason: str, *, is_saved: bool) -> tuple[int, str]:
        """Return the exit code and the whole reason of a stop after which the job may go on.

        Args:
            reason: Of the stop.
            is_saved: Nothing is lost by it: there is a checkpoint, or no step was done.
        """
        if self._failure:
            exit_code, why = EXIT_FAILED, self._failure
        elif self._interruption is not None:
            exit_code, why = self._interruption.exit_code, self._interruption.reason
        else:
            exit_code, why = EXIT_RESUMABLE if is_saved else EXIT_LOST, ""
        return exit_code, reason if reason.startswith(why) else f"{why}; {reason}"

    def how_to_resume(self, checkpoint: str | None, *, has_job: bool, step: int, is_complete: bool) -> str:
        """Return what to add to the reason of a stop: the command that goes on, or begins again.

        Args:
            checkpoint: Folder of the newest.
            has_job: It is known what is trained.
            step: The last committed one.
            is_complete: The checkpoint is of the job's last step: only the script's end is left.
        """
        if checkpoint is None and not has_job:
            return ""
        settings = self._context.settings
        nodes = str(self._needed_nodes)
        if settings.most_nodes is not None:
            nodes += f":{settings.most_nodes}"
        command = ["resilient", "run", "--nodes", nodes, *settings.options]
        if checkpoint is not None:
            command += ["--resume", checkpoint]
        words = shlex.join([*command, settings.script, *settings.arguments])
        if is_complete:
            return f"; all steps are done and saved in {checkpoint}; run the end of the script with: {words}"
        if checkpoint is not None:
            return f"; resume with: {words}"
        return f"{'; there is no checkpoint' if step else ''}; start again with: {words}"
