"""Flags of `quern bench`, and what its benchmarks get: machine, flags, and the text to measure on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quern.bench.material import MICRO_BATCH_TOKENS
from quern.bench.measure import Bench
from quern.flags.check_flags import UNSAID
from quern.text.documents import read
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer

What = Literal["tokenizer", "encode", "packing", "loading", "train", "prefill", "decode", "attention", "windows",
               "cross-entropy", "prepare", "ranks", "grug", "serve", "quality"]  # fmt: skip


@dataclass(frozen=True)
class BenchOptions:
    """Measure this machine: each figure is the median of several rounds, with the lowest and the highest.

    example: quern bench train decode

    example: quern bench quality --train train.parquet --val val.parquet --minutes 10

    example: quern bench gpu --help
    """

    what: Annotated[tuple[What, ...], tyro.conf.Positional] = ()
    """What to measure. Default: all except prepare, ranks, grug, serve and quality."""
    out: Path = Path("out")
    """The folder of the records, which are written to bench/ in it."""
    rounds: int = 5
    """How often each figure is measured."""
    seed: int = 0
    batch_tokens: int = MICRO_BATCH_TOKENS
    """`train`, `ranks`, `grug`: tokens of one optimizer step, in micro-batches of at most 4,096."""
    trace: Annotated[Path | None, UNSAID] = None
    """`ranks`: also write a timeline of some steps to this file, for ui.perfetto.dev. Default: none."""
    start: bool = True
    """`train`: also measure start-up time and peak memory of new processes, which takes longest."""
    data: Annotated[Path | None, UNSAID] = None
    """Text for tokenizer, encode, prepare and packing: a file or a folder. Default: the built-in world."""
    megabytes: float = 8.0
    """How much of that text to use."""
    documents: int = 1_000_000
    """`packing`: documents of the corpus whose loader is started and resumed; 100,000,000 takes minutes."""
    train: Annotated[Path | None, UNSAID] = None
    """`quality`: the training text, a file or a folder. It has no default."""
    val: Annotated[Path | None, UNSAID] = None
    """`quality`: the validation text. It has no default."""
    minutes: float = 10.0
    """`quality`: minutes of training, counted in steps only."""
    depth: int = 4
    """`quality`: the depth of the recipe."""
    quick: bool = False
    """Use tiny sizes, to see that everything runs; the figures mean nothing."""
    device: Annotated[Literal["cpu", "cuda", "mps"] | None, UNSAID] = None
    """Default: the fastest device of the machine."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, UNSAID] = None
    """Default: bf16 where it is measured to be faster."""
    threads: Annotated[int | None, UNSAID] = None
    """CPU threads. Default: one for each core."""
    compile: bool = True
    """--no-compile runs eagerly."""

    def validate(self) -> None:
        """Raises ValueError or FileNotFoundError, before anything is measured, with the value to give instead."""
        if self.batch_tokens % 512:
            raise ValueError(f"--batch-tokens must be a multiple of the 512 tokens of a row, not {self.batch_tokens}")
        if "quality" in self.what and (self.train is None or self.val is None):
            raise ValueError("quality needs text: give --train and --val, each a file or a folder")
        for path in (self.data, self.train, self.val):
            if path is not None and not path.exists():
                raise FileNotFoundError(f"there is no {path}: give a file or a folder of text")


@dataclass(frozen=True, kw_only=True)
class Setup(Bench):
    """Context of the benchmarks of `quern bench`; the text is made at first use. log: Takes lines for the user."""

    options: BenchOptions = field(default_factory=BenchOptions)
    log: Callable[[str], None] = print

    @cached_property
    def texts(self) -> list[str]:
        """Documents of `--megabytes` in all, or all documents of a smaller source."""
        megabytes, data = 0.2 if self.quick else self.options.megabytes, self.options.data
        if data is None:
            return list(corpus.documents(self.seed, megabytes))
        texts, size = list[str](), 0
        for text, _ in read(data):
            texts.append(text)
            size += len(text)
            if size >= megabytes * 1e6:
                break
        return texts

    @cached_property
    def text_bytes(self) -> int:
        return sum(len(text.encode("utf-8", "replace")) for text in self.texts)

    @property
    def text_name(self) -> str:
        return "tinyworld" if self.options.data is None else self.options.data.name

    @property
    def vocab_size(self) -> int:
        return 512 if self.quick else 8192

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.train(self.texts, self.vocab_size)
