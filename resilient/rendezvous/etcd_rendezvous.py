"""The rendezvous backend ``etcd-v3`` of torchrun, which it finds by its entry point in the group ``torchrun.handlers``.

torch itself speaks etcd's old protocol alone, which servers since 3.4 have switched off. Tried with torch 2.13; the
classes of ``torch.distributed.elastic.rendezvous`` that it builds on are documented.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

# The package itself may be half imported: it looks for its plug-ins as it is imported.
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from resilient.common.network.etcd_connection import EtcdUnreachableError, KeptLease, asked_until, etcd_client
from resilient.rendezvous.etcd_store import EtcdStore

if TYPE_CHECKING:
    from pyetcd import MultiEndpointEtcd3Client

_PREFIX = "/torch/elastic/"
_TTL_S = 7200
"""What a job leaves is forgotten by etcd after two hours, as torch's own backend has it."""
_PATIENCE_S = 60.0
"""For so long etcd may be away: a job's agents ask several times a second, and would end of the first failure."""


class EtcdRendezvousBackend(RendezvousBackend):
    """Keeps the state of one job's rendezvous under one key."""

    def __init__(self, client: MultiEndpointEtcd3Client, run_id: str, lease: KeptLease) -> None:
        """Wrap a client; the state ends with the lease."""
        self._client = client
        self._key = f"{_PREFIX}rendezvous/{run_id}"
        self._lease = lease

    @property
    def name(self) -> str:
        """What ``--rdzv-backend`` calls it."""
        return "etcd-v3"

    def get_state(self) -> tuple[bytes, Any] | None:
        """Return the state and the revision that wrote it, None where there is none."""
        value, about = self._asked(lambda: self._client.get(self._key))
        return None if about is None else (value, about.mod_revision)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        """Write the state if it is as the token says, absent without one.

        Returns:
            What is there then, the revision that wrote it, and whether that was this call.
        """
        made = self._client.transactions
        if token is not None and not isinstance(token, int):
            return self._unchanged()
        done, answers = self._asked(
            lambda: self._client.transaction(
                compare=[made.mod(self._key) == (token or 0)],
                success=[made.put(self._key, state, self._lease.id()), made.get(self._key)],
                failure=[],
            )
        )
        if not done:
            return self._unchanged()
        ((value, about),) = answers[1]
        return value, about.mod_revision, True

    def _unchanged(self) -> tuple[bytes, Any, bool] | None:
        found = self.get_state()
        return None if found is None else (*found, False)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return asked_until(time.monotonic() + _PATIENCE_S, self._client, ask)
        except EtcdUnreachableError as error:
            raise RendezvousConnectionError(str(error)) from error


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    # By default torch's agents keep the address of the store of the first round. Where a newcomer becomes rank 0, or
    # rank 0 is lost, they would then wait for each other at two of them; this has them agree on one in each round.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    client = etcd_client(
        parameters.endpoint,
        timeout_s=float(parameters.get("read_timeout", 10)),
        ca=parameters.get("ca_cert"),
        certificate=parameters.get("ssl_cert"),
        key=parameters.get("ssl_cert_key"),
    )
    try:
        lease = KeptLease(client, _TTL_S)
    except EtcdUnreachableError as error:
        raise RendezvousConnectionError(str(error)) from error
    joined = timedelta(seconds=float(parameters.get("join_timeout", 600)))
    store = EtcdStore(client, f"{_PREFIX}store/{parameters.run_id}/", joined, lease)
    return create_handler(store, EtcdRendezvousBackend(client, parameters.run_id, lease), parameters)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return what makes a rendezvous handler of torchrun's parameters; the entry point.

    ``--rdzv-endpoint`` names the servers, ``HOST[:PORT],...``. Of ``--rdzv-conf``: ``read_timeout`` (s, 10),
    ``ca_cert``, ``ssl_cert`` and ``ssl_cert_key`` (files), and all that torch's dynamic rendezvous knows.
    """
    return _create
