"""The facts of a report, as labelled text and numbers: what report.md and report.html both show.

Takes what `report_records` read; writes nothing. Keys it knows get a title and a unit; others are shown as
they are, so that a new field of a record appears in the report without a change here.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from quern.report.numbers import duration, human, human_bytes, human_flops, number, percent
from quern.report.run_records import RunRecords, StageRecords, event_time, finite

Rows = list[tuple[str, str]]

LABELS = {
    "kv_heads": "key-value heads",
    "vocab_size": "vocabulary",
    "rope_base": "RoPE base",
    "softcap": "logit softcap",
    "bos": "BOS token's id",
    "added_bos_share": "added BOS share",
    "fp8": "FP8",
    "windows": "attention windows",
    "flops_per_token": "FLOPs per token",
    "kv_bytes_per_token": "KV cache per token",
    "batch_tokens": "batch",
    "micro_batch_tokens": "micro-batch",
    "steps": "steps planned",
    "warmdown_share": "warm-down",
    "warmup_steps": "warm-up steps",
    "final_lr": "final learning rate",
    "lr_share": "peak rate, of pretraining's",
    "too_long": "too long a conversation",
    "max_skips": "skips in a row allowed",
    "parameters": "parameters,",
    "kaplan": "matrices and head",
    "log_every": "steps between records",
    "eval_every": "steps between validations",
    "save_every": "steps between saves",
    "keep": "checkpoints kept",
    "seconds": "took",
    "git": "code",
    "dtype": "compute dtype",
    "bytes_per_token": "bytes per token",
}
SHARES = ("share", "final_lr", "utilisation", "mfu")


@dataclass(frozen=True)
class Table:
    """A record's list of objects, as rows of text."""

    title: str
    header: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Cell:
    """One stage's score on a task; `value` and the interval are None where it was not measured."""

    value: float | None
    low: float | None
    high: float | None
    count: int | None = None


@dataclass(frozen=True)
class ScoreRow:
    """A task over the stages; `cells` follows `score_stages`. A share's axis runs from 0 to 1."""

    task: str
    metric: str
    count: int | None
    chance: float | None
    cells: list[Cell]

    @property
    def is_share(self) -> bool:
        return self.metric == "accuracy"


def tiles(run: RunRecords) -> Rows:
    """The figures to see first, as (label, value)."""
    stage = main_stage(run)
    found: Rows = []
    parameters = total_parameters(run)
    if parameters is not None:
        found.append(("parameters", human(parameters)))
    if stage is not None:
        tokens, flops, seconds = stage.last("tokens"), stage.last("flops"), stage.last("seconds")
        bpb, mfu = stage.last("val_bpb"), typical(stage, "mfu")
        speed = typical(stage, "tokens_per_second")
        steps = stage.last("step")
        if steps is not None:
            found.append(("steps of pretraining" if stage.name == "pretrain" else "steps", f"{steps:,.0f}"))
        if tokens is not None:
            found.append(("tokens trained on", human(tokens)))
        if flops is not None:
            found.append(("compute", f"{human_flops(flops)}"))
        if seconds is not None:
            found.append(("in training steps", duration(seconds)))
        if speed is not None:
            found.append(("tokens a second", human(speed)))
        if mfu is not None:
            found.append(("model FLOPs utilisation", percent(mfu)))
        if bpb is not None:
            found.append(("bits per byte, held out", f"{bpb:.3f}"))
    return found


def main_stage(run: RunRecords) -> StageRecords | None:
    """Pretraining, or the first stage there is."""
    return run.stage("pretrain") or (run.stages[0] if run.stages else None)


def total_parameters(run: RunRecords) -> float | None:
    """From run.json's model, where `parameters` is a count or a table of counts with a total."""
    model = run.run.get("model")
    found = model.get("parameters") if isinstance(model, dict) else None
    return finite(found.get("total")) if isinstance(found, dict) else finite(found)


def typical(stage: StageRecords, key: str) -> float | None:
    """The median, which a slow first step or a pause does not move."""
    values = stage.column(key)[1]
    return statistics.median(values) if values else None


def model_rows(run: RunRecords) -> Rows:
    """What the model is called, its shape and its counts."""
    model, made_by = run.recipe.get("model"), run.recipe.get("make_model")
    name: Rows = [("architecture", made_by.rpartition(":")[2])] if isinstance(made_by, str) else []
    return [*name, *flatten(model if isinstance(model, dict) else {}), *flatten(_part(run, "model"))]


def training_rows(run: RunRecords, stage: StageRecords) -> Rows:
    """What was done in a stage, and what its recipe asked for; how long it was is stated as done, not as asked."""
    key = {"pretrain": "train"}.get(stage.name, stage.name)
    asked = stage.recipe.get(key)
    done: Rows = []
    for name, label in (
        ("step", "steps done"),
        ("tokens", "tokens seen"),
        ("flops", "FLOPs"),
        ("loss", "last loss"),
    ):
        value = stage.last(name)
        if value is not None:
            done.append((label, human_flops(value) if name == "flops" else number(value)))
    if stage.last("seconds") is not None:
        done.append(("time in steps", duration(stage.last("seconds") or 0)))
    done += _length(run, stage)
    return [*done, *flatten(_without(asked, {"horizon_ratio", "epochs"}) if isinstance(asked, dict) else {})]


def _length(run: RunRecords, stage: StageRecords) -> Rows:
    """Tokens for each parameter of the matrices and the head, or epochs of conversations."""
    parameters = _part(run, "model").get("parameters")
    counted = finite(parameters.get("kaplan")) if isinstance(parameters, dict) else None
    tokens = stage.last("tokens")
    if stage.name != "sft":
        return [("tokens per parameter of matrices and head", number(tokens / counted))] if tokens and counted else []
    asked, model = stage.recipe.get("sft"), stage.recipe.get("model")
    data = next((event for event in reversed(stage.events) if event.get("kind") == "data"), {})
    facts = {**(asked if isinstance(asked, dict) else {}), **(model if isinstance(model, dict) else {}), **data}
    names = ("batch_tokens", "context", "pieces", "rows", "documents", "documents_without_target", "documents_too_long")
    batch, context, pieces, rows, documents, empty, long = (finite(facts.get(name)) or 0.0 for name in names)
    usable = documents - empty - (long if facts.get("too_long") == "drop" else 0)
    if not (context and rows and usable > 0):
        return []
    # A row holds several conversations: `pieces` in `rows`, of the part of the data that was packed first.
    seen = (stage.last("step") or 0.0) * batch / context * pieces / rows
    return [("conversations seen, about", f"{seen:,.0f}"), ("epochs", f"{seen / usable:.2g}")]


def data_rows(run: RunRecords) -> Rows:
    """Corpus, documents, bytes, packing, and the tokenizer."""
    data, source = _part(run, "data"), run.recipe.get("data")
    rows: Rows = [("source", source)] if isinstance(source, str) and "source" not in data else []
    rows += flatten(data)
    # Whatever else the run says of what it learned from, such as packing, comes before the tokenizer.
    for key in run.run:
        if key not in ("command", "git", "machine", "versions", "model", "data", "tokenizer"):
            rows += flatten(_part(run, key), _label(key))
    return [*rows, *flatten(_part(run, "tokenizer"), "tokenizer")]


def data_tables(run: RunRecords) -> list[Table]:
    """Lists of objects inside data and tokenizer, such as the compression report."""
    return [*tables(_part(run, "data")), *tables(_part(run, "tokenizer"), "tokenizer")]


def repeat_rows(run: RunRecords) -> Rows:
    """Code, seed, machine and versions."""
    rows: Rows = []
    if run.run.get("git"):
        rows.append(("code", str(run.run["git"])))
    if run.recipe.get("seed") is not None:
        rows.append(("seed", str(run.recipe["seed"])))
    machine, versions = _part(run, "machine"), _part(run, "versions")
    return [
        *rows,
        *flatten(machine),
        *flatten({key: versions[key] for key in versions if key not in machine}),
    ]


def command(run: RunRecords) -> str:
    """The command line that started the run, as typed."""
    found = run.run.get("command", "")
    return " ".join(map(str, found)) if isinstance(found, list) else str(found)


def event_rows(stage: StageRecords) -> list[tuple[str, str, str, str]]:
    """(time, kind, step, details). A stretch of events of one kind in a row, such as saves, is one row."""
    rows: list[tuple[str, str, str, str]] = []
    for group in _stretches(stage.events):
        first, last = group[0], group[-1]
        kind = str(first.get("kind", "event"))
        steps = [text for event in (first, last) if (text := _plain(event.get("step")))]
        step = "–".join(dict.fromkeys(steps))
        ignored = {"kind", "step", "time", "utc", "at"}
        details = ", ".join(f"{label}: {value}" for label, value in flatten(_without(last, ignored)))
        rows.append((event_time(first), f"{kind} ×{len(group)}" if len(group) > 1 else kind, step, details))
    return rows


def _stretches(events: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    for event in events:
        if group and event.get("kind") != group[0].get("kind"):
            yield group
            group = []
        group.append(event)
    if group:
        yield group


def score_stages(run: RunRecords) -> list[str]:
    """The evaluated stages, from untrained onwards."""
    order = ["untrained", "pretrain", "sft"]
    found = {str(line.get("stage", "")) for line in run.scores}
    return sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))


def score_rows(run: RunRecords) -> list[ScoreRow]:
    """One row per task and metric, in the order of the records."""
    stages = score_stages(run)
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for line in run.scores:
        key = (str(line.get("task", "")), str(line.get("metric", "")))
        groups.setdefault(key, {})[str(line.get("stage", ""))] = line
    rows = []
    for (task, metric), lines in groups.items():
        if stages[1:] and lines.keys() == {"untrained"}:
            continue  # questions that nothing trained was asked: without fine-tuning there is none that answers
        last = next(lines[name] for name in reversed(stages) if name in lines)
        count = finite(last.get("count"))
        cells = [_cell(lines.get(name, {})) for name in stages]
        rows.append(
            ScoreRow(task, metric, int(count) if count is not None else None, finite(last.get("chance")), cells)
        )
    return rows


def score_setting(run: RunRecords) -> Table:
    """What identifies each evaluation: prompts, BOS, shots, questions, and those left out since they did not fit."""
    shown = {(row.task, row.metric) for row in score_rows(run)}
    rows = [
        [
            str(line.get("stage", "")),
            str(line.get("task", "")),
            _plain(line.get("count")),
            str(line.get("prompt_hash") or "–"),
            {True: "yes", False: "no"}.get(line.get("bos"), "–"),  # type: ignore[arg-type]
            _plain(line.get("shots")) or "0",
            _plain(line.get("skipped")) or "0",
        ]
        for line in run.scores
        if (str(line.get("task", "")), str(line.get("metric", ""))) in shown
    ]
    return Table("How it was asked", ["stage", "task", "count", "prompts", "BOS", "shots", "left out"], rows)


def _cell(line: dict[str, Any]) -> Cell:
    count = finite(line.get("count"))
    return Cell(
        finite(line.get("value")),
        finite(line.get("low")),
        finite(line.get("high")),
        None if count is None else int(count),
    )


def flatten(record: dict[str, Any], prefix: str = "") -> Rows:
    """Labelled values of a record; objects inside become longer labels, lists of objects are left to
    `tables`.
    """
    rows: Rows = []
    for key, value in record.items():
        label = f"{prefix} {_label(key)}".strip()
        if isinstance(value, dict):
            rows += flatten(value, label)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            continue
        elif value is not None and value != []:
            rows.append((label, _format(key, value)))
    return rows


def tables(record: dict[str, Any], prefix: str = "") -> list[Table]:
    """The lists of objects in a record."""
    found = []
    for key, value in record.items():
        title = f"{prefix} {key.replace('_', ' ')}".strip()
        if isinstance(value, dict):
            found += tables(value, title)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            header = list(dict.fromkeys(name for item in value for name in item))
            rows = [[_format(name, item.get(name, "")) for name in header] for item in value]
            found.append(Table(title, [_label(name) for name in header], rows))
    return found


def _label(key: str) -> str:
    return LABELS.get(key) or key.replace("_", " ")


def _format(key: str, value: Any) -> str:
    amount = finite(value)
    if amount is None:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return ", ".join(map(_plain, value))
        return str(value)
    if key == "bytes" or key.endswith("_bytes") or key.endswith("bytes_per_token") and amount > 64:
        return human_bytes(amount)
    if key in SHARES or key.endswith(("_share", "_utilisation")):
        return percent(amount)
    if key.endswith("seconds"):
        return duration(amount)
    if "flops" in key:
        return human_flops(amount)
    return f"{number(amount)} tokens" if key.endswith("_tokens") else number(amount)


def _part(run: RunRecords, key: str) -> dict[str, Any]:
    found = run.run.get(key)
    return found if isinstance(found, dict) else {"name": found} if isinstance(found, str) else {}


def _without(record: dict[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in keys}


def _plain(value: Any) -> str:
    amount = finite(value)
    return number(amount) if amount is not None else "" if value is None else str(value)
