"""A profile function that counts the calls of a process, and acts before one of them: what kills and other faults need.

Events are the calls of Python and of C functions that chosen files of quern make or receive, as Python's profiler sees
them: before each forward, gradient, update, write, fsync and rename there is one. Nothing of quern is replaced.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

QUERN = Path(__file__).parents[2] / "quern"


class Events:
    """Counts events by part.

    Args:
        files: Files and folders of quern/ whose events count.
        at: The part and the number of the event before which `act` is called.
        act: Gets a description of the place.
        parts: Names of parts, which last as long as a call of their code. All other events are of the part "train".
    """

    def __init__(
        self,
        files: tuple[str, ...],
        at: tuple[str, int] | None,
        act: Callable[[str], object],
        parts: Mapping[CodeType, str] | None = None,
    ) -> None:
        self.files, self.at, self.act, self.parts = tuple(str(QUERN / file) for file in files), at, act, parts or {}
        self.counts = {"train": 0, **dict.fromkeys(self.parts.values(), 0)}
        self.part = "train"
        self.ours: dict[str, bool] = {}  # by file, asked on every call that Python makes: the hash of a code is slow

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        ours = self.ours.get(code.co_filename)
        if ours is None:
            ours = self.ours[code.co_filename] = code.co_filename.startswith(self.files)
        if not ours or event in ("c_return", "c_exception"):
            return
        if code in self.parts:
            self.part = self.parts[code] if event == "call" else "train" if event == "return" else self.part
        if event == "return":
            return
        self.counts[self.part] += 1
        if self.at == (self.part, self.counts[self.part]):
            called = getattr(argument, "__name__", "") if event == "c_call" else ""
            self.act(f"{self.part}: {Path(code.co_filename).name} {code.co_name} {called}".rstrip())
