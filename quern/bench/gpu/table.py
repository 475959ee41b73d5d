"""The Markdown page of a record of `quern bench gpu`: the aims, then every figure of each section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quern.bench.gpu.attention import OVER_FULL, place
from quern.bench.measure import number, table

UNMEASURED = "not yet measured"
FULL, WINDOW = (place(128, 16_384, mask, "triton") for mask in ("full", "window 1024"))
AIMS = (  # description, section, figure, unit, least or most, limit
    ("causal attention, 16,384 tokens, head dim 128, forward", "attention", f"{FULL} forward", "TFLOP/s", "≥", 400),
    ("the same, backward", "attention", f"{FULL} backward", "TFLOP/s", "≥", 330),
    ("a window of 1,024 over full, the same sizes, forward", "attention", f"{WINDOW} forward{OVER_FULL}", "×", "≥", 4),
    ("the same, backward", "attention", f"{WINDOW} backward{OVER_FULL}", "×", "≥", 4),
    ("training at depth 12: MFU", "training", "MFU: of the data sheet", "%", "≥", 45),
    ("training at depth 12: memory", "training", "memory: at most", "GB", "≤", 34),
    ("decoding at batch 1", "decode", "batch 1, compiled: of the bandwidth", "%", "≥", 50),
)


def page(body: Mapping[str, Any]) -> str:
    """Returns the page of a record, or of {} for none."""
    lines = ["# GPU measurements", ""]
    if body:
        machine, version = body["machine"], body["versions"]
        lines += [
            f"{machine['processor']}, {machine['dtype']}, torch {version['torch']}, quern {version['quern']} "
            f"({version['git']}), {body['utc']}, {body['seconds']:.0f} s. Attention: {machine['attention']}.",
            "",
            *(["Tiny sizes (--quick): the figures mean nothing.", ""] if body["quick"] else []),
            *(f"- {note}" for note in body["notes"]),
        ]
    else:
        lines += ["`quern bench gpu` has not been run on a GPU yet; it writes this page.", ""]
    sections = body.get("sections", {})
    found = {(name, m["name"]): m["median"] for name, section in sections.items() for m in section["measures"]}
    lines += ["| aim | limit | measured | |", "|---|---|---|---|"]
    for what, section, name, unit, sign, limit in AIMS:
        value = found.get((section, name))
        result = f"{UNMEASURED} | " if value is None else f"{number(value)} {unit} | {verdict(value, sign, limit)}"
        lines.append(f"| {what} | {sign} {limit:g} {unit} | {result} |")
    for name, section in sections.items():
        problems = [f"- {line}" for line in (*section["problems"], section["error"]) if line]
        lines += ["", f"## {name}", "", "```", *table(section["measures"]), "```", *problems]
    return "\n".join(lines) + "\n"


def verdict(value: float, sign: str, limit: float) -> str:
    return "met" if (value >= limit if sign == "≥" else value <= limit) else "missed"
