"""Flags of `quern bench` and of `quern bench gpu`, read without PyTorch, which takes seconds to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from annotated_types import Interval

from quern.field_types import Amount, Count, Few, Seed
from quern.flags.check_flags import DeviceOptions, Mark
from quern.resolve import MICRO_BATCH_TOKENS
from quern.validate import refuse_missing

Section = Literal["training", "attention", "exactness", "decode", "loss", "rope", "muon", "fp8", "real"]
What = Literal["tokenizer", "encode", "packing", "loading", "train", "prefill", "decode", "attention", "windows",
               "cross-entropy", "prepare", "ranks", "grug", "serve", "quality"]  # fmt: skip


@dataclass
class BenchOptions(DeviceOptions):
    """Measure this machine: each figure is the median of several rounds, with the lowest and the highest.

    example: quern bench train decode

    example: quern bench quality --train train.parquet --val val.parquet --data encyclopedia/ --minutes 10

    example: quern bench gpu --help
    """

    what: Annotated[tuple[What, ...], Mark.POSITIONAL] = ()
    """Parts to measure. Default: all except prepare, ranks, grug, serve and quality, which take minutes."""
    out: Path = Path("out")
    """The folder of the records, which are written to bench/ in it."""
    rounds: Few = 5
    """How often each figure is measured."""
    seed: Seed = 0
    """Seed of the weights and the data."""
    batch_tokens: Count = MICRO_BATCH_TOKENS
    """`train`, `ranks`, `grug`: tokens of one optimizer step, in micro-batches of at most 4,096."""
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
    """Use tiny sizes, to see that everything runs; the figures mean nothing."""

    def __post_init__(self) -> None:
        if self.batch_tokens % 512:
            raise ValueError(f"--batch-tokens must be a multiple of the 512 tokens of a row, not {self.batch_tokens}")
        if "ranks" in self.what and self.batch_tokens < 1024 and not self.quick:
            raise ValueError(f"ranks has two ranks of a row each: set --batch-tokens 1024, not {self.batch_tokens}")
        none = self.train is self.data is None
        if "quality" in self.what and ((self.train is None) != (self.val is None) or none):
            raise ValueError(
                "quality needs text: give --train and --val, --data, or all three, each a file or a folder"
            )
        for name in ("train", "val", "data"):  # before the minutes of the first text
            refuse_missing(name, getattr(self, name))


@dataclass
class GpuOptions(DeviceOptions):
    """Nine minutes of measurements that need a GPU.

    example: quern bench gpu --data texts/
    """

    sections: tuple[Section, ...] = get_args(Section)
    """The sections to run, of which each has its share of the time."""
    minutes: Amount = 9.0
    """When to stop."""
    data: str | None = None
    """`real`: the text to train on, a file or a folder, or prepared tokens (.bin)."""
    tokenizer: str | None = None
    """`real`: the tokenizer of prepared tokens."""
    out: Path = Path("out")
    """The folder of the record, which is written to bench/ in it."""
    seed: Seed = 0
    """Seed of the weights and the data."""
    quick: bool = False
    """Use tiny sizes, to see that everything runs; the figures mean nothing."""
