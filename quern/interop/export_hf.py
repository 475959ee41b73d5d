"""Writes a run's model as a folder in Hugging Face's format, whole or not at all.

It holds weights in safetensors, configuration, tokenizer, chat template and a model card. `llama` is Hugging Face's own
Llama, which `quern import` reads too. `gpt` and `unet` bring their Python files, modeling_quern*.py
word for word, which `trust_remote_code=True` runs; their weights keep names and values. An idea's subclass is refused.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from quern.field_types import imported
from quern.interop import llama_format
from quern.interop.model_card import model_card
from quern.machine import detect
from quern.model.base import LanguageModel
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.model.unet import UNet
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir
from quern.temporaries import TemporaryFolder, remove_abandoned, sync_path
from quern.text.hugging_face import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from quern.text.tokenizer import Tokenizer


def run(run_dir: RunDir, folder: Path, *, stage: str | None, dtype: torch.dtype, log: Callable[[str], None]) -> None:
    """Writes the newest intact checkpoint of a stage (None: the last one) to `folder`.

    Raises FileNotFoundError for a missing run, ImportError without `tokenizers`, ValueError if `folder` is not empty,
    the model is of a class of its own, or a record is damaged.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already: name another folder with --dir, or remove it first")
    loaded = load(run_dir, detect("cpu", "fp32", compile=False), log, stage)
    _require_known(loaded, run_dir)
    weights = {name: tensor.to(dtype) for name, tensor in _weights(loaded.model, loaded.tokenizer).items()}
    texts = _texts(loaded, dtype, log)
    texts["README.md"] = model_card(loaded, run_dir, weights, has_tokenizer="tokenizer.json" in texts)
    folder.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(folder.parent, glob.escape(folder.name))
    temporary = TemporaryFolder(folder)
    try:
        whole = temporary.path / folder.name
        whole.mkdir()
        try:
            save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:  # such as a full disk
            raise OSError(f"cannot write {folder} ({error}): choose another folder with --dir") from error
        for name, text in texts.items():
            (whole / name).write_text(text, encoding="utf-8")
        # safetensors makes its file readable by the owner only; the other files follow the umask.
        (whole / "model.safetensors").chmod((whole / "config.json").stat().st_mode)
        for path in (*whole.iterdir(), whole):
            sync_path(path)
        os.rename(whole, folder)  # replaces an empty folder
    finally:
        temporary.remove()
    sync_path(folder.absolute().parent)
    size = (folder / "model.safetensors").stat().st_size
    log(f"step {loaded.step:,} of {loaded.stage}, {size / 1e6:,.1f} MB of weights → {folder}")


def _require_known(loaded: LoadedModel, run_dir: RunDir) -> None:
    """Raises ValueError for the model of an idea: what its code computes is not in the exported files."""
    kind = imported(loaded.recipe.make_model)
    if kind not in (Llama, *ARCHITECTURES) or type(loaded.model) is not kind:
        raise ValueError(
            f"run '{run_dir.run}' holds a {type(loaded.model).__name__} that its own recipe file makes, which other "
            "programs cannot compute: export a run of the recipes gpt, unet or llama as they come with quern"
        )


def _texts(loaded: LoadedModel, dtype: torch.dtype, log: Callable[[str], None]) -> dict[str, str]:
    """File name → text, for every file except the weights and the model card."""
    tokenizer, shape = loaded.tokenizer, loaded.recipe.model
    config, texts = llama_format.sizes_to(shape, tokenizer, dtype), {}
    if type(loaded.model) is Llama:
        llama_format.refuse_windows(shape)
        config |= llama_format.config_to(shape)
    else:
        config |= _config(loaded.model, tokenizer)
        for name in ("modeling_quern.py", f"modeling_{config['model_type']}.py"):
            texts[name] = (Path(__file__).parent / name).read_text(encoding="utf-8")
    texts |= {"config.json": _json(config), "generation_config.json": _json(_generation_config(tokenizer))}
    try:
        texts["tokenizer.json"] = _json(tokenizer_json(tokenizer))
        texts["tokenizer_config.json"] = _json(tokenizer_config(tokenizer, shape.context))
        texts["chat_template.jinja"] = CHAT_TEMPLATE
    except ValueError as error:
        log(f"exported without a tokenizer: {error}")
    return texts


def _generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The sampling settings of `quern chat`. BOS also ends a text, because it begins the next document."""
    return {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": [tokenizer.special("<|assistant_end|>"), tokenizer.bos],
        "pad_token_id": tokenizer.bos,  # not in config.json: transformers would not train that row of the embedding
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 50,
    }


def _json(body: dict[str, Any]) -> str:
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


ARCHITECTURES: Mapping[Any, tuple[str, str]] = {GPT: ("quern_gpt", "QuernGPT"), UNet: ("quern_unet", "QuernUNet")}
"""The `model_type` of an architecture, and the prefix of its classes."""


def _config(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of config.json of a `GPT` or a `UNet`."""
    (name, prefix), shape = ARCHITECTURES[type(model)], model.shape
    return {
        "architectures": [f"{prefix}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"modeling_quern.{prefix}Config",
            "AutoModelForCausalLM": f"modeling_{name}.{prefix}ForCausalLM",
        },
        "model_type": name,
        "vocab_size": tokenizer.vocab_size,
        "windows": list(model.windows),
        "rope_base": shape.rope_base,
        "key_offset": shape.key_offset,
        "softcap": shape.softcap,
        "bos_token_id": tokenizer.bos if shape.bos is None else shape.bos,
    }


def _weights(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Rows of tables beyond the tokens of the tokenizer are left out, as the engine does."""
    if type(model) is Llama:
        return llama_format.weights_to(model.state_dict(), len(model.blocks))
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return {
        name: (tensor[: tokenizer.vocab_size] if name in tables | {"head.weight"} else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }
