"""Freed memory is kept and used again, on CPUs with glibc.

XLA asks for all of a step's temporary memory in one piece (a gigabyte at `quern bench`'s reference size) and gives it
back at the end. By default the kernel then takes the pages away and hands out zeroed ones, one page fault for every
4 KiB, in the next step. What quern/machine.py does for PyTorch is not enough: XLA allocates in threads of its own,
whose heaps glibc maps anew whatever their size, unless all threads share one heap.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h; a threshold of -1 is: never


def keep_freed_memory() -> None:
    """For the whole process; call it before JAX starts its threads. On other C libraries it does nothing."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        for setting, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            libc.mallopt(setting, value)
