"""Programs whose exceptions or values would fake a pass, checks that name exceptions, and very long numbers.

One tier is enough: the process of the check is the same in all of them.
"""

import builtins
from collections.abc import Collection, Iterator

import pytest
from hypothesis import given, strategies

from quern.generate.sandbox import Limits, Program, Sandbox
from quern.generate.sandbox.guest import checker, program
from tests.generate.sandbox.programs import MESSAGE
from tests.generate.sandbox.test_sandbox import opened

RIGHT = "def f(x=0): return x + 1"
"""Meets every check of `RAISED` and `LIES`, so that none of them fails whatever the program does."""
_MAPPING = """
from collections.abc import Mapping
class M(Mapping):
    __getitem__ = lambda self, key: program.f(key)
    __len__ = lambda self: 1
    __iter__ = lambda self: iter([1])
assert M().get(1, 2) == 2
"""
_ALL, _ANSWERED = "assert all(map(program.f, range(3)))", "assert program.f(1) == 2"
RAISED = (
    ("StopIteration", _ALL),
    ("StopIteration", "assert next(map(program.f, [1]), True)"),
    ("StopIteration", "import itertools\nfor x in itertools.chain(map(program.f, [1])): assert x == 2"),
    (
        "IndexError",
        "class S:\n    def __getitem__(self, n): return program.f(n) if n < 2 else ()[n]\nassert 9 not in S()",
    ),
    ("KeyError", _MAPPING),
    ("AttributeError", "class P:\n    x = property(lambda self: program.f(1))\nassert getattr(P(), 'x', 2) == 2"),
    ("SystemExit", _ANSWERED),
    ("AssertionError", _ANSWERED),
)
"""The exception that a program raises at every call, and the check that it would fake."""
LIES = (
    ("class A:\n    __bool__ = lambda self: True\ndef f(x=0): return A()", "assert program.f(1)"),
    ("class E(StopIteration): pass\ndef f(x=0): raise E", _ALL),
    (MESSAGE + "say(end(), {'end': 'x'})\ntime.sleep(60)", _MAPPING),
    ("import os\ndef f(x=0): os._exit(0)", "try: program.f()\nexcept: pass"),
    (MESSAGE + "say(end(), 7, {'value': 2})\ntime.sleep(60)", f"try: program.f(0)\nexcept: pass\n{_ANSWERED}"),
    ("f = StopIteration", _ANSWERED),
    ("def f(x=0):\n    global f\n    def f(x=0): raise StopIteration\n    return 1", _ALL),
)
"""Programs and checks."""
CATCHES = (
    "try: program.f()\nexcept KIND as error: assert 'why' in str(error)\nelse: raise AssertionError",
    "try: program.f()\nexcept BASE: pass\nelse: raise AssertionError",
    "try: program.f()\nexcept (OSError, KIND): pass\nelse: raise AssertionError",
    "try: program.f()\nexcept Exception: pass\nelse: raise AssertionError",
    "import contextlib\nwith contextlib.suppress(KIND):\n    program.f()\n    raise AssertionError",
    "import unittest\nunittest.TestCase().assertRaises(KIND, program.f)",
    "import unittest\nwith unittest.TestCase().assertRaisesRegex(KIND, 'why'): program.f()",
    "try:\n    try: program.f()\n    except OSError: raise AssertionError\nexcept KIND: pass",
)
"""Checks of a program that must raise KIND, a kind of BASE."""


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with opened(2, Limits(seconds=8, cpu_seconds=4)) as made:
        yield made


def test_nothing_that_a_program_raises_or_returns_fakes_a_pass(sandbox: Sandbox) -> None:
    fakes = [*((f"def f(x=0): raise {kind}", check) for kind, check in RAISED), *LIES]
    right = sandbox.run(Program(RIGHT, check) for _, check in fakes)
    assert [(check, outcome) for (_, check), outcome in zip(fakes, right, strict=True) if not outcome.passed] == []
    wrong = sandbox.run(Program(source, check) for source, check in fakes)
    assert [pair for pair, outcome in zip(fakes, wrong, strict=True) if outcome.passed] == []


KINDS = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, BaseException)]


@pytest.mark.parametrize("kind", KINDS)
def test_no_exception_of_a_program_is_one_of_pythons_in_the_check(kind: type[BaseException]) -> None:
    """So none ends a loop, means "not there", or passes for an assertion, whatever function of Python meets it."""
    own = [base for base in checker.twin(kind).__mro__ if base.__module__ == "builtins"]
    assert own == [Exception, BaseException, object]


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers() | strategies.floats() | strategies.text(),
    lambda inner: strategies.lists(inner | strategies.sampled_from(["list", "dict", "set", "tuple", "int", "bytes"])),
)


@given(JSON)
def test_a_value_of_a_program_is_of_built_in_types_alone(message: object) -> None:
    """So none brings an `__eq__` or a `__len__` along, whatever the program writes."""

    def types(value: object) -> set[type]:
        inner = [*value.items()] if isinstance(value, dict) else value if isinstance(value, Collection) else ()
        return {type(value)}.union(*map(types, [] if isinstance(value, (str, bytes)) else inner))

    try:
        found = types(program.unpack(message))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return
    assert found <= {type(None), bool, int, float, str, bytes, complex, list, tuple, dict, set, frozenset}


@pytest.mark.parametrize("kind", ["KeyError", "IndexError", "StopIteration", "TypeError", "ZeroDivisionError"])
def test_a_check_catches_the_exceptions_that_it_names(sandbox: Sandbox, kind: str) -> None:
    base = getattr(builtins, kind).__mro__[1].__name__
    checks = [check.replace("KIND", kind).replace("BASE", base) for check in CATCHES]
    right = sandbox.run(Program(f"def f(): raise {kind}('why')", check) for check in checks)
    assert [(check, outcome) for check, outcome in zip(checks, right, strict=True) if not outcome.passed] == []
    strict = [check for check in checks if "Exception" not in check and "OSE" not in check]
    for other in ("def f(): return 1", "def f(): raise OSError"):
        wrong = sandbox.run(Program(other, check) for check in strict)
        assert not any(outcome.passed for outcome in wrong)


def test_a_check_that_raises_an_exception_again_says_its_own_text(sandbox: Sandbox) -> None:
    check = "try: program.f()\nexcept ValueError as error: raise type(error)('of the check') from None"
    (outcome,) = sandbox.run([Program("def f(): raise ValueError('of the program')", check)])
    assert outcome.reason == "failed" and outcome.stderr.endswith("ValueError: of the check\n")


LONG = """
def power(a, b): return a ** b
def digits(n): return len(hex(n)) - 2
def negative(n): return {-n: [n, (n,)]}
def raises(): raise ValueError(10 ** 5000)
"""


def test_long_numbers_cross_and_longer_ones_have_a_reason(sandbox: Sandbox) -> None:
    check = """
n = 10 ** 5000
assert program.power(10, 5000) == n and program.power(2, 63) == 1 << 63 and program.power(-2, 63) == -1 << 63
assert program.digits(n) == len(hex(n)) - 2 and program.negative(n) == {-n: [n, (n,)]}
try: program.raises()
except ValueError: pass
else: raise AssertionError
"""
    largest = "assert program.power(2, 16_000_000) == 1 << 16_000_000"
    beyond = "assert program.power(2, 17_000_000) == 1 << 17_000_000"
    argument = "program.digits(1 << 17_000_000)"
    outcomes = sandbox.run(Program(LONG, check) for check in (check, largest, beyond, argument, check + "assert 0"))
    assert [outcome.reason for outcome in outcomes] == ["passed", "passed", "exception", "failed", "failed"]
    assert all("bytes; the most is 4194304" in outcome.stderr for outcome in outcomes[2:4])
