"""Names what `make check` gives to pyright: the files that changed since it last found nothing, and what imports them.

    python tests/changed.py STAMP      prints the files, or "all", or "none"

Every function has annotations, so an error that a change causes is in the changed file or in one that imports it. All
files are read where the stamp is missing, as in a clean clone, or older than what all depend on.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_ALL = ("pyproject.toml", "constraints.txt", "typings")
MOST = 150
"""Files, beyond which reading all takes as long."""


def changed(stamp: Path, root: Path = ROOT) -> list[str] | None:
    """Returns the files to read, or None for all."""
    if not stamp.exists():
        return None
    at = stamp.stat().st_mtime
    if any(path.stat().st_mtime > at for name in FOR_ALL for path in [root / name, *(root / name).rglob("*")]):
        return None
    texts = {path.relative_to(root): path for folder in ("quern", "tests") for path in (root / folder).rglob("*.py")}
    new = {path for path, file in texts.items() if file.stat().st_mtime > at}
    names = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in new}
    imported = "|".join(rf"from {re.escape(n)} import|import {re.escape(n)}\b|{_member(n)}" for n in sorted(names))
    pattern = re.compile(rf"^\s*(?:{imported})", re.MULTILINE)
    found = {p for p, file in texts.items() if p in new or (names and pattern.search(file.read_text("utf-8")))}
    return None if len(found) > MOST else sorted(map(str, found))


def _member(name: str) -> str:
    """`from a import b`, also with others and over several lines, of the module a.b."""
    package, _, own = name.rpartition(".")
    return rf"from {re.escape(package)} import (?:\([^)]*|.*)\b{own}\b"


if __name__ == "__main__":
    files = changed(Path(sys.argv[1]))
    print("all" if files is None else " ".join(files) or "none")
