"""`quern export`: writes a run's model as a folder for other programs, atomically.

`--to hf`: Hugging Face's Llama format: weights in safetensors, configuration, tokenizer, chat template.
`transformers.LlamaForCausalLM` and `quern import` read it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors.torch import save_file

from quern.flags import check_flags
from quern.flags.check_flags import UNSAID
from quern.interop.llama_format import config_to, weights_to
from quern.machine import detect
from quern.model.llama import Llama
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir
from quern.temporaries import sync_path
from quern.text.hugging_face import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from quern.text.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class ExportOptions:
    """Flags of `quern export`."""

    dir: Path
    """The folder to write; it must be empty or missing."""
    to: Literal["hf"] = "hf"
    """hf: Hugging Face's Llama format."""
    run: str = "first"
    """The run's name."""
    out: Path = Path("out")
    """The output folder that holds the run."""
    stage: Annotated[Literal["pretrain", "sft", "rl"] | None, UNSAID] = None
    """Default: the run's last stage."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """fp32 is exact; bf16 has half the size."""


def main(arguments: list[str], log: Callable[[str], None], description: str = "") -> int:
    options = check_flags.read(ExportOptions, arguments, prog="quern export", description=description)
    run(RunDir(options.out, options.run), options.dir, stage=options.stage, dtype=DTYPES[options.dtype], log=log)
    return 0


def run(run_dir: RunDir, folder: Path, *, stage: str | None, dtype: torch.dtype, log: Callable[[str], None]) -> None:
    """Writes the newest intact checkpoint of a stage (None: the last stage) to `folder`.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: `folder` is not empty, or the model is not a Llama.
        ImportError: `tokenizers` is not installed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name another folder with --dir, or remove it first")
    loaded = load(run_dir, detect("cpu", "fp32", compile=False), log, stage)
    if type(loaded.model) is not Llama:
        raise ValueError(
            f"run '{run_dir.run}' holds a {type(loaded.model).__name__}, for which Hugging Face has no name: "
            "export a run of the recipe `llama` (quern pretrain llama)"
        )
    texts = _texts(loaded, dtype, log)
    weights = weights_to(loaded.model.state_dict(), len(loaded.model.blocks))
    with_dtype = {name: tensor.to(dtype) for name, tensor in weights.items()}
    temporary = folder.with_name(f".{folder.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        save_file(with_dtype, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        # safetensors makes its file readable by the owner only; the other files follow the umask.
        (temporary / "model.safetensors").chmod((temporary / "config.json").stat().st_mode)
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        os.rename(temporary, folder)  # replaces an empty folder
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(folder.absolute().parent)
    size = (folder / "model.safetensors").stat().st_size
    log(f"step {loaded.step:,} of {loaded.stage}, {size / 1e6:,.1f} MB of weights → {folder}")


def _texts(loaded: LoadedModel, dtype: torch.dtype, log: Callable[[str], None]) -> dict[str, str]:
    """File name → text, for every file except the weights."""
    tokenizer, shape = loaded.tokenizer, loaded.recipe.model
    assert shape.context
    bodies: dict[str, Any] = {
        "config.json": config_to(shape, tokenizer, dtype),
        "generation_config.json": _generation_config(tokenizer),
    }
    try:
        bodies["tokenizer.json"] = tokenizer_json(tokenizer)
    except ValueError as error:
        log(f"exported without a tokenizer: {error}")
        return {name: _json(body) for name, body in bodies.items()}
    bodies["tokenizer_config.json"] = tokenizer_config(tokenizer, shape.context)
    return {name: _json(body) for name, body in bodies.items()} | {"chat_template.jinja": CHAT_TEMPLATE}


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The sampling settings of `quern chat`. BOS also ends a text, because it begins the next document."""
    return {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": [tokenizer.special("<|assistant_end|>"), tokenizer.bos],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
    }


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"
