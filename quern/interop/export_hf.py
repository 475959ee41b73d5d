"""Writes a run's Llama as a folder in Hugging Face's format, whole or not at all.

It holds weights in safetensors, configuration, tokenizer and chat template. `transformers.LlamaForCausalLM` and
`quern import` read it.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quern.interop.llama_format import config_to, weights_to
from quern.interop.load_llama import load_llama
from quern.runs.load import LoadedModel
from quern.runs.run_dir import RunDir
from quern.temporaries import sync_path
from quern.text.hugging_face import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from quern.text.tokenizer import Tokenizer


def run(run_dir: RunDir, folder: Path, *, stage: str | None, dtype: torch.dtype, log: Callable[[str], None]) -> None:
    """Writes the newest intact checkpoint of a stage (None: the last stage) to `folder`.

    Raises:
        FileNotFoundError: There is no such run.
        ValueError: `folder` is not empty, or the model is not a Llama.
        ImportError: `tokenizers` is not installed.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name another folder with --dir, or remove it first")
    loaded = load_llama(run_dir, stage, log)
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
