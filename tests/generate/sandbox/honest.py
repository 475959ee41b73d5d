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
