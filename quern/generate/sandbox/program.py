"""The sandbox's data: a program with its check, the limits, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from annotated_types import Interval

from quern.field_types import Amount, annotations_of, refuse_outside

Reason = Literal["passed", "failed", "exception", "exit", "timeout", "memory", "output", "killed"]


class SandboxError(RuntimeError):
    """No tier works on this machine, or the sandbox itself failed. The message says what to do."""


@dataclass(frozen=True)
class Program:
    """A program, and the check that decides whether it passes.

    The check runs in another process than the program (docs/sandbox.md). There, `program.name(arguments)` calls the
    program's function `name`. Arguments and results cross as plain data: None, numbers, strings, bytes, and lists,
    tuples, sets and dictionaries of these. An exception of the function is raised in the check.
    """

    source: str
    """Python source. Nobody needs to trust it."""
    check: str = ""
    """Python source that raises an exception if the program is wrong: `assert program.add(1, 2) == 3`. An empty check
    accepts every program that reaches its end, by the program's own word."""


@dataclass(frozen=True)
class Limits:
    """Limits of each program, and in its own process of the check. Raises ValueError for one outside its range."""

    seconds: Amount = 10.0
    """Wall clock, from the order to the verdict."""
    cpu_seconds: Amount = 5.0
    """CPU time, rounded up to whole seconds."""
    memory_megabytes: Annotated[int, Interval(ge=32, le=10**6)] = 512
    """Address space, of which the interpreter has about 30 MB and each thread 8 MB or more."""
    file_megabytes: Annotated[int, Interval(ge=1, le=1000)] = 16
    """The largest file, and the size of the program's own /tmp."""
    output_kilobytes: Annotated[int, Interval(ge=1, le=1000)] = 64
    """The most that a program may print to each of stdout and stderr."""
    threads: Annotated[int, Interval(ge=0, le=1000)] = 16
    """Threads, besides the first. A program cannot start processes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            refuse_outside(annotations_of(Limits)[field.name], getattr(self, field.name), field.name)


@dataclass(frozen=True)
class Outcome:
    """The result of one program."""

    passed: bool
    """The program ran to its end without an exception, and its check raised none."""
    reason: Reason
    """"passed"; "failed": the check raised an exception of its own; "exception": the program raised one; "exit": the
    program ended itself before its end; "timeout": too much wall clock or CPU time; "memory"; "output": it printed too
    much; "killed": a signal ended it."""
    stdout: str
    """The program's output, cut at the limit. The check's is discarded."""
    stderr: str
    """The program's output, then the traceback of the program or of its check."""
    seconds: float
    """Wall clock."""
    tier: str
    """The tier that confined the program."""
