"""conftest.py: a test cannot reach beyond this machine, and can reach a server of its own; the order of files names
files that exist."""

import socket

import pytest

from tests.conftest import GROUPS, SLOWEST_FIRST
from tests.support.line_server import ROOT


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.invalid", 443)])
def test_a_connection_to_elsewhere_is_refused(address: tuple[str, int]) -> None:
    with socket.socket() as client, pytest.raises(PermissionError, match="serve it from 127.0.0.1"):
        client.connect(address)


def test_a_connection_to_this_machine_is_made() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), timeout=5) as client,
    ):
        assert client.getpeername() == server.getsockname()


def test_groups_and_order_name_what_exists() -> None:
    for start in {start for group in GROUPS.values() for start in group} | {*SLOWEST_FIRST} - GROUPS.keys():
        assert list(ROOT.glob(f"{start}*")), f"{start} in tests/conftest.py names no file"
