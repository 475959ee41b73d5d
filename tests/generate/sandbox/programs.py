"""Programs for the sandbox, as tables: honest ones that meet their checks, hostile ones, and forgers of `CHECK`.

Hostile ones are of one line, or have a heading of their name and expected reasons. SECRET_FILE has the text of
`SECRET`; PORT is a server on 127.0.0.1; HOST_PID is the process of the tests. An attack that fails raises an exception,
so "exception" means that it was refused.
"""

HONEST_PROGRAMS = {
    "values": (
        "def same(*a, **k): return a, k",
        """
values = (None, True, 1, -2.5, float("inf"), "ä\\n", b"\\0", [1, [2]], {"a": (1,), 2: {3}}, frozenset({4}), 2j)
assert program.same(*values, x=[]) == (values, {"x": []})
assert [type(v) for v in program.same(*values)[0]] == [type(v) for v in values]
""",
    ),
    "subclasses": (
        """
from collections import *
class N(int): pass
def f(): return OrderedDict(a=1), Counter("aa"), defaultdict(list), N(3)
""",
        "assert program.f() == ({'a': 1}, {'a': 2}, {}, 3)",
    ),
    "an own exception": (
        "class Own(ValueError): pass\ndef f(): raise Own('text')",
        "try: program.f()\nexcept ValueError as error: assert 'text' in str(error)\nelse: raise AssertionError",
    ),
    "the module": (
        """
from dataclasses import dataclass, astuple
n = 0
@dataclass
class A:
    x: int = 1
def f(y: int = 1):
    global n
    n += 1
    return n, __name__, astuple(A()), f.__annotations__["y"] is int
""",
        "assert [program.f() for _ in range(2)] == [(n, '__main__', (1,), True) for n in (1, 2)]",
    ),
    "threads": (
        """
from concurrent.futures import ThreadPoolExecutor
def f():
    with ThreadPoolExecutor(4) as pool: return list(pool.map(abs, [-1, 2]))
""",
        "assert program.f() == [1, 2]",
    ),
    "asyncio": ("import asyncio\ndef f(): return asyncio.run(asyncio.sleep(0.01, 7))", "assert program.f() == 7"),
    "random bytes": (
        "import random, secrets\ndef f(): return secrets.token_bytes(9), random.SystemRandom().random()",
        "assert program.f() != program.f()",
    ),
    "calls from threads": (
        "def f(x): return x",
        """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool: assert list(pool.map(program.f, range(300))) == list(range(300))
""",
    ),
    "late imports": (
        """
def f():
    import csv, decimal, sqlite3, unittest.mock, xml.dom, zoneinfo
    return str(decimal.Decimal(1) / 7)[:8], sqlite3.connect(":memory:").execute("select 6 * 7").fetchall()
""",
        "assert program.f() == ('0.142857', [(42,)])",
    ),
}
"""Sources and checks by name."""

SECRET = "the-secret-of-the-host"

_REFUSED = r"""
vfork | import os; os.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {})
exec | import os, sys; os.execv(sys.executable, ['python', '-c', 'print(1)'])
clone with a namespace | import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0
inodes | import os; [os.mkdir(f'/tmp/{n}') for n in range(10**6)]
sparse file | open('/tmp/a', 'wb').truncate(1 << 40)
memory file | import os; os.memfd_create('a')
shared memory | from multiprocessing import shared_memory as s; s.SharedMemory(create=True, size=1 << 30)
open files | a = [open('/dev/null') for _ in range(10**6)]
pipes | import os, fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)
connect | import socket; socket.create_connection(('127.0.0.1', PORT), 1)
datagram | import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))
abstract socket | import socket; socket.socket(socket.AF_UNIX).connect('\0quern')
datagram pair | import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
netlink | import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
secret | print(open('SECRET_FILE').read())
symlink | import os; os.symlink('SECRET_FILE', '/tmp/a'); print(open('/tmp/a').read())
hard link | import os; os.link('SECRET_FILE', '/tmp/a'); print(open('/tmp/a').read())
remove | import os; os.unlink('SECRET_FILE')
rename | import os; os.rename('SECRET_FILE', 'SECRET_FILE2')
overwrite | open('SECRET_FILE', 'w')
mode | import os; os.chmod('SECRET_FILE', 0o777)
dates | import os; os.utime('SECRET_FILE', (0, 0))
truncate | import os; os.truncate('SECRET_FILE', 0)
standard library | import os; open(os.__file__, 'a')
root folder | open('/new', 'w')
lock of a file of the host | import fcntl, os; fcntl.flock(open(os.__file__), fcntl.LOCK_EX | fcntl.LOCK_NB)
record lock of a file of the host | import fcntl, os; fcntl.lockf(open(os.__file__), fcntl.LOCK_SH | fcntl.LOCK_NB)
lock of an open file | import fcntl, os; fcntl.fcntl(open(os.__file__), 37, bytes(32))
lease | import fcntl, os; fcntl.fcntl(open(os.__file__), 1024, fcntl.F_RDLCK)
entropy of the host, by a mode that reads too | open('/dev/urandom', 'r+b', buffering=0)
chroot | import os; os.chroot('/tmp')
mount | import ctypes; assert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0
device | import os; os.mknod('/tmp/a', 0o60666, os.makedev(8, 0)); open('/tmp/a', 'rb').read(1)
environment | import os; print(os.environ['CANARY'], os.getenvb(b'CANARY'))
environment in /proc | print(open('/proc/1/environ').read(), open('/proc/HOST_PID/environ').read())
root in /proc | print(open('/proc/self/root' + 'SECRET_FILE').read())
memory in /proc | open('/proc/self/mem', 'r+b')
memory of the parent in /proc | import os; open(f'/proc/{os.getppid()}/mem', 'r+b')
files in /proc | import os; print(os.listdir('/proc/self/fd'))
kill the parent | import os; os.kill(os.getppid(), 9)
kill the host | import os; os.kill(HOST_PID, 9)
kill all | import os; os.kill(-1, 9)
signal by a file's owner | import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, 8, os.getppid())
process file | import os, signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)
limits of the parent | import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_NOFILE, (0, 0))
own limits | import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))
trace the parent | import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0
outlive the parent | import ctypes; assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0
input | input()
long exception | raise ValueError('x' * 10**7)
syntax | def f(:
null | a = 1NULL
"""
_PLAIN = r"""
### fork bomb: exception
import os
while True: os.fork()
### thread bomb: exception
import threading, time
threading.stack_size(32768)
while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
### threads left behind: passed
import threading
def loop():
    while True: pass
for _ in range(4): threading.Thread(target=loop).start()
### list that grows: memory
a = [0]
while True: a += a
### many bytes: memory
a = []
while True: a.append(bytearray(1 << 20))
### mapped: exception memory
import mmap
a = [mmap.mmap(-1, 1 << 26) for _ in range(100)]
### recursion in C: killed memory exception timeout
import sys
sys.setrecursionlimit(10**9)
a = []
for _ in range(10**6): a = [a]
repr(a)
### nested source: exception memory killed
eval('(' * 100000 + ')' * 100000)
### disk, many files: exception
for n in range(10**6):
    with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(1 << 20))
### environment in memory: passed
import ctypes
p = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
n = 0
while p and p[n]: print(p[n]); n += 1
### open files of others: passed
import os
for file in range(64):
    try: print(file, os.pread(file, 1 << 20, 0))
    except OSError: pass
### kill itself: killed
import os
os.kill(os.getpid(), 9)
### crash: killed
import ctypes
ctypes.string_at(0)
### stop itself: timeout
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
### loop that ignores signals and catches all: timeout
import signal
for n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
### sleep: timeout
import time
time.sleep(10**6)
### flood: output
while True:
    try: print('x' * 100000)
    except OSError: pass
### flood of errors: output
import sys
while True: sys.stderr.write('x' * 10000)
### exception that lies: exception exit
class E(Exception):
    def __str__(self): raise SystemExit(0)
raise E
### no output: passed
import sys
sys.stdout.close()
sys.stderr = None
### not text: passed
import os
os.write(1, bytes(range(256)))
### exit at once: exit
import os
os._exit(0)
### exit of a thread: exit
import threading, os, time
threading.Thread(target=os._exit, args=(0,)).start()
time.sleep(9)
### no builtins: exit
import builtins
vars(builtins).clear()
### no modules: passed exit
import sys
sys.modules.clear()
### no frames: exit exception
import sys
sys.setrecursionlimit(10)
def f(n): f(n + 1)
f(0)
"""


def sections(table: str) -> dict[str, str]:
    parts = (part.split("\n", 1) for part in table.split("### ")[1:])
    return {heading: source for heading, source in parts}


PLAIN = {
    name: ("exception", source.replace("NULL", "\0"))
    for name, source in (line.split(" | ", 1) for line in _REFUSED.strip().splitlines())
} | {heading.rpartition(": ")[0]: (heading.rpartition(": ")[2], source) for heading, source in sections(_PLAIN).items()}
"""Expected reasons and source by name."""

CHECK = "assert program.answer() == 42  # CHECK_SECRET"
LIES = "failed exception exit killed timeout"
"""Reasons of a program whose lies are not believed; it does not matter which."""

MESSAGE = r"""
import json, os, time
def say(*messages):
    for message in messages:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        os.write(4, len(data).to_bytes(4, "big") + data)
def end():
    import sys
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("end"), str): frame = frame.f_back
    return {"end": frame.f_locals["end"]}
"""
"""Speaks the guest's protocol in the place of the guest."""
_FORGERIES = r"""
### nothing

### print
FAKED
print('passed')
print('{"reason": "passed"}')
### exit at once
import os
os._exit(0)
### exit when asked
import os
def answer(): os._exit(0)
### equal object
class A:
    __eq__ = lambda self, other: True
    __ne__ = lambda self, other: False
def answer(): return A()
### other builtins
FAKED
import builtins
for n in ('exec', 'compile', 'isinstance', 'len'): setattr(builtins, n, lambda *a, **k: 42)
### other modules
FAKED
import sys
for m in list(sys.modules.values()):
    m.verdict = m.run_text = m.pack = lambda *a: {'reason': 'passed'}
### profiler
FAKED
import sys
def p(f, e, a):
    f.f_locals.update(answer={'value': 42})
    return p
sys.settrace(p); sys.setprofile(p)
### verdict to every file
FAKED
import os
for n in range(64):
    try: os.write(n, b'confined\n{"reason": "passed", "text": ""}')
    except OSError: pass
### thread
FAKED
import threading, os
def f():
    while True:
        os.write(4, b'{}')
threading.Thread(target=f).start()
### closed files
import os
os.closerange(3, 64)
while True: pass
### early end
MESSAGE
say(end())
os._exit(0)
### endless message
MESSAGE
say(end())
os.write(4, b'\xff' * 4)
while True: os.write(4, bytes(1 << 16))
### itself
def answer():
    a = []
    a.append(a)
    return a
### never
def answer():
    while True: pass
### the check in frames
import gc, re, sys
def answer():
    frame = sys._getframe()
    while frame:
        print([*re.findall("CHECK[_]SECRET", repr(frame.f_locals))])
        frame = frame.f_back
    print([o for o in gc.get_objects() if type(o) in (dict, list, tuple) and re.search("CHECK[_]SECRET", repr(o))][:1])
### the check in memory
import ctypes, os, re
libc, (reader, writer), own = ctypes.CDLL(None), os.pipe(), "OWN_SECRET"
def answer():
    found = set()
    for start in (id(object()), id([]), id("x" * 10**6)):
        for page in range((start >> 12) - 1500, (start >> 12) + 1500):
            if libc.write(writer, ctypes.c_void_p(page << 12), 4096) == 4096:
                found |= set(re.findall(b"(?:CHECK|OWN)[_]SECRET", os.read(reader, 4096)))
    print(found)
"""

_ANSWERS = {
    "early end, then wrong": "end(), {'value': 41}",
    "wrong end": "{'end': '0' * 32}, {'value': 42}",
    "verdict for an answer": "end(), {'reason': 'passed', 'text': ''}",
    "object for a value": "end(), {'value': {'__class__': 'int'}}",
    "unknown kind": "end(), {'value': ['os.system', 'true']}",
    "deep value": "end(), b'{\"value\": ' + b'[\"list\", ' * 10**5 + b']' * 10**5 + b'}'",
    "not JSON": r"end(), b'\xff\xfe'",
    "exception with a type": "end(), {'error': '__import__', 'message': 'os', 'text': []}",
}
"""Messages of a program that then answers no more."""

FORGERIES = {
    name: source.replace("FAKED", "def answer(): return 0").replace("MESSAGE", MESSAGE)
    for name, source in sections(_FORGERIES).items()
} | {name: f"{MESSAGE}say({messages})\ntime.sleep(60)" for name, messages in _ANSWERS.items()}
"""Sources by name: programs that claim to meet the check."""
