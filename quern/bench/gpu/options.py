"""The flags of `quern bench gpu`, read without PyTorch, which takes seconds to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from quern.field_types import Amount, Seed, Threads, refuse_outside

SECTIONS = ("training", "attention", "exactness", "decode", "loss", "rope", "muon", "fp8", "real")


def parse(arguments: Sequence[str], sections: Sequence[str] = SECTIONS) -> argparse.Namespace:
    """Reads the flags; an error or --help ends the process."""
    parser = argparse.ArgumentParser(
        "quern bench gpu", description="nine minutes of measurements that need a GPU", add_help=False
    )
    add = parser.add_argument
    add("-h", "--help", "--help-all", action="help", help="show all flags and exit")
    add("--sections", nargs="+", choices=sections, default=list(sections), help="the sections to run")
    add("--minutes", type=float, default=9.0, help="when to stop")
    add("--data", help="text to train on: a file or folder; or prepared tokens (.bin)")
    add("--tokenizer", help="the tokenizer of prepared tokens")
    add("--out", type=Path, default=Path("out"), help="the folder of the record, which is written to bench/ in it")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="CPU threads; default: one for each core")
    add("--quick", action="store_true", help="use tiny sizes, to see that everything runs; the figures mean nothing")
    add("--no-compile", dest="compile", action="store_false", help="run eagerly")
    options = parser.parse_args(list(arguments))
    for name, kind in (("minutes", Amount), ("seed", Seed), ("threads", Threads)):
        if getattr(options, name) is not None:
            refuse_outside(kind, getattr(options, name), f"--{name}")
    return options
