"""The system calls that a program may make, as a seccomp filter in classic BPF.

The filter is a list of what is allowed; every other call fails with EPERM. Not on it: new processes, programs and
sockets to anywhere, signals to others, debugging, mounts, modes and dates of files, extended attributes, locks of files
(a file of the host that a program can read could be locked for the host), io_uring, BPF.
Source: the kernel's Documentation/userspace-api/seccomp_filter.rst; the numbers are those of its header files.
"""

from __future__ import annotations

import platform
import struct

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
