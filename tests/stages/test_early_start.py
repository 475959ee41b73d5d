"""Training that begins before its text is prepared learns the same, bit for bit; and what ends one ends the other."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.stages import pretrain
from quern.stages.open_data import data_of_run
from quern.train.guard import EXIT_DONE, EXIT_STOPPED
from tests.support import early_run, ranks
from tests.support.early_run import STEPS, losses, train
from tests.support.hub_server import hub_server
from tests.support.run_bench import ENVIRONMENT, ROOT
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for the child in /proc")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with text and tokenizer, and the run `whole`, whose text was prepared before it began."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("early")
    early_run.write_inputs(folder)
    (folder / "go").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain.EarlyStart, "enough", lambda self, documents, tokens: False)
        assert train(folder, "whole") == EXIT_DONE
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture
def folder(inputs: Path, tmp_path: Path) -> Path:
    """A folder with the same text, of which nothing is prepared."""
    for name in ("text.jsonl", "tokenizer.json"):
        shutil.copy(inputs / name, tmp_path)
    return tmp_path


def child() -> list[int]:
    """Process ids of preparations that this worker of pytest started, by their environment."""
    name = "PYTEST_XDIST_WORKER"
    worker = f"{name}={os.environ[name]}\0".encode() if name in os.environ else b""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"quern.stages.early_start" in path.read_bytes() and worker in (path.parent / "environ").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # the process has ended
    return found


def in_part(folder: Path) -> bool:
    (manifest,) = (folder / "out" / "data").glob("*/manifest.json")
    return "train" in json.loads(manifest.read_text(encoding="utf-8"))["unfinished"]


def facts(folder: Path, run: str, name: str) -> dict[str, Any]:
    return json.loads((folder / "out" / "runs" / run / name).read_text(encoding="utf-8"))


def in_thread(folder: Path, run: str, lines: list[str]) -> tuple[threading.Thread, list[object]]:
    outcome: list[object] = []

    def body() -> None:
        try:
            outcome.append(train(folder, run, lines=lines))
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    return thread, outcome


def test_an_early_start_learns_the_same(inputs: Path, folder: Path) -> None:
    lines: list[str] = []
    thread, outcome = in_thread(folder, "early", lines)
    until(lambda: len(losses(folder, "early")) > 5)
    assert in_part(folder) and len(child()) == 1
    (folder / "go").touch()
    thread.join()
    assert outcome == [EXIT_DONE] and child() == []
    assert losses(folder, "early") == losses(inputs, "whole") and len(losses(folder, "early")) >= STEPS
    assert any("are enough to begin; another process prepares the rest" in line for line in lines)
    assert any("tokens to train on so far" in line for line in lines) and any("at most" in line for line in lines)
    assert any(line.startswith("tokens: train continues after") for line in lines)
    assert not in_part(folder)
    assert facts(folder, "early", "run.json")["data"] == facts(inputs, "whole", "run.json")["data"]
    for at, run in ((folder, "early"), (inputs, "whole")):
        assert facts(at, run, "pretrain/origin.json")["group_size"] == early_run.DIVISION.group_size


def test_training_begins_before_the_text_is_downloaded(
    inputs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (folder / "text.jsonl").read_bytes().splitlines(keepends=True)
    with hub_server() as hub:
        hub.sets = {"mill/words": {f"data/train-{n}.jsonl": b"".join(lines[n : n + 100]) for n in range(0, 600, 100)}}
        hub.held = "mill/words/data/train-400.jsonl"
        for name, value in {"no_proxy": "*", "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(folder / "none")}.items():
            monkeypatch.setenv(name, value)
        (folder / "go").touch()
        (folder / "data").write_text("hf:mill/words", encoding="utf-8")
        said: list[str] = []
        thread, outcome = in_thread(folder, "early", said)
        until(lambda: len(losses(folder, "early")) > 5)
        assert in_part(folder) and len(child()) == 1
        until(lambda: list(folder.rglob("train-400.jsonl.part")))
        assert len(list(folder.rglob("train-*.jsonl"))) == 4
        hub.released.set()
        thread.join()
    assert outcome == [EXIT_DONE] and child() == [] and not in_part(folder)
    assert losses(folder, "early") == losses(inputs, "whole")
    assert hub.files_asked().count("mill/words/data/train-0.jsonl") == 1


def test_a_run_that_needs_no_more_of_the_text_leaves_it_in_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_run, "STEPS", 8)
    lines: list[str] = []
    assert train(folder, "short", lines=lines) == EXIT_DONE
    assert in_part(folder) and child() == []
    assert "tokens: the rest of the text is not prepared; a longer run or `quern prepare` continues" in lines
    session = early_run.session_of(folder, "short", False, early_run.alone())
    data = data_of_run(early_run.asked(folder)[0], session.run_dir, lines.append)
    assert data.val.num_documents > 5 and not data.train.whole and data.train.num_tokens > 10_000


@pytest.mark.parametrize("broken", [False, True])
def test_a_preparation_that_fails_ends_the_run_which_can_be_resumed(inputs: Path, folder: Path, broken: bool) -> None:
    lines: list[str] = []
    thread, outcome = in_thread(folder, "failed", lines)
    until(lambda: len(losses(folder, "failed")) > 5)
    if broken:
        (folder / "go").write_text("broken", encoding="utf-8")
    else:
        os.kill(child()[0], signal.SIGKILL)
    thread.join()
    why = "ValueError: this text cannot be read" if broken else "it ended with code -9"
    (error,) = outcome
    assert str(error).startswith(f"the text is prepared in part only, since the preparation process failed: {why}")
    assert f"continue with `quern pretrain --resume --run failed --out {folder}/out`" in str(error)
    assert any(line.startswith("warning: the preparation process failed") for line in lines)
    assert in_part(folder) and child() == [] and len(losses(folder, "failed")) < STEPS
    (folder / "go").write_text("", encoding="utf-8")
    assert train(folder, "failed", resume=True) == EXIT_DONE
    assert losses(folder, "failed") == losses(inputs, "whole") and not in_part(folder)


def started(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "tests/support/early_run.py"), str(folder), "killed", *flags]
    return subprocess.Popen(command, env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)


def test_a_run_that_is_stopped_or_killed_takes_its_preparation_along(inputs: Path, folder: Path) -> None:
    process = started(folder)
    until(lambda: len(losses(folder, "killed")) > 8)  # it has saved step 7
    process.kill()
    process.communicate()
    until(lambda: child() == [])
    assert in_part(folder)

    process = started(folder, "resume")  # trains to the end of what is prepared, and waits
    events = folder / "out" / "runs" / "killed" / "pretrain" / "events.jsonl"
    until(lambda: '"resume"' in events.read_text(encoding="utf-8"))
    seen = -1
    while seen != (seen := len(losses(folder, "killed"))):
        time.sleep(2)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=30)
    stopped = re.search(r"stopped after step (\d+) as asked, and saved", said)
    assert process.returncode == EXIT_STOPPED and stopped is not None, said
    assert losses(folder, "killed")[-1]["step"] == int(stopped[1]) < STEPS
    assert child() == [] and in_part(folder)

    (folder / "go").touch()
    assert train(folder, "killed", resume=True) == EXIT_DONE
    assert losses(folder, "killed") == losses(inputs, "whole") and not in_part(folder)


def test_an_early_start_on_two_ranks(inputs: Path, folder: Path) -> None:
    def release() -> None:
        until(lambda: len(losses(folder, "early")) > 5)
        found.append(in_part(folder))
        (folder / "go").touch()

    found: list[bool] = []
    thread = threading.Thread(target=release)
    with ranks.running() as on_ranks:
        thread.start()
        assert on_ranks(2, "tests.support.early_run:train_on_ranks", folder=str(folder), run="early") == [0, 0]
        thread.join()
        assert found == [True] and not in_part(folder)
        assert on_ranks(2, "tests.support.early_run:train_on_ranks", folder=str(folder), run="again") == [0, 0]
    assert losses(folder, "early") == losses(folder, "again") and len(losses(folder, "early")) >= STEPS
