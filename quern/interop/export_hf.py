"""`quern export`: a run's model as a folder that other programs read. It is written whole or not at all.

`--to hf`: a Llama as Hugging Face writes it: weights in safetensors, configuration, tokenizer, chat template. Read by
`transformers.LlamaForCausalLM`, and back by `quern import`.
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

from quern.data.token_file import sync_path
from quern.flags import check_flags
from quern.flags.check_flags import UNSAID
from quern.interop.llama_format import config_to, weights_to
from quern.machine import detect
from quern.model.llama import Llama
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir
from quern.text.hugging_face import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from quern.text.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class ExportOptions:
    """Flags of `quern export`."""

    dir: Path
    """The folder to write; it must not hold anything yet."""
    to: Literal["hf"] = "hf"
    """hf: Hugging Face's Llama."""
    run: str = "first"
    """The run's name."""
    out: Path = Path("out")
    """The folder that everything of quern's lies under."""
    stage: Annotated[Literal["pretrain", "sft"] | None, UNSAID] = None
    """Default: the last one the run has."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """fp32 is exact; bf16 is half the size."""


def main(arguments: list[str], log: Callable[[str], None], description: str = "") -> int:
    options = check_flags.read(ExportOptions, arguments, prog="quern export", description=description)
    run(RunDir(options.out, options.run), options.dir, stage=options.stage, dtype=DTYPES[options.dtype], log=log)
    return 0


def run(run_dir: RunDir, folder: Path, *, stage: str | None, dtype: torch.dtype, log: Callable[[str], None]) -> None:
    """Writes the newest good checkpoint of a stage (None: of the last there is) to `folder`.

    Raises FileNotFoundError without a run, ValueError where `folder` holds something or the model is no Llama.
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
        # safetensors makes its file readable by the owner alone; the others follow the umask.
        (temporary / "model.safetensors").chmod((temporary / "config.json").stat().st_mode)
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        os.rename(temporary, folder)  # onto an empty folder or none
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_path(folder.absolute().parent)
    size = (folder / "model.safetensors").stat().st_size
    log(f"step {loaded.step:,} of {loaded.stage}, {size / 1e6:,.1f} MB of weights → {folder}")


def _texts(loaded: LoadedModel, dtype: torch.dtype, log: Callable[[str], None]) -> dict[str, str]:
    """Every file but the weights, by name."""
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
    """As `quern chat` samples. A document ends where the next one's BOS begins, so that ends a text too."""
    return {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": [tokenizer.special("<|assistant_end|>"), tokenizer.bos],
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
    }


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"
