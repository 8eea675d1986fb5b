"""Which streams of workers reach the screen, in torchrun's words: ``--tee``, ``--redirects``, a filter of ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resilient.errors import ArgumentError

STDOUT, STDERR = 1, 2
BOTH = STDOUT | STDERR

_EACH = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
_RANKS = re.compile(r"\d+(,\d+)*")


@dataclass(frozen=True, kw_only=True)
class ShownStreams:
    """What is shown of each worker, by its local rank. All that workers print is in their logs besides.

    ``tee`` and ``redirects`` are numbers, 0 for no stream, 1 for stdout, 2 for stderr and 3 for both; or one for each
    local rank, as in "0:1,1:3", and none for those that are not named.

    Args:
        tee: Streams that are shown.
        redirects: Streams that go to the log alone; others are shown, too. ``tee`` counts where both name one.
        local_ranks: Workers of which anything is shown, as in "0,1"; "" for all.
    """

    tee: str = "0"
    redirects: str = "3"
    local_ranks: str = ""

    def __post_init__(self) -> None:
        for name in ("tee", "redirects"):
            text = getattr(self, name)
            if text not in ("0", "1", "2", "3") and not _EACH.fullmatch(text):
                fix = "0 is for none, 1 for stdout, 2 for stderr, 3 for both"
                raise ArgumentError(name, "be 0, 1, 2, 3 or RANK:N,...", repr(text), fix)
        if self.local_ranks and not _RANKS.fullmatch(self.local_ranks):
            raise ArgumentError(
                "local_ranks_filter", "be local ranks with commas between", repr(self.local_ranks), "as in 0,1"
            )

    def of(self, local_rank: int) -> int:
        """Return what is shown of a worker: a sum of ``STDOUT`` and ``STDERR``."""
        if self.local_ranks and local_rank not in map(int, self.local_ranks.split(",")):
            return 0
        return _named(self.tee, local_rank) | (BOTH & ~_named(self.redirects, local_rank))

    @property
    def has_any(self) -> bool:
        """Whether anything of anybody may be shown."""
        return self.tee != "0" or self.redirects != "3"

    def logs(self, local_rank: int) -> tuple[bool, bool]:
        """Return whether a worker's log is shown, and whether the one is that stdout has where the two are apart."""
        streams = self.of(local_rank)
        return bool(streams & STDERR), bool(streams & STDOUT)

    @property
    def options(self) -> tuple[str, ...]:
        """The words that say the same on a command line."""
        words = ("--tee", self.tee, "--redirects", self.redirects)
        return (*words, "--local-ranks-filter", self.local_ranks) if self.local_ranks else words


def _named(text: str, local_rank: int) -> int:
    if ":" not in text:
        return int(text)
    each = dict(pair.split(":") for pair in text.split(","))
    return next((int(streams) for rank, streams in each.items() if int(rank) == local_rank), 0)
