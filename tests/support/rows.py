"""Files of rows: JSON lines, compressed if the name ends in .gz, or Parquet."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
        return path
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode("utf-8")
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path
