"""The process of the check: it calls the program's functions by messages, and gives the verdict.

The program's text and objects are never here. What arrives is JSON, which becomes plain data or a `ProgramError`.
"""

from __future__ import annotations

import ast
import builtins
import functools
import threading
from typing import Any

from .program import MOST_TEXT, Channel, describe, encode, pack, run_text, unpack

REASONS = {"MemoryError": "memory", "SystemExit": "exit"}
NAMES_EXCEPTIONS = ("assertRaises", "assertRaisesRegex", "suppress")
"""Functions whose arguments name exceptions, as an `except` clause does."""
WITH_TWINS = "<with twins>"
"""Name of `with_twins` in a check, which no check can write."""


class ProgramError(Exception):
    """An exception of the program. `twin` makes a subclass for each built-in exception.

    None of them is a built-in exception itself: to Python's own code a StopIteration, an IndexError or an
    AttributeError means "the end" or "not there", so a program that raises one could end a loop of the check early.
    """

    answer: dict[str, str] | None = None  # None where the check itself made the exception


@functools.cache
def twin(kind: type[BaseException]) -> Any:
    """The subclass of `ProgramError` that stands for a built-in exception. Twins inherit as the originals do."""
    if kind in (Exception, BaseException):
        return ProgramError
    return type(kind.__name__, tuple(dict.fromkeys(twin(base) for base in kind.__bases__ if base is not object)), {})


def with_twins(kinds: Any) -> Any:
    """Adds the twins of exception types, or of a tuple of them, so that `except` finds both. Returns others as is."""
    found = kinds if isinstance(kinds, tuple) else (kinds,)
    if not all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in found):
        return kinds
    return (*found, *map(twin, found))


def _compile(check: str) -> ast.Module:
    """Parses a check. Its `except` clauses also catch the twins of the exceptions that they name."""
    tree = ast.parse(check, "check.py")

    def wrap(node: ast.expr) -> ast.expr:
        name = ast.copy_location(ast.Name(WITH_TWINS, ast.Load()), node)
        return ast.copy_location(ast.Call(name, [node], []), node)

    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            node.type = wrap(node.type)
        elif isinstance(node, ast.Call) and (
            getattr(node.func, "attr", getattr(node.func, "id", "")) in NAMES_EXCEPTIONS
        ):
            node.args = [arg if isinstance(arg, ast.Starred) else wrap(arg) for arg in node.args]
    return tree


class _Lost(BaseException):
    """The program's process is gone, or does not answer as it should. No `except Exception` catches it."""

    def __init__(self, verdict: dict[str, str]) -> None:
        self.verdict = verdict


class Functions:
    """`program` in a check: its attributes are the program's functions."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lost: _Lost | None = None
        self._one_call = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: self._call(name, arguments, named)

    def _call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        answer = self._ask("value", {"name": name, "arguments": pack(arguments), "named": pack(named)})
        if "value" in answer:
            return answer["value"]
        kind = getattr(builtins, answer["error"], None)
        known = isinstance(kind, type) and issubclass(kind, BaseException)
        error = twin(kind if known else RuntimeError)(answer["message"])
        error.answer = answer
        raise error

    def _ask(self, expected: str, call: Any = None) -> dict[str, Any]:
        """Sends a call, if any, and returns the next answer: {expected: …}, or what `describe` returns."""
        with self._one_call:
            if self._lost is not None:
                raise self._lost
            message = None if call is None else encode(call)
            try:
                if message is not None:
                    self._channel.write(message)
                answer = self._channel.receive()
                if expected in answer:
                    return {expected: unpack(answer[expected])}
                return {key: str(answer[key]) for key in ("error", "message", "text")}
            except (EOFError, BrokenPipeError):
                self._lost = _Lost({"reason": "gone", "text": ""})
            except Exception as error:
                text = f"the program's answer cannot be read: {type(error).__name__}: {error}"
                self._lost = _Lost({"reason": "exception", "text": text[:MOST_TEXT]})
            raise self._lost


def verdict(check: str, end: str, channel: Channel) -> dict[str, str]:
    """Runs the check. Returns the verdict: a reason, and a text for stderr.

    The reason "gone" means that the program's process ended: its exit status says why. end: the message of a program
    that reached its end.
    """
    program = Functions(channel)
    try:
        answer = program._ask("end")
        if answer != {"end": end}:
            return _of_program(answer)
        names = {"__name__": "__main__", "program": program, WITH_TWINS: with_twins}
        run_text(check, "check.py", names, _compile(check))
        return {"reason": "passed", "text": ""} if program._lost is None else program._lost.verdict
    except _Lost as lost:
        return lost.verdict
    # All but an answer is the check's own: an assertion, a fault of the check, SystemExit. The verdict carries it, with
    # its traceback. It must not leave this function, because a check passes only by running to its end.
    except BaseException as error:
        if isinstance(error, ProgramError) and error.answer:
            return _of_program(error.answer)
        return {"reason": "failed", "text": describe(error)["text"]}


def _of_program(answer: dict[str, Any]) -> dict[str, str]:
    return {"reason": REASONS.get(answer.get("error", ""), "exception"), "text": answer.get("text", "")[:MOST_TEXT]}
