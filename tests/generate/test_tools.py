"""The calculator against Python's own exact arithmetic, against hostile text, and inside a row of tokens."""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quern.generate.tools import ERROR, MAX_CALLS, MAX_CHARACTERS, ToolError, ToolState, calculate
from tests.support.toy_engine import toy_tokenizer


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


@given(
    st.one_of(st.text(max_size=60), st.text("0123456789.,+-*/%() ", max_size=200), st.text("9*/-(). ", max_size=200))
)
def test_any_text_gives_a_plain_number_or_an_error(expression: str) -> None:
    try:
        value = calculate(expression)
    except ToolError:
        return
    assert Fraction(value) is not None and len(value) <= 80
    assert "e" not in value and value.isascii()


def push_all(state: ToolState, ids: list[int]) -> list[list[int]]:
    return [state.push(token) for token in ids]


def call(expression: str) -> list[int]:
    tokenizer = toy_tokenizer()
    start, end = tokenizer.special("<|tool_start|>"), tokenizer.special("<|tool_end|>")
    return [start, *tokenizer.encode(expression), end]


def answer(text: str) -> list[int]:
    tokenizer = toy_tokenizer()
    start, end = tokenizer.special("<|output_start|>"), tokenizer.special("<|output_end|>")
    return [start, *tokenizer.encode(text), end]


def test_a_call_is_answered_once_and_generation_goes_on() -> None:
    tokenizer = toy_tokenizer()
    state = ToolState(tokenizer)
    assert push_all(state, tokenizer.encode("It is ")) == [[]] * len(tokenizer.encode("It is "))
    forced = push_all(state, call("123 + 456"))
    assert forced[-1] == answer("579") and not any(forced[:-1])
    assert state.kind == "output"
    assert not any(push_all(state, answer("579")))
    assert state.kind == "text" and state.calls == 1


def test_an_expression_that_cannot_be_computed_is_answered_with_an_error() -> None:
    tokenizer = toy_tokenizer()
    for ids in (call("1 / 0"), call("what?"), call(""), [call("")[0], 0xFF, call("")[1]]):
        assert push_all(ToolState(tokenizer), ids)[-1] == answer(ERROR)


def test_calls_beyond_the_limit_are_not_computed() -> None:
    state = ToolState(toy_tokenizer())
    results = []
    for _ in range(MAX_CALLS + 1):
        results.append(push_all(state, call("1 + 1"))[-1])
        push_all(state, results[-1])
    assert results == [answer("2")] * MAX_CALLS + [answer(ERROR)]


def test_marks_out_of_place_do_nothing() -> None:
    tokenizer = toy_tokenizer()
    state = ToolState(tokenizer)
    marks = [
        tokenizer.special(name) for name in ("<|tool_end|>", "<|output_end|>", "<|output_start|>", "<|user_start|>")
    ]
    assert not any(push_all(state, marks)) and state.kind == "text"
    # Text that merely spells the marks is text.
    assert not any(push_all(state, tokenizer.encode("<|tool_start|>1+1<|tool_end|>"))) and state.kind == "text"
