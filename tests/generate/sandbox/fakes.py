"""Programs that are wrong, and would meet their checks by what they raise or return.

`RIGHT` meets every check of `RAISED` and `LIES`, so that none of them fails whatever the program does.
"""

from tests.generate.sandbox.forgeries import MESSAGE

RIGHT = "def f(x=0): return x + 1"
_MAPPING = """
from collections.abc import Mapping
class M(Mapping):
    __getitem__ = lambda self, key: program.f(key)
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([1])
"""
_CLOSED = """
def g():
    try: yield
    finally: assert program.f(1) == 2
"""
_ANSWERED = "assert program.f(1) == 2"

RAISED = {
    "StopIteration": [
        "assert all(map(program.f, range(3)))",
        "assert next(map(program.f, [1]), True)",
        "assert not any(x > 9 for x in map(program.f, range(3)))",
        "a, *rest = [1, *map(program.f, [1])]\nassert all(x == 2 for x in rest)",
        "import itertools\nfor x in itertools.chain(map(program.f, [1])): assert x == 2",
    ],
    "IndexError": [
        "class S:\n    def __getitem__(self, n): return program.f(n) if n < 2 else ()[n]\nassert 9 not in S()"
    ],
    "KeyError": [_MAPPING + "assert M().get(1, 2) == 2"],
    "AttributeError": ["class P:\n    x = property(lambda self: program.f(1))\nassert getattr(P(), 'x', 2) == 2"],
    "GeneratorExit": [_CLOSED + "x = g()\nnext(x)\nx.close()"],
    "SystemExit": [_ANSWERED],
    "AssertionError": [_ANSWERED],
}
"""Checks by the exception that the program raises at every call."""

LIES = {
    "truth": ("class A:\n    __bool__ = lambda self: True\ndef f(x=0): return A()", "assert program.f(1)"),
    "hash": (
        "class A(str):\n    __hash__ = lambda self: hash(2)\n    __eq__ = lambda self, other: True\n"
        "def f(x=0): return A('x')",
        "assert program.f(1) in {2}",
    ),
    "metaclass": (
        "class T(type):\n    __instancecheck__ = __eq__ = lambda *a: True\n    __hash__ = type.__hash__\n"
        "class A(metaclass=T): pass\ndef f(x=0): return A",
        _ANSWERED,
    ),
    "own exception": ("class E(StopIteration): pass\ndef f(x=0): raise E", "assert all(map(program.f, range(3)))"),
    "name": (
        "class StopIteration(Exception): pass\ndef f(x=0): raise StopIteration",
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
