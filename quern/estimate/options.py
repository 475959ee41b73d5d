"""Flags of `quern lab plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro
from annotated_types import Interval

from quern.flags.check_flags import UNSAID
from quern.flags.recipe_flags import FOLLOWING
from quern.ranges import Amount, Few
from quern.recipe import Recipe


@dataclass(frozen=True)
class PlanOptions:
    """Flags of `quern lab plan`: the fields of the recipe, and the hardware."""

    refusals: ClassVar = FOLLOWING[:1]

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    gpus: Few = 8
    """Number of GPUs in all; of ranks, for --gpu cpu."""
    gpu: Literal["a100", "h100", "h200", "b200", "l40s", "rtx4090", "cpu"] = "h100"
    """cpu: ranks that share this machine, whose matrix products are measured."""
    network: Literal["ib-xdr", "ib-ndr", "ib-hdr", "ethernet-400g", "ethernet-100g", "ethernet-25g", "ethernet-10g"] = (
        "ib-ndr"
    )
    """Between machines; ib: an adapter for each GPU, ethernet: one for each machine."""
    per_machine: Annotated[Few | None, UNSAID] = None
    """GPUs in one machine. Default: as machines are usually sold."""
    matmul_tflops: Annotated[Amount | None, UNSAID] = None
    """Measured rate of a GPU's large matrix products (`quern bench train`). Default: 70 % of its peak."""
    dollars_per_hour: Annotated[Annotated[float, Interval(ge=0, le=1e6)] | None, UNSAID] = None
    """The price of one GPU. Default: as in quern/estimate/hardware.py."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """The compute dtype."""
    compile: bool = True
    """--no-compile: memory of an eager run."""
    json: Annotated[Path | None, UNSAID] = None
    """Also write everything to this file. Default: no file."""
