"""The process of the check: it calls the program's functions by messages, and gives the verdict.

The program's text and objects are never here. What arrives is JSON, which becomes plain data or an exception.
"""

from __future__ import annotations

import builtins
from typing import Any

from .program import MOST_TEXT, describe, run_text
from .values import Channel, pack, unpack

REASONS = {"MemoryError": "memory", "SystemExit": "exit"}


class _Lost(BaseException):
    """The program's process is gone, or does not answer as it should. No `except Exception` catches it.

    Args:
        verdict: The verdict that follows.
    """

    def __init__(self, verdict: dict[str, str]) -> None:
        self.verdict = verdict


class Functions:
    """`program` in a check: its attributes are the program's functions."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lost: _Lost | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **named: self._call(name, arguments, named)

    def _call(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call = {"name": name, "arguments": pack(arguments), "named": pack(named)}
        answer = self._ask(call)
        if "value" in answer:
            return answer["value"]
        kind = getattr(builtins, str(answer["error"]), None)
        kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
        try:
            error = kind(str(answer["message"]))
        except TypeError:  # some take more arguments
            error = RuntimeError(str(answer["message"]))
        error.of_program = answer  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    def _ask(self, call: Any = None) -> dict[str, Any]:
        """Sends a call, if any, and returns the next answer: {"value": …}, {"end": …}, or what `describe` returns."""
        try:
            if self._lost is None and call is not None:
                self._channel.send(call)
            answer = self._channel.receive()
            if "value" in answer:
                return {"value": unpack(answer["value"])}
            return {key: str(answer[key]) for key in (("end",) if "end" in answer else ("error", "message", "text"))}
        except (EOFError, BrokenPipeError):
            self._lost = _Lost({"reason": "gone", "text": ""})
        except Exception as error:
            text = f"the program's answer cannot be read: {type(error).__name__}: {error}"
            self._lost = _Lost({"reason": "exception", "text": text[:MOST_TEXT]})
        raise self._lost


def verdict(check: str, end: str, channel: Channel) -> dict[str, str]:
    """Runs the check. Returns the verdict: a reason, and a text for stderr.

    The reason "gone" means that the program's process ended: its exit status says why.

    Args:
        end: The message of a program that reached its end.
        channel: Messages of the program.
    """
    program = Functions(channel)
    try:
        answer = program._ask()
        if answer != {"end": end}:
            return _of_program(answer)
        run_text(check, "check.py", {"__name__": "__main__", "program": program})
        return {"reason": "passed", "text": ""} if program._lost is None else program._lost.verdict
    except _Lost as lost:
        return lost.verdict
    except BaseException as error:
        answer = getattr(error, "of_program", None)
        return _of_program(answer) if answer else {"reason": "failed", "text": describe(error)["text"]}


def _of_program(answer: dict[str, Any]) -> dict[str, str]:
    return {"reason": REASONS.get(answer.get("error", ""), "exception"), "text": answer.get("text", "")[:MOST_TEXT]}
