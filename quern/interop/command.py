"""`quern export` and `quern import`: their flags. The programs are imported when they run.

`quern run --for PROGRAM` plans an export before it trains.

`--to hf` writes a folder in Hugging Face's format (`export_hf.py`), `--to gguf` one file for llama.cpp
(`export_gguf.py`). docs/export.md says what is exact and what is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

from quern.field_types import code_path
from quern.flags import check_flags
from quern.flags.check_flags import Mark
from quern.flags.recipe_flags import Arguments
from quern.recipe import Recipe
from quern.recipes import load_recipe
from quern.resolve import resolve
from quern.runs.run_dir import RunDir
from quern.terminal import silent
from quern.validate import extra

HF_DTYPES = ("fp32", "bf16")
READ_BY = {"llama": "ollama llama.cpp transformers".split(), "gpt": ["transformers"], "unet": ["transformers"]}
"""Programs that read an export, by the file of the model."""


@dataclass
class ExportOptions:
    """Flags of `quern export`."""

    dir: Path
    """hf: the folder to write; it must be empty or missing, and not the current folder. gguf: the file (….gguf), or a
    folder for it."""
    to: Literal["hf", "gguf"] = "hf"
    """hf: Hugging Face's format, for transformers. gguf: llama.cpp's, also for ollama; for runs of the recipe llama."""
    run: str = "first"
    """The run's name."""
    out: Path = Path("out")
    """The output folder that holds the run."""
    stage: Literal["pretrain", "sft", "rl"] | None = None
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


def plan(arguments: Arguments) -> Arguments:
    """The arguments of `quern run`, with what the program of `--for` needs where the user does not say otherwise."""
    if arguments.value("for") not in READ_BY["llama"][:2] or "resume" in arguments.given:
        return arguments
    named = {"text.digits", "text.tokenizer"} & arguments.given.keys()
    recipe = () if arguments.recipes else ("llama",)
    return Arguments((*recipe, *arguments, *(() if named else ("--text.digits", "1"))))


def refuse_plan(program: str | None, recipe: Recipe) -> None:
    """Raises ValueError for a recipe whose model the program cannot read, ImportError without the export's library."""
    if program is None:
        return
    model = code_path(recipe.make_model).partition(":")[0].removeprefix("quern.model.")
    if program not in READ_BY.get(model, []):
        raise ValueError(
            f"{program} cannot read a model of the recipe '{recipe.name}': leave --for {program} out, or train one of "
            f"{', '.join(name for name, programs in READ_BY.items() if program in programs)}"
        )
    gguf = program != "transformers"
    with extra("export", f"--for {program} needs extra packages"):
        import_module("gguf" if gguf else "tokenizers")
    from quern.interop.export_gguf import other_ids
    from quern.interop.llama_format import config_to, refuse_windows
    from quern.stages.tokenizers import named_tokenizer

    if model == "llama":
        (refuse_windows if gguf else config_to)(resolve(recipe).model)
    if not gguf:
        return
    if recipe.text.tokenizer is None and recipe.text.digits != 1:
        raise ValueError(f"{program} splits numbers into digits: use --text.digits 1 with --for {program}")
    with suppress(FileNotFoundError):  # the preparation names the file, unless the run has its tokenizer already
        tokenizer = named_tokenizer(recipe.text.tokenizer, None, silent)
        if tokenizer and (difference := other_ids(tokenizer)):
            raise ValueError(f"{difference}: leave --text.tokenizer or --for {program} out")


def export_plan(program: str | None, run_dir: RunDir, log: Callable[[str], None]) -> None:
    """Writes the export that `quern run --for` planned, unless it is there, and says how the program reads it."""
    if program is None:
        return
    folder, gguf = run_dir.folder / "export", program != "transformers"
    path = folder / f"{run_dir.run}.gguf" if gguf else folder / "transformers"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        how = ["--to", "gguf", "--dtype", "fp16"] if gguf else []
        export(["--run", run_dir.run, "--out", str(run_dir.out), "--dir", str(path), *how], log, "")
    else:
        log(f"{path} was there already: to export the newest checkpoint, remove it and repeat the command")
    said = {
        "ollama": f"echo FROM {quote(str(path.absolute()))} > Modelfile; ollama create {run_dir.run} -f Modelfile",
        "llama.cpp": f"llama-cli -m {quote(str(path))}",
        "transformers": f"AutoModelForCausalLM.from_pretrained({str(path)!r}, trust_remote_code=True)",
    }
    log(f"for {program}: {said[program]}")


@dataclass
class ImportOptions:
    """Flags of `quern import`."""

    folder: Annotated[Path, Mark.POSITIONAL]
    """The folder to read: config.json, model.safetensors or the files of its index, and tokenizer.json."""
    run: str
    """The new run's name."""
    out: Path = Path("out")
    """The output folder for the run."""
    stage: Literal["pretrain", "sft"] = "pretrain"
    """pretrain: a base model; sft: a chat model."""
    tokenizer: Path | None = None
    """A tokenizer.json of quern's, where the folder has none. Default: the folder's."""
    data: str = "tinyworld"
    """The text for evaluation."""


def import_model(arguments: Arguments, log: Callable[[str], None], description: str) -> int:
    options = check_flags.read(ImportOptions, arguments, prog="quern import", description=description)
    from quern.interop import import_hf

    import_hf.run(
        options.folder,
        RunDir(options.out, options.run),
        replace(load_recipe("llama")[0], data=options.data),
        stage=options.stage,
        tokenizer=options.tokenizer,
        log=log,
        command=arguments.command("import"),
    )
    return 0
