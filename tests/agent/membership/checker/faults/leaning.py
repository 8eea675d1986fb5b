"""What a seed has more of than others: with a little of everything, what takes three of a kind hardly ever happens."""

from __future__ import annotations

from enum import Enum
from random import Random


class Leaning(Enum):
    """A leaning; the values are the faults that it makes frequent."""

    NONE = ()
    LOSSES = ("dies", "dies with others", "loses a worker", "is joined by another")
    CHECKPOINTS = ("has a full disk", "sees a manifest fail", "is interrupted", "hangs", "has damaged memory", "dies")
    MOVES = ("leaves", "is joined by another", "is joined by one that is unlike", "dies", "is disconnected")
    ERRORS = ("has an error", "has a broken link", "loses a connection", "is disconnected", "is joined by another")

    @classmethod
    def draw(cls, random: Random) -> Leaning:
        """Return that of a seed."""
        return random.choice((cls.NONE, cls.LOSSES, cls.LOSSES, cls.CHECKPOINTS, cls.MOVES, cls.ERRORS))

    @property
    def shape_weights(self) -> tuple[int, ...]:
        """How often each shape of job is drawn: without redundancy, one loss is one too many.

        Three copies are what damage can be found out by, and few needed nodes what errors can be borne with.
        """
        match self:
            case Leaning.LOSSES:
                return (2, 2, 1, 1, 4, 4)
            case Leaning.CHECKPOINTS:
                return (2, 2, 1, 5, 1, 0)
            case Leaning.ERRORS:
                return (4, 1, 3, 1, 2, 1)
            case _:
                return (3, 4, 3, 2, 1, 0)

    @property
    def num_spare(self) -> int:
        """How many nodes there are at least besides those that are needed."""
        return 2 if self in (Leaning.ERRORS, Leaning.MOVES) else 0

    @property
    def checkpoints_every(self) -> tuple[int, ...]:
        """What is drawn from for the steps from one checkpoint to the next; 0 for none."""
        return (0, 1, 1, 2) if self is Leaning.LOSSES else (0, 0, 1, 2)

    @property
    def speeds(self) -> tuple[float, ...]:
        """What is drawn from for how readily something of a node happens: slow ones are far behind the others."""
        if self is Leaning.LOSSES:
            return (1.0, 0.03)
        return (1.0, 1.0, 0.05) if self is Leaning.MOVES else (1.0, 1.0, 0.3, 0.05)

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of the moments that faults wait for more often."""
        return ("FIRST_STEP", "SAVED", "SAVED", "LAST_STEP", "INSTALLING") if self is Leaning.LOSSES else ()

    @property
    def skipping_rate(self) -> float:
        """How many of the steps are skipped."""
        return 0.5 if self is Leaning.LOSSES else 0.2

    @property
    def num_faults(self) -> tuple[int, ...]:
        """What is drawn from for how many faults there are."""
        return (0, 1, 2, 4, 6, 8) if self is Leaning.NONE else (2, 4, 6, 8)

    def weigh(self, kind: str, weight: float, random: Random) -> float:
        """Return how often a kind of fault comes: of each seed, a quarter of them not at all."""
        return weight * random.choice((0, 1, 1, 2)) * (6 if kind in self.value else 1)
