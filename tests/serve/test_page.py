"""Requests of the chat page to its server: its files, how to begin."""

import hashlib
import json
from pathlib import Path

from quern.serve.access import Keys
from quern.serve.gate import Gate
from quern.serve.routes import MEDIA_TYPES, WEB, Welcome, read_suggestions
from quern.serve.server import LOOPBACK, create_app
from tests.support.http_server import running, web
from tests.support.toy_engine import toy_engine

CHAT = {"temperature": 0.7, "top_k": 50}


def chat(stage: str, *turns: str) -> str:
    return json.dumps({"stage": stage, "kind": "chat", "messages": [{"role": "user", "content": one} for one in turns]})


def test_suggestions_are_the_first_turns_of_the_stages_samples(tmp_path: Path) -> None:
    assert read_suggestions(tmp_path, "sft") == ()
    lines = [
        json.dumps({"stage": "pretrain", "kind": "completion", "prompt": "Once upon a time", "text": " there"}),
        *(chat("sft", f"question {n}", "a second turn") for n in range(12)),
        chat("sft", "question 0"),
        chat("sft", "of two\nlines"),
        chat("sft", "long " * 100),
        chat("rl", "of another stage"),
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_suggestions(tmp_path, "sft") == tuple(f"question {n}" for n in range(0, 12, 2))
    assert read_suggestions(tmp_path, "rl") == ("of another stage",)
    assert read_suggestions(tmp_path, "pretrain") == ("Once upon a time",)


def test_every_file_of_the_page_is_served_and_nothing_else() -> None:
    engine = toy_engine()
    keys = Keys({hashlib.sha256(b"secret").digest(): "alice"})
    welcome = Welcome({"toy": ["<b>hello</b>"]}, completes=["toy"])
    with running(create_app({"toy": engine}, Gate(LOOPBACK, keys), welcome=welcome)) as url:
        files = [file for file in WEB.rglob("*") if file.suffix in MEDIA_TYPES]
        assert len(files) > 15
        for file in files:
            path = {"index.html": "", "docs.html": "docs"}.get(file.name, file.relative_to(WEB).as_posix())
            answer = web.get(f"{url}/{path}")
            assert answer.content == file.read_bytes(), path
            assert answer.headers["content-type"].startswith(MEDIA_TYPES[file.suffix].split(";")[0])
            assert answer.headers["content-security-policy"].startswith("default-src 'self';")
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-request-id"].startswith("req_")
            # The page's own files name no other host and set no markup.
            if file.parent == WEB and file.suffix != ".svg":
                assert "https://" not in answer.text and "innerHTML" not in answer.text, path
        for path in ("index.html", "vendor/README.md", "vendor/LICENSE.temml", "../routes.py", "web/app.js"):
            assert web.get(f"{url}/{path}").status_code == 401, path
            assert web.get(f"{url}/{path}", headers={"authorization": "Bearer secret"}).status_code == 404, path
        assert web.get(f"{url}/welcome").status_code == 401
        answer = web.get(f"{url}/welcome", headers={"authorization": "Bearer secret"})
        assert answer.json() == {"suggestions": {"toy": ["<b>hello</b>"]}, "completes": ["toy"], "sampling": CHAT}


def test_the_vendored_libraries_are_those_of_their_table() -> None:
    vendor = WEB / "vendor"
    rows = [line.split("|") for line in (vendor / "README.md").read_text(encoding="utf-8").splitlines()]
    told = {row[1].strip(): row[5].strip(" `") for row in rows if len(row) > 5 and "." in row[1]}
    files = [file for file in vendor.iterdir() if file.suffix in (".js", ".mjs")]
    assert told == {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert len(list(vendor.glob("LICENSE.*"))) == len(files)
