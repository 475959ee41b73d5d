"""conftest.py: a test cannot reach beyond this machine, and can reach a server of its own; the order of files names
files that exist."""

import socket

import pytest

from tests.conftest import SERVERS, SLOWEST_FIRST
from tests.support.line_server import ROOT


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.invalid", 443)])
def test_a_connection_to_elsewhere_is_refused(address: tuple[str, int]) -> None:
    with socket.socket() as client, pytest.raises(PermissionError, match="serve it from 127.0.0.1"):
        client.connect(address)


def test_the_order_names_what_exists() -> None:
    assert [name for name in SLOWEST_FIRST if name not in SERVERS and not (ROOT / name).exists()] == []
