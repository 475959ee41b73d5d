"""The physical memory of a process, as the system counts it. Without torch, which counts its devices' itself."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path


def resident(field: str = "VmRSS", process: str = "self") -> int | None:
    """Bytes of physical memory by a field of /proc/<process>/status; None where the system does not say."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def peak_resident() -> int:
    """Most bytes of physical memory that this process has held since `reset_peak_resident`, or since it began."""
    found = resident("VmHWM")  # on Linux getrusage never reports less than the parent held at the start
    if found is not None:
        return found
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_resident() -> bool:
    """Begins the peak of this process again (man 5 proc). Returns whether the system can."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False
