"""Data sets of the Hugging Face Hub by name, from a small hub on loopback (tests/support/hub_server.py)."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.recipe import ConversationSource, Resolved, TextRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.runs.public_data import fetch_conversations, public_data, shards_used
from quern.text import downloads
from tests.support.hub_server import COMMIT, Hub, hub_server, parquet


def words(file: str) -> bytes:
    return parquet([{"body": f"{file} {i} the grain and the bread {i * i}"} for i in range(60)])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub_server() as hub:
        files = ("data/train-0.parquet", "data/train-1.parquet", "data/validation-0.parquet", "data/test-0.parquet")
        hub.sets = {"mill/words": {file: words(file) for file in files}}
        settings = {"no_proxy": "*", "HF_ENDPOINT": hub.url, "HF_TOKEN": "", "HF_TOKEN_PATH": str(tmp_path / "none")}
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        yield hub


def recipe_for(data: str, **changes: Any) -> Resolved:
    return Resolved.of(resolve(replace(RECIPE, data=data, **changes)))


def local(paths: tuple[Path, ...], out: Path) -> list[str]:
    return [path.relative_to(out / "downloads").as_posix().partition("/")[2] for path in paths]


def test_files_are_listed_and_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    recipe = recipe_for("hf:mill/words", shards=1)
    found = public_data(recipe, tmp_path)
    assert found is not None and (found.shards, found.available) == (1, 2)
    assert local(found.train, tmp_path) == ["train/data/train-0.parquet"]
    assert local(found.val, tmp_path) == ["val/data/validation-0.parquet"]
    assert [path.read_bytes() for path in found.train] == [hub.sets["mill/words"]["data/train-0.parquet"]]
    asked = len(hub.asked)
    assert public_data(recipe, tmp_path) == found and len(hub.asked) == asked
    hub.sets["mill/words"]["data/train-00.parquet"] = b"new"  # the repository has moved on; this run reads its commit
    more = public_data(replace(recipe, shards=9), tmp_path)
    assert more is not None and [path.name for path in more.train] == ["train-0.parquet", "train-1.parquet"]
    assert fetch_conversations(ConversationSource("hf:mill/words"), tmp_path) == {"train": more.train, "val": ()}
    assert hub.files_asked() == [f"mill/words/data/{name}.parquet" for name in ("validation-0", "train-0", "train-1")]
    assert any(path == f"/datasets/mill/words/resolve/{COMMIT}/data/train-1.parquet" for path, _, _ in hub.asked)


def test_a_token_is_sent_to_the_hub_and_not_to_the_host_of_its_files(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "hf_secret"
    with pytest.raises(OSError, match="cannot list hf:mill/words at .*gated.* the token in the variable HF_TOKEN"):
        public_data(recipe_for("hf:mill/words"), tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert public_data(recipe_for("hf:mill/words"), tmp_path) is not None
    sent = {path.split("/")[1]: authorization for path, authorization, _ in hub.asked}
    assert sent == {"api": "Bearer hf_secret", "datasets": "Bearer hf_secret", "cdn": None}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf:mill/none", "cannot list hf:mill/none at http://127.0.0.1.*404"),
        ("hf:mill/words@v9", "cannot list hf:mill/words@v9 .*Revision Not Found"),
    ],
)
def test_what_there_is_not(hub: Hub, tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(OSError, match=message):
        public_data(recipe_for(name), tmp_path)


def test_no_connection_and_a_damaged_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    public_data(recipe_for("hf:mill/words", shards=1), tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert public_data(recipe_for("hf:mill/words", shards=1), tmp_path) is not None, "nothing is asked for"
    (listing,) = tmp_path.rglob("listing.json")
    listing.write_text('{"files": {}}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"listing.json is damaged .Object missing required field `name`.: remove"):
        public_data(recipe_for("hf:mill/words"), tmp_path)


def test_revisions_configs_and_splits(hub: Hub, tmp_path: Path) -> None:
    hub.revisions = ("refs/convert/parquet",)
    hub.cards["mill/words"] = [{"config_name": "exam", "data_files": [{"split": "test", "path": "data/test-*"}]}]
    recipe = recipe_for("hf:mill/words:exam@refs/convert/parquet", text=TextRecipe(split="test"))
    assert shards_used(recipe, tmp_path) == 1 and hub.files_asked() == []
    found = public_data(recipe, tmp_path)
    assert found is not None and [path.name for path in found.train] == ["test-0.parquet"]
    talks = fetch_conversations(ConversationSource("hf:mill/words:exam", split="test"), tmp_path)
    assert [path.name for path in talks["train"]] == ["test-0.parquet"] and talks["val"] == ()


def test_the_command_reads_the_column_of_the_set_and_writes_nothing_into_home(hub: Hub, tmp_path: Path) -> None:
    """The library of the Hub reads HF_ENDPOINT by itself, when it is imported: hence a process."""
    (tmp_path / "home").mkdir()
    environment = {**os.environ, "HOME": str(tmp_path / "home")}
    for name in ("HF_TOKEN", *downloads.QUIET_HUB):  # other tests of this process have set the latter
        environment.pop(name, None)
    flags = "--data hf:mill/words --shards 1 --text.vocab-size 300 --text.val-megabytes 0.001 --text.column body"
    command = [sys.executable, "-m", "quern", "prepare", *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "hf:mill/words: 1 of 2 training files are used" in done.stdout, done.stderr
    (manifest,) = tmp_path.glob("out/data/hf-mill-words-*/manifest.json")
    assert json.loads(manifest.read_text(encoding="utf-8"))["splits"]["train"]["documents"] == 60
    assert {path for path, _, _ in hub.asked if path.startswith("/api")} == {"/api/datasets/mill/words"}
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
