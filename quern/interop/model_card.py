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


def model_card(loaded: LoadedModel, run_dir: RunDir, weights: Mapping[str, Tensor], *, has_tokenizer: bool) -> str:
    """The text of README.md, from the run's records. Raises ValueError, which names the file, for a damaged record."""
    remote, scores = type(loaded.model) is not Llama, _scores(loaded, run_dir)
    trust, prompt = ", trust_remote_code=True" if remote else "", TEXT if loaded.stage == "pretrain" else CHAT
    notes = [SPECIAL] if has_tokenizer else []
    notes += [*(REMOTE_CODE if remote else ()), *([DOCUMENTS] if type(loaded.model) is UNet else ())]
    score_head = ("task", "measure", "value", "95% interval", "guessing", "of")
    stage_head = ("stage", "learned from", "steps", "tokens", "loss", "held-out loss", "bits per byte")
    return CARD.format(
        architecture=loaded.recipe.name,
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
    """The sources of a stage, as a reader elsewhere may see them: of a path, its last part."""
    path = run_dir.stage(stage) / "recipe.json"
    recipe = read_json(path, dict[str, Any]) if path.exists() else {}
    if imported := run_dir.facts().get("imported"):
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
