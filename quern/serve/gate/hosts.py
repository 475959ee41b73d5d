"""The host names for which a server answers.

A page of another host can reach a server on this machine by DNS rebinding: its own name then resolves to the server's
address. The browser still sends that name in the Host header, so a server that knows its names is safe.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence


class Hosts:
    """Tests Host headers: `header in hosts`.

    Accepted are IP addresses, which no one can rebind; localhost and its subdomains; the host name that was bound; this
    machine's name; and the names that the user lists: "*.example.org" for subdomains, "*" for every name.
    """

    def __init__(self, bound: str, named: Sequence[str] = ()) -> None:
        machine = socket.gethostname()
        self._names = {name.lower() for name in ("localhost", bound, machine, f"{machine}.local", *named)}

    def __contains__(self, header: str) -> bool:
        name = host_name(header)
        try:
            ipaddress.ip_address(name.partition("%")[0])
            return True
        except ValueError:
            pass
        parents = [name.split(".", number)[number] for number in range(1, name.count(".") + 1)]
        patterns = {name, "*", *(f"*.{parent}" for parent in parents)}
        return bool(name) and ("localhost" in parents or bool(self._names & patterns))


def host_name(host: str) -> str:
    """The host name in a Host header, in lower case, without port and brackets."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()
