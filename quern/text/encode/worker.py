"""The process that encodes documents for pool.py: it answers each unit of texts with their ids, until the other side of
its socket is closed, as by the death of its parent.

A unit and its answer are frames: two uint64 (the number of documents, the bytes of the payload), the length of each
document as int64, and the payload, which is UTF-8 text or ids. It imports no tensor library, so that it starts in a
fraction of a second and takes little memory.
"""

from __future__ import annotations

import signal
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quern.child import orders, replying
from quern.text.tokenizer import Tokenizer

HEADER = struct.Struct("<QQ")


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Encodes documents one by one on this thread.

    tiktoken's batches on two threads take longer: their threads wait for each other at every short document.

    Returns:
        ids: (T,) of the dtype, uint16 or uint32, BOS first in each document.
        lengths: (documents,) int64, BOS included.
    """
    documents, bos = [], np.array([tokenizer.bos], dtype=np.uint32)
    for text in texts:
        documents += [bos, tokenizer.encode_array(text)]
    lengths = np.array([len(ids) for ids in documents[1::2]], dtype=np.int64) + 1
    return np.concatenate(documents, dtype=dtype, casting="same_kind"), lengths


def send(connection: socket.socket, lengths: np.ndarray, payload: bytes) -> None:
    """Sends a frame. lengths: (documents,) int64."""
    connection.sendall(HEADER.pack(len(lengths), len(payload)) + lengths.tobytes())
    connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[np.ndarray, bytearray] | None:
    """Receives the lengths and the payload of a frame; None if the other side has closed the connection."""
    header = _receive_bytes(connection, HEADER.size)
    if header is None:
        return None
    documents, size = HEADER.unpack(header)
    lengths, payload = _receive_bytes(connection, 8 * documents), _receive_bytes(connection, size)
    return None if lengths is None or payload is None else (np.frombuffer(lengths, dtype=np.int64), payload)


def _receive_bytes(connection: socket.socket, size: int) -> bytearray | None:
    received, done = bytearray(size), 0
    view = memoryview(received)
    while done < size:
        count = connection.recv_into(view[done:], size - done, socket.MSG_WAITALL)
        if count == 0:
            return None
        done += count
    return received


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which then closes the socket
    with replying():
        order, _ = orders()
        dtype, tokenizer = np.dtype(order["dtype"]), Tokenizer.load(Path(order["tokenizer"]))
        with socket.socket(fileno=order["socket"]) as connection:
            while (unit := receive(connection)) is not None:
                lengths, payload = unit
                view, ends = memoryview(payload), np.cumsum(lengths).tolist()
                texts = (str(view[end - size : end], "utf-8") for end, size in zip(ends, lengths.tolist(), strict=True))
                ids, lengths = encode_documents(tokenizer, texts, dtype)
                send(connection, lengths, ids.tobytes())


if __name__ == "__main__":
    main()
