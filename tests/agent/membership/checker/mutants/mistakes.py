"""The mistakes: what in the machine's source is replaced by what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Args:
        name: What is wrong.
        file: In ``agent/membership/``.
        right: Occurs there once.
        wrong: Stands there instead.
    """

    name: str
    file: str
    right: str
    wrong: str

    def make(self, folder: Path) -> None:
        """Make it in a copy of ``agent/membership/``.

        Raises:
            ValueError: The source is another than the mistake was made for.
        """
        path = folder / self.file
        source = path.read_text()
        if source.count(self.right) != 1:
            found = source.count(self.right)
            raise ValueError(f"mistake {self.name!r} must replace what is once in {self.file}, found it {found} times")
        path.write_text(source.replace(self.right, self.wrong))


_AGREEMENT = "next_generation/agreement.py"
_FORMING = "next_generation/forming.py"
_MEMBERS = "next_generation/members.py"
_CHANGE = "parts/change.py"
_CHECKPOINTS = "parts/checkpoints.py"
_ERRORS = "parts/own_errors.py"
_LAST = "parts/last_checkpoint.py"
_TRAINING = "parts/training.py"

MISTAKES = (
    # ------------------------------------------------------------ agreement
    Mistake(
        "agreement on the oldest version",
        _AGREEMENT,
        "agreed = max([version, *outcomes, *(progress.version for progress in reports.values())])",
        "agreed = min([p.version for p in reports.values() if p.version >= 0], default=version)",
    ),
    Mistake(
        "nobody is rolled forward",
        _AGREEMENT,
        "roll_forward=outcome if behind else None",
        "roll_forward=None",
    ),
    Mistake(
        "what those behind retained counts as held",
        _AGREEMENT,
        "held[worker] = _current(progress)\n",
        "held[worker] = _joined(_current(progress), _retained(progress))\n",
    ),
    Mistake(
        "states of any version count as held",
        _AGREEMENT,
        "if progress.version == agreed:",
        "if progress.version >= 0:",
    ),
    Mistake(
        "a step that only a dead worker told of is forgotten",
        _AGREEMENT,
        "outcomes.setdefault(newest.step, newest)",
        "pass",
    ),
    Mistake(
        "retained states are no sources",
        _AGREEMENT,
        "held[worker] = _joined(_current(progress), _retained(progress))",
        "held[worker] = _current(progress)",
    ),
    Mistake(
        "a joiner is taken to hold what another holds",
        "lifecycle.py",
        "heard.get(worker, NOTHING)",
        "heard.get(worker) or next(iter(heard.values()), NOTHING)",
    ),
    Mistake(
        "agreement before all have reported",
        "lifecycle.py",
        "elif parts.phase is Phase.AGREEING and not parts.awaits_anybody:",
        "elif parts.phase is Phase.AGREEING and parts.change is not None and parts.change.reports:",
    ),
    Mistake(
        "who stands by is not asked",
        "job_parts.py",
        "return (self.participants.placed() | standing_by) - self.change.reports.keys()",
        "return self.participants.placed() - self.change.reports.keys()",
    ),
    Mistake(
        "reports of nodes that are gone count",
        "job_parts.py",
        "            self.change.forget(member.workers)",
        "            pass",
    ),
    # ------------------------------------------------------------ fencing
    Mistake(
        "reports for older generations count",
        "handlers.py",
        "if change is not None and message.generation == change.generation:",
        "if change is not None:",
    ),
    Mistake(
        "installations of older generations count",
        "handlers.py",
        "        if message.generation != self._context.generation:\n            return\n"
        '        self._context.record(\n            "installed"',
        '        self._context.record(\n            "installed"',
    ),
    Mistake(
        "steps of older generations count",
        "handlers.py",
        "        if message.generation != self._context.generation:\n            return\n"
        "        self._parts.suspicions.note_step",
        "        self._parts.suspicions.note_step",
    ),
    Mistake(
        "parts of checkpoints of older generations count",
        "credibility.py",
        "is_writer and message.generation == parts.context.generation and",
        "is_writer and",
    ),
    Mistake(
        "suspicions of older generations count",
        "handlers.py",
        "        if message.generation != self._context.generation:\n            return\n        where",
        "        where",
    ),
    Mistake(
        "nodes that are gone are listened to",
        "machine.py",
        "said.node not in self.members or not is_credible(self.parts, said.message, worker)",
        "False",
    ),
    # ------------------------------------------------------------ losses, joins, departures
    Mistake(
        "who suspects is given up",
        "handlers.py",
        'self._regrouping.begin_failure([], f"communication{where} failed: {message.reason}")',
        "self._lifecycle.evict(worker[0], message.reason)",
    ),
    Mistake(
        "nobody who does not report is given up",
        _CHANGE,
        "if now < self._deadline:",
        'if now < float("inf"):',
    ),
    Mistake(
        "stalls are not seen",
        "regrouping.py",
        "        if stalled_s:\n",
        "        if stalled_s < 0:\n",
    ),
    Mistake(
        "a loss while all go to a boundary waits for it",
        "regrouping.py",
        "if parts.change is None or parts.change.at_boundary:",
        "if parts.change is None:",
    ),
    Mistake(
        "the loss of a sender is no loss",
        "lifecycle.py",
        "return parts.participants.is_placed(node) or parts.participants.sends(node)",
        "return parts.participants.is_placed(node)",
    ),
    Mistake(
        "the loss of who saves is no loss",
        "lifecycle.py",
        "return node in {waited for waited, _ in parts.awaiting}",
        "return False",
    ),
    Mistake(
        "joins and departures leave the step under way",
        "lifecycle.py",
        'self._regrouping.begin(at_boundary=True, cause="join" if joining else "leave")',
        'self._regrouping.begin(at_boundary=False, cause="join" if joining else "leave")',
    ),
    Mistake(
        "who leaves is let go at once",
        "handlers.py",
        "if not self._parts.is_needed(event.node):",
        "if event.node >= 0:",
    ),
    Mistake(
        "who leaves gets a place",
        _MEMBERS,
        "member.is_ready and not member.leaving",
        "member.is_ready",
    ),
    Mistake(
        "workers are counted where nodes are meant",
        "regrouping.py",
        "num_missing = parts.ending.needed_nodes - len(parts.context.available())",
        "num_missing = parts.ending.needed_nodes - len(parts.context.ready_workers())",
    ),
    Mistake(
        "nobody is waited for when nodes are too few",
        "regrouping.py",
        "return not change.has_waited or len(coming) >= num_missing",
        "return False",
    ),
    # ------------------------------------------------------------ nodes cut off, errors, likeness
    Mistake(
        "who is cut off is lost at once",
        "handlers.py",
        "if change is not None and not change.at_boundary:",
        "if change is None or not change.at_boundary:",
    ),
    Mistake(
        "who is back counts as cut off",
        "handlers.py",
        "members[event.node].cut_off = False",
        "members[event.node].cut_off = True",
    ),
    Mistake(
        "the same error on a second node is that node's own",
        _ERRORS,
        "if first != node:",
        "if first < 0:",
    ),
    Mistake(
        "an error of one node is the job's own",
        _ERRORS,
        "if not self._has_stepped:",
        "if kind:",
    ),
    Mistake(
        "ever different errors cost node after node",
        _ERRORS,
        "if len(self._since_step) >= _MOST_WITHOUT_A_STEP:",
        "if len(self._since_step) < 0:",
    ),
    Mistake(
        "who had an error stays",
        "regrouping.py",
        "            self.send_away(node, error)",
        "            pass",
    ),
    Mistake(
        "whose link broke once is let go",
        "parts/suspicions.py",
        "_ENOUGH = 2",
        "_ENOUGH = 1",
    ),
    Mistake(
        "an odd copy of which another tells is kept",
        "handlers.py",
        "if change is None or holder not in change.damaged}",
        "if holder == worker and (change is None or holder not in change.damaged)}",
    ),
    Mistake(
        "who is unlike the others is let in",
        "handlers.py",
        "reason = parts.likeness.why_unlike(member.node, message.job.alike) or parts",
        "reason = parts",
    ),
    # ------------------------------------------------------------ checkpoints
    Mistake(
        "the last checkpoint's copies are not compared",
        _LAST,
        "return find_differences(copies, is_equal)",
        "return []",
    ),
    Mistake(
        "what was written of an odd copy counts",
        _LAST,
        "if worker in self._writers[state]:",
        "if worker[0] < 0:",
    ),
    Mistake(
        "a checkpoint is whole with its first part",
        _CHECKPOINTS,
        "if not self._parts.lacking(message.step, job.profile):",
        "if self._parts.states(message.step):",
    ),
    Mistake(
        "a checkpoint is made of parts of two steps",
        _CHECKPOINTS,
        "        states = self._states.get(step, {})\n",
        "        states = {name: files for states in self._states.values() for name, files in states.items()}\n",
    ),
    Mistake(
        "a checkpoint is made of parts of two generations",
        _CHECKPOINTS,
        "        self._parts = Parts()\n        for step in",
        "        for step in",
    ),
    Mistake(
        "a checkpoint without a manifest counts",
        _CHECKPOINTS,
        "        self._context.do(write)\n",
        "        self._context.do(write)\n        self.note_written(write.path)\n",
    ),
    Mistake(
        "lost states are made anew",
        _FORMING,
        "source = source_at(agreement.version, checkpoints)",
        "source = source_at(agreement.version, checkpoints) or INIT",
    ),
    Mistake(
        "the oldest checkpoint is gone back to",
        _FORMING,
        "newest = max(checkpoints, key",
        "newest = min(checkpoints, key",
    ),
    Mistake(
        "skipped steps are forgotten",
        _TRAINING,
        "self._version, self._skipped = formed.version, formed.skipped",
        "self._version = formed.version",
    ),
    # ------------------------------------------------------------ ends
    Mistake(
        "finished without a checkpoint",
        "handlers.py",
        "is_saved = parts.progress.step == num_steps and parts.checkpoints.has(num_steps)",
        "is_saved = True",
    ),
    Mistake(
        "a last step that nobody holds is not trained again",
        "regrouping.py",
        "return parts.is_complete or not uncovered(job.profile, agreement.held.values())",
        "return True",
    ),
    Mistake(
        "the last checkpoint may lack what nobody holds",
        "ends.py",
        "        if lost:\n",
        "        if lost and step < 0:\n",
    ),
    Mistake(
        "a generation follows an interruption",
        "regrouping.py",
        "        if parts.ending.reason:\n",
        "        if parts.ending.failure:\n",
    ),
    Mistake(
        "the end does not wait for the main worker",
        "lifecycle.py",
        "if node == main_node and main_rank not in member.done:",
        "if node < 0 and main_rank == main_node:",
    ),
    Mistake(
        "several workers speak for the job",
        "ends.py",
        "Finish(is_main=worker == parts.participants.main)",
        "Finish(is_main=worker[1] == parts.participants.main[1])",
    ),
    Mistake(
        "an interruption waits for ever for its checkpoint",
        "lifecycle.py",
        "if now >= interruption.deadline:",
        'if now >= float("inf"):',
    ),
    Mistake(
        "the last checkpoint is waited for for ever",
        "handlers.py",
        "if last is not None and self._context.now >= last.deadline:",
        'if last is not None and self._context.now >= float("inf"):',
    ),
)
