"""The tiers of confinement, best first, and the command that starts the guest of each.

"bubblewrap": namespaces by bwrap (https://github.com/containers/bubblewrap), and in each program seccomp and rlimits.
"landlock": Landlock, seccomp and rlimits by system calls alone. `guest/confine.py` has the part inside.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from quern.generate.sandbox.program import SandboxError

GUEST = Path(__file__).parent / "guest"
PYTHON = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
"""The environment of the guest, and none of its programs: with it, sets have the same order in every run."""
HOW = "install bubblewrap (Debian: apt install bubblewrap), on Linux 5.13 or later; root without capabilities cannot"
START = """
import os, sys
os.environ.clear()
sys.path.append(sys.argv[1])
from guest.zygote import main
main(*sys.argv[2:])
"""


def libraries() -> list[str]:
    """The folders that Python reads: its standard library and the system's shared libraries."""
    prefix = Path(sys.base_prefix)
    system = "/usr/lib /usr/lib64 /lib /lib64 /usr/share/zoneinfo"
    folders = (prefix / "lib", prefix / "lib64", *map(Path, system.split()))
    return sorted({str(folder) for folder in folders if folder.is_dir()})


def _python(tier: str, path: str) -> list[str]:
    """The command of the guest, whose package `guest` is in the folder `path`."""
    return [str(PYTHON), *"-s -S -P -B -u -X utf8 -c".split(), START, path, tier, json.dumps(libraries())]


def bubblewrap() -> list[str]:
    """The command of the tier "bubblewrap". Raises SandboxError if bwrap is not installed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxError("bwrap is not installed")
    command = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--hostname", "sandbox"]
    # The guest mounts each program's /tmp. Root needs no user namespace for that; each program then gets its own.
    command += ["--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += [] if os.geteuid() == 0 else ["--unshare-user"]
    bound = {path: path for path in (*libraries(), str(PYTHON))} | {"/sandbox/guest": str(GUEST)}
    for parent in sorted({parent for path in (*bound, "/dev/null") for parent in Path(path).parents}):
        command += ["--perms", "0755", "--dir", str(parent)]  # by itself, bwrap makes them for root alone
    for path, source in bound.items():
        command += ["--ro-bind", source, path]
    # Not /dev/urandom, which would be writable: os.urandom is a system call.
    command += ["--dev-bind", "/dev/null", "/dev/null", "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--", *_python("bubblewrap", "/sandbox")]


def landlock() -> list[str]:
    """The command of the tier "landlock". The guest itself finds out whether the kernel has it."""
    return _python("landlock", str(GUEST.parent))


TIERS: dict[str, Callable[[], list[str]]] = {"bubblewrap": bubblewrap, "landlock": landlock}
