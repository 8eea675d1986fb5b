"""Accelerators by their data sheets, for planning without having them.

Owns numbers, and the clusters made of them. What the data sheets do not say is assumed, once for all devices or per
device, and said here.
"""

from __future__ import annotations

from dataclasses import dataclass

from resilient.templates.common.words import look_up
from resilient.templates.inputs.cluster import Cluster, Link

USABLE_MEMORY = 0.9
"""Part of a device's memory that a plan may fill (assumed): the rest is for the driver's context, buffers of the
communication library, workspaces and what fragmentation wastes."""

LINK_EFFICIENCY = 0.8
"""Part of a link's nominal bandwidth per direction that large messages reach (assumed; NCCL's tests reach 0.75 to 0.9
over NVLink, PCIe and InfiniBand)."""

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, and how its makers and cloud providers connect it.

    Args:
        flops_per_s: Dense multiplications and additions of fp16 or bf16 matrices, nominal.
        matmul_efficiency: Part of ``flops_per_s`` that a transformer's matrix products reach. Assumed so that whole
            steps come near published runs: Megatron-LM reaches 0.44 to 0.56 of an A100 (Narayanan et al. 2021, table
            1; Korthikanti et al. 2023, table 5), norms, communication and the filling of the pipeline included.
        memory_bytes: All its memory.
        memory_bytes_per_s: Memory bandwidth, nominal.
        intra_node: To another device of the node.
        inter_node: To a device of another node.
    """

    flops_per_s: float
    matmul_efficiency: float
    memory_bytes: int
    memory_bytes_per_s: float
    intra_node: Link
    inter_node: Link


def network(gbit_per_s: float) -> Link:
    """Describe a network between nodes by its nominal bandwidth, of a device and in one direction."""
    return _link(gbit_per_s / 8, 0.02)


def _link(gb_per_s: float, latency_ms: float) -> Link:
    return Link(latency_ms=latency_ms, bytes_per_s=LINK_EFFICIENCY * gb_per_s * 1e9)


# Latencies are what a message of a few bytes takes through NCCL, to the order of magnitude.
_PCIE_4 = _link(32, 0.015)
_NVLINK_2, _NVLINK_3, _NVLINK_4 = _link(150, 0.01), _link(300, 0.01), _link(450, 0.01)
_IB_EDR, _IB_HDR, _IB_NDR = network(100), network(200), network(400)

DEVICES = {
    # 300 W do not sustain the nominal clock in large products, nor 72 W that of the L4.
    "a40": Device(
        flops_per_s=149.7e12,
        matmul_efficiency=0.5,
        memory_bytes=48 * _GIB,
        memory_bytes_per_s=696e9,
        intra_node=_PCIE_4,
        inter_node=_IB_HDR,
    ),
    "a100-40gb": Device(
        flops_per_s=312e12,
        matmul_efficiency=0.6,
        memory_bytes=40 * _GIB,
        memory_bytes_per_s=1555e9,
        intra_node=_NVLINK_3,
        inter_node=_IB_HDR,
    ),
    "a100-80gb": Device(
        flops_per_s=312e12,
        matmul_efficiency=0.6,
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=2039e9,
        intra_node=_NVLINK_3,
        inter_node=_IB_HDR,
    ),
    "h100": Device(
        flops_per_s=989.4e12,
        matmul_efficiency=0.55,
        memory_bytes=80 * _GIB,
        memory_bytes_per_s=3350e9,
        intra_node=_NVLINK_4,
        inter_node=_IB_NDR,
    ),
    "h200": Device(
        flops_per_s=989.4e12,
        matmul_efficiency=0.55,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4800e9,
        intra_node=_NVLINK_4,
        inter_node=_IB_NDR,
    ),
    "v100-32gb": Device(
        flops_per_s=125e12,
        matmul_efficiency=0.5,
        memory_bytes=32 * _GIB,
        memory_bytes_per_s=900e9,
        intra_node=_NVLINK_2,
        inter_node=_IB_EDR,
    ),
    "l4": Device(
        flops_per_s=121e12,
        matmul_efficiency=0.45,
        memory_bytes=24 * _GIB,
        memory_bytes_per_s=300e9,
        intra_node=_PCIE_4,
        inter_node=_IB_EDR,
    ),
}
"""By name; the SXM variants of A100, H100, H200 and V100."""


def full_name(name: str) -> str:
    """Return the device that a name means: one without a size means the largest; any other means itself."""
    sizes = [known for known in DEVICES if known.startswith(f"{name}-")]
    return max(sizes, key=lambda known: DEVICES[known].memory_bytes, default=name)


def cluster_of(device: str, devices_per_node: int, *, inter_node: Link | None = None) -> Cluster:
    """Describe nodes of a known device.

    Args:
        device: A name in :data:`DEVICES`.
        devices_per_node: Devices of each node.
        inter_node: Between two nodes, where it is not what is usual for the device.

    Raises:
        ValueError: The device is not known; the message names those that are.
    """
    known = look_up("device", device, DEVICES)
    return Cluster(
        devices_per_node=devices_per_node,
        memory_bytes=int(USABLE_MEMORY * known.memory_bytes),
        intra_node=known.intra_node,
        inter_node=inter_node or known.inter_node,
    )
