"""Flags of `quern bench`, read without PyTorch, which takes seconds to import."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Interval

from quern.field_types import Amount, Count, Few, Seed
from quern.flags.check_flags import DeviceOptions, Mark
from quern.validate import refuse_missing

What = Literal["tokenizer", "encode", "packing", "loading", "train", "prefill", "decode", "attention", "windows",
               "cross-entropy", "prepare", "ranks", "grug", "serve", "quality", "exactness", "rope", "muon", "fp8",
               "gpu"]  # fmt: skip
DtypeAndHeadDim = Literal["bfloat16-128", "bfloat16-64", "float16-128", "bfloat16-256", "bfloat16-32"]


FOR_ONE = {
    **dict.fromkeys(("train", "val", "minutes", "depth"), "quality"),
    **{"trace": "ranks", "documents": "packing", "only": "exactness"},
}
"""Options of one benchmark, which may also be named by `gpu` or by none."""


@dataclass
class BenchOptions(DeviceOptions):
    """Measure this machine: each figure is the median of several rounds, with the lowest and the highest.

    example: quern bench train decode

    example: quern bench quality --train train.parquet --val val.parquet --data encyclopedia/ --minutes 10

    example: quern bench gpu --no-start
    """

    what: Annotated[tuple[What, ...], Mark.POSITIONAL] = ()
    """Parts to measure; gpu stands for train, attention, exactness, decode, cross-entropy, rope, muon and fp8. Default:
    all before prepare."""
    out: Path = Path("out")
    """The folder of the records, which are written to bench/ in it."""
    rounds: Few = 5
    """How often each figure is measured."""
    seed: Seed = 0
    """Seed of the weights and the data."""
    batch_tokens: Count | None = None
    """`train`, `fp8`, `ranks`, `grug`: tokens of one optimizer step. Default: 4,096; on CUDA 65,536 for `train` and
    `fp8`, 16,384 for `grug`. A micro-batch has at most as many."""
    trace: Path | None = None
    """`ranks`: also write a timeline of some steps to this file, for ui.perfetto.dev. Default: none."""
    start: bool = True
    """`train`: also measure start-up time and peak memory of new processes, which takes longest."""
    data: Path | None = None
    """Text for tokenizer, encode, prepare and packing: a file or a folder. Default: the built-in world. `quality`: a
    second text, such as articles of an encyclopedia, large enough to be read once; its validation text is held out."""
    megabytes: Amount = 8.0
    """How much of it tokenizer, encode, prepare and packing use."""
    documents: Annotated[int, Interval(ge=1, le=10**9)] = 1_000_000
    """`packing`: documents of the corpus whose loader is started and resumed; 100,000,000 takes minutes."""
    train: Path | None = None
    """`quality`: the training text, a file or a folder. It has no default."""
    val: Path | None = None
    """`quality`: the validation text of `--train`. It has no default."""
    minutes: Amount = 10.0
    """`quality`: minutes of training, counted in steps only."""
    depth: Annotated[int, Interval(ge=1, le=1000)] | None = None
    """`quality`: the depth of the recipe. Default: fitted to text and time."""
    quick: bool = False
    """Use tiny sizes, to see that everything runs; the figures mean nothing. The records are <what>.quick.json."""
    only: DtypeAndHeadDim | None = None
    """`exactness`: the only dtype and head dim. Default: all of them, one after another."""

    def __post_init__(self) -> None:
        tokens = self.batch_tokens or 1024
        if tokens % 512:
            row = "the 512 tokens of a row (on CUDA 2,048)"
            raise ValueError(f"--batch-tokens must be a multiple of {row}, not {tokens}")
        if "ranks" in self.what and tokens < 1024 and not self.quick:
            raise ValueError(f"ranks has two ranks of a row each: set --batch-tokens 1024, not {tokens}")
        named = {*self.what, *(["exactness"] if "gpu" in self.what else [] if self.what else ["packing"])}
        for field in fields(self):
            if FOR_ONE.get(field.name, "gpu") not in (*named, "gpu") and getattr(self, field.name) != field.default:
                one = FOR_ONE[field.name]
                raise ValueError(f"--{field.name} is for `quern bench {one}`: name {one}, or leave the flag out")
        none = self.train is self.data is None
        if "quality" in self.what and ((self.train is None) != (self.val is None) or none):
            raise ValueError("quality needs text: give --train and --val, --data, or all three, each a file or folder")
        for name in ("train", "val", "data"):  # before the minutes of the first text
            refuse_missing(name, getattr(self, name))
