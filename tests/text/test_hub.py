"""Fetching over a bad line: a loopback server that resets, truncates, lies and redirects.

Whatever happens, a file under its final name is byte for byte the published one, or is not there.
"""

import hashlib
import http.server
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from quern.text import data_sets
from quern.text.data_sets import DataSet
from quern.text.hub import download, fetch

BODY = b"PAR1" + random.Random(0).randbytes(300_000) + b"PAR1"
SHA256 = hashlib.sha256(BODY).hexdigest()


@dataclass
class Plan:
    """What the server does; each request takes the next of `cuts` (None: serve to the end)."""

    body: bytes = BODY
    cuts: list[int | None] = field(default_factory=list)
    reset: bool = True  # end a cut answer by a reset, not by an orderly close
    ranges: bool = True
    etag: str | None = '"one"'
    statuses: list[int] = field(default_factory=list)
    stated_length: int | None = None
    linked_etag: str | None = None
    redirect: bool = False
    shift: int = 0  # answer a Range from this many bytes further on
    gate: threading.Event | None = None  # a whole answer stops halfway until it is set
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0


class Server(http.server.ThreadingHTTPServer):
    plan: Plan

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        self.close_request(request)  # no orderly shutdown first, so that SO_LINGER 0 sends a reset

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # connections break on purpose here


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        plan = self.server.plan
        if plan.redirect and not self.path.startswith("/storage"):
            self.send_response(302)
            self.send_header("Location", "/storage" + self.path)
            if plan.linked_etag:
                self.send_header("X-Linked-Etag", f'"{plan.linked_etag}"')
            self.end_headers()
            return
        wanted = self.headers.get("Range")
        plan.requests.append((self.path, wanted))
        if plan.statuses and (status := plan.statuses.pop(0)) != 200:
            self.send_error(status)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and plan.ranges else 0
        if self.headers.get("If-Range", plan.etag) != plan.etag:
            start = 0
        if start and start >= len(plan.body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(plan.body)}")
            self.end_headers()
            return
        start += plan.shift if start else 0
        rest = plan.body[start:]
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(plan.body) - 1}/{len(plan.body)}")
        stated = len(rest) if plan.stated_length is None else plan.stated_length
        if stated >= 0:
            self.send_header("Content-Length", str(stated))
        if plan.etag:
            self.send_header("ETag", plan.etag)
        self.end_headers()
        cut = plan.cuts.pop(0) if plan.cuts else None
        plan.sent += len(rest[:cut])
        if plan.gate is not None:
            half = rest[: len(rest) // 2]
            self.wfile.write(half)
            plan.gate.wait(30)
            rest = rest[len(half) :]
        self.wfile.write(rest[:cut])
        if cut is not None and plan.reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Plan], str]]:
    """serve(plan) starts (or re-plans) the server and returns its base URL."""
    monkeypatch.setenv("no_proxy", "*")
    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def plan_it(plan: Plan) -> str:
        server.plan = plan
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield plan_it
    server.shutdown()
    thread.join()
    server.server_close()


def get(base: str, path: Path, sha256: str | None = None, tries: int = 5) -> None:
    download(f"{base}/file.parquet", path, sha256, tries=tries, pause_seconds=0.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.parquet"


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("reset", [True, False], ids=["reset", "closed"])
def test_broken_connections_cost_no_byte_twice(serve, path: Path, seed: int, reset: bool) -> None:
    rng = random.Random(seed)
    plan = Plan(cuts=[rng.choice((1, 5, 40_000, rng.randrange(1, 90_000))) for _ in range(8)], reset=reset)
    get(serve(plan), path)
    assert path.read_bytes() == BODY
    assert len(plan.requests) == 1 + sum(range_ is not None for _, range_ in plan.requests)
    if not reset:  # a reset may lose bytes on their way
        assert plan.sent == len(BODY)
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_a_later_call_goes_on_where_an_earlier_one_gave_up(serve, path: Path) -> None:
    with pytest.raises(OSError, match=r"Run it again to go on from 100,000 bytes"):
        get(serve(Plan(cuts=[100_000, 0, 0], reset=False)), path, tries=2)
    assert not path.exists()
    plan = Plan()
    get(serve(plan), path)
    assert path.read_bytes() == BODY and plan.requests == [("/file.parquet", "bytes=100000-")]


def test_a_server_without_ranges_is_read_from_the_start(serve, path: Path) -> None:
    get(serve(Plan(cuts=[1000, 200_000, 5], ranges=False, reset=False)), path)
    assert path.read_bytes() == BODY


def test_a_file_changed_in_between_is_never_mixed(serve, path: Path) -> None:
    changed = b"PAR1" + random.Random(1).randbytes(len(BODY) - 8) + b"PAR1"
    for body, before, now in ((changed, '"one"', '"two"'), (changed + b"PAR1", None, None)):
        with pytest.raises(OSError):
            get(serve(Plan(cuts=[100_000, 0], reset=False, etag=before)), path, tries=2)
        get(serve(Plan(body=body, etag=now)), path)
        assert path.read_bytes() == body
        path.unlink()


@pytest.mark.parametrize("start", [b"", b"PAR1 of unknown origin", BODY[:5000], BODY + b"more"])
def test_a_part_of_unknown_origin_is_not_continued(serve, path: Path, start: bytes) -> None:
    path.with_name(path.name + ".part").write_bytes(start)
    get(serve(Plan()), path)
    assert path.read_bytes() == BODY


LIES = {
    "longer than it is": (Plan(stated_length=len(BODY) + 50), None, "ended after 300,008 of 300,058"),
    "shorter than it is": (Plan(stated_length=len(BODY) - 50), None, "not a whole Parquet"),
    "shorter, with a hash": (Plan(body=BODY[:-50] + b"PAR1"), SHA256, "SHA-256"),
    "no length": (Plan(stated_length=-1), None, "states no length"),
    "one byte flipped": (Plan(body=BODY[:999] + bytes([BODY[999] ^ 1]) + BODY[1000:]), SHA256, "SHA-256"),
    "a log-in page": (Plan(body=b"<html>please log in</html>"), None, "not a whole Parquet"),
    "an empty file": (Plan(body=b""), None, "not a whole Parquet"),
    "another hash announced": (Plan(redirect=True, linked_etag="0" * 64), None, "SHA-256"),
    "another part": (Plan(cuts=[9, None] * 9, reset=False, shift=1), None, "after 9 of"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_lying_server_leaves_nothing_under_the_final_name(serve, path: Path, case: str) -> None:
    plan, sha256, message = LIES[case]
    with pytest.raises(OSError, match=message):
        get(serve(plan), path, sha256)
    assert not path.exists()
    get(serve(Plan()), path, SHA256)  # and what it left behind does no harm
    assert path.read_bytes() == BODY


def test_the_hash_on_the_redirect_is_checked(serve, path: Path) -> None:
    get(serve(Plan(redirect=True, linked_etag=SHA256, cuts=[70_000])), path)
    assert path.read_bytes() == BODY


def test_a_damaged_part_is_caught_by_the_hash_and_fetched_anew(serve, path: Path) -> None:
    with pytest.raises(OSError):
        get(serve(Plan(cuts=[100_000, 0], reset=False)), path, tries=2)
    part = path.with_name(path.name + ".part")
    part.write_bytes(b"PAR1" + bytes(99_996))
    get(serve(Plan()), path, SHA256)
    assert path.read_bytes() == BODY


def test_busy_servers_are_tried_again_and_refusals_are_not(serve, path: Path) -> None:
    get(serve(Plan(statuses=[503, 429, 500])), path)
    assert path.read_bytes() == BODY
    plan = Plan(statuses=[404] * 9)
    with pytest.raises(OSError, match=r"404.*check the address"):
        get(serve(plan), path.with_name("other.parquet"))
    assert len(plan.requests) == 1
    plan = Plan(statuses=[503] * 9)
    with pytest.raises(OSError, match="tried 5 times"):
        get(serve(plan), path.with_name("other.parquet"))
    assert len(plan.requests) == 5


def test_no_server_at_all_is_a_clear_error(path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(OSError, match="no connection"):
            get(address, path)


def test_a_full_disk_is_reported_at_once(serve, path: Path) -> None:
    plan = Plan()
    base = serve(plan)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            get(base, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not path.exists() and len(plan.requests) == 1


def test_progress_is_told_byte_by_byte_of_the_whole(serve, path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    base = serve(Plan(cuts=[100_000], reset=False))
    download(f"{base}/x", path, None, lambda *step: seen.append(step), pause_seconds=0.0)
    sizes = [size for _, size, _ in seen]
    assert sizes == sorted(set(sizes)) and sizes[-1] == len(BODY)
    assert {(name, total) for name, _, total in seen} == {("file.parquet", len(BODY))}


SHARDS = DataSet("test", "http://nowhere.invalid", ("t0.parquet", "t1.parquet", "t2.parquet"), ("v.parquet",))


def names(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.parquet"))


def test_validation_files_do_not_depend_on_the_number_of_shards(serve, tmp_path: Path) -> None:
    plan = Plan()
    base = serve(plan)
    of_server = replace(SHARDS, base=base)
    fetched = fetch(of_server, tmp_path, shards=1, pause_seconds=0.0)
    assert fetched.train == (tmp_path / "train/t0.parquet",) and fetched.val == (tmp_path / "val/v.parquet",)
    assert names(tmp_path) == ["train/t0.parquet", "val/v.parquet"]
    fetch(replace(SHARDS, base=base + "/"), tmp_path, pause_seconds=0.0)
    assert names(tmp_path) == [*(f"train/t{i}.parquet" for i in range(3)), "val/v.parquet"]
    assert [request for request, _ in plan.requests] == [
        "/v.parquet",
        "/t0.parquet",
        "/t1.parquet",
        "/t2.parquet",
    ]
    again = fetch(replace(SHARDS, base="http://127.0.0.1:9"), tmp_path, shards=1, pause_seconds=0.0)
    assert again == fetched  # nothing is asked for again, and the other files are not of this call
    (tmp_path / "train" / "t1.parquet").write_bytes(BODY[:-1])
    fetch(of_server, tmp_path, pause_seconds=0.0)
    assert (tmp_path / "train" / "t1.parquet").read_bytes() == BODY and len(plan.requests) == 5


FETCH = """
import sys
from pathlib import Path
from quern.text.hub import DataSet, fetch
dataset = DataSet("", sys.argv[2], ("t0.parquet", "t1.parquet"), ("v.parquet",))
fetch(dataset, Path(sys.argv[1]), lambda *progress: print("bytes", flush=True),
      pause_seconds=0.0, log=lambda line: print(line, flush=True))
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_second_process_waits_for_the_first_and_finds_the_files(serve, tmp_path: Path, killed: bool) -> None:
    plan = Plan(gate=threading.Event())
    command = [sys.executable, "-c", FETCH, str(tmp_path), serve(plan)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout and plan.gate and first.stdout.readline() == "bytes\n"  # it holds the lock, and is stuck
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
            assert second.stdout
            said = second.stdout.readline()
            assert said.startswith(f"waiting for process {first.pid} on ")
            assert said.endswith(f", which writes to {tmp_path}, without a time limit\n")
            if killed:
                first.kill()
            plan.gate.set()
            rest = second.stdout.read()
            assert "waiting" not in rest and ("bytes" in rest) == killed
    assert (first.returncode, second.returncode) == (-signal.SIGKILL if killed else 0, 0)
    assert names(tmp_path) == ["train/t0.parquet", "train/t1.parquet", "val/v.parquet"]
    if not killed:
        assert [path for path, _ in plan.requests] == ["/v.parquet", "/t0.parquet", "/t1.parquet"]


def test_token_shards_are_checked_by_their_header(serve, tmp_path: Path) -> None:
    header = struct.pack("<3i", 20240520, 1, 500) + bytes(1012)
    good = header + bytes(1000)
    for body in (good[:-2], b"\0" + good[1:], good + b"xx"):
        with pytest.raises(OSError, match="token shard"):
            download(serve(Plan(body=body)), tmp_path / "x.bin", tries=1)
    download(serve(Plan(body=good)), tmp_path / "x.bin")
    assert (tmp_path / "x.bin").read_bytes() == good


def test_a_mirror_of_the_hub_and_a_vocabulary_of_another_server(serve, tmp_path: Path) -> None:
    plan = Plan()
    base = serve(plan)
    other = DataSet("", f"{data_sets.HUB}/a/b/resolve/main", ("t.parquet",), (), tokenizer=f"{base}/v/r50k.tiktoken")
    fetched = fetch(other, tmp_path, endpoint=base + "/", pause_seconds=0.0)
    assert [path for path, _ in plan.requests] == ["/v/r50k.tiktoken", "/datasets/a/b/resolve/main/t.parquet"]
    assert fetched.tokenizer == tmp_path / "r50k.tiktoken" and fetched.val == ()


def test_the_catalogue_is_consistent() -> None:
    for name, dataset in data_sets.DATASETS.items():
        assert dataset.base.startswith("https://") and not dataset.base.endswith("/"), name
        assert dataset.val and not set(dataset.val) & set(dataset.train), name
        assert len(set(dataset.train)) == len(dataset.train), name
        tokenizer = dataset.tokenizer.rpartition("/")[2]
        assert set(dataset.sha256) <= {*dataset.train, *dataset.val, tokenizer}, name
        assert (dataset.kind in ("documents", "tokens")) == (dataset.file_tokens > 0), name
        assert (dataset.kind == "tokens") == (tokenizer in dataset.sha256), name
