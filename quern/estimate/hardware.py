"""What is known of GPUs and networks: their makers' figures, and the few assumptions that turn these into speeds.

Peaks are dense, bf16 with fp32 accumulation; bandwidths are bytes per second in one direction. Sources: NVIDIA's data
sheets (A100, H100, H200, HGX B200, L40S; GeForce RTX 4090's architecture paper), whose peaks "with sparsity" and
bandwidths of both directions are halved here; InfiniBand's and Ethernet's names say their rate. A measured rate is
better than any of it: `quern lab plan --matmul-tflops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

ATTAINED_MATMUL = 0.7
"""Share of the peak at which large matrix products run: clocks fall under load, and tiles do not fill a GPU evenly."""
ATTAINED_BANDWIDTH = 0.8
"""Share of a link's or a memory's rate that large transfers reach."""


@dataclass(frozen=True)
class Processor:
    """peak_flops: per second; memory: bytes; memory_bandwidth, link_bandwidth: bytes per second, the latter to others
    in its machine; link_seconds: of one hop; per_machine: how many usually are in one; reserved: bytes that the driver,
    NCCL and the allocator keep; dollars_per_hour: what one costs to rent, where a public source says so."""

    peak_flops: float
    memory: float
    memory_bandwidth: float
    link_bandwidth: float
    link_seconds: float
    per_machine: int
    reserved: float = 2e9
    attained: float = ATTAINED_MATMUL
    dollars_per_hour: float | None = None


@dataclass(frozen=True)
class Network:
    """bandwidth: bytes per second that leave one machine, or, if each GPU has its adapter, one GPU; hop_seconds."""

    bandwidth: float
    hop_seconds: float
    adapter_per_gpu: bool


NVLINK_SECONDS, PCIE_SECONDS = 3e-6, 1e-5

PROCESSORS: Mapping[str, Processor] = MappingProxyType(
    {
        "a100": Processor(312e12, 80e9, 2.04e12, 300e9, NVLINK_SECONDS, 8),
        # The price: nanochat's speedrun, 8 of them at about $24 an hour (github.com/karpathy/nanochat).
        "h100": Processor(989e12, 80e9, 3.35e12, 450e9, NVLINK_SECONDS, 8, dollars_per_hour=3.0),
        "h200": Processor(989e12, 141e9, 4.8e12, 450e9, NVLINK_SECONDS, 8),
        "b200": Processor(2250e12, 180e9, 7.7e12, 900e9, NVLINK_SECONDS, 8),
        "l40s": Processor(362e12, 48e9, 0.864e12, 32e9, PCIE_SECONDS, 8),
        "rtx4090": Processor(165e12, 24e9, 1.008e12, 25e9, PCIE_SECONDS, 4),
    }
)

NETWORKS: Mapping[str, Network] = MappingProxyType(
    {
        "ib-xdr": Network(100e9, 5e-6, True),
        "ib-ndr": Network(50e9, 5e-6, True),
        "ib-hdr": Network(25e9, 5e-6, True),
        "ethernet-400g": Network(50e9, 2e-5, False),
        "ethernet-100g": Network(12.5e9, 2e-5, False),
        "ethernet-25g": Network(3.125e9, 5e-5, False),
        "ethernet-10g": Network(1.25e9, 5e-5, False),
    }
)

CPU_MEMORY_BANDWIDTH, LOOPBACK_BANDWIDTH, LOOPBACK_SECONDS = 1e10, 1e9, 1e-4
"""Of one rank beside others on a machine; gloo through the loopback device, which copies twice."""


def processors_like_this(flops: float, memory: float, ranks: int) -> Processor:
    """One of `ranks` processes that share a CPU. flops: measured, of all cores together; memory: the machine's."""
    return Processor(
        flops / ranks, memory / ranks, CPU_MEMORY_BANDWIDTH, LOOPBACK_BANDWIDTH, LOOPBACK_SECONDS, ranks, 0.0, 1.0
    )
