"""The machines a job is planned for: devices of a node, their memory, and what moving bytes between them costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilient.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way from one device to another.

    Args:
        latency_ms: Time until the first byte arrives.
        bytes_per_s: Bandwidth; None where it is too large to matter.
    """

    latency_ms: float = 0.0
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.latency_ms < 0:
            raise ArgumentError("latency_ms", "be >= 0", self.latency_ms, "0 means none")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ArgumentError("bytes_per_s", "be > 0", self.bytes_per_s, "None means unlimited")

    def transfer_ms(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_ms + (0.0 if self.bytes_per_s is None else num_bytes / self.bytes_per_s * 1e3)


MOST_BYTES = 10**15
"""Of a device's memory, and of all layers together: a petabyte. Sums and products of them then fit into 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal nodes.

    Args:
        devices_per_node: Devices (workers) of each node.
        memory_bytes: Memory of a device that training may use; None for no limit.
        intra_node: Between two devices of a node.
        inter_node: Between two nodes, through one network card of each.
        cards_per_node: Network cards of each node; None where each device has one.
    """

    devices_per_node: int = 1
    memory_bytes: int | None = None
    intra_node: Link = field(default_factory=Link)
    inter_node: Link = field(default_factory=Link)
    cards_per_node: int | None = None

    def __post_init__(self) -> None:
        if self.devices_per_node < 1:
            raise ArgumentError("devices_per_node", "be >= 1", self.devices_per_node, "give each node a worker")
        if self.memory_bytes is not None and not 1 <= self.memory_bytes <= MOST_BYTES:
            raise ArgumentError("memory_bytes", f"be 1 to {MOST_BYTES}", self.memory_bytes, "None means no limit")
        if self.cards_per_node is not None and self.cards_per_node < 1:
            raise ArgumentError("cards_per_node", "be >= 1", self.cards_per_node, "None means one for each device")

    @property
    def cards_per_device(self) -> float:
        """Network cards of a node for each of its devices."""
        return 1.0 if self.cards_per_node is None else self.cards_per_node / self.devices_per_node
