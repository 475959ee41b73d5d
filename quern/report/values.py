"""Labels and formats for the fields of a record: JSON objects as rows and tables of text.

Known keys get a label and a unit. Unknown keys are shown as they are, so a new field of a record appears in the report
without a change here.
"""

from dataclasses import dataclass
from typing import Any

from quern.report.numbers import duration, human_bytes, human_flops, number, percent
from quern.report.run_records import finite

Pairs = list[tuple[str, str]]
"""(label, value)."""

LABELS = {
    "kv_heads": "key-value heads",
    "vocab_size": "vocabulary",
    "rope_base": "RoPE base",
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
    "lr_share": "peak learning rate, relative to pretraining",
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


def flatten(record: dict[str, Any], prefix: str = "") -> Pairs:
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


def tables(record: dict[str, Any], prefix: str = "") -> list[tuple[str, Table]]:
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
        return human_bytes(amount)
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
