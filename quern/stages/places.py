"""Where a run's files lie: everything under one output folder, `out/` unless `--out` says otherwise.

out/tokenizers/<name>-<fingerprint>.json     out/data/<name>-<fingerprint>/     out/downloads/<data set>/
out/runs/<run>/  run.json  recipe.json  tokenizer.json  evaluate.jsonl  samples.jsonl  report.md  report.html
out/runs/<run>/{pretrain,sft}/  recipe.json  metrics.jsonl  events.jsonl  checkpoints/
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quern.text.tokenizer import Tokenizer

STAGES = ("pretrain", "sft")


@dataclass(frozen=True)
class Places:
    """out: the output folder; run: the run's name, letters, digits, dots, dashes and underscores."""

    out: Path
    run: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.run):
            raise ValueError(f"'{self.run}' cannot name a run: use letters, digits, dots, dashes and underscores")

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.run

    def stage(self, name: str) -> Path:
        return self.folder / name

    def checkpoints(self, stage: str) -> Path:
        return self.stage(stage) / "checkpoints"

    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer. Raises FileNotFoundError naming the runs that there are."""
        path = self.folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"there is no run '{self.run}' with a tokenizer under {self.out}: {self.known()}")
        return Tokenizer.load(path)

    def known(self) -> str:
        """What runs there are, for messages."""
        runs = sorted(path.name for path in (self.out / "runs").glob("*") if path.is_dir())
        return f"name one of {', '.join(runs)} with --run" if runs else "make one with `quern run`"

    def write(self, name: str, body: dict[str, Any]) -> None:
        """Writes a JSON file of the run's folder, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.replace(path)

    def append(self, name: str, lines: list[dict[str, Any]]) -> None:
        """Appends lines to a JSONL file of the run's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
