"""The process groups of one generation, which any thread may abort.

Owns all use of torch's backends. They are built directly, not through ``torch.distributed``'s global state, because a
job has a new set of groups at every change of membership.
"""

from resilient.comm.alone import LastOfSeveral
from resilient.comm.connect import connect
from resilient.comm.gloo import GlooCommunicator
from resilient.comm.interface import DONE, Communicator, Group, Pending, SingleProcessCommunicator
from resilient.comm.store_client import StoreClient
from resilient.comm.store_host import StoreHost

__all__ = [
    "DONE",
    "Communicator",
    "GlooCommunicator",
    "Group",
    "LastOfSeveral",
    "Pending",
    "SingleProcessCommunicator",
    "StoreClient",
    "StoreHost",
    "connect",
]
