"""The name of a study, its lock, and the facts of its first start."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quern import __version__
from quern.records import git_hash
from quern.temporaries import holder

if TYPE_CHECKING:
    from quern.machine import Machine

FIXED = {"device": "--device", "dtype": "--dtype", "compiled": "--compile"}
"""Facts of the machine that change the numbers, and the flags that set them."""


def check_name(name: str) -> str:
    """Returns the name of a study, which is also the name of its folder.

    Raises:
        ValueError: The name could be a path, or a hidden file.
    """
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise ValueError(f"a study cannot be called '{name}': use letters, digits, - _ and .")
    return name


def start_facts(machine: Machine, command: str) -> dict[str, Any]:
    """The facts of a start, for the records: time, versions, machine. command: the command line."""
    return {
        "command": command,
        "registered": datetime.now(UTC).isoformat(timespec="seconds"),
        "quern": __version__,
        "commit": git_hash(Path(__file__).parent),
        "machine": machine.describe(),
    }


def compare_facts(name: str, before: dict[str, Any] | None, now: dict[str, Any] | None) -> str | None:
    """Compares the facts of a study's first start with those of this one.

    Args:
        name: Of the study.
        before, now: As from `start_facts`; None if they are not known.

    Returns:
        A warning if the code or PyTorch have changed.

    Raises:
        ValueError: The device, the dtype or the use of torch.compile differ.
    """
    if before is None or now is None:
        return None
    old, new = before["machine"], now["machine"]
    fixed = [f"{flag} ({old[key]} then, {new[key]} now)" for key, flag in FIXED.items() if old[key] != new[key]]
    if fixed:
        raise ValueError(
            f"the study '{name}' was started with another {', '.join(fixed)}, so its runs could not be compared: "
            "give the same flags, or name another study with --study"
        )
    pairs = [(key, before.get(key), now.get(key)) for key in ("quern", "commit")] + [
        ("torch", old.get("torch"), new.get("torch"))
    ]
    changed = [f"{key} {old} then, {new} now" for key, old, new in pairs if old != new]
    return f"warning: the study '{name}' was started by other software: {'; '.join(changed)}" if changed else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a study's lock for the length of the block.

    Raises:
        ValueError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise ValueError(
                f"{stream.read() or 'another process'} works on the study {folder.name}: wait until it ends, or name "
                "another with --study"
            ) from error
        stream.truncate(0)
        stream.write(holder())
        stream.flush()
        yield
