"""Numbers, and the fields of a record, as text for readers: labels, units, and rows and tables of JSON objects.

Known keys get a label and a unit. Unknown keys are shown as they are, so a new field of a record appears in the report
without a change here. Units are decimal: 1 kB is 1,000 bytes.
"""

from dataclasses import dataclass
from typing import Any

from quern.report.records import Record, finite

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


def number(value: float) -> str:
    """1234567 → 1,234,567; 0.123456 → 0.1235."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def human(value: float) -> str:
    """1234567 → 1.23M."""
    return _scaled(value, ("T", "B", "M", "K")) or f"{value:.3g}"


def human_bytes(value: float) -> str:
    """24,000,000 → 24 MB."""
    return _scaled(value, (" TB", " GB", " MB", " kB")) or f"{value:.0f} bytes"


def human_flops(value: float) -> str:
    """4.7e14 → 470 TFLOP."""
    prefixes = "ZEPTGM"
    return _scaled(value, [f" {prefix}FLOP" for prefix in prefixes], smallest=1e6) or f"{value:,.0f} FLOP"


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


def _scaled(value: float, units: list[str] | tuple[str, ...], smallest: float = 1e3) -> str:
    """The value in the largest unit that fits (units: largest first, a factor of 1,000 apart); "" if none fits."""
    size = smallest * 1000 ** (len(units) - 1)
    for unit in units:
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
        size /= 1000
    return ""


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
