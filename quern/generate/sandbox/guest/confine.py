"""Confines a process before it reads a program: a private /tmp, Landlock, rlimits, no capabilities, seccomp.

The namespaces of the tier "bubblewrap" are there already when Python starts. System calls go through ctypes.
Source: Documentation/userspace-api/landlock.rst of the kernel, man 2 for the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import struct
from math import ceil
from pathlib import Path
from typing import Any

from . import seccomp

MOST_FILES = 64
MEGABYTE = 1 << 20
MOST_INODES = 1000
FIRST_USER, USERS = 10_000, 50_000
"""User ids for root's programs. Each gets its own, because the kernel does not count root's threads."""

CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
CAPABILITY_VERSION = 0x20080522
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
LANDLOCK_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file system rights that each version knows; later ones know as many as 5."""
WRITE_FILE, READ_FILE, READ_DIR = 2, 4, 8

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> int:
    """Calls a function of libc. Raises OSError if it fails."""
    result = getattr(_libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock(readable: list[str]) -> int:
    """Makes a ruleset that lets a process read these folders, and use /dev/null. Returns its file."""
    try:
        version = _call("syscall", CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    except OSError as error:
        raise OSError("this kernel has no Landlock, or it is off") from error
    handled = (1 << LANDLOCK_RIGHTS[min(version, 5)]) - 1
    # From version 4: no TCP (two rights). From version 6: no abstract sockets and no signals to the outside.
    attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = _call("syscall", CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    rules = {path: READ_FILE | READ_DIR for path in readable}
    for path, rights in {**rules, "/dev/null": READ_FILE | WRITE_FILE}.items():
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call("syscall", ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, file), 0)
        os.close(file)
    return ruleset


def _tasks_of_user() -> int:
    """Number of threads that this user has now."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            count += len(list((folder / "task").iterdir())) if folder.stat().st_uid == os.getuid() else 0
        except OSError:  # it ended meanwhile
            continue
    return count


def apply(ruleset: int | None, limits: dict[str, Any]) -> None:
    """Confines this process for good, under the fields of `Limits`. ruleset: of `landlock`; None for namespaces."""
    user, is_root, parent = FIRST_USER + os.getpid() % USERS, os.geteuid() == 0, os.getppid()
    size = limits["file_megabytes"] * MEGABYTE
    if ruleset is None:
        _private_tmp(size)
    if is_root:
        # Under Landlock, the files of Python may be root's alone: only the real user changes, whose threads count.
        is_root = _own_user(user, user if ruleset is None else 0)
    others = _own_user_namespace(is_root, ruleset is None)
    for kind, most in (
        (resource.RLIMIT_AS, limits["memory_megabytes"] * MEGABYTE),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_NPROC, others + limits["threads"] + 1),
        (resource.RLIMIT_NOFILE, MOST_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))
    cpu_seconds = ceil(limits["cpu_seconds"])
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if ruleset is not None:
        _call("syscall", RESTRICT_SELF, ruleset, 0)
    _call("capset", struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))
    _call("prctl", PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise OSError("the zygote ended")
    code = seccomp.program_filter(os.getpid())
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    _call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0)


def _private_tmp(size: int) -> None:
    _call("unshare", CLONE_NEWNS)
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={size},nr_inodes={MOST_INODES},mode=1777".encode()
    _call("mount", b"tmpfs", b"/tmp", b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)
    os.chdir("/tmp")


def _own_user(real: int, effective: int) -> bool:
    """Makes root another user. Returns False if this user namespace has none: then root is one outside it."""
    try:
        os.setresgid(real, effective, effective)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    os.setgroups([])
    os.setresuid(real, effective, effective)
    return True


def _own_user_namespace(is_root: bool, required: bool) -> int:
    """Enters a user namespace, where threads are counted for this process alone. Returns how many others count."""
    try:
        _call("unshare", CLONE_NEWUSER)
    except OSError:
        if required:
            raise
        return 0 if is_root else _tasks_of_user() - 1
    return 0
