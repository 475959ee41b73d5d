"""The process of the program: it runs the source, and then its functions for the check, by messages.

In this process nothing is believed: a hostile program can change all of it, and the check sees plain data only. The
messages between both processes are length-prefixed JSON, with values in JSON: a value becomes itself (None, bool, int,
float, str) or a list whose first item names its type: [1, (2,)] becomes ["list", 1, ["tuple", 2]]. A long int becomes
["int", "0x…"], because Python refuses decimals of over 4,300 digits. The reader builds built-in types only, so the
sender cannot bring code or an `__eq__` along.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any

MOST_TEXT = 10_000
"""Characters of a traceback."""
MOST_BYTES = 4 << 20
"""The longest message."""
LONG = 1 << 63
CONTAINERS = (list, tuple, dict, set, frozenset)


def pack(value: Any) -> Any:
    """A value as JSON. Raises TypeError for an object that is not plain data."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        value = int(value)
        return value if abs(value) < LONG else ["int", hex(value)]
    for plain in (float, str):
        if isinstance(value, plain):
            return plain(value)
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    for container in CONTAINERS:
        if isinstance(value, container):
            items = [part for item in value.items() for part in item] if isinstance(value, dict) else value
            return [container.__name__, *map(pack, items)]
    raise TypeError(f"a {type(value).__name__} is not plain data: return numbers, strings, lists, dictionaries")


def unpack(value: Any) -> Any:
    """The value of a JSON text that `pack` wrote. Raises an exception for any other."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise ValueError("a JSON object is not a packed value")
        return value
    kind, *items = value
    if kind == "bytes":
        return bytes.fromhex(items[0])
    if kind == "complex":
        return complex(*items)
    if kind == "int":
        return int(items[0], 16)
    items = [unpack(item) for item in items]
    if kind == "dict":
        return dict(zip(items[::2], items[1::2], strict=True))
    return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](items)


def encode(message: Any) -> bytes:
    """The bytes of a message. Raises ValueError if they are too many."""
    data = json.dumps(message).encode()
    _refuse_long(len(data))
    return len(data).to_bytes(4, "big") + data


def _refuse_long(length: int) -> None:
    if length > MOST_BYTES:
        raise ValueError(f"a value has {length} bytes; the most is {MOST_BYTES}")


class Channel:
    """Messages over two pipes."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")

    def write(self, data: bytes) -> None:
        """Writes a message of `encode`."""
        self._writer.write(data)
        self._writer.flush()

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end, ValueError for a message that is too long."""
        length = int.from_bytes(self._read(4), "big")
        _refuse_long(length)
        return json.loads(self._read(length))

    def _read(self, length: int) -> bytes:
        data = self._reader.read(length)
        if len(data) < length:
            raise EOFError("the process at the other end is gone")
        return data


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
