"""CORE's bundle by name, from a server on loopback: resumed, checked, unpacked whole or not at all."""

import hashlib
import http.server
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quern.eval.core.bundle import ARCHIVE, BUNDLE, core_bundle
from quern.eval.core.tasks import find_tasks, read_rows
from quern.text.data_sets import DataSet

ROWS = "".join(json.dumps({"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2}) + "\n" for n in range(9))
CONFIG = "icl_tasks:\n- label: copa\n  dataset_uri: commonsense/copa.jsonl\n"


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], tuple[DataSet, list[str | None]]]]:
    """serve(body) → the bundle at a loopback server, and the Range of each request. The first answer breaks off."""
    monkeypatch.setenv("no_proxy", "*")
    body, asked = b"", list[str | None]()

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            asked.append(wanted)
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.send_header("ETag", '"one"')
            self.end_headers()
            self.wfile.write(body[start:] if len(asked) > 1 else body[: len(body) // 2])

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()

    def offer(content: bytes) -> tuple[DataSet, list[str | None]]:
        nonlocal body
        body = content
        digest = {ARCHIVE: hashlib.sha256(content).hexdigest()}
        return replace(BUNDLE, base=f"http://127.0.0.1:{server.server_address[1]}", sha256=digest), asked

    yield offer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("folder", ["eval_bundle/eval_data/commonsense/", "commonsense/"])
def test_the_bundle_is_fetched_once_and_its_tasks_are_found(serve, tmp_path: Path, folder: str) -> None:
    root = "eval_bundle/" if folder.startswith("eval") else ""
    files = {
        f"{folder}copa.jsonl": ROWS,
        f"{root}core.yaml": CONFIG,
        f"{root}other/copa.jsonl": "{}",
        f"{root}a.txt": "a",
    }
    bundle, asked = serve(zipped(files))
    found = core_bundle(tmp_path, print, bundle)
    assert asked[0] is None and (asked[1] or "").startswith("bytes=")
    assert [path.name for path in found.rglob("*") if path.is_file()] == ["copa.jsonl"]
    [(task, path)] = find_tasks(found)
    assert task.name == "copa" and len(read_rows(path, task)) == 9
    assert core_bundle(tmp_path, print, bundle) == found and len(asked) == 2


def test_without_a_configuration_files_are_found_by_name(serve, tmp_path: Path) -> None:
    bundle, _ = serve(zipped({"x/copa.jsonl": ROWS, "x/notes.jsonl": "{}"}))
    [(task, _)] = find_tasks(core_bundle(tmp_path, print, bundle))
    assert task.name == "copa"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"../copa.jsonl": ROWS}, "has the entry '../copa.jsonl', which leaves its folder"),
        ({"copa.jsonl": ROWS, "/tmp/copa.jsonl": ROWS}, "which leaves its folder"),
        ({"readme.txt": "nothing"}, "has no file of CORE's tasks"),
        ({}, "no file of CORE's tasks"),
    ],
)
def test_a_bad_bundle_leaves_nothing_unpacked(serve, tmp_path: Path, files: dict[str, str], message: str) -> None:
    bundle, _ = serve(zipped(files))
    with pytest.raises(ValueError, match=message):
        core_bundle(tmp_path, print, bundle)
    assert sorted(path.name for path in (tmp_path / "downloads/core").iterdir()) == [".lock", "val"]
    assert not list(tmp_path.rglob("copa.jsonl"))


def test_a_damaged_archive_is_named(serve, tmp_path: Path) -> None:
    bundle, _ = serve(b"<html>log in first</html>" * 9)
    with pytest.raises(ValueError, match="eval_bundle.zip is damaged .*: remove it and run this again"):
        core_bundle(tmp_path, print, bundle)
