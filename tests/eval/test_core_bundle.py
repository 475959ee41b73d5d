"""CORE's bundle by name, from a server on loopback: checked, unpacked whole or not at all."""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from quern.eval.core import ARCHIVE, core_bundle, find_tasks, read_rows
from tests.support.hub_server import Hub, hub_server

ROWS = "".join(json.dumps({"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2}) + "\n" for n in range(9))
CONFIG = "icl_tasks:\n- label: copa\n  dataset_uri: commonsense/copa.jsonl\n"


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with hub_server() as hub:
        yield hub


def offer(hub: Hub, content: bytes) -> tuple[str, str]:
    """The bundle at the server."""
    hub.others = {ARCHIVE: content}
    return f"{hub.url}/{ARCHIVE}", hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("folder", ["eval_bundle/eval_data/commonsense/", "commonsense/"])
def test_the_bundle_is_fetched_once_and_its_tasks_are_found(hub: Hub, tmp_path: Path, folder: str) -> None:
    root = "eval_bundle/" if folder.startswith("eval") else ""
    files = {
        f"{folder}copa.jsonl": ROWS,
        f"{root}core.yaml": CONFIG,
        f"{root}other/copa.jsonl": "{}",
        f"{root}a.txt": "a",
    }
    bundle = offer(hub, zipped(files))
    hub.cuts = [100]
    found = core_bundle(tmp_path, print, bundle)
    assert len(hub.asked) == 2, "the first answer broke off"
    assert [path.name for path in found.rglob("*") if path.is_file()] == ["copa.jsonl"]
    [(task, path)] = find_tasks(found)
    assert task.name == "copa" and len(read_rows(path, task)) == 9
    assert core_bundle(tmp_path, print, bundle) == found and len(hub.asked) == 2


def test_without_a_configuration_files_are_found_by_name(hub: Hub, tmp_path: Path) -> None:
    bundle = offer(hub, zipped({"x/copa.jsonl": ROWS, "x/notes.jsonl": "{}"}))
    [(task, _)] = find_tasks(core_bundle(tmp_path, print, bundle))
    assert task.name == "copa"


def test_an_interrupted_unpacking_leaves_nothing_and_is_done_again(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = offer(hub, zipped({"x/copa.jsonl": ROWS}))
    with monkeypatch.context() as patched:
        patched.setattr("quern.eval.core.sync_path", lambda path: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full; or name a folder with CORE's files with --bundle"):
            core_bundle(tmp_path, print, bundle)
    assert sorted(path.name for path in (tmp_path / "downloads/core").iterdir()) == [".lock", ARCHIVE]
    assert find_tasks(core_bundle(tmp_path, print, bundle))
