"""Writes a run's model as a folder in Hugging Face's format, whole or not at all.

It holds weights in safetensors, configuration, tokenizer, chat template and a model card. `llama` is Hugging Face's own
Llama, which `quern import` reads too. `gpt` and `unet` bring their Python files, modeling_quern*.py
word for word, which `trust_remote_code=True` runs; their weights keep names and values. An idea's subclass is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from quern import __version__
from quern.field_types import imported
from quern.interop import llama_format
from quern.machine import detect
from quern.model.base import LanguageModel
from quern.model.gpt import GPT
from quern.model.llama import Llama
from quern.model.unet import UNet
from quern.records import read_json, read_lines, read_metrics
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import STAGES, RunDir
from quern.temporaries import sync_path, temporary_folder
from quern.text.hugging_face import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from quern.text.tokenizer import Tokenizer


def run(run_dir: RunDir, folder: Path, *, stage: str | None, dtype: torch.dtype, log: Callable[[str], None]) -> None:
    """Writes the newest intact checkpoint of a stage (None: the last one) to `folder`.

    Raises FileNotFoundError for a missing run, ImportError without `tokenizers`, ValueError if `folder` is not empty,
    the model is of a class of its own or a Llama that Hugging Face's cannot represent, or a record is damaged.
    """
    target = folder.resolve()  # what a link names
    if target == Path.cwd() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise ValueError(f"{folder} is there already: name another folder with --dir, or remove it first")
    loaded = load(run_dir, detect("cpu", "fp32", compile=False), log, stage)
    kind = imported(loaded.recipe.make_model)
    if kind not in (Llama, *ARCHITECTURES) or type(loaded.model) is not kind:  # what its code computes is not exported
        raise ValueError(
            f"run '{run_dir.run}' holds a {type(loaded.model).__name__} that its own recipe file makes, which other "
            "programs cannot compute: export a run of the recipes gpt, unet or llama as they come with quern"
        )
    weights = {name: tensor.to(dtype) for name, tensor in _weights(loaded.model, loaded.tokenizer).items()}
    texts = _texts(loaded, dtype, log)
    texts["README.md"] = _model_card(loaded, run_dir, weights, has_tokenizer="tokenizer.json" in texts)
    target.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target) as temporary:
        whole = temporary / target.name
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
        os.rename(whole, target)  # replaces an empty folder
    sync_path(target.parent)
    size = (folder / "model.safetensors").stat().st_size
    log(f"step {loaded.step:,} of {loaded.stage}, {size / 1e6:,.1f} MB of weights → {folder}")


def _texts(loaded: LoadedModel, dtype: torch.dtype, log: Callable[[str], None]) -> dict[str, str]:
    """File name → text, for every file except the weights and the model card."""
    tokenizer, shape = loaded.tokenizer, loaded.recipe.model
    config = _config(loaded.model, tokenizer, dtype)
    code = ("modeling_quern.py", f"modeling_{config['model_type']}.py") if "auto_map" in config else ()
    texts = {name: (Path(__file__).parent / name).read_text(encoding="utf-8") for name in code}
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


def _config(model: LanguageModel, tokenizer: Tokenizer, dtype: torch.dtype) -> dict[str, Any]:
    """The fields of config.json: those that every architecture has, then its own."""
    shape = model.shape
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.special("<|assistant_end|>"),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if type(model) is Llama:
        return sizes | llama_format.config_to(shape)
    name, prefix = ARCHITECTURES[type(model)]
    return sizes | {
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
        "bigram_rows": model.bigrams.num_embeddings if isinstance(model, GPT) and shape.bigrams else 0,
        "softcap": shape.softcap,
        "bos_token_id": tokenizer.bos if shape.bos is None else shape.bos,
    }


def _weights(model: LanguageModel, tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Rows of the vocabulary beyond the tokens of the tokenizer are left out, as the engine does."""
    if type(model) is Llama:
        return llama_format.weights_to(model.state_dict(), len(model.blocks))
    tables = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    tables = tables - {"bigrams.weight"} | {"head.weight"}
    return {
        name: (tensor[: tokenizer.vocab_size] if name in tables else tensor).contiguous()
        for name, tensor in model.state_dict().items()
    }


# The model card, README.md, in the form of the Hugging Face Hub. A number that is not recorded is left out. Scores are
# those of the exported weights: of the same stage and step. Files and folders of the user are named without their path.

CARD = """---
library_name: transformers
pipeline_tag: text-generation
license: unknown
tags:
- quern
- {architecture}
---

# {run}

A language model of the architecture `{architecture}` with {parameters:,} parameters: step {step:,} of the stage
`{stage}`. Written by quern {version}.

## Use

{use}
## Sizes

{sizes}
## Training

{training}
{scores}## Limits

{limits}

## License

The license is not recorded. Before you publish this folder, replace `license: unknown` at the top of this file; the
texts that the model was trained on may limit the choice.
"""
USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder"{trust})
model = AutoModelForCausalLM.from_pretrained("path/to/this/folder"{trust})
{prompt}
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```
"""
CHAT = """\
messages = [{"role": "user", "content": "Who are you?"}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")"""
TEXT = 'inputs = tokenizer("Once upon a time", return_tensors="pt")'
NO_TOKENIZER = "The folder has no tokenizer: the model takes and gives token ids.\n"
SPECIAL = (
    "The tokenizer reads `<|user_start|>` and the like as special tokens also in a user's message. Pass "
    "`split_special_tokens=True` for text that you do not trust."
)
REMOTE_CODE = (
    "The architecture is not part of transformers: its code is in the Python files of this folder, which "
    "`trust_remote_code=True` runs.",
    "`generate` uses a key-value cache. It holds every token, also for layers whose attention has a window. `forward` "
    "with a cache takes the whole text in `input_ids`, not the new tokens alone.",
    "Padding on the left or right is masked by `attention_mask`. Inputs as embeddings, explicit positions, static "
    "caches and a resized vocabulary are refused with an error.",
)
DOCUMENTS = "A BOS token begins a document: tokens after it do not see those before it."


def _model_card(loaded: LoadedModel, run_dir: RunDir, weights: Mapping[str, Tensor], *, has_tokenizer: bool) -> str:
    """The text of README.md, from the run's records. Raises ValueError, which names the file, for a damaged record."""
    remote, scores = type(loaded.model) is not Llama, _scores(loaded, run_dir)
    trust, prompt = ", trust_remote_code=True" if remote else "", TEXT if loaded.stage == "pretrain" else CHAT
    notes = [SPECIAL] if has_tokenizer else []
    notes += [*(REMOTE_CODE if remote else ()), *([DOCUMENTS] if type(loaded.model) is UNet else ())]
    score_head = ("task", "measure", "value", "95% interval", "guessing", "of")
    stage_head = ("stage", "learned from", "steps", "tokens", "loss", "held-out loss", "bits per byte")
    return CARD.format(
        architecture=type(loaded.model).__name__.lower(),
        run=run_dir.run,
        parameters=sum(tensor.numel() for tensor in weights.values()),
        step=loaded.step,
        stage=loaded.stage,
        version=__version__,
        use=USE.format(trust=trust, prompt=prompt) if has_tokenizer else NO_TOKENIZER,
        sizes=_table(("", ""), _sizes(loaded, weights)),
        training=_table(stage_head, _stages(loaded, run_dir)),
        scores=f"## Scores\n\n{_table(score_head, scores)}\n" if scores else "",
        limits="\n".join(f"- {note}" for note in notes),
    )


def _sizes(loaded: LoadedModel, weights: Mapping[str, Tensor]) -> list[Sequence[Any]]:
    shape = loaded.recipe.model
    return [
        ("layers", shape.depth),
        ("width", shape.width),
        ("query heads", shape.heads),
        ("key and value heads", shape.kv_heads),
        ("head dim", shape.head_dim),
        ("context, tokens", shape.context),
        ("vocabulary", loaded.tokenizer.vocab_size),
        ("tokens that each layer sees", ", ".join(f"{one:,}" if one else "all" for one in loaded.model.windows)),
        ("weights", ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in weights.values()}))),
    ]


def _stages(loaded: LoadedModel, run_dir: RunDir) -> list[Sequence[Any]]:
    """One row for each stage up to the exported one."""
    rows: list[Sequence[Any]] = []
    for stage in filter(run_dir.has_trained, STAGES[: STAGES.index(loaded.stage) + 1]):
        known: dict[str, Any] = {}
        for line in read_metrics(run_dir.stage(stage)):
            if stage != loaded.stage or (line.get("step") or 0) <= loaded.step:
                known |= {name: value for name, value in line.items() if value is not None}
        last = (known.get(name) for name in ("step", "tokens", "loss", "val_loss", "val_bpb"))
        rows.append((stage, _learned_from(run_dir, stage), *last))
    return rows


def _learned_from(run_dir: RunDir, stage: str) -> str:
    """The sources of a stage, as a reader elsewhere may see them: only the last part of a path."""
    path = run_dir.stage(stage) / "recipe.json"
    recipe = read_json(path, dict[str, Any]) if path.exists() else {}
    if (imported := run_dir.facts().get("imported")) and stage == next(filter(run_dir.has_trained, STAGES)):
        return f"imported from {Path(imported).name}"
    if stage == "pretrain":
        sources = (recipe.get("data") or "").split("\n")
    elif stage == "rl":
        sources = (recipe.get("rl") or {}).get("rewards") or ()
    else:
        sources = [one["source"] for one in recipe.get("conversations") or [{"source": "tinyworld"}]]
    return ", ".join(Path(source).name for source in sources)


def _scores(loaded: LoadedModel, run_dir: RunDir) -> list[Sequence[Any]]:
    """The newest score of each task and measure, of the exported weights only."""
    lines = read_lines(run_dir.folder / "evaluate.jsonl")
    mine = [line for line in lines if (line.get("stage"), line.get("step")) == (loaded.stage, loaded.step)]
    newest = {(line.get("task"), line.get("metric")): line for line in mine}
    return [
        (
            task,
            "bits per byte" if metric == "bpb" else metric,
            line.get("value"),
            " to ".join(_shown(line[end]) for end in ("low", "high") if line.get(end) is not None),
            line.get("chance"),
            line.get("count"),
        )
        for (task, metric), line in newest.items()
    ]


def _shown(value: Any) -> str:
    if isinstance(value, float) and value != int(value):
        return f"{value:,.4f}"
    return f"{int(value):,}" if isinstance(value, int | float) else str(value or "").replace("|", "/")


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *(map(_shown, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
