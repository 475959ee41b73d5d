"""The process of the program: it runs the source, and then its functions for the check.

Nothing here is believed: a hostile program can change all of it, and the check sees plain data only.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import traceback
import types
from typing import Any

from .values import Channel, encode, pack, unpack

MOST_TEXT = 10_000
"""Characters of a traceback."""


def run_text(text: str, name: str, namespace: dict[str, Any], tree: ast.Module | None = None) -> None:
    """Runs a source text, or its syntax tree if there is one, in a namespace."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)  # tracebacks show its lines
    exec(compile(tree or text, name, "exec", dont_inherit=True), namespace)


def describe(error: BaseException) -> dict[str, str]:
    """An exception as a message: its type, its text, and the traceback."""
    kind = next((kind for kind in type(error).__mro__ if kind.__module__ == "builtins"), Exception)
    if isinstance(error, MemoryError):
        return {"error": "MemoryError", "message": "", "text": "MemoryError\n"}  # there may be no memory for more
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith(os.path.dirname(__file__)):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames, limit=-20))
    try:
        message = str(error)[:MOST_TEXT]
    except Exception:  # a __str__ of the program's, or a number with too many digits
        message = ""
    return {"error": kind.__name__, "message": message, "text": text[-MOST_TEXT:]}


def run_program(source: str, end: str, channel: Channel) -> None:
    """Runs the source, tells the check its `end` or how it failed, and answers calls. Does not return."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    try:
        run_text(source, "program.py", vars(module))
        answer = {"end": end}
    except BaseException as error:
        answer = describe(error)
    channel.write(encode(answer))
    while True:
        call = channel.receive()
        try:
            arguments, named = unpack(call["arguments"]), unpack(call["named"])
            answer = encode({"value": pack(getattr(module, call["name"])(*arguments, **named))})
        except BaseException as error:
            answer = encode(describe(error))
        channel.write(answer)
