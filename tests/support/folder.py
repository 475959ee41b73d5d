"""The contents of a folder."""

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file but locks, by its path in the folder."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
