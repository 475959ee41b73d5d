"""Guard: what training does when a step goes wrong or someone asks it to stop. No tensors here.

`Guard` decides what becomes of a step whose loss or gradient is not finite; its state is JSON, so that a
resumed run decides as the uninterrupted one would. `Stop` turns SIGTERM, SIGINT and SIGHUP into a flag that the
loop reads between steps. The exit codes of the training commands are defined here too.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Literal, TextIO

# Exit codes of the training commands, after sysexits.h where it has a fitting name (Python and argument
# parsing use 1 and 2). A second signal is what the process dies of: a shell shows 128 + its number,
# subprocess minus it.
EXIT_DONE = 0
EXIT_DIVERGED = 70  # EX_SOFTWARE: too many steps in a row were not finite; the last good checkpoint was named
EXIT_NOT_SAVED = 74  # EX_IOERR: a checkpoint could not be written; those before it are intact
EXIT_STOPPED = 75  # EX_TEMPFAIL: stopped by a signal after a whole step, saved: resume to go on

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """Skips steps that are not finite, and stops when more than `max_skips` come in a row.

    A skipped step must leave weights and optimizer untouched; the next finite one is then taken as usual.
    """

    def __init__(self, max_skips: int):
        if max_skips < 0:
            raise ValueError(f"max_skips must be 0 (stop at the first) or more, got {max_skips}")
        self.max_skips = max_skips
        self.skips_in_row = 0
        self.skips = 0

    def observe(self, finite: bool) -> Literal["step", "skip", "stop"]:
        """What to do with this step, given whether its loss and gradient norm are finite (on every rank)."""
        if finite:
            self.skips_in_row = 0
            return "step"
        self.skips_in_row += 1
        self.skips += 1
        return "stop" if self.skips_in_row > self.max_skips else "skip"

    def state(self) -> dict[str, int]:
        """JSON for the checkpoint; `max_skips` is the recipe's and is not in it."""
        return {"skips_in_row": self.skips_in_row, "skips": self.skips}

    def load_state(self, state: dict[str, Any]) -> None:
        self.skips_in_row = int(state["skips_in_row"])
        self.skips = int(state["skips"])


class Stop:
    """While open, the first SIGTERM, SIGINT or SIGHUP sets `requested`; a second SIGTERM or SIGINT ends the process.

        with Stop() as stop:
            for step in ...:
                ...
                if stop.requested:
                    ...save, and end with EXIT_STOPPED

    Once Python has seen the first SIGTERM or SIGINT, both get back the kernel's own action. So the second one works
    even while Python is stuck inside a native call, and the shell sees a death by signal; checkpoints and records
    stand any death. Signals that arrive together, inside one native call, count as one. On leaving, the
    handlers from before are put back. Outside the main thread, where Python allows no handlers, nothing is
    installed.

    SIGHUP says that the terminal is gone. The kernel and the shell may each send it, so it never counts as the second
    signal. Where it is ignored at the start (nohup) it stays ignored. What is printed to a terminal or a pipe that
    nobody reads any more is dropped while this is open, and does not raise.
    """

    def __init__(self, alone: bool = True) -> None:
        """
        Args:
            alone: False on one of several ranks. Rank 0 then reports the stop, when all have heard, and later signals
                are ignored: the scheduler and the launcher may each send one, and the launcher ends ranks by SIGKILL.
        """
        self.alone = alone
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()
        for which, handler in self._before.items():
            if which == self.signal == signal.SIGHUP:
                continue  # the second one of a session that ends may come while the process leaves
            # None stands for a handler that was not installed from Python, and cannot be put back from it.
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signal.Signals(number)
        for which in (signal.SIGHUP,) if number == signal.SIGHUP and self.alone else SIGNALS:
            at_once = self.alone and which != signal.SIGHUP
            signal.signal(which, signal.SIG_DFL if at_once else signal.SIG_IGN)
        if not self.alone:
            return
        note = f"\n{signal.Signals(number).name}: finishing this step, saving, then exiting; once more exits at once.\n"
        with contextlib.suppress(OSError):  # nobody may be listening any more
            os.write(2, note.encode())  # print() is not safe here: it may have been interrupted midway


def heeded() -> list[signal.Signals]:
    """The signals that ask to stop. SIGHUP is not among them when it is ignored, as under nohup."""
    return [which for which in SIGNALS if which != signal.SIGHUP or signal.getsignal(which) != signal.SIG_IGN]


class _Unread:
    """A text stream that drops what nobody reads any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):  # a terminal that hung up, a pipe that was closed
                raise
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())  # what is still buffered is flushed at the exit, whose code counts
            os.close(null)
