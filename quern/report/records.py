"""Reads the records of a run folder for the report, and shows their values as text. No model, no checkpoint.

The folder holds run.json, evaluate.jsonl and samples.jsonl, and one folder per stage (pretrain, sft, rl) with
recipe.json, metrics.jsonl and events.jsonl. Every file is optional, because a run can stop at any time. `seconds`
counts time in training steps; `seconds`, `flops` and `tokens` start at zero with the stage.

Known keys get a label and a unit, unknown keys are shown as they are. Units are decimal: 1 kB is 1,000 bytes.
"""

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quern.records import EVENTS, METRICS, read_events, read_json, read_lines, read_metrics
from quern.terminal import human_size

Record = dict[str, Any]
"""A line of a record, or a whole file of JSON."""
SCORES, SAMPLES = "evaluate.jsonl", "samples.jsonl"
STAGE_TITLES = {
    "untrained": "Untrained",
    "pretrain": "Pretraining",
    "grug": "Pretraining in JAX",
    "sft": "Fine-tuning",
    "rl": "Reinforcement learning",
}


@dataclass(frozen=True)
class StageRecords:
    """The records of one stage. metrics: lines of training steps; validations: lines of evaluators; both by step."""

    name: str
    recipe: Record
    metrics: list[Record]
    validations: list[Record]
    events: list[Record]

    @property
    def title(self) -> str:
        return STAGE_TITLES.get(self.name, self.name)

    def last(self, key: str) -> float | None:
        """The latest finite value of a metric."""
        values = self.column(key)[1]
        return values[-1] if values else None

    def column(self, key: str, against: str = "step") -> tuple[list[float], list[float]]:
        """(x, y) of the lines in which a metric and another one, x, are finite. Validations have names with `val_`."""
        lines = self.validations if key.startswith("val_") else self.metrics
        pairs = ((finite(line.get(against)), finite(line.get(key))) for line in lines)
        points = [(x, y) for x, y in pairs if x is not None and y is not None]
        return [x for x, _ in points], [y for _, y in points]

    def steps_of(self, kind: str) -> list[float]:
        """The steps at which events of a kind happened."""
        steps = (finite(event.get("step")) for event in self.events if event.get("kind") == kind)
        return [step for step in steps if step is not None]

    def resumed_at(self) -> list[float]:
        """The steps at which training resumed. Resuming a finished stage trains nothing and does not count."""
        end = self.last("step") or 0.0
        return [step for step in self.steps_of("resume") if step < end]


@dataclass(frozen=True)
class RunRecords:
    """samples: the latest line of each (stage, prompt)."""

    name: str
    run: Record
    recipe: Record
    stages: list[StageRecords]
    scores: list[Record]
    samples: list[Record]

    def stage(self, name: str) -> StageRecords | None:
        return next((stage for stage in self.stages if stage.name == name), None)

    @property
    def main_stage(self) -> StageRecords | None:
        """Pretraining, or else the first stage."""
        return self.stage("pretrain") or next(iter(self.stages), None)

    def part(self, key: str) -> Record:
        """An object in run.json."""
        return as_object(self.run.get(key))

    def parameters(self, key: str) -> float | None:
        """A parameter count in run.json."""
        return finite(as_object(self.part("model").get("parameters")).get(key))


def read_run(folder: Path) -> RunRecords:
    """Reads every record of a run. Raises FileNotFoundError if the folder holds none, ValueError if one is damaged."""
    found = {path.parent for name in (METRICS, EVENTS) for path in folder.glob(f"*/{name}")}
    stages = [_read_stage(path) for path in sorted(found, key=lambda path: stage_order(path.name))]
    run, scores, samples = _read_object(folder / "run.json"), read_lines(folder / SCORES), read_lines(folder / SAMPLES)
    if not (stages or run or scores or samples):
        raise FileNotFoundError(f"{folder} holds no records of a run: name another, or train one with `quern run`")
    recipe = next((stage.recipe for stage in stages if stage.recipe), {})
    shown = {_question(sample): sample for sample in samples}
    return RunRecords(folder.resolve().name, run, recipe, stages, scores, list(shown.values()))


def _read_stage(folder: Path) -> StageRecords:
    lines = sorted(read_metrics(folder), key=lambda line: finite(line.get("step")) or 0.0)
    validations = [line for line in lines if any(key.startswith("val_") for key in line)]
    metrics = [line for line in lines if "loss" in line or line not in validations]
    return StageRecords(folder.name, _read_object(folder / "recipe.json"), metrics, validations, read_events(folder))


def _read_object(path: Path) -> Record:
    return read_json(path, Record) if path.exists() else {}


def finite(value: Any) -> float | None:
    """A number as a float; None for anything else, for NaN, infinities and integers that no float can hold."""
    with suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None


def as_object(value: Any) -> Record:
    """The value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def stage_order(name: str) -> tuple[int, str]:
    """Sorts stages in the order of training, and others behind them."""
    return [*STAGE_TITLES, name].index(name), name


def _question(sample: Record) -> str:
    """Identifies the prompt of a sample: a run can be evaluated more than once."""
    asked = sample.get("messages")
    if isinstance(asked, list) and all(isinstance(message, dict) for message in asked):
        asked = [message for message in asked if message.get("role") != "assistant"]
    return json.dumps([sample.get("stage"), sample.get("kind"), sample.get("prompt"), asked])


Pairs = list[tuple[str, str]]
"""(label, value)."""

LABELS = {
    "kv_heads": "key-value heads",
    "vocab_size": "vocabulary",
    "rope_base": "RoPE base",
    "key_offset": "partial key offset",
    "softcap": "logit softcap",
    "bos": "BOS token id",
    "added_bos_share": "added BOS share",
    "fp8": "FP8",
    "windows": "attention windows",
    "flops_per_token": "FLOPs per token",
    "kv_bytes_per_token": "KV cache per token",
    "batch_tokens": "batch",
    "micro_batch_tokens": "micro-batch",
    "steps": "planned steps",
    "warmdown_share": "warm-down",
    "warmup_steps": "warm-up steps",
    "final_lr": "final learning rate",
    "lr_share": "peak learning rate, share of the square-root rate",
    "too_long": "conversations longer than the context",
    "recompute": "blocks computed twice",
    "max_skips": "allowed consecutive skips",
    "parameters": "parameters,",
    "kaplan": "matrices and head",
    "log_every": "steps between records",
    "eval_every": "steps between validations",
    "save_every": "steps between saves",
    "keep": "kept checkpoints",
    "seconds": "duration",
    "git": "commit",
    "dtype": "compute dtype",
    "bytes_per_token": "bytes per token",
}
SHARES = ("share", "final_lr", "utilisation", "mfu")


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: list[str]
    rows: list[list[str]]


def number(value: float) -> str:
    """1234567 → 1,234,567; 0.123456 → 0.1235."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def human(value: float) -> str:
    """1234567 → 1.23M."""
    return _scaled(value, ("T", "B", "M", "K")) or f"{value:.3g}"


def human_flops(value: float) -> str:
    """4.7e14 → 470 TFLOP."""
    return _scaled(value, [f" {prefix}FLOP" for prefix in "ZEPTGM"], smallest=1e6) or f"{value:,.0f} FLOP"


def duration(seconds: float) -> str:
    """400 → 6 min 40 s."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def percent(share: float) -> str:
    """0.8333 → 83%; one decimal below 10% and above 99%."""
    value = 100 * share
    return f"{value:.1f}%" if 0 < abs(value) < 9.95 or 99 < value < 99.95 else f"{value:.0f}%"


def _scaled(value: float, units: Sequence[str], smallest: float = 1e3) -> str:
    """The value in the largest unit that fits (units: largest first, a factor of 1,000 apart); "" if none fits."""
    sizes = ((smallest * 1000.0**power, unit) for power, unit in zip(reversed(range(len(units))), units, strict=True))
    return next((f"{value / size:.3g}{unit}" for size, unit in sizes if abs(value) >= 0.9995 * size), "")


def flatten(record: Record, prefix: str = "") -> Pairs:
    """Labelled values of a record. Nested objects get longer labels; `tables` handles lists of objects."""
    pairs: Pairs = []
    for key, value in record.items():
        name = f"{prefix} {label(key)}".strip()
        if isinstance(value, dict):
            pairs += flatten(value, name)
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            continue
        elif value is not None and value != []:
            pairs.append((name, formatted(key, value)))
    return pairs


def tables(record: Record, prefix: str = "") -> list[tuple[str, Table]]:
    """(title, table) for each list of objects in a record."""
    found = []
    for key, value in record.items():
        title = f"{prefix} {key.replace('_', ' ')}".strip()
        if isinstance(value, dict):
            found += tables(value, title)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            keys = list(dict.fromkeys(name for item in value for name in item))
            rows = [[formatted(name, item.get(name, "")) for name in keys] for item in value]
            found.append((title.capitalize(), Table([label(name) for name in keys], rows)))
    return found


def label(key: str) -> str:
    return LABELS.get(key) or key.replace("_", " ")


def formatted(key: str, value: Any) -> str:
    """A value as text, with the unit that its key implies."""
    amount = finite(value)
    if amount is None:
        if isinstance(value, bool):
            return "yes" if value else "no"
        return ", ".join(map(plain, value)) if isinstance(value, list) else str(value)
    if key == "bytes" or key.endswith("_bytes") or key.endswith("bytes_per_token") and amount > 64:
        return human_size(amount)
    if key in SHARES or key.endswith(("_share", "_utilisation")):
        return percent(amount)
    if key.endswith("seconds"):
        return duration(amount)
    if "flops" in key:
        return human_flops(amount)
    return f"{number(amount)} tokens" if key.endswith("_tokens") else number(amount)


def plain(value: Any) -> str:
    """A value as text without a unit; None becomes "" """
    amount = finite(value)
    return number(amount) if amount is not None else "" if value is None else str(value)
