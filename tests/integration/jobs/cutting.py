"""The small chain; in every generation, the connections of one pair of nodes break as soon as it is installed."""

from __future__ import annotations

import argparse
import sys

import chain

from resilient.comm import GlooCommunicator
from resilient.comm.own_sockets import shut_down_connections
from resilient.protocol.messages import Generation, Installed
from resilient.runtime import install as installing
from resilient.runtime import worker
from resilient.runtime.install import Session, WorkerContext


def parse_arguments() -> argparse.Namespace:
    """Return the pair; the other options are the chain's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cut", type=int, nargs=2, required=True, metavar="NODE")
    args, others = parser.parse_known_args()
    sys.argv[1:] = others
    return args


ARGS = parse_arguments()


def install(context: WorkerContext, message: Generation) -> tuple[Session, Installed]:
    """Install a generation; then break what this worker has connected to the other node of the pair."""
    session, installed = installing.install(context, message)
    nodes = {slot.rank: slot.node for slot in message.plan.slots}
    if session.slot.node in ARGS.cut and isinstance(session.comm, GlooCommunicator):
        others = {address for address, rank in session.comm.peers.items() if nodes[rank] in ARGS.cut}
        shut_down_connections("nobody's", others)
    return session, installed


if __name__ == "__main__":
    worker.install = install
    chain.main()
