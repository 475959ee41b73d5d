"""Hostile programs: name, expected reason (one of several for some), source. Tokens in capitals are replaced.

SECRET_FILE has the text of `SECRET`; PORT is a server on 127.0.0.1; HOST_PID is the process of the tests. Programs of
FORGERIES have the check `CHECK`, which none of them meets; the others have no check. An attack that fails raises an
exception, so "exception" means that it was refused.
"""

SECRET = "the-secret-of-the-host"
CHECK = "assert program.answer() == 42  # CHECK_SECRET"
LIES = "failed exception exit killed timeout"
"""Reasons of a program whose lies are not believed; it does not matter which."""

PROCESSES = {
    "fork bomb": ("exception", "import os\nwhile True: os.fork()"),
    "fork by its number": ("exit", "import ctypes, os\nctypes.CDLL(None).syscall(57) >= 0 and print('SECRET')\nos._exit(1)"),
    "vfork": ("exception", "import os\nos.posix_spawn('/bin/sh', ['sh', '-c', 'true'], {})"),
    "subprocess": ("exception", "import subprocess\nsubprocess.run(['true'])"),
    "shell": ("exception", "import os\nassert os.system('true') == 0"),
    "exec": ("exception", "import os, sys\nos.execv(sys.executable, ['python', '-c', 'print(1)'])"),
    "multiprocessing": ("exception", "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()"),
    "thread bomb": (
        "exception",
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    ),
    "clone with a namespace": (
        "exception",
        "import ctypes, os\nif ctypes.CDLL(None, use_errno=True).unshare(0x10000000) < 0: raise OSError(ctypes.get_errno())",
    ),
    "threads left behind": (
        "passed",
        "import threading\ndef loop():\n    while True: pass\n"
        "for _ in range(4): threading.Thread(target=loop).start()",
    ),
}
SPACE = {
    "list that grows": ("memory", "a = [0]\nwhile True: a += a"),
    "bytes": ("memory", "bytearray(1 << 40)"),
    "many bytes": ("memory", "a = []\nwhile True: a.append(bytearray(1 << 20))"),
    "mapped": ("exception memory", "import mmap\na = [mmap.mmap(-1, 1 << 26) for _ in range(100)]"),
    "text": ("memory", "'x' * (1 << 33)"),
    "recursion": ("exception", "def f(): f()\nf()"),
    "endless recursion": (
        "memory killed timeout exception",
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    ),
    "recursion in C": (
        "killed memory exception",
        "import sys\nsys.setrecursionlimit(10**9)\na = []\nfor _ in range(10**6): a = [a]\nrepr(a)",
    ),
    "nested source": ("exception memory killed", "eval('(' * 100000 + ')' * 100000)"),
    "disk": ("exception", "with open('/tmp/a', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"),
    "disk, many files": (
        "exception",
        "for n in range(10**6):\n    with open(f'/tmp/{n}', 'wb') as file: file.write(bytes(1 << 20))",
    ),
    "inodes": ("exception", "import os\nfor n in range(10**6): os.mkdir(f'/tmp/{n}')"),
    "sparse file": ("exception", "open('/tmp/a', 'wb').truncate(1 << 40)"),
    "memory file": ("exception", "import os\nos.memfd_create('a')"),
    "shared memory": ("exception", "from multiprocessing import shared_memory as s\ns.SharedMemory(create=True, size=1 << 30)"),
    "open files": ("exception", "a = []\nwhile True: a.append(open('/dev/null'))"),
    "pipes": ("exception", "import os, fcntl\nr, w = os.pipe()\nfcntl.fcntl(w, 1031, 1 << 20)"),
}
NETWORK = {
    "connect": ("exception", "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)"),
    "http": ("exception", "import urllib.request as u\nu.urlopen('http://127.0.0.1:PORT/', timeout=1)"),
    "datagram": ("exception", "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"),
    "listen": ("exception", "import socket\nsocket.create_server(('127.0.0.1', 0))"),
    "abstract socket": ("exception", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0quern')"),
    "datagram pair": ("exception", "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"),
    "netlink": ("exception", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)"),
    "asyncio": ("exception", "import asyncio\nasyncio.run(asyncio.open_connection('127.0.0.1', PORT))"),
}
FILES = {
    "secret": ("exception", "print(open('SECRET_FILE').read())"),
    "home": ("exception", "import os\nprint(os.listdir('HOME_FOLDER'))"),
    "passwords": ("exception", "print(open('/etc/passwd').read())"),
    "relative": ("exception", "print(open('../../../../../../../..' + 'SECRET_FILE').read())"),
    "symlink": ("exception", "import os\nos.symlink('SECRET_FILE', '/tmp/a')\nprint(open('/tmp/a').read())"),
    "hard link": ("exception", "import os\nos.link('SECRET_FILE', '/tmp/a')\nprint(open('/tmp/a').read())"),
    "remove": ("exception", "import os\nos.unlink('SECRET_FILE')"),
    "rename": ("exception", "import os\nos.rename('SECRET_FILE', 'SECRET_FILE2')"),
    "overwrite": ("exception", "open('SECRET_FILE', 'w')"),
    "mode": ("exception", "import os\nos.chmod('SECRET_FILE', 0o777)"),
    "dates": ("exception", "import os\nos.utime('SECRET_FILE', (0, 0))"),
    "truncate": ("exception", "import os\nos.truncate('SECRET_FILE', 0)"),
    "standard library": ("exception", "import os\nopen(os.__file__, 'a')"),
    "root folder": ("exception", "open('/new', 'w')"),
    "chroot": ("exception", "import os\nos.chroot('/tmp')"),
    "mount": (
        "exception",
        "import ctypes\nif ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) < 0: raise OSError('refused')",
    ),
    "device": ("exception", "import os\nos.mknod('/tmp/a', 0o60666, os.makedev(8, 0))\nopen('/tmp/a', 'rb').read(1)"),
    "environment": ("exception", "import os\nprint(os.environ['CANARY'], os.getenvb(b'CANARY'))"),
    "environment in memory": (
        "passed",
        "import ctypes\np = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
        "n = 0\nwhile p and p[n]: print(p[n]); n += 1",
    ),
    "proc: environment": ("exception", "print(open('/proc/1/environ').read(), open('/proc/HOST_PID/environ').read())"),
    "proc: root": ("exception", "print(open('/proc/self/root' + 'SECRET_FILE').read())"),
    "proc: memory": ("exception", "open('/proc/self/mem', 'r+b')"),
    "proc: memory of the parent": ("exception", "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')"),
    "proc: files": ("exception", "import os\nprint(os.listdir('/proc/self/fd'))"),
    "proc: kernel": ("exception", "open('/proc/sysrq-trigger', 'w').write('b')"),
    "open files of others": (
        "passed",
        "import os\nfor file in range(64):\n    try: print(file, os.pread(file, 1 << 20, 0))\n    except OSError: pass",
    ),
}
SIGNALS = {
    "kill the parent": ("exception", "import os\nos.kill(os.getppid(), 9)"),
    "kill the host": ("exception", "import os\nos.kill(HOST_PID, 9)"),
    "kill all": ("exception", "import os\nos.kill(-1, 9)"),
    "kill the group": ("exception", "import os\nos.killpg(0, 9)"),
    "signal by a file's owner": (
        "exception",
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, 10, 9)\nfcntl.fcntl(r, 8, os.getppid())",
    ),
    "process file": ("exception", "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)"),
    "limits of the parent": ("exception", "import os, resource as r\nr.prlimit(os.getppid(), r.RLIMIT_NOFILE, (0, 0))"),
    "own limits": ("exception", "import resource as r\nr.setrlimit(r.RLIMIT_AS, (-1, -1))"),
    "trace the parent": (
        "exception",
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) < 0: raise OSError('refused')",
    ),
    "outlive the parent": (
        "exception",
        "import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) < 0: raise OSError('refused')",
    ),
    "kill itself": ("killed", "import os\nos.kill(os.getpid(), 9)"),
    "crash": ("killed", "import ctypes\nctypes.string_at(0)"),
    "abort": ("killed", "import os\nos.abort()"),
    "alarm": ("killed", "import signal, time\nsignal.alarm(1)\ntime.sleep(60)"),
    "stop itself": ("timeout", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)"),
}
TIME = {
    "loop": ("timeout", "while True: pass"),
    "loop that ignores signals": (
        "timeout",
        "import signal\nfor n in set(signal.Signals) - {9, 19}: signal.signal(n, signal.SIG_IGN)\nwhile True: pass",
    ),
    "loop that catches all": ("timeout", "while True:\n    try:\n        while True: pass\n    except BaseException: pass"),
    "sleep": ("timeout", "import time\ntime.sleep(10**6)"),
    "power": ("timeout memory", "9**9**9"),
    "regular expression": ("timeout", "import re\nre.match('(a+)+$', 'a' * 64 + 'b')"),
    "deadlock": ("timeout", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()"),
    "input": ("exception", "input()"),
}
OUTPUT = {
    "flood": ("output", "while True: print('x' * 10000)"),
    "flood that goes on": (
        "output",
        "while True:\n    try: print('x' * 100000)\n    except OSError: pass",
    ),
    "flood of errors": ("output", "import sys\nwhile True: sys.stderr.write('x' * 10000)"),
    "long output": ("output", "print('x' * 100000)"),
    "long exception": ("exception", "raise ValueError('x' * 10**7)"),
    "exception that lies": (
        "exception exit",
        "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E",
    ),
    "no output": ("passed", "import sys\nsys.stdout.close()\nsys.stderr = None"),
    "not text": ("passed", "import os\nos.write(1, bytes(range(256)))"),
}
EXITS = {
    "exit": ("exit", "import sys\nsys.exit(0)"),
    "exit at once": ("exit", "import os\nos._exit(0)"),
    "exit of a thread": ("exit", "import threading, os, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(9)"),
    "syntax": ("exception", "def f(:"),
    "null": ("exception", "a = 1\0"),
    "half a letter": ("exception", "a = '\ud800'"),
    "no builtins": ("exit", "import builtins\nvars(builtins).clear()"),
    "no modules": ("passed exit", "import sys\nsys.modules.clear()"),
    "no frames": ("exit exception", "import sys\nsys.setrecursionlimit(10)\ndef f(n): f(n + 1)\nf(0)"),
}
PLAIN = PROCESSES | SPACE | NETWORK | FILES | SIGNALS | TIME | OUTPUT | EXITS

FAKED = "def answer(): return 0\n"
ALWAYS_EQUAL = "    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n    __hash__ = None\n"
MESSAGE = """
import json, os
def say(*messages):
    for message in messages:
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        os.write(4, len(data).to_bytes(4, "big") + data)
def end():
    import sys
    frame = sys._getframe()
    while "end" not in frame.f_locals: frame = frame.f_back
    return {"end": frame.f_locals["end"]}
"""
FORGERIES = {
    "nothing": "",
    "print": FAKED + "print('passed')\nprint('{\"reason\": \"passed\"}')",
    "exit": "import sys\nsys.exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit when asked": "import os\ndef answer(): os._exit(0)",
    "SystemExit when asked": "def answer(): raise SystemExit(0)",
    "at exit": FAKED + "import atexit, os\natexit.register(os._exit, 0)",
    "equal object": "class A:\n" + ALWAYS_EQUAL + "def answer(): return A()",
    "equal number": "class A(int):\n" + ALWAYS_EQUAL + "def answer(): return A(0)",
    "equal float": "class A(float):\n" + ALWAYS_EQUAL + "def answer(): return A('nan')",
    "equal text": "class A(str):\n" + ALWAYS_EQUAL + "def answer(): return A('x')",
    "equal list": "class A(list):\n" + ALWAYS_EQUAL + "def answer(): return A()",
    "no assertions": FAKED + "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})",
    "assertion that passes": "def answer(): raise AssertionError('passed')",
    "other exceptions": "class GeneratorExit(BaseException): pass\ndef answer(): raise GeneratorExit",
    "other builtins": FAKED + "import builtins\nfor n in ('exec', 'compile', 'isinstance', 'len'): setattr(builtins, n, lambda *a, **k: 42)",
    "other modules": FAKED + "import sys\nfor m in list(sys.modules.values()):\n    m.verdict = m.run_text = m.pack = lambda *a: {'reason': 'passed'}",
    "other guest": FAKED + "import sys\nz = sys.modules['guest.zygote']\nz.verdict = lambda *a: {'reason': 'passed', 'text': ''}",
    "profiler": FAKED + "import sys\ndef p(f, e, a):\n    f.f_locals.update(answer={'value': 42})\n    return p\nsys.settrace(p); sys.setprofile(p)",
    "garbage collector": FAKED + "import gc\nfor o in gc.get_objects():\n    if isinstance(o, dict) and 'reason' in o: o['reason'] = 'passed'",
    "verdict to every file": FAKED + "import os\nfor n in range(64):\n    try: os.write(n, b'confined\\n{\"reason\": \"passed\", \"text\": \"\"}')\n    except OSError: pass",
    "thread": FAKED + "import threading, os\ndef f():\n    while True:\n        os.write(4, b'{}')\nthreading.Thread(target=f).start()",
    "early end": MESSAGE + "say(end())\nos._exit(0)",
    "early end, then wrong": MESSAGE + "say(end(), {'value': 41})\nos._exit(0)",
    "wrong end": MESSAGE + "say({'end': '0' * 32}, {'value': 42})\nos._exit(0)",
    "verdict for an answer": MESSAGE + "say(end(), {'reason': 'passed', 'text': ''})\nos._exit(0)",
    "object for a value": MESSAGE + "say(end(), {'value': {'__class__': 'int'}})\nos._exit(0)",
    "unknown kind": MESSAGE + "say(end(), {'value': ['os.system', 'true']})\nos._exit(0)",
    "deep value": MESSAGE + "say(end(), b'{\"value\": ' + b'[\"list\", ' * 10**5 + b']' * 10**5 + b'}')\nos._exit(0)",
    "endless message": MESSAGE + "say(end())\nos.write(4, b'\\xff' * 4)\nwhile True: os.write(4, bytes(1 << 16))",
    "not JSON": MESSAGE + "say(end(), b'\\xff\\xfe')\nos._exit(0)",
    "exception with a type": MESSAGE + "say(end(), {'error': '__import__', 'message': 'os', 'text': []})\nos._exit(0)",
    "long number": "def answer(): return 10**5000",
    "itself": "def answer():\n    a = []\n    a.append(a)\n    return a",
    "generator": "def answer():\n    while True: yield 42",
    "never": "def answer():\n    while True: pass",
    "the check in frames": """
import gc, re, sys
def answer():
    frame = sys._getframe()
    while frame:
        print([*re.findall("CHECK[_]SECRET", repr(frame.f_locals))])
        frame = frame.f_back
    print([o for o in gc.get_objects() if type(o) in (dict, list, tuple) and re.search("CHECK[_]SECRET", repr(o))][:1])
""",
    "the check in memory": """
import ctypes, os, re
libc, (reader, writer), own = ctypes.CDLL(None), os.pipe(), "OWN_SECRET"
def answer():
    found = set()
    for start in (id(object()), id([]), id("x" * 10**6)):
        for page in range((start >> 12) - 6000, (start >> 12) + 6000):
            if libc.write(writer, ctypes.c_void_p(page << 12), 4096) == 4096:
                found |= set(re.findall(b"(?:CHECK|OWN)[_]SECRET", os.read(reader, 4096)))
    print(found)
""",
}
"""Sources of programs that claim to meet the check."""
