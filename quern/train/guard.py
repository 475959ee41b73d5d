"""Guard: how training handles a step that is not finite, and a request to stop. No tensors here.

`Guard` decides what happens to a step whose loss or gradient is not finite. `Stop` turns SIGTERM, SIGINT and SIGHUP
into a flag that the loop reads between steps. This file also defines the exit codes of the training commands.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TextIO

# Exit codes of the training commands, after sysexits.h where it has a fitting name (Python and argument parsing use 1
# and 2). A second signal kills the process: a shell shows 128 + its number, subprocess the negative number.
EXIT_DONE = 0
EXIT_DIVERGED = 70  # EX_SOFTWARE: too many steps in a row were not finite; the message names the last good checkpoint
EXIT_NOT_SAVED = 74  # EX_IOERR: a checkpoint or the records could not be written; earlier ones are intact
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal after a whole step (in RL a round), and saved: resume to continue

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(eq=False)
class Guard:
    """Skips steps that are not finite, and stops after more than `max_skips` of them in a row.

    A skipped step must not change the weights or the optimizer. The next finite step is a normal step.
    """

    max_skips: int
    skips_in_row: int = 0
    skips: int = 0

    def observe(self, finite: bool) -> Literal["step", "skip", "stop"]:
        """Returns what to do with this step. finite: whether its loss and gradient norm are, on every rank."""
        if finite:
            self.skips_in_row = 0
            return "step"
        self.skips_in_row += 1
        self.skips += 1
        return "stop" if self.skips_in_row > self.max_skips else "skip"


class Stop:
    """While open, the first SIGTERM, SIGINT or SIGHUP sets `requested`; a second SIGTERM or SIGINT ends the process.

    After the first SIGTERM or SIGINT, both signals get the kernel's default action. So the second one works even while
    Python is blocked in a native call. Signals that arrive together, during one native call, count as one. On exit, the
    earlier handlers are restored. Outside the main thread, where Python allows no handlers, none are installed.

    SIGHUP means that the terminal is gone. The kernel and the shell may each send it, so it never counts as the second
    signal. If it is ignored at the start (nohup), it stays ignored. While this is open, output to a terminal or pipe
    without a reader is dropped and raises nothing.

    alone: False on one of several ranks. Then rank 0 reports the stop, once all ranks know of it, and later signals are
    ignored: the scheduler and the launcher may each send one, and the launcher uses SIGKILL. saves, part: for the
    message, which says that this part of the run is finished.
    """

    def __init__(self, alone: bool = True, saves: bool = True, part: str = "step") -> None:
        self.alone, self._part = alone, part
        self._saving = " saving," if saves else ""
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._output = contextlib.ExitStack()

    @property
    def requested(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for which in heeded():
                self._before[which] = signal.signal(which, self._receive)
        self._output.enter_context(contextlib.redirect_stdout(_Unread(sys.stdout)))
        self._output.enter_context(contextlib.redirect_stderr(_Unread(sys.stderr)))
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        for which, handler in self._before.items():
            if which == self.signal == signal.SIGHUP:
                continue  # the second SIGHUP of a closing session may arrive while the process exits
            # None means a handler that was not installed from Python. Python cannot restore it.
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        for which in (signal.SIGHUP,) if number == signal.SIGHUP and self.alone else SIGNALS:
            at_once = self.alone and which != signal.SIGHUP
            signal.signal(which, signal.SIG_DFL if at_once else signal.SIG_IGN)
        if not self.alone:
            return
        name = signal.Signals(number).name
        more = "" if number == signal.SIGHUP else "; once more exits at once"
        note = f"\n{name}: finishing this {self._part},{self._saving} then exiting{more}.\n"
        with contextlib.suppress(OSError):  # the reader may be gone
            os.write(2, note.encode())  # print() is not reentrant


def heeded() -> list[signal.Signals]:
    """Returns the signals that request a stop; without SIGHUP if it is ignored, as under nohup."""
    return [which for which in SIGNALS if which != signal.SIGHUP or signal.getsignal(which) != signal.SIG_IGN]


class _Unread:
    """A text stream that drops its output once the reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._dropping(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._dropping(self._stream.flush)

    def _dropping(self, call: Callable[..., object], *text: str) -> None:
        try:
            call(*text)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):  # a terminal that hung up, a pipe that was closed
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())  # the buffer is flushed at exit, and must not change the exit code
            os.close(null)
