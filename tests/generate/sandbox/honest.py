"""Programs that meet their checks: sources and checks by name."""

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
    "exceptions": (
        """
class Own(ValueError): pass
def f(n): raise [ValueError, KeyError, Own][n]("text")
""",
        """
for n, kind in enumerate([ValueError, KeyError, ValueError]):
    try:
        program.f(n)
    except kind as error:
        assert "text" in str(error)
    else:
        raise AssertionError
""",
    ),
    "state": (
        """
n = 0
def f():
    global n
    n += 1
    return n
""",
        "assert [program.f() for _ in range(3)] == [1, 2, 3]",
    ),
    "main": ("if __name__ == '__main__': x = 5\ndef f(): return x", "assert program.f() == 5"),
    "threads": (
        """
from concurrent.futures import ThreadPoolExecutor
def f():
    with ThreadPoolExecutor(4) as pool: return list(pool.map(abs, [-1, 2]))
""",
        "assert program.f() == [1, 2]",
    ),
    "asyncio": (
        """
import asyncio
async def g():
    await asyncio.sleep(0.01)
    return 7
def f(): return asyncio.run(g())
""",
        "assert program.f() == 7",
    ),
    "dataclasses": (
        """
from dataclasses import dataclass, astuple
@dataclass
class A:
    x: int = 1
def f(): return astuple(A())
""",
        "assert program.f() == (1,)",
    ),
    "annotations": ("def f(x: int = 1): return f.__annotations__['x'] is int", "assert program.f()"),
    "random bytes": (
        "import random, secrets\ndef f(): return secrets.token_bytes(9), random.SystemRandom().random()",
        "assert program.f() != program.f()",
    ),
    "database in memory": (
        "import sqlite3\ndef f(): return sqlite3.connect(':memory:').execute('select 6 * 7').fetchall()",
        "assert program.f() == [(42,)]",
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
    return str(decimal.Decimal(1) / 7)
""",
        "assert program.f().startswith('0.142857')",
    ),
}
