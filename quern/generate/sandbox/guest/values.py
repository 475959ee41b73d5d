"""Plain data between the program and its check: length-prefixed JSON messages, and values in JSON.

A value becomes itself (None, bool, int, float, str) or a list whose first item names its type: [1, (2,)] becomes
["list", 1, ["tuple", 2]]. A long int becomes ["int", "0x…"], because Python refuses decimals of over 4,300 digits. The
reader builds built-in types only, so the sender cannot bring code or an `__eq__` along.
"""

from __future__ import annotations

import json
import os
from typing import Any

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
    """The value of a JSON text that `pack` wrote. Raises ValueError or TypeError for any other."""
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
        self.reader, self.writer = reader, writer

    def write(self, data: bytes) -> None:
        """Writes a message of `encode`."""
        while data:
            data = data[os.write(self.writer, data) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError at the end, ValueError for a message that is too long."""
        length = int.from_bytes(self._read(4), "big")
        _refuse_long(length)
        return json.loads(self._read(length))

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = os.read(self.reader, min(length - len(parts), 1 << 16))
            if not part:
                raise EOFError("the process at the other end is gone")
            parts += part
        return bytes(parts)
