"""A small text to train on."""

import json
from pathlib import Path

from quern.text.tinyworld import corpus


def write_text(folder: Path) -> None:
    """Writes text.jsonl, a few documents."""
    with open(folder / "text.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in corpus.documents(0, 0.003, "train"))
