"""Connections that stall, flood or crowd out others."""

import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest
import uvicorn

from quern.serve.gate import HEADER_BYTES, Connection, Connections, Gate, Pace
from quern.serve.server import LOOPBACK, create_app
from tests.serve.test_operations import ask, slow_engine
from tests.support.http_server import running, web
from tests.support.toy_engine import toy_engine

QUICK = {"HEADER_SECONDS": 0.5, "BODY_SECONDS": 0.8, "UNREAD_SECONDS": 0.8}
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"


@contextmanager
def changed(**values: float) -> Iterator[None]:
    """Other constants of the gate."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(f"quern.serve.gate.{name}", value)
        yield


@pytest.fixture
def url() -> Iterator[str]:
    with changed(**QUICK), running(create_app({"toy": toy_engine()})) as base:
        yield base


@contextmanager
def connected(url: str, source: str = "127.0.0.1") -> Iterator[socket.socket]:
    address = (url.removeprefix("http://").split(":")[0], int(url.rsplit(":", 1)[1]))
    with closing(socket.create_connection(address, 10, (source, 0))) as connection:
        yield connection


def reply(connection: socket.socket) -> bytes:
    """The bytes that arrive until the server closes the connection."""
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def flood(connection: socket.socket, pieces: Iterator[bytes]) -> int:
    """Sends until the server closes the connection. Returns the bytes that were sent."""
    sent = 0
    try:
        for piece in pieces:
            connection.sendall(piece)
            sent += len(piece)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sent


def endless(*pieces: bytes, total: int = 32 << 20) -> Iterator[bytes]:
    """The pieces, the last one again and again, `total` bytes of it."""
    yield from pieces[:-1]
    for _ in range(total // len(pieces[-1])):
        yield pieces[-1]


FLOODS = {
    "a value": ([GET, b"x: ", b"a" * 4096], b"431"),
    "many headers": ([GET, b"x: y\r\n" * 500], b"431"),
    "the path": ([b"GET /" + b"a" * 4096, b"a" * 4096], b"431"),
    "after empty lines": ([b"\r\n\r\n" + GET, b"x: ", b"a" * 4096], b"4"),
    "the second request's headers": ([GET, b"\r\n", GET, b"x: ", b"a" * 4096], b"200"),
    "chunk extensions": ([CHUNKED, b"1;" + b"x" * 4096 + b"\r\na\r\n"], b"413"),
    "trailers": ([CHUNKED + b"0\r\n", b"x: y\r\n" * 500], b"4"),
    "a body": ([HEAD + b"content-length: 99999999\r\n\r\n", b"a" * 4096], b"413"),
}


@pytest.mark.parametrize(("pieces", "status"), FLOODS.values(), ids=FLOODS)
def test_a_flood_is_cut_off(url: str, pieces: list[bytes], status: bytes) -> None:
    with connected(url) as connection:
        sent = flood(connection, endless(*pieces))
        assert sent < 16 << 20, "the sockets' buffers and the limit, not the flood"
        found = reply(connection)
        assert found == b"" or found.startswith(b"HTTP/1.1 " + status), "a reset may have lost the answer"
        assert found.count(b"HTTP/1.1 413") < 2, "the second one would answer the next request"
    assert web.get(f"{url}/health").status_code == 200


def test_headers_just_over_the_limit_are_told_so_and_just_below_are_not(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(GET + b"x: " + b"a" * HEADER_BYTES)
        assert reply(connection).startswith(b"HTTP/1.1 431 ")
    with connected(url) as connection:
        connection.sendall(GET + b"x: " + b"a" * (HEADER_BYTES - 100) + b"\r\nconnection: close\r\n\r\n")
        assert reply(connection).startswith(b"HTTP/1.1 200 ")


def test_large_bodies_and_many_requests_on_one_connection_pass(url: str) -> None:
    text = "a" * 500_000
    with httpx.Client(timeout=60) as client:
        for _ in range(3):
            answer = client.post(f"{url}/detokenize", json={"tokens": [65] * 65_000})
            assert answer.status_code == 200
            assert client.post(f"{url}/nothing", json={"text": text}).status_code == 404, "nobody reads this body"
            assert client.get(f"{url}/health").status_code == 200


STALLED = {
    "idle": (b"", b""),
    "half a header": (GET, b""),
    "half a body": (HEAD + b"content-length: 10\r\n\r\n{", b""),
    "half a chunked body": (CHUNKED + b"1\r\n{\r\n", b""),
    "a header that drips": (GET + b"x: ", b"a"),  # which does not move the deadline
}


@pytest.mark.parametrize(("begin", "drip"), STALLED.values(), ids=STALLED)
def test_a_stalled_connection_is_closed(url: str, begin: bytes, drip: bytes) -> None:
    start = time.monotonic()
    with connected(url) as connection:
        connection.settimeout(0.05)
        connection.sendall(begin)
        while time.monotonic() - start < 5:
            try:
                connection.sendall(drip)
                if not connection.recv(1 << 16):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    assert time.monotonic() - start < 3


def test_an_idle_connection_stays_for_the_time_of_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn's own default is less; here it is 0."""
    monkeypatch.setattr("uvicorn.Config", partial(uvicorn.Config, timeout_keep_alive=0))
    with running(create_app({"toy": toy_engine()})) as url, connected(url) as connection:
        for _ in range(2):
            connection.sendall(GET + b"\r\n")
            time.sleep(0.2)  # the response comes in two pieces
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_its_response_is_closed(url: str) -> None:
    many = GET.replace(b"/health", b"/vendor/temml.min.js") + b"\r\n"
    with connected(url) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)  # of one wait; it ends with an error, where the server does not close
        sent = flood(connection, endless(many, total=64 << 20))
    assert sent < 64 << 20


def crowded(opened: ExitStack, most: int) -> str:
    """The URL of a server with so few places."""
    opened.enter_context(changed(MOST_CONNECTIONS=most))
    return opened.enter_context(running(create_app({"toy": slow_engine()}, Gate(LOOPBACK))))


def test_half_headers_shut_nobody_out() -> None:
    with ExitStack() as opened:
        url = crowded(opened, 16)
        stream = opened.enter_context(ThreadPoolExecutor(1)).submit(ask, url, max_tokens=60)
        time.sleep(0.3)
        for number in range(60):
            attacker = opened.enter_context(connected(url, f"127.0.0.{1 + number % 3}"))
            attacker.sendall(GET)
            if number % 10 == 0:
                assert ask(url, max_tokens=2).status_code == 200
        assert stream.result().status_code == 200, "a request that is being answered is never closed for others"


def test_one_address_has_half_of_the_places() -> None:
    with ExitStack() as opened:
        url, busy = crowded(opened, 8), []
        for _ in range(6):
            busy.append(opened.enter_context(connected(url, "127.0.0.2")))
            busy[-1].sendall(HEAD + b"content-length: 10\r\n\r\n{")
            time.sleep(0.1)
        found = [connection.recv(12) for connection in busy[4:]]
        assert found == [b"HTTP/1.1 503"] * 2
        assert web.get(f"{url}/health").status_code == 200


def test_without_a_limit_of_open_files_there_are_many_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS may set none."""
    monkeypatch.setattr("os.sysconf", lambda _: -1)
    connections = Connections()
    assert all(connections.enter(Connection.__new__(Connection), f"10.0.0.{number}") for number in range(20))


@pytest.mark.parametrize("trusted", [[], ["127.0.0.1"]], ids=["nobody", "the proxy"])
def test_rates_believe_named_proxies_alone(trusted: list[str]) -> None:
    app = create_app({"toy": toy_engine()}, Gate(LOOPBACK, per_minute=2))
    with running(app, trusted=trusted) as url:
        found = []
        for client in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
            body = {"prompt": "x"}
            found.append(web.post(f"{url}/tokenize", json=body, headers={"x-forwarded-for": client}).status_code)
    assert found == [200, 200, 200 if trusted else 429]


def test_a_limited_client_stays_limited_among_more_clients_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quern.serve.gate.MOST_CLIENTS", 2)
    rate = Pace(1 / 60, 0, lambda: 100.0)
    assert [rate.wait(client, patient=False) for client in "abaca"] == pytest.approx([0, 0, 60, 0, 60])


def test_a_body_is_read_also_where_its_headers_offer_another_protocol(url: str) -> None:
    """Java's HttpClient and `curl --http2` send such headers; the header may arrive in two pieces."""
    offer, body = (
        b"connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
        b'{"prompt": "x"}',
    )
    sent = HEAD + offer + b"content-length: %d\r\n\r\n" % len(body) + body
    name = sent.index(b"Upgrade: ")
    for cut in range(name - 3, name + 10):
        with connected(url) as connection:
            connection.sendall(sent[:cut])
            time.sleep(0.01)
            connection.sendall(sent[cut:])
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 "), sent[:cut]


def test_a_request_that_is_no_http_leaves_no_line_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with running(create_app({"toy": toy_engine()})) as url, connected(url) as connection:
        connection.sendall(b"nonsense\r\n\r\n")
        assert reply(connection).startswith(b"HTTP/1.1 400")
    assert capsys.readouterr().err == ""


# HTTPS -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {cert} -days 2 -subj /CN=localhost"
    try:
        subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl, which makes the certificate, is not installed")
    return cert, key


def test_https(certificate: tuple[Path, Path]) -> None:
    with running(create_app({"toy": toy_engine()}), tls=certificate) as url:
        secure = url.replace("http:", "https:")
        trusting = ssl.create_default_context(cafile=str(certificate[0]))
        assert httpx.get(f"{secure}/health", verify=trusting).status_code == 200
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{secure}/health")
        text = "a" * 300_000  # many records, whose first may come with the end of the handshake
        body = {"model": "toy", "prompt": text, "add_special_tokens": False}
        assert len(httpx.post(f"{secure}/tokenize", json=body, verify=trusting, timeout=60).json()["tokens"]) > 1000
        with connected(url) as connection:
            connection.sendall(GET + b"\r\n")
            assert not reply(connection).startswith(b"HTTP"), "plain HTTP is no TLS"


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["nothing", "half a record"])
def test_handshakes_that_never_end_shut_nobody_out(certificate: tuple[Path, Path], sent: bytes) -> None:
    with ExitStack() as opened:
        opened.enter_context(changed(MOST_CONNECTIONS=8, **QUICK))
        app, connections = create_app({"toy": toy_engine()}), Connections()
        url = opened.enter_context(running(app, tls=certificate, connections=connections))
        start, attackers = time.monotonic(), []
        for number in range(20):
            attackers.append(opened.enter_context(connected(url, f"127.0.0.{1 + number % 3}")))
            attackers[-1].sendall(sent)
        assert web.get(url.replace("http:", "https:") + "/health").status_code == 200
        assert [reply(attacker) for attacker in attackers] == [b""] * 20, "closed: for others, or after a while"
        assert time.monotonic() - start < 5
        while connections._open and time.monotonic() - start < 6:
            time.sleep(0.01)  # the server hears of it after the client
        assert not connections._open
