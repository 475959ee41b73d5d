"""The Python code of run folders that may be executed: code trained with in this output folder, or allowed by a user.

A run keeps its recipe's file, so a run that somebody else made is a program. out/trusted/<SHA-256> allows a file. It
holds the identity of out/trusted/key, its inode number and the time of its change, which no copy or archive keeps: what
another output folder allows is not allowed here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from quern.flags.recipe_flags import Arguments
from quern.records import read_json
from quern.temporaries import sha256_of, write_whole
from quern.validate import RecipeBody

FLAG = "--trust-code"


def trust(out: Path, digest: str | None) -> None:
    """Allows the Python file with this SHA-256; None: nothing."""
    if digest is not None and not _trusts(out, digest):
        (out / "trusted").mkdir(parents=True, exist_ok=True)
        (out / "trusted" / "key").open("a", encoding="utf-8").close()
        write_whole(out / "trusted" / digest, _identity(out))


def require_trusted(out: Path, path: Path) -> None:
    """Raises ValueError for a Python file that is not allowed in this output folder."""
    if not _trusts(out, sha256_of(path)):
        raise ValueError(
            f"{path} is Python code that was not run under {out} before, and this command would run it: read it, then "
            f"repeat the command with {FLAG}, which runs it and remembers it"
        )


def trust_runs(arguments: Arguments, log: Callable[[str], None]) -> None:
    """Allows the code of the runs that a command names."""
    out = Path(arguments.value("out") or "out")
    names = [arguments.value("run") or "first", *arguments.repeated(("from", "also"))]
    for name in {name.rpartition("=")[2] for name in names}:
        folder = out / "runs" / name
        paths = [*folder.glob("*/recipe_source.py")]
        for recipe in folder.glob("rl/recipe.json"):
            rewards = read_json(recipe, RecipeBody).get("rl", {}).get("rewards", ())
            paths += [path for path in map(Path, rewards) if path.suffix == ".py" and path.is_file()]
        for path in paths:
            trust(out, sha256_of(path))
            log(f"trusted: {path}")


def _identity(out: Path) -> str:
    found = (out / "trusted" / "key").stat()
    return f"{found.st_ino} {found.st_ctime_ns}"


def _trusts(out: Path, digest: str) -> bool:
    path = out / "trusted" / digest
    return path.is_file() and path.with_name("key").is_file() and path.read_text(encoding="utf-8") == _identity(out)
