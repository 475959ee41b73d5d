"""The calculator a model may call, and the state machine that runs it inside a generated row.

A model calls it by writing <|tool_start|> expression <|tool_end|>; the engine answers by forcing <|output_start|>
result <|output_end|> into the same row, and generation continues after it.

No text is executed: the alphabet of the expression is checked, Python's `ast` parses it, and only numbers and
arithmetic nodes are evaluated. Values are exact fractions, so 0.1 + 0.2 is 0.3. Every intermediate value has at most
MAX_BITS, so no expression takes long.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterable
from decimal import Context, Decimal
from fractions import Fraction
from typing import Literal

from quern.terminal import ascii_signs
from quern.text.chat import ContentPart
from quern.text.tokenizer import Tokenizer

MAX_CHARACTERS = 200
MAX_DEPTH = 50
MAX_BITS = 512  # bits of a numerator or a denominator: about 154 digits
MAX_DIGITS = 40  # digits of a result's integer part; a longer one is useless to a small model
SIGNIFICANT_DIGITS = 10  # digits of a result that is not an integer

ERROR = "error"  # the output for an expression that cannot be computed
MAX_CALLS = 8  # tool calls answered in one reply

Kind = Literal["text", "tool", "output"]


class ToolError(ValueError):
    """The calculator refuses the expression, with the reason."""


_ALPHABET = re.compile(r"[0-9.,+\-*/%() \t]+")
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?![\d,])")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: _power(left, right),
}


def calculate(expression: str) -> str:
    """The value of an arithmetic expression in decimal notation: "579", "2.5", "-3.333333333". Raises ToolError for one
    that is not made of + - * / // % **, parentheses and numbers, a division by zero, or a number that is too large."""
    if len(expression) > MAX_CHARACTERS:
        raise ToolError(f"the expression has {len(expression)} characters; the calculator takes {MAX_CHARACTERS}")
    text = ascii_signs(expression).strip()
    if not _ALPHABET.fullmatch(text):
        raise ToolError("an expression holds numbers, + - * / // % ** and parentheses, nothing else")
    text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = _LEADING_ZEROS.sub("", text)
    try:
        return _plain(_value(ast.parse(text, mode="eval").body, text, 0))
    except (SyntaxError, MemoryError, RecursionError):
        raise ToolError("the expression is not well formed") from None
    except (ZeroDivisionError, OverflowError):
        raise ToolError("division by zero, or a number too large") from None


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ToolError(f"the expression nests deeper than {MAX_DEPTH}")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        # Read the text, not the parsed float: 0.1 is exactly one tenth.
        return _bounded(Fraction(text[node.col_offset : node.end_col_offset]))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, text, depth + 1))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left, text, depth + 1), _value(node.right, text, depth + 1)
        return _bounded(_BINARY[type(node.op)](left, right))
    raise ToolError("the expression is not well formed")


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    whole = exponent.numerator
    if exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits > 1 and abs(whole) * (bits - 1) > MAX_BITS:
            raise ToolError("the power is too large")
        if bits <= 1 and whole:  # a base of 0, 1 or -1 needs only the exponent's sign and parity
            whole = (2 - whole % 2) * (1 if whole > 0 else -1)
        return Fraction(base**whole)
    if base < 0:
        raise ToolError("a fractional power of a negative number is not a real number")
    return Fraction(repr(float(base) ** float(exponent)))


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ToolError("the number is too large")
    return value


def _plain(value: Fraction) -> str:
    if abs(value) >= 10**MAX_DIGITS:
        raise ToolError(f"the result has more than {MAX_DIGITS} digits")
    if value.denominator == 1:
        return str(value.numerator)
    whole_digits = len(str(abs(int(value))))
    context = Context(prec=max(SIGNIFICANT_DIGITS, whole_digits + 2))
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    text = format(rounded, "f")
    if len(text) > 2 * MAX_DIGITS:
        raise ToolError("the result is too close to zero to write plainly")
    return text


def spoken(parts: Iterable[ContentPart]) -> str:
    """Returns a reply as text for people: its words, and each sum with its result, as [384+527 → 911].

    A call without a result that the calculator found, such as one of "!" or one that was cut off, is left out.
    """
    words, call = list[str](), ""
    for part in parts:
        if part["type"] == "text":
            words.append(part["text"])
        elif part["type"] == "tool":
            call = part["text"]
        elif call and part["text"] not in ("", ERROR):
            words.append(f"[{call} → {part['text']}] ")
    return "".join(words)


class ToolState:
    """Which part of the reply each token belongs to, and what a tool's answer forces.

    plain: there is text alone, whose tokenizer may lack the marks of calls. of_caller: the tools are the caller's, and
    the first call ends the reply; otherwise the calculator answers.
    """

    def __init__(self, tokenizer: Tokenizer, plain: bool, of_caller: bool):
        self.kind: Kind = "text"
        self.calls = 0
        self.called = False
        """Whether a call of the caller's tools ends the reply."""
        self._tokenizer, self._of_caller = tokenizer, of_caller
        self._expression: list[int] = []
        names = ("<|tool_start|>", "<|tool_end|>", "<|output_start|>", "<|output_end|>")
        marks = [-1 if plain else tokenizer.special(name) for name in names]
        self.tool_start, self._tool_end, self._output_start, self._output_end = marks

    def push(self, token: int) -> list[int]:
        """Takes all tokens of the row in order; returns those that must follow: the calculator's answer, or none."""
        if self.kind == "text" and token == self.tool_start:
            self.kind, self._expression = "tool", []
        elif self.kind == "tool" and token == self._tool_end and self._of_caller:
            self.called = True
        elif self.kind == "tool" and token == self._tool_end:
            self.kind = "output"
            self.calls += 1
            return [self._output_start, *self._tokenizer.encode(self._answer()), self._output_end]
        elif self.kind == "tool":
            self._expression.append(token)
        elif self.kind == "output" and token == self._output_end:
            self.kind = "text"
        return []

    def _answer(self) -> str:
        try:
            text = self._tokenizer.decode_bytes(self._expression).decode("utf-8")
            return calculate(text) if self.calls <= MAX_CALLS else ERROR
        except (ToolError, UnicodeDecodeError):
            return ERROR
