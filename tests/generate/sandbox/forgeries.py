"""Programs that claim to meet `CHECK` and do not, as a table: a heading with the name, then the source."""

from tests.generate.sandbox.hostile import sections

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
