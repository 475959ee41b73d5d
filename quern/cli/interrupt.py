"""Quiet ends: Ctrl-C during imports (one line and exit code 130), and output that nobody reads (exit code 141)."""

from __future__ import annotations

import os
import select
import sys

INTERRUPTED = "interrupted"
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
EXIT_UNREAD = 141  # 128 + SIGPIPE. The signal stays ignored, because the default action would also end servers.


def interrupted(number: int) -> KeyboardInterrupt:
    """Returns the exception for SIGINT. During an import it ends the process: some libraries lose exceptions."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame := frame.f_back:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, f"{INTERRUPTED}\n".encode())
            os._exit(EXIT_INTERRUPTED)
    return KeyboardInterrupt()


def discard_unread() -> bool:
    """Redirects to nowhere those of stdout and stderr whose reader closed the pipe. Returns whether there was one."""
    poll = select.poll()
    for file in (1, 2):
        poll.register(file, 0)
    unread = [file for file, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for file in unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file)
    return bool(unread)
