"""The worker's connection to its node agent: a Unix-domain socket, one reader thread, an inbox.

Owns the worker's end; messages are msgpack, in frames. Workers never import
``resilient.agent``; the agent imports this. Must not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable

import msgspec

from resilient.common.framing import HEADER_BYTES, frame, frame_size
from resilient.errors import ControlError
from resilient.protocol.generation_packing import GenerationUnpacker
from resilient.protocol.messages import (
    MAX_MESSAGE_BYTES,
    Arm,
    FromWorkerMessage,
    PackedGeneration,
    Regroup,
    ToWorkerMessage,
    decode_to_worker,
    encode,
)
from resilient.templates.inputs.cluster import Cluster, Link
from resilient.templates.plan import Sharding, check_beside_planner, tensor_degree

logger = logging.getLogger(__name__)


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First frame of a worker: who it is, and the proof that its agent started it, and started no other since."""

    token: str
    local_rank: int


def socket_address(name: str) -> str:
    """Return the address of the socket that an agent calls ``name``.

    It is one without a file: an agent that is killed leaves nothing behind.
    """
    return f"\0{name}"


_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as the kernel tells them."""


def user_at_other_end(connection: socket.socket) -> int:
    """Return whose process it is: the socket has no file whose rights would say who may come, or listen."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user


decode_attach = msgspec.msgpack.Decoder(Attach).decode


def _die_with_agent() -> None:
    os._exit(1)


class AgentClient:
    """A worker's connection to its agent.

    Set ``on_regroup`` and ``on_arm`` before sending ``Ready``. Both are called in the reader thread, as soon as the
    message is there; they must be quick and must not raise.

    Args:
        name: Of the agent's socket (:func:`socket_address`).
        token: What the agent gave this worker.
        node: Number of this node.
        local_rank: Which of the node's workers this is.
        run_directory: Where checkpoints and logs go.
        on_lost: Called in the reader thread when the agent is gone. A worker dies with its agent: by default the
            process exits at once.

    Raises:
        ControlError: The agent cannot be reached.
    """

    def __init__(
        self,
        name: str,
        *,
        token: str,
        node: int,
        local_rank: int,
        run_directory: str,
        on_lost: Callable[[], None] = _die_with_agent,
    ) -> None:
        self.node = node
        self.local_rank = local_rank
        self.run_directory = run_directory
        self.on_regroup: Callable[[Regroup], None] | None = None
        self.on_arm: Callable[[Arm], None] | None = None
        self._on_lost = on_lost
        self._unpacker = GenerationUnpacker()
        self._inbox: queue.SimpleQueue[ToWorkerMessage | None] = queue.SimpleQueue()
        self._send_lock = threading.Lock()
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(socket_address(name))
            if (user := user_at_other_end(self._socket)) != os.geteuid():  # its name is free once the agent is killed
                raise PermissionError(errno.EPERM, f"user {user} listens there")
            self._socket.sendall(frame(encode(Attach(token=token, local_rank=local_rank)), MAX_MESSAGE_BYTES))
        except OSError as error:
            self._socket.close()
            raise ControlError(f"cannot reach the node agent at {name}: {error}") from error
        self._reader = threading.Thread(target=self._read, name="agent-reader", daemon=True)
        self._reader.start()

    @staticmethod
    def is_wanted() -> bool:
        """Return whether an agent started this process."""
        return "RESILIENT_AGENT" in os.environ

    @classmethod
    def from_environment(cls) -> AgentClient | None:
        """Connect to the agent that started this process; None when no agent did."""
        if not cls.is_wanted():
            return None
        return cls(
            os.environ["RESILIENT_AGENT"],
            token=os.environ["RESILIENT_TOKEN"],
            node=int(os.environ["RESILIENT_NODE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            run_directory=os.environ["RESILIENT_RUN_DIR"],
        )

    def send(self, message: FromWorkerMessage) -> None:
        """Send a message; any thread may call this.

        Raises:
            ControlError: The agent is gone, or the message is too large.
        """
        data = frame(encode(message), MAX_MESSAGE_BYTES)
        try:
            with self._send_lock:
                self._socket.sendall(data)
        except OSError as error:
            raise ControlError(f"the node agent is gone: {error}") from error

    def receive(self, timeout: float | None = None) -> ToWorkerMessage:
        """Return the next Regroup, Generation, Save or Finish, in the order they were sent.

        Args:
            timeout: Seconds to wait; None waits for ever.

        Raises:
            TimeoutError: Nothing came in time.
            ControlError: The connection is closed.
        """
        try:
            message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"no message from the node agent within {timeout} s") from None
        if message is None:
            self._inbox.put(None)
            raise ControlError("the connection to the node agent is closed")
        return message

    def close(self) -> None:
        """Close the connection; the agent's end afterwards no longer ends this process."""
        self._closed = True
        with contextlib.suppress(OSError):  # the agent may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._socket.close()

    def _read(self) -> None:
        try:
            while (message := self._read_message()) is not None:
                self._dispatch(message)
        except OSError:
            pass  # a connection that breaks is as good as closed
        except (ControlError, msgspec.DecodeError) as error:
            logger.error("closed the connection to the node agent, of which no more can be understood: %s", error)
        self._inbox.put(None)
        if not self._closed:
            self._on_lost()

    def _read_message(self) -> ToWorkerMessage | None:
        header = self._read_exactly(HEADER_BYTES)
        if header is None:
            return None
        payload = self._read_exactly(frame_size(header, MAX_MESSAGE_BYTES))
        if payload is None:
            return None
        message = decode_to_worker(payload)
        return self._unpacker.unpack(message) if isinstance(message, PackedGeneration) else message

    def _read_exactly(self, num_bytes: int) -> bytes | None:
        data = bytearray()
        while len(data) < num_bytes:
            chunk = self._socket.recv(num_bytes - len(data))
            if not chunk:
                return None
            data += chunk
        return bytes(data)

    def _dispatch(self, message: ToWorkerMessage) -> None:
        if isinstance(message, Arm):
            if self.on_arm is not None:
                self.on_arm(message)
            return
        # The inbox first: whoever sees communication break because of the callback finds the reason there.
        self._inbox.put(message)
        if isinstance(message, Regroup) and self.on_regroup is not None:
            self.on_regroup(message)


def cluster_from_environment() -> tuple[Cluster, int, int | None]:
    """Return what a planner is to plan for: the nodes that this worker's agent knows of, how many the job was started
    with, and how many workers of each are to share a microbatch; None for what makes steps shortest.

    Raises:
        ArgumentError: Workers are to divide states, which planners decide on.
    """
    check_beside_planner(Sharding(os.environ.get("RESILIENT_SHARD", Sharding.OFF)))
    workers_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    network = msgspec.json.decode(os.environ["RESILIENT_NETWORK"], type=Link)
    cluster = Cluster(devices_per_node=workers_per_node, inter_node=network)
    degree = tensor_degree(os.environ.get("RESILIENT_TP", "1"))
    return cluster, int(os.environ["WORLD_SIZE"]) // workers_per_node, degree
