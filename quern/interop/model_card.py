"""The README.md of an exported folder: a model card in the form of the Hugging Face Hub, from the run's records.

A number that is not recorded is left out. Scores are those of the exported weights: of the same stage and step. Files
and folders of the user are named without their path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from quern import __version__
from quern.model.llama import Llama
from quern.model.unet import UNet
from quern.records import read_json, read_lines, read_metrics
from quern.runs.load import LoadedModel
from quern.runs.run_dir import STAGES, RunDir

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
license: {license}
tags:
- quern
- {architecture}
---
"""
UNKNOWN_LICENSE = "unknown"
LICENSE = """\
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


def model_card(loaded: LoadedModel, run_dir: RunDir, weights: Mapping[str, Tensor], *, has_tokenizer: bool) -> str:
    """The text of README.md, from the run's records. Raises ValueError, which names the file, for a damaged
    record."""
    architecture, parameters = loaded.recipe.name, sum(tensor.numel() for tensor in weights.values())
    remote = type(loaded.model) is not Llama
    parts = [
        HEAD.format(license=UNKNOWN_LICENSE, architecture=architecture),
        f"# {run_dir.run}\n",
        f"A language model of the architecture `{architecture}` with {parameters:,} parameters: step {loaded.step:,} "
        f"of the stage `{loaded.stage}`. Written by quern {__version__}.\n",
        "## Use\n",
        _use(loaded.stage, remote, has_tokenizer),
        "## Sizes\n",
        _table(("", ""), _sizes(loaded, weights)),
        "## Training\n",
        _table(("stage", "learned from", "steps", "tokens", "loss", "held-out loss"), _stages(loaded, run_dir)),
    ]
    if scores := _scores(loaded, run_dir):
        parts += ["## Scores\n", _table(("task", "measure", "value", "95% interval", "guessing", "of"), scores)]
    notes = [SPECIAL] if has_tokenizer else ["The folder has no tokenizer."]
    notes += REMOTE_CODE if remote else ()
    notes += [DOCUMENTS] if type(loaded.model) is UNet else ()
    return "\n".join([*parts, "## Limits\n", *(f"- {note}" for note in notes), "", "## License\n", LICENSE])


def _use(stage: str, remote: bool, has_tokenizer: bool) -> str:
    prompt = CHAT if stage != "pretrain" else TEXT
    text = USE.format(trust=", trust_remote_code=True" if remote else "", prompt=prompt)
    return text if has_tokenizer else "The folder has no tokenizer: the model takes and gives token ids.\n"


def _sizes(loaded: LoadedModel, weights: Mapping[str, Tensor]) -> list[Sequence[str]]:
    shape = loaded.recipe.model
    rows = {
        "layers": shape.depth,
        "width": shape.width,
        "query heads": shape.heads,
        "key and value heads": shape.kv_heads,
        "head dim": shape.head_dim,
        "context, tokens": shape.context,
        "vocabulary": loaded.tokenizer.vocab_size,
    }
    shown = [(name, f"{value:,}") for name, value in rows.items() if value is not None]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    windows = [f"{window:,}" if window is not None else "all" for window in loaded.model.windows]
    return [*shown, ("tokens that each layer sees", ", ".join(windows)), ("weights", ", ".join(dtypes))]


def _stages(loaded: LoadedModel, run_dir: RunDir) -> list[Sequence[str]]:
    """One row for each stage up to the exported one."""
    rows: list[Sequence[str]] = []
    for stage in STAGES[: STAGES.index(loaded.stage) + 1]:
        if not run_dir.has_trained(stage):
            continue
        lines = read_metrics(run_dir.stage(stage))
        if stage == loaded.stage:
            lines = [line for line in lines if (line.get("step") or 0) <= loaded.step]
        held_out = _last(lines, "val_loss")
        bits = _last(lines, "val_bpb")
        rows.append(
            (
                stage,
                _learned_from(run_dir, stage),
                _number(_last(lines, "step")),
                _number(_last(lines, "tokens")),
                _number(_last(lines, "loss")),
                _number(held_out) + (f" ({_number(bits)} bits per byte)" if bits is not None else ""),
            )
        )
    return rows


def _learned_from(run_dir: RunDir, stage: str) -> str:
    if imported := run_dir.facts().get("imported"):
        return f"imported from {_name(imported)}"
    path = run_dir.stage(stage) / "recipe.json"
    recipe = read_json(path, dict[str, Any]) if path.exists() else {}
    if stage == "pretrain":
        return ", ".join(map(_name, (recipe.get("data") or "").split("\n")))
    if stage == "rl":
        return ", ".join(_name(reward) for reward in (recipe.get("rl") or {}).get("rewards") or ())
    return ", ".join(_name(one["source"]) for one in recipe.get("conversations") or [{"source": "tinyworld"}])


def _scores(loaded: LoadedModel, run_dir: RunDir) -> list[Sequence[str]]:
    """The newest score of each task and measure, of the exported weights only."""
    lines = read_lines(run_dir.folder / "evaluate.jsonl")
    mine = [line for line in lines if (line.get("stage"), line.get("step")) == (loaded.stage, loaded.step)]
    newest = {(line.get("task"), line.get("metric")): line for line in mine}
    return [
        (
            str(task),
            "bits per byte" if metric == "bpb" else str(metric),
            _number(line.get("value")),
            " to ".join(_number(line[end]) for end in ("low", "high") if line.get(end) is not None),
            _number(line.get("chance")),
            _number(line.get("count")),
        )
        for (task, metric), line in newest.items()
    ]


def _last(lines: Iterable[dict[str, Any]], key: str) -> float | None:
    return next((line[key] for line in reversed(list(lines)) if line.get(key) is not None), None)


def _name(source: str) -> str:
    """A source as a reader elsewhere may see it: of a path, its last part."""
    return Path(str(source)).name


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.4f}" if isinstance(value, float) and value != int(value) else f"{int(value):,}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
