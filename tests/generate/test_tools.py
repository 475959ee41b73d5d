"""The calculator against Python's own exact arithmetic and against hostile text; test_reply.py has its calls."""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.generate.tools import MAX_CHARACTERS, ToolError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("123 + 456", "579"),
        ("1,234,567 * 2", "2469134"),
        ("1,000.5 + 1", "1001.5"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 3", "3.333333333"),
        ("-7 // 2", "-4"),
        ("2 ** 10", "1024"),
        ("2 ** 0.5", "1.414213562"),
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("007 + 1", "8"),
        (".5 + 5.", "5.5"),
        ("3 × 4 ÷ 6 − 1", "1"),
        ("1 ** 99999999999999999999", "1"),
        ("(0 - 1) ** 99999999999999999999", "-1"),
        ("0 ** 0", "1"),
        ("123456789012.5 / 3", "41152263004.17"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


def _join(parts: tuple[str, str, str]) -> str:
    return f"({parts[0]} {parts[1]} {parts[2]})"


NUMBERS = st.one_of(
    st.integers(0, 10**6).map(str), st.decimals(0, 1000, places=2, allow_nan=False).map(lambda d: format(d, "f"))
)


@given(st.recursive(NUMBERS, lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(_join), max_leaves=6))
def test_values_are_those_of_exact_fractions(expression: str) -> None:
    """The oracle: the same text evaluated by Python over Fraction literals, and rounded to ten digits."""
    try:
        expected = eval(re.sub(r"\d+(\.\d+)?", r"Fraction('\g<0>')", expression), {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(ToolError):
            calculate(expression)
        return
    found = Fraction(calculate(expression))
    if expected.denominator == 1:
        assert found == expected
    else:
        assert abs(found - expected) <= max(abs(expected) * Fraction(1, 10**9), Fraction(1, 10**30))


HOSTILE = [
    "",
    "1, 2",
    "12,34",
    "0,125*8",  # a decimal comma
    "1 == 1",
    "1_000",
    "1e9",
    "0x10",
    "abs(-1)",
    "().__class__.__bases__",
    "__import__('os').system('true')",
    "1 << 100000",
    "1\n2",
    "\x00",
    "１ + １",
    "∞",
    "9 ** 9 ** 9 ** 9",
    "(9 ** 99) ** 99",
    "0.1 ** 9999999999",
    "(2 ** 0.5) ** 1000000",
    "1 / 10 ** 200",
    "1 / 0",
    "0 ** -1",
    "(-8) ** 0.5",
    "1" * (MAX_CHARACTERS + 1),
    "-" * 199 + "1",
    "9**" * 66 + "9",
]


@pytest.mark.parametrize("expression", HOSTILE)
def test_what_is_not_arithmetic_or_too_large_is_refused(expression: str) -> None:
    start = time.perf_counter()
    with pytest.raises(ToolError):
        calculate(expression)
    assert time.perf_counter() - start < 1


@given(st.text(max_size=60) | st.text("0123456789.,+-*/%() ", max_size=200) | st.text("9*/-(). ", max_size=200))
def test_any_text_gives_a_plain_number_or_an_error(expression: str) -> None:
    try:
        value = calculate(expression)
    except ToolError:
        return
    assert Fraction(value) is not None and len(value) <= 80
    assert "e" not in value and value.isascii()
