"""Programs that are wrong, and would meet their checks by what they raise or return.

`RIGHT` meets every check of `RAISED` and `LIES`, so that none of them fails whatever the program does.
"""

from tests.generate.sandbox.forgeries import MESSAGE

RIGHT = "def f(x=0): return x + 1"
_SEQUENCE = "class S:\n    def __getitem__(self, n): return program.f(n) if n < 2 else ()[n]\n"
_MAPPING = """
from collections.abc import Mapping
class M(Mapping):
    __getitem__ = lambda self, key: program.f(key)
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([1])
"""
_ITERATOR = """
class I:
    n = 0
    def __iter__(self): return self
    def __next__(self):
        self.n += 1
        if self.n > 3: raise StopIteration
        return program.f(self.n)
"""
_PROPERTY = "class P:\n    x = property(lambda self: program.f(1))\n"
_HINT = """
class H:
    def __iter__(self): return iter([])
    def __length_hint__(self): return program.f(1)
"""
_ASYNC = """
import asyncio
class A:
    n = 0
    def __aiter__(self): return self
    async def __anext__(self):
        self.n += 1
        if self.n > 2: raise StopAsyncIteration
        return program.f(self.n)
async def main():
    async for x in A(): assert x in (2, 3)
    return [x async for x in A()]
"""
_CLOSED = """
def g():
    try: yield
    finally: assert program.f(1) == 2
"""
_TOOLS = "import functools, itertools, operator\n"

RAISED = {
    "StopIteration": [
        "assert all(map(program.f, range(3)))",
        "assert all(a == b for a, b in zip(map(program.f, range(3)), [1, 2, 3]))",
        "for got, want in zip(map(program.f, range(3)), [1, 2, 3]): assert got == want",
        "assert next(map(program.f, [1]), True)",
        "for x in iter(program.f, 1): assert x == 1",
        "for x in map(program.f, range(3)): assert x in (1, 2, 3)",
        "assert not list(filter(lambda x: x > 9, map(program.f, range(3))))",
        "assert not any(x > 9 for x in map(program.f, range(3)))",
        "assert not any(map(lambda x: program.f(x) > 9, range(3)))",
        "assert set(map(program.f, range(3))) <= {1, 2, 3}",
        "assert sum(map(program.f, [-1])) == 0",
        "assert sorted(map(program.f, [-1, -1])) in ([], [0, 0])",
        "for n, x in enumerate(map(program.f, range(3))): assert x == n + 1",
        "a, *rest = [1, *map(program.f, [1])]\nassert all(x == 2 for x in rest)",
        "assert max(map(program.f, [1]), default=2) == 2",
        "assert ''.join(map(str, map(program.f, []))) + ''.join(map(str, map(program.f, [1]))) in ('', '2')",
        "assert dict(zip([1], map(program.f, [1]))).get(1, 2) == 2",
        "def g(): yield from map(program.f, [1])\nfor x in g(): assert x == 2",
        _TOOLS + "for x in itertools.chain(map(program.f, [1])): assert x == 2",
        _TOOLS + "for x in itertools.starmap(program.f, [(1,)]): assert x == 2",
        _TOOLS + "for x in itertools.takewhile(program.f, [1, 2]): assert x",
        _TOOLS + "assert not list(itertools.filterfalse(program.f, [1]))",
        _TOOLS + "assert not list(itertools.dropwhile(program.f, [1]))",
        _TOOLS + "for x in itertools.islice(map(program.f, [1]), 1): assert x == 2",
        _TOOLS + "for x in itertools.accumulate([1, 1], lambda a, b: program.f(b)): assert x in (1, 2)",
        _TOOLS + "for key, group in itertools.groupby([1], program.f): assert key == 2",
        _TOOLS + "assert functools.reduce(operator.and_, map(program.f, []), 2) == 2\nassert all(map(program.f, [1]))",
        _ITERATOR + "for x in I(): assert x in (2, 3, 4)",
        _ITERATOR + "assert 9 not in I()",
        "x = {1: 2}\nx.update(zip([1], map(program.f, [1])))\nassert x == {1: 2}",
        "x = [2]\nx.extend(map(program.f, [1]))\nassert set(x) == {2}",
    ],
    "IndexError": [_SEQUENCE + "for x in S(): assert x in (1, 2)", _SEQUENCE + "assert 9 not in S()"],
    "KeyError": [_MAPPING + "assert M().get(1, 2) == 2", _MAPPING + "assert 1 not in M() or M()[1] == 2"],
    "AttributeError": [
        _PROPERTY + "assert getattr(P(), 'x', 2) == 2",
        _PROPERTY + "assert not hasattr(P(), 'x') or P().x == 2",
    ],
    "TypeError": [_HINT + "assert list(H()) == []"],
    "StopAsyncIteration": [_ASYNC + "assert set(asyncio.run(main())) <= {2, 3}"],
    "GeneratorExit": [_CLOSED + "x = g()\nnext(x)\nx.close()"],
    "SystemExit": ["assert program.f(1) == 2"],
    "KeyboardInterrupt": ["assert program.f(1) == 2"],
    "AssertionError": ["assert program.f(1) == 2"],
    "NotImplementedError": ["assert program.f(1) == 2"],
}
"""Checks by the exception that the program raises at every call."""

_ANSWERED = "assert program.f(1) == 2"
LIES = {
    "truth": ("class A:\n    __bool__ = lambda self: True\ndef f(x=0): return A()", "assert program.f(1)"),
    "length": ("class A(list):\n    __len__ = lambda self: 2\ndef f(x=0): return A()", _ANSWERED),
    "hash": (
        "class A(str):\n    __hash__ = lambda self: hash(2)\n    __eq__ = lambda self, other: True\n"
        "def f(x=0): return A('x')",
        "assert program.f(1) in {2}",
    ),
    "reflected": ("class A(int):\n    __req__ = __eq__ = lambda self, other: True\ndef f(x=0): return A()", _ANSWERED),
    "order": ("class A(float):\n    __lt__ = __gt__ = lambda *a: False\ndef f(x=0): return A()", _ANSWERED),
    "contains": ("class A(dict):\n    __contains__ = lambda self, key: True\ndef f(x=0): return A()", _ANSWERED),
    "items": ("class A(dict):\n    items = lambda self: [(1,)]\ndef f(x=0): return A()", _ANSWERED),
    "iteration": ("class A(tuple):\n    __iter__ = lambda self: iter(())\ndef f(x=0): return A((1,))", _ANSWERED),
    "bytes": ("class A(bytes):\n    hex = lambda self: '02'\ndef f(x=0): return A(b'x')", _ANSWERED),
    "metaclass": (
        "class T(type):\n    __instancecheck__ = __eq__ = lambda *a: True\n    __hash__ = type.__hash__\n"
        "class A(metaclass=T): pass\ndef f(x=0): return A",
        _ANSWERED,
    ),
    "class": (
        "class A:\n    __class__ = int\n    __int__ = lambda self: 2\ndef f(x=0): return A()",
        "assert program.f(2) == 3",
    ),
    "not a number": ("def f(x=0): return float('nan')", _ANSWERED),
    "attribute": ("class f:\n    __new__ = lambda c, x=0: c\n    __eq__ = lambda *a: True", _ANSWERED),
    "own exception": ("class E(StopIteration): pass\ndef f(x=0): raise E", "assert all(map(program.f, range(3)))"),
    "group": ("def f(x=0): raise ExceptionGroup('g', [StopIteration()])", "assert all(map(program.f, range(3)))"),
    "name": (
        "class StopIteration(Exception): pass\ndef f(x=0): raise StopIteration",
        "assert all(map(program.f, [1]))",
    ),
    "builtins": (
        "import builtins\nbuiltins.RuntimeError = builtins.TypeError = StopIteration\ndef f(x=0): raise RuntimeError",
        "assert all(map(program.f, [1]))",
    ),
    "end again": (MESSAGE + "say(end(), {'end': 'x'})\ntime.sleep(60)", _MAPPING + "assert M().get(1, 2) == 2"),
    "gone": ("import os\ndef f(x=0): os._exit(0)", "try: program.f()\nexcept: pass"),
    "unread": (
        MESSAGE + "say(end(), 7, {'value': 2})\ntime.sleep(60)",
        "try: program.f(0)\nexcept: pass\nassert program.f(1) == 2",
    ),
    "function": ("f = StopIteration", _ANSWERED),
    "no function": ("", "assert all(map(program.f, [1]))"),
    "generator": ("def f(x=0):\n    yield 2", _ANSWERED),
    "later": (
        "def f(x=0):\n    global f\n    def f(x=0): raise StopIteration\n    return 1",
        "assert all(map(program.f, range(3)))",
    ),
}
"""Programs and checks by name."""

CATCHES = {
    "except": "try: program.f()\nexcept KIND as error: assert 'why' in str(error)\nelse: raise AssertionError",
    "its base": "try: program.f()\nexcept BASE: pass\nelse: raise AssertionError",
    "one of two": "try: program.f()\nexcept (OSError, KIND): pass\nelse: raise AssertionError",
    "any": "try: program.f()\nexcept Exception: pass\nelse: raise AssertionError",
    "suppress": "import contextlib\nwith contextlib.suppress(KIND):\n    program.f()\n    raise AssertionError",
    "unittest": "import unittest\nunittest.TestCase().assertRaises(KIND, program.f)",
    "unittest block": "import unittest\nwith unittest.TestCase().assertRaisesRegex(KIND, 'why'): program.f()",
    "not another": "try:\n    try: program.f()\n    except OSError: raise AssertionError\nexcept KIND: pass",
}
"""Checks of a program that must raise KIND, a kind of BASE."""
