"""The board's server: the pages, the refusals, and the headers that keep other sites out."""

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quern.lab.board.server import PAGE, TYPES, WEB, BoardOptions, Server, run
from tests.browser.test_board import board


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    out = tmp_path / "out"
    folder = out / "runs" / "a" / "pretrain"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 10, "tokens": 80, "loss": 2.5}\n')
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    with board(out) as found:
        yield found


def ask(server: Server, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET" if body is None else "POST", path, body, named)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    is_json = answer.headers["Content-Type"] == "application/json"
    return answer.status, json.loads(content) if is_json else content, dict(answer.headers)


CURVES = json.dumps({"x": "steps", "y": "loss", "points": 10, "runs": {"a/pretrain": [0, 0]}}).encode()
JSON = {"Content_Type": "application/json"}


def test_every_file_of_the_page_is_served(server: Server) -> None:
    for path, file in PAGE.items():
        status, content, headers = ask(server, path)
        media_type = TYPES[file.rpartition(".")[2]]
        assert (status, content, headers["Content-Type"]) == (200, (WEB / file).read_bytes(), media_type)
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
    served = {WEB / file for file in PAGE.values()}
    assert {path for path in WEB.rglob("*") if path.is_file()} - served == {WEB / "vendor" / "LICENSE"}


def test_runs_and_curves(server: Server) -> None:
    status, listing, _ = ask(server, "/api/list")
    assert status == 200 and [run["id"] for run in listing["runs"]] == ["a/pretrain"]
    status, curves, _ = ask(server, "/api/curves", CURVES, **JSON)
    assert status == 200 and curves["runs"]["a/pretrain"]["y"] == [2.5]


def test_a_client_that_leaves_is_no_error(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    address = "127.0.0.1", server.server_address[1]
    for _ in range(20):
        with socket.create_connection(address) as client:  # it leaves before the answers, and the kernel says so
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /vendor/uPlot.js HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 5)
    assert ask(server, "/api/list")[0] == 200
    assert capfd.readouterr().err == ""


def test_connections_that_come_at_once_wait_their_turn(tmp_path: Path) -> None:
    """The kernel would let each that its queue has no room for try again after one second, then after two."""
    with Server(BoardOptions(tmp_path, port=0)) as server:
        address = "127.0.0.1", server.server_address[1]
        for client in [socket.create_connection(address, timeout=9) for _ in range(20)]:
            client.close()


def test_no_other_path_is_opened(server: Server) -> None:
    paths = """/../secret.json /%2e%2e/secret.json /vendor/../../server.py /runs/a/pretrain/metrics.jsonl //etc/passwd
     /api/list?study=../../secret.json /api/list?study=%2e%2e /board.js/ /report/a /report/..%2f..%2fsecret.json"""
    for path in paths.split():
        status, answer, _ = ask(server, path)
        assert status == 404 and "secret" not in json.dumps(answer), path


def test_only_loopback_names_are_answered(server: Server) -> None:
    for host in ("evil.example", "evil.example:8010", "127.0.0.1.evil.example", "", "[", "localhost.:1"):
        for body, more in ((None, {}), (CURVES, JSON)):
            status, answer, _ = ask(server, "/api/curves" if body else "/api/list", body, Host=host, **more)
            assert (status, list(answer)) == (403, ["error"]), host
    for host in ("127.0.0.1:8010", "localhost", "LOCALHOST:1", "[::1]:8010"):
        assert ask(server, "/api/list", Host=host)[0] == 200, host


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/api/curves", CURVES, {"Content_Type": "text/plain"}, 400),  # what a form of another site can send
        ("/api/curves", b"[]", JSON, 400),
        ("/api/curves", b"[" * 100_000, JSON, 400),
        ("/api/curves", b'{"x": "lr"}', JSON, 400),
        ("/api/curves", b"{}", JSON | {"Content_Length": str(10**9)}, 400),
        ("/api/curves", CURVES[:-1] + b', "study": "none"}', JSON, 404),
        ("/api/list", CURVES, JSON, 404),
        ("/api/manage", b'{"action": "remove", "run": "a"}', {"Content_Type": "text/plain"}, 400),
        ("/api/manage", b'{"action": "remove", "run": "../out/runs/a"}', JSON, 404),
        ("/api/manage", b'{"action": "rename", "run": "a", "to": "../b"}', JSON, 400),
    ],
)
def test_wrong_requests(server: Server, path: str, body: bytes, headers: dict[str, str], status: int) -> None:
    found, answer, _ = ask(server, path, body, **headers)
    assert (found, list(answer)) == (status, ["error"])


def test_runs_are_removed_from_this_machine_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = b'{"action": "remove", "run": "a"}'
    with monkeypatch.context() as patch:
        patch.setattr(server, "get_request", lambda: (server.socket.accept()[0], ("192.0.2.7", 5000)))
        status, answer, _ = ask(server, "/api/manage", remove, **JSON)
        assert status == 400 and "on the machine that has them" in answer["error"]
        assert ask(server, "/api/list")[1]["runs"]
    assert ask(server, "/api/manage", remove, **JSON)[0] == 200 and not ask(server, "/api/list")[1]["runs"]


def test_options_are_checked(tmp_path: Path, server: Server) -> None:
    with pytest.raises(FileNotFoundError, match="name the output folder"):
        run(BoardOptions(tmp_path / "none"), print)
    with pytest.raises(OSError, match="choose another --port"):
        run(BoardOptions(tmp_path, port=server.server_address[1]), print)
