"""Flags of `quern lab plan`, makers' figures of the GPUs and networks that they name, and attained shares of those.

Peaks are dense, bf16 with fp32 accumulation; bandwidths are bytes per second in one direction. Sources: NVIDIA's data
sheets (A100, H100, H200, HGX B200, L40S; GeForce RTX 4090's architecture paper), whose peaks "with sparsity" and
bandwidths of both directions are halved here; the names of InfiniBand and Ethernet give their rate. A measured rate is
better than all of these: `quern lab plan --matmul-tflops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Interval

from quern.field_types import Amount, Few
from quern.flags.check_flags import Mark
from quern.flags.recipe_flags import FINE_TUNING, FOLLOWING, RL, Refusal
from quern.recipe import Recipe
from quern.validate import refuse_set

ATTAINED_MATMUL = 0.7
"""Share of the peak that large matrix products reach: clocks fall under load, and tiles do not fill a GPU evenly."""
ATTAINED_BANDWIDTH = 0.8  # share of a link's or a memory's rate that large transfers reach
HOST_BANDWIDTH = 32e9
"""Bytes per second between a GPU and its CPU's memory: PCIe 4, 16 lanes; newer GPUs reach twice that."""
NVLINK_SECONDS, PCIE_SECONDS = 3e-6, 1e-5


@dataclass(frozen=True)
class Processor:
    """A GPU, or one rank's share of a CPU, in FLOP/s, bytes, bytes per second and seconds. Links are those between the
    GPUs of a machine, their seconds of one hop; `reserved`: bytes of the driver, NCCL and the allocator."""

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
    """Links between machines: bytes per second that leave one GPU if each has its adapter, or else one machine."""

    bandwidth: float
    hop_seconds: float
    adapter_per_gpu: bool


PROCESSORS: Mapping[str, Processor] = {
    "a100": Processor(312e12, 80e9, 2.04e12, 300e9, NVLINK_SECONDS, 8),
    # The price: nanochat's speedrun, 8 of them at about $24 an hour (github.com/karpathy/nanochat).
    "h100": Processor(989e12, 80e9, 3.35e12, 450e9, NVLINK_SECONDS, 8, dollars_per_hour=3.0),
    "h200": Processor(989e12, 141e9, 4.8e12, 450e9, NVLINK_SECONDS, 8),
    "b200": Processor(2250e12, 180e9, 7.7e12, 900e9, NVLINK_SECONDS, 8),
    "l40s": Processor(362e12, 48e9, 0.864e12, 32e9, PCIE_SECONDS, 8),
    "rtx4090": Processor(165e12, 24e9, 1.008e12, 25e9, PCIE_SECONDS, 4),
}
NETWORKS: Mapping[str, Network] = {
    "ib-xdr": Network(100e9, 5e-6, True),
    "ib-ndr": Network(50e9, 5e-6, True),
    "ib-hdr": Network(25e9, 5e-6, True),
    "ethernet-400g": Network(50e9, 2e-5, False),
    "ethernet-100g": Network(12.5e9, 2e-5, False),
    "ethernet-25g": Network(3.125e9, 5e-5, False),
    "ethernet-10g": Network(1.25e9, 5e-5, False),
}


def cpu_rank(flops: float, memory: float, ranks: int) -> Processor:
    """Returns one of `ranks` processes that share a CPU of so many measured FLOP/s and bytes, and talk through
    loopback."""
    memory_bandwidth, loopback_bandwidth, loopback_seconds = 1e10, 1e9, 1e-4
    links = loopback_bandwidth, loopback_seconds, ranks
    return Processor(flops / ranks, memory / ranks, memory_bandwidth, *links, reserved=0.0, attained=1.0)


@dataclass(frozen=True)
class PlanOptions:
    """Flags of `quern lab plan`: the fields of the recipe, and the hardware."""

    refusals: ClassVar = (
        RL,
        Refusal(FINE_TUNING, "is for fine-tuning, and a plan is for pretraining"),
        Refusal("train.minutes", "is a time on this machine, and a plan says how long others take: give --train.steps"),
        Refusal("text.tokenizer", "is not read for a plan: leave it out, and give its size with --text.vocab-size"),
        Refusal(
            "train.fp8", "is not in a plan, which counts products in bf16: leave it out, also of the recipe's file"
        ),
        FOLLOWING[0],
    )

    recipe: Annotated[Recipe, Mark.FLAT]
    gpus: Few = 8
    """Number of GPUs in all; of ranks, for --gpu cpu."""
    gpu: Literal["a100", "h100", "h200", "b200", "l40s", "rtx4090", "cpu"] = "h100"
    """cpu: ranks that share this machine, whose matrix products are measured."""
    network: Literal["ib-xdr", "ib-ndr", "ib-hdr", "ethernet-400g", "ethernet-100g", "ethernet-25g", "ethernet-10g"] = (
        "ib-ndr"
    )
    """Between machines; ib: an adapter for each GPU, ethernet: one for each machine."""
    per_machine: Few | None = None
    """GPUs in one machine. Default: as machines are usually sold."""
    matmul_tflops: Amount | None = None
    """Measured rate of a GPU's large matrix products (`quern bench train`). Default: 70 % of its peak."""
    dollars_per_hour: Annotated[float, Interval(ge=0, le=1e6)] | None = None
    """The price of one GPU. Default: as in quern/estimate/options.py."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """The compute dtype."""
    compile: bool = True
    """--no-compile: memory of an eager run."""
    json: Path | None = None
    """Also write everything to this file. Default: no file."""

    def __post_init__(self) -> None:
        refuse_set(self.recipe, self.refusals)
