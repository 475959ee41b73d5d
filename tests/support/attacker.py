"""Sends the requests of a file to a port, one after another, until its input ends; prints how many it has sent.

A process of its own, of low priority: what a client spends is not to delay the clients that measure gaps.
"""

import os
import pickle
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path


def send(port: int, wire: bytes) -> None:
    """Sends a request on a connection of its own and reads until the server has answered it or closes."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with suppress(OSError):  # a server may answer and close before it has read everything
            connection.sendall(wire)
        reader = connection.makefile("rb")
        reader.readline()
        left = None
        while (line := reader.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            left = int(value) if name.lower() == b"content-length" else left
        reader.read(left or 0)


def main() -> None:
    port, wires = int(sys.argv[1]), pickle.loads(Path(sys.argv[2]).read_bytes())
    os.nice(10)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    sent = 0
    while not ended.is_set():
        send(port, wires[sent % len(wires)])
        sent += 1
    print(sent)


if __name__ == "__main__":
    main()
