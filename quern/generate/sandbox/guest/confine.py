"""Confines a process before it reads a program: a private /tmp, Landlock, rlimits, no capabilities, seccomp.

The namespaces of the tier "bubblewrap" are there already when Python starts. System calls go through ctypes.
Sources: Documentation/userspace-api of the kernel, landlock.rst and seccomp_filter.rst; its header files for the
numbers of system calls; man 2 for the rest.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from math import ceil
from pathlib import Path
from typing import Any

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
    """Confines this process for good, under the fields of `Limits`. ruleset: from `landlock`; None for namespaces."""
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
    code = program_filter(os.getpid())
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


# The system calls that a program may make, as a seccomp filter in classic BPF: a list of what is allowed; every other
# call fails with EPERM. Not on it: new processes, programs and sockets to anywhere, signals to others, debugging,
# mounts, modes and dates of files, extended attributes, locks of files (a file of the host that a program can read
# could be locked for the host), io_uring, BPF.

# name, number on x86_64, number on aarch64
TABLE = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70
preadv2 327 286, pwritev2 328 287, lseek 8 62, sendfile 40 71, copy_file_range 326 285, open 2 -
openat 257 56, openat2 437 437, creat 85 -, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24
pipe 22 -, pipe2 293 59, eventfd 284 -, eventfd2 290 19, stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79
statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78
getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, umask 95 166, mkdir 83 -, mkdirat 258 34
rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, link 86 -
linkat 265 37, symlink 88 -, symlinkat 266 36, ftruncate 77 46, fallocate 285 47, fsync 74 82, fdatasync 75 83
select 23 -, pselect6 270 72, poll 7 -, ppoll 271 73, epoll_create 213 -, epoll_create1 291 20
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, epoll_pwait2 441 441, sendto 44 206, recvfrom 45 207
shutdown 48 210, getsockopt 55 209, getsockname 51 204, getpeername 52 205
brk 12 214, mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, futex 202 98
membarrier 324 283, rseq 334 293, set_robust_list 273 99, set_tid_address 218 96, arch_prctl 158 -
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigpending 127 136, rt_sigsuspend 130 133
rt_sigtimedwait 128 137, rt_sigreturn 15 139, sigaltstack 131 132, restart_syscall 219 128, pause 34 -
alarm 37 -, setitimer 38 103, getitimer 36 102, nanosleep 35 101, clock_nanosleep 230 115
clock_gettime 228 113, clock_getres 229 114, gettimeofday 96 169, time 201 -, times 100 153
sched_yield 24 124, sched_getaffinity 204 123, getcpu 309 168, getrandom 318 278, getpid 39 172
getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177
getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -, getpgid 121 155, getsid 124 156
getrlimit 97 163, getrusage 98 165, setrlimit 160 164, sysinfo 99 179, uname 63 160, wait4 61 260
waitid 247 95, exit 60 93, exit_group 231 94
"""
CHECKED = "kill 62 129, tgkill 234 131, prlimit64 302 261, fcntl 72 25, ioctl 16 29, clone 56 220, socketpair 53 199"
"""Calls whose arguments decide."""
CLONE3 = 435
"""Its arguments are behind a pointer, which a filter cannot follow. With ENOSYS, libc takes clone."""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the table, and AUDIT_ARCH of linux/audit.h."""

ALLOW, KILL, ERRNO, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000, 1, 38
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
NUMBER, ARCH, ARGUMENTS = 0, 4, 16
"""Offsets in struct seccomp_data. An argument has 64 bits; the low half, which the kernel reads here, is first."""

CLONE_THREAD, CLONE_NAMESPACES = 0x10000, 0x7E020080
FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
"""Copies and flags: not locks, and not F_SETOWN and F_SETSIG, which send signals to other processes."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
ANY = 0xFFFFFFFF

Condition = tuple[int, int, tuple[int, ...]]
"""Number of an argument, mask, and the values that it may have under the mask."""


def numbers(table: str) -> dict[str, int]:
    """System call numbers on this machine by name."""
    column = MACHINES[platform.machine()][0]
    rows = (row.split() for row in table.replace("\n", ",").split(",") if row.strip())
    return {name: int(columns[column]) for name, *columns in rows if columns[column] != "-"}


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)


def _checked(number: int, *conditions: Condition) -> bytes:
    """Allows a call if every condition holds."""
    body = b""
    for argument, mask, values in conditions:
        body += _step(LOAD, ARGUMENTS + 8 * argument) + _step(AND, mask)
        body += b"".join(_step(EQUAL, value, len(values) - place) for place, value in enumerate(values))
        body += _step(RETURN, ERRNO | EPERM)
    body += _step(RETURN, ALLOW)
    return _step(EQUAL, number, 0, len(body) // 8) + body


def program_filter(pid: int) -> bytes:
    """The filter of the process `pid`, an array of struct sock_filter."""
    at = numbers(CHECKED)
    return b"".join(
        (
            _step(LOAD, ARCH),
            _step(EQUAL, MACHINES[platform.machine()][1], 1),
            _step(RETURN, KILL),
            _step(LOAD, NUMBER),
            *(_step(EQUAL, number, 0, 1) + _step(RETURN, ALLOW) for number in numbers(TABLE).values()),
            _checked(at["kill"], (0, ANY, (pid,))),
            _checked(at["tgkill"], (0, ANY, (pid,))),
            _checked(at["prlimit64"], (0, ANY, (0, pid))),
            _checked(at["fcntl"], (1, ANY, FCNTL)),
            _checked(at["ioctl"], (1, ANY, IOCTL)),
            _checked(at["clone"], (0, CLONE_THREAD | CLONE_NAMESPACES, (CLONE_THREAD,))),
            # Pairs of Unix stream sockets (asyncio has one): a datagram socket could send to any address.
            _checked(at["socketpair"], (0, ANY, (1,)), (1, 0xF, (1,))),
            _step(EQUAL, CLONE3, 0, 1),
            _step(RETURN, ERRNO | ENOSYS),
            _step(RETURN, ERRNO | EPERM),
        )
    )
