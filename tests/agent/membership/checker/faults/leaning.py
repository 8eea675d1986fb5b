"""What a seed has more of than others: with a little of everything, what takes three of a kind hardly ever happens."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, kw_only=True)
class Leaning:
    """A leaning. What has several values is drawn from them.

    Args:
        name: What the history calls it.
        often: Faults that are frequent.
        shapes: How often each shape of job is drawn.
        num_spare: Nodes there are at least besides those that are needed.
        num_steps: The fewest and the most steps of a job.
        checkpoints_every: Steps from one checkpoint to the next; 0 for none.
        skipping_rate: How many of the steps are skipped.
        speeds: How readily something of a node happens: slow ones are far behind the others.
        moments: Names of those that faults wait for more often.
        num_faults: How many there are.
        calm: Events that go well at first: with few, no step is done before all goes wrong.
    """

    name: str
    often: tuple[str, ...] = ()
    shapes: tuple[int, ...] = (3, 4, 3, 2, 1, 0, 0)
    num_spare: int = 0
    num_steps: tuple[int, int] = (3, 8)
    checkpoints_every: tuple[int, ...] = (0, 0, 1, 2)
    skipping_rate: float = 0.2
    speeds: tuple[float, ...] = (1.0, 1.0, 0.3, 0.05)
    moments: tuple[str, ...] = ()
    num_faults: tuple[int, ...] = (2, 4, 6, 8)
    calm: tuple[int, ...] = (0,)

    def weigh(self, kind: str, weight: float, random: Random) -> float:
        """Return how often a kind of fault comes: of each seed, a quarter of them not at all."""
        return weight * random.choice((0, 1, 1, 2)) * (6 if kind in self.often else 1)


NONE = Leaning(name="no leaning", num_faults=(0, 1, 2, 4, 6, 8))
LOSSES = Leaning(
    name="losses",
    often=("dies", "dies with others", "loses a worker", "is joined by another"),
    shapes=(2, 2, 1, 1, 3, 3, 2),  # without redundancy, one loss is one too many
    checkpoints_every=(0, 1, 1, 2),
    skipping_rate=0.5,
    speeds=(1.0, 0.03),
    moments=("FIRST_STEP", "SAVED", "SAVED", "LAST_STEP", "INSTALLING"),
)
CHECKPOINTS = Leaning(
    name="checkpoints",
    often=(
        "has a full disk",
        "sees a manifest fail",
        "is interrupted",
        "hangs",
        "has damaged memory",
        "has damaged memory at the end",
    ),
    shapes=(2, 1, 1, 6, 1, 0, 0),  # three copies are what damage can be found out by
    num_spare=2,
    num_steps=(6, 10),
    moments=("ANY", "ANY", "ANY"),
    calm=(0, 40, 80),
)
MOVES = Leaning(
    name="moves",
    often=("leaves", "is joined by another", "is joined by one that is unlike", "dies", "is disconnected"),
    num_spare=2,
    speeds=(1.0, 1.0, 0.05),
)
ONLY_COPIES = Leaning(
    name="only copies",
    often=("leaves", "is cut off", "loses a connection", "repeats itself"),
    shapes=(0, 0, 0, 0, 1, 1, 8),  # who leaves holds what nobody else does, and has no place when it sends that
    num_spare=2,
    num_steps=(6, 10),
    checkpoints_every=(0, 0, 2),
    speeds=(1.0, 1.0, 0.05),
    moments=("ANY", "ANY", "COPYING"),
    calm=(0, 40, 80),
)
ERRORS = Leaning(
    name="errors",
    often=("has an error", "has a broken link", "loses a connection"),
    shapes=(6, 1, 3, 1, 1, 0, 0),  # few needed nodes are what errors can be borne with
    num_spare=3,
    num_steps=(6, 10),
    moments=("ANY", "ANY", "ANY"),
    calm=(0, 40, 80),
)
LEANINGS = (NONE, LOSSES, LOSSES, CHECKPOINTS, MOVES, ERRORS, ONLY_COPIES, ONLY_COPIES)
"""One is drawn for each seed."""
