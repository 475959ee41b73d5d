"""`quern export` and `quern import`: their flags. The programs are imported when they run.

`--to hf` writes a folder in Hugging Face's format (`export_hf.py`), `--to gguf` one file for llama.cpp
(`export_gguf.py`). docs/export.md says what is exact and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quern.flags import check_flags
from quern.flags.check_flags import UNSAID
from quern.recipe import Recipe
from quern.runs.run_dir import RunDir

HF_DTYPES = ("fp32", "bf16")


@dataclass
class ExportOptions:
    """Flags of `quern export`."""

    dir: Path
    """hf: the folder to write; it must be empty or missing. gguf: the file (….gguf), or a folder for it."""
    to: Literal["hf", "gguf"] = "hf"
    """hf: Hugging Face's format, for transformers. gguf: llama.cpp's, also for ollama; for runs of the recipe llama."""
    run: str = "first"
    """The run's name."""
    out: Path = Path("out")
    """The output folder that holds the run."""
    stage: Annotated[Literal["pretrain", "sft", "rl"] | None, UNSAID] = None
    """Default: the run's last stage."""
    dtype: Literal["fp32", "bf16", "fp16", "q8_0"] = "fp32"
    """fp32 is exact; bf16 has half the size. Only gguf: fp16, and q8_0, 8.5 bits per weight."""
    accept_other_ids: bool = False
    """gguf: export although llama.cpp splits text otherwise than the run's tokenizer, so that ids differ."""


def export(arguments: Sequence[str], log: Callable[[str], None], description: str) -> int:
    options = check_flags.read(ExportOptions, arguments, prog="quern export", description=description)
    run_dir, stage = RunDir(options.out, options.run), options.stage
    if options.to == "gguf":
        from quern.interop import export_gguf

        other_ids = options.accept_other_ids
        export_gguf.run(run_dir, options.dir, dtype=options.dtype, accept_other_ids=other_ids, stage=stage, log=log)
        return 0
    if options.dtype not in HF_DTYPES:
        raise ValueError(f"--to hf takes --dtype {' or '.join(HF_DTYPES)}, not {options.dtype}: only gguf has that one")
    if options.accept_other_ids:
        raise ValueError("--accept-other-ids is for --to gguf: Hugging Face's format keeps the ids of every tokenizer")
    from quern.interop import export_hf
    from quern.machine import DTYPES

    export_hf.run(run_dir, options.dir, stage=stage, dtype=DTYPES[options.dtype], log=log)
    return 0


@dataclass
class ImportOptions:
    """Flags of `quern import`."""

    folder: tyro.conf.Positional[Path]
    """The folder to read: config.json, *.safetensors and tokenizer.json."""
    run: str
    """The new run's name."""
    out: Path = Path("out")
    """The output folder for the run."""
    stage: Literal["pretrain", "sft"] = "pretrain"
    """pretrain: a base model; sft: a chat model."""
    tokenizer: Annotated[Path | None, UNSAID] = None
    """A tokenizer.json of quern's, where the folder has none. Default: the folder's."""
    data: str = "tinyworld"
    """The text for evaluation."""


def import_model(arguments: Sequence[str], log: Callable[[str], None], recipe: Recipe, description: str) -> int:
    """recipe: the recipe of the architecture; the folder determines its shape."""
    options = check_flags.read(ImportOptions, arguments, prog="quern import", description=description)
    from quern.interop import import_hf

    run_dir, recipe = RunDir(options.out, options.run), replace(recipe, data=options.data)
    import_hf.run(options.folder, run_dir, recipe, stage=options.stage, tokenizer=options.tokenizer, log=log)
    return 0
