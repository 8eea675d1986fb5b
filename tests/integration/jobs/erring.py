"""The small chain; on the first nodes that read a sample of a step, and on no others, something fails."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import chain
from torch import Tensor

from resilient.data.sampler import StepSampler

BATCH = 28
ERRORS = ("disk", "memory", "kill", "crash")


def parse_arguments() -> argparse.Namespace:
    """Return the options of the errors; the others are the chain's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--err-step", type=int, required=True)
    parser.add_argument("--err-on", type=int, default=1, metavar="COUNT", help="how many nodes")
    parser.add_argument("--err", choices=ERRORS, default="disk", help="of each node, in turn")
    parser.add_argument("--then-err", choices=ERRORS, help="of all but the first node")
    parser.add_argument("--marks", type=Path, required=True, metavar="FOLDER", help="where nodes say that it is them")
    args, others = parser.parse_known_args()
    sys.argv[1:] = others
    return args


class ErringWaves(chain.Waves):
    """Samples that some nodes cannot read."""

    args = parse_arguments()
    erring = frozenset(
        map(int, StepSampler(num_samples=chain.NUM_SAMPLES, global_batch=BATCH, seed=0).indices(args.err_step))
    )

    def __getitem__(self, index: int) -> Mapping[str, Tensor]:
        turn = self._turn() if index in self.erring else None
        if turn is not None:
            self._fail(self.args.then_err if turn and self.args.then_err else self.args.err, index)
        return super().__getitem__(index)

    def _turn(self) -> int | None:
        """Return the how manyeth node with errors this is; None if it is none."""
        node = os.environ["RESILIENT_NODE"]
        for turn in range(self.args.err_on):
            mark, mine = self.args.marks / f"{turn}", self.args.marks / f"{turn}-{node}-{os.getpid()}"
            mine.write_text(node)
            try:
                os.link(mine, mark)
            except FileExistsError:
                if mark.read_text() != node:
                    continue
            return turn
        return None

    def _fail(self, what: str, index: int) -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif what == "memory":
            raise MemoryError(f"no room for sample {index}")
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"/data/{index}")


if __name__ == "__main__":
    chain.Waves = ErringWaves
    chain.main()
