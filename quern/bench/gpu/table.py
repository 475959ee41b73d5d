"""The page of a record of `quern bench gpu`: what was aimed at, then every figure, in Markdown.

Figures whose names are "place: column" make a grid of places by columns. It reads records and measures nothing; of no
record at all it says "not yet measured".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quern.bench.gpu.attention import figure, over_full
from quern.bench.record import number

UNMEASURED = "not yet measured"


@dataclass(frozen=True)
class Aim:
    """A figure of a section, and what it should at least (or at most) be."""

    what: str
    section: str
    measure: str
    unit: str
    least: float | None = None
    most: float | None = None

    def bar(self) -> str:
        sign, value = ("≥", self.least) if self.least is not None else ("≤", self.most)
        return f"{sign} {value:g} {self.unit}"

    def met(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


FULL = [figure(128, 16_384, "full", "triton", way) for way in ("forward", "backward")]
WINDOW = [over_full(figure(128, 16_384, "window 1024", "triton", way)) for way in ("forward", "backward")]
AIMS = (
    Aim("causal attention, 16,384 tokens, head dim 128, forward", "attention", FULL[0], "TFLOP/s", least=400),
    Aim("the same, backward", "attention", FULL[1], "TFLOP/s", least=330),
    Aim("a window of 1,024 over full, the same sizes, forward", "attention", WINDOW[0], "×", least=4),
    Aim("the same, backward", "attention", WINDOW[1], "×", least=4),
    Aim("training at depth 12: MFU", "training", "MFU: of the data sheet", "%", least=45),
    Aim("training at depth 12: memory", "training", "memory: at most", "GB", most=34),
    Aim("decoding at batch 1", "decode", "batch 1, compiled: of the bandwidth", "%", least=50),
)


def shown(value: float) -> str:
    """As in other tables, but small errors keep their digits."""
    return number(value) if value == 0 or abs(value) >= 0.01 else f"{value:.1e}"


def page(body: Mapping[str, Any]) -> str:
    """body: a record, or {} for none."""
    lines = ["# What a GPU shows", ""]
    if body:
        machine, version = body["machine"], body["versions"]
        lines += [
            f"{machine['processor']}, {machine['dtype']}, torch {version['torch']}, quern {version['quern']} "
            f"({version['git']}), {body['utc']}, {body['seconds']:.0f} s. Attention: {machine['attention']}.",
            "",
        ]
        if body["quick"]:
            lines += ["Tiny sizes (--quick): the figures mean nothing.", ""]
        lines += [f"- {note}" for note in body["notes"]]
    else:
        lines += ["`quern bench gpu` has not been run on a GPU yet; this page is what it writes.", ""]
    lines += table(["what", "aim", "measured", ""], [aim_row(aim, body) for aim in AIMS])
    for name, section in body.get("sections", {}).items():
        lines += ["", f"## {name}", "", *section_lines(section)]
    return "\n".join(lines) + "\n"


def aim_row(aim: Aim, body: Mapping[str, Any]) -> list[str]:
    measures = body.get("sections", {}).get(aim.section, {}).get("measures", [])
    value = next((m["median"] for m in measures if m["name"] == aim.measure), None)
    if value is None:
        return [aim.what, aim.bar(), UNMEASURED, ""]
    return [aim.what, aim.bar(), f"{shown(value)} {aim.unit}", "met" if aim.met(value) else "missed"]


def section_lines(section: Mapping[str, Any]) -> Iterator[str]:
    """Grids, one for each unit; then what went wrong."""
    for unit in dict.fromkeys(m["unit"] for m in section["measures"]):
        measures = [m for m in section["measures"] if m["unit"] == unit]
        places = dict.fromkeys(_split(m["name"])[0] for m in measures)
        columns = list(dict.fromkeys(_split(m["name"])[1] for m in measures))
        cells = {_split(m["name"]): m for m in measures}
        notes = {_split(m["name"])[0]: m["note"] for m in measures if m.get("note")}
        rows = []
        for place in places:
            found = [cells.get((place, column)) for column in columns]
            rows.append([place, *("" if m is None else shown(m["median"]) for m in found), notes.get(place, "")])
        yield from table([unit, *columns, ""], rows)
        yield ""
    for line in [*section["problems"], *([section["error"]] if section["error"] else [])]:
        yield f"- {line}"


def _split(name: str) -> tuple[str, str]:
    place, separator, column = name.rpartition(": ")
    return (place, column) if separator else (name, "")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *(line(row) for row in rows)]
