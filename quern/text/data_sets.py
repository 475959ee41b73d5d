"""The public data sets that quern knows by name (data_sets.toml, which explains the fields)."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal


@dataclass(frozen=True)
class DataSet:
    """The files of a data set of the Hugging Face Hub."""

    about: str  # a line for the user
    repository: str
    folder: str  # the folder that holds them there; "" for the root
    train: tuple[str, ...]  # the training files, in reading order
    val: tuple[str, ...]  # the files for validation; of conversations and questions, the test split
    kind: Literal["documents", "conversations", "questions", "tests", "tokens"] = "documents"
    file_tokens: int = 0  # tokens in a training file
    file_rows: int = 0  # rows in a training file
    tokenizer: tuple[str, str] | None = None

    def path(self, file: str) -> str:
        """The path of a file in the repository."""
        return f"{self.folder}/{file}".lstrip("/")


def _read(path: Path) -> dict[str, DataSet]:
    tables: dict[str, dict[str, Any]] = tomllib.loads(path.read_text(encoding="utf-8"))
    for table in tables.values():
        table.setdefault("folder", "")
        for key in ("train", "val"):
            names: list[Any] = table[key]
            if len(names) == 3 and isinstance(names[1], int):
                template, count, first = names
                table[key] = [template.format(number) for number in range(first, first + count)]
        table |= {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
    return {name: DataSet(**table) for name, table in tables.items()}


DATASETS: Mapping[str, DataSet] = MappingProxyType(_read(Path(__file__).with_suffix(".toml")))
