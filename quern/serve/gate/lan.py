"""`quern serve --lan`: the address at which other devices of the local network find this machine, and its QR code."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable

import segno

from quern.serve.gate.keys import Keys, digest, new_key

ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737). To choose a route to it sends nothing."""


def lan_address() -> str:
    """This machine's IPv4 address in the network of its default route. Raises ValueError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ELSEWHERE, 9))
            return str(probe.getsockname()[0])
        except OSError:
            raise ValueError("--lan finds no network: connect this machine to one, or leave --lan out") from None


def admit(keys: Keys | None) -> tuple[Keys, Callable[[str, int], str]]:
    """The keys to ask for, and a function that makes an invitation from the scheme and the port.

    keys: the user's; None makes one for this start, which is in the link. Raises ValueError without a network.
    """
    address, key = lan_address(), new_key()

    def invite(scheme: str, port: int) -> str:
        link = f"{scheme}://{address}:{port}/" + ("" if keys else f"#key={key}")
        drawn = io.StringIO()
        segno.make(link, micro=False).terminal(drawn, border=2, compact=True)
        told = "the page asks for a key of --keys" if keys else "the link has a key for this start"
        return f"on a phone or another computer of this network ({told}):\n{link}\n{drawn.getvalue()}"

    return keys or Keys({digest(key): "lan"}), invite
