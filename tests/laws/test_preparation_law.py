"""Laws: token shards have the same bytes however many processes encode the text, and after kills at any moment.

The plain twin encodes document by document and writes them one by one. A killed preparation is continued, killed again
and continued to its end; finished shards stay the files that they are, and their documents are not encoded again.
"""

import json
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quern.data.token_file import ShardWriter
from quern.stages.encode import write_shards
from quern.text.tokenizer import Tokenizer
from tests.laws.table import Law
from tests.support import preparing
from tests.support.folder import contents
from tests.support.line_server import ENVIRONMENT, ROOT
from tests.support.waiting import until


def documents(count: int) -> list[str]:
    """Short and long ones, with characters of one to four bytes, and one that is longer than many units."""
    rng = random.Random(5)
    words = "mill stone grain flour river köln 世界 😀 baker 17 482 wheel\n\n don't   spaces \ud800".split(" ")
    texts = [" ".join(rng.choices(words, k=int(rng.paretovariate(1.2) * 3))) for _ in range(count)]
    return [*(text[:2000] for text in texts if text), "grain " * 2000, "x"]


TEXTS = documents(400)
EQUAL = "equal, byte for byte"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, 330)


def plain(tokenizer: Tokenizer, folder: Path, shard_tokens: int) -> dict[str, bytes]:
    """The files of the plain twin, by name."""
    vocab_size, bos = tokenizer.vocab_size, tokenizer.bos
    with ShardWriter(folder, "train", shard_tokens, vocab_size=vocab_size, bos=bos, fingerprint="mark") as writer:
        for text in TEXTS:
            writer.add([tokenizer.bos, *tokenizer.encode(text)])
    return contents(folder)


def differing(found: dict[str, bytes], expected: dict[str, bytes]) -> int:
    """How many files differ, or are missing or too many."""
    return sum(found.get(name) != expected.get(name) for name in found.keys() | expected.keys())


@pytest.mark.parametrize("shard_tokens", [211, 997, 10**8])
def test_shards_do_not_depend_on_processes(shard_tokens: int, tokenizer: Tokenizer, tmp_path: Path, law: Law) -> None:
    expected, wrong = plain(tokenizer, tmp_path / "plain", shard_tokens), 0
    assert len(expected) >= (3 if shard_tokens == 10**8 else 15)
    for workers, unit_characters in ((1, 700), (2, 10_000), (3, 300)):
        folder = tmp_path / f"{workers}-{unit_characters}"
        how: dict[str, Any] = {"workers": workers, "shard_tokens": shard_tokens, "unit_characters": unit_characters}
        write_shards(iter(TEXTS), tokenizer, folder, "train", "mark", lambda line: None, **how)
        wrong += differing(contents(folder), expected)
    law("shards of 1, 2 and 3 processes = those of a plain loop: files that differ", wrong, unit=EQUAL)


class Preparation:
    """Runs tests/support/preparing.py on the documents, in folders below one."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, (self.texts, self.tokenizer) = folder, (folder / "texts.json", folder / "tokenizer.json")
        self.kills = 0
        self.texts.write_text(json.dumps(TEXTS), encoding="utf-8")
        tokenizer.save(self.tokenizer)
        self.expected = plain(tokenizer, folder / "plain", preparing.SHARD_TOKENS)
        self.events = {workers: self.run(f"whole-{workers}", workers)["events"] for workers in (1, 2)}

    def run(self, name: str, workers: int, kill: int | None = None) -> dict[str, int]:
        """Prepares to the end and returns what the process printed; with `kill`, until that event if there is one."""
        arguments = [self.texts, self.tokenizer, self.folder / name, workers, *([] if kill is None else [kill])]
        command = [sys.executable, str(ROOT / "tests/support/preparing.py"), *map(str, arguments)]
        env = ENVIRONMENT | {"TMPDIR": str(self.folder)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode in ([0] if kill is None else [0, -signal.SIGKILL]), done.stderr
        self.kills += done.returncode == -signal.SIGKILL
        return {} if kill is not None else json.loads(done.stdout.splitlines()[-1])

    def finished(self, name: str) -> dict[str, tuple[int, int]]:
        """The shards that the manifest lists as finished: documents and inode of each."""
        path = self.folder / name / "manifest.json"
        manifest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        entry = manifest.get("unfinished", {}).get("train") or manifest.get("splits", {}).get("train", {"files": []})
        return {
            file["name"]: (file["documents"], (self.folder / name / file["name"]).stat().st_ino)
            for file in entry["files"]
        }

    def trial(self, number: int) -> list[str]:
        """Kills a preparation twice and lets it end → what is wrong with the outcome."""
        rng, name = random.Random(number), f"trial-{number}"
        workers = 1 + number % 2
        self.run(name, workers, kill=rng.randrange(1, self.events[workers]))
        first = self.finished(name)
        share = 1 - sum(documents for documents, _ in first.values()) / len(TEXTS)
        again = max(2, int(rng.random() * share * self.events[workers] * 0.8))
        self.run(name, workers, kill=again)
        second = self.finished(name)
        wrong = [f"{file} was written again" for file in first if second.get(file) != first[file]]
        ended = self.run(name, 1)
        third = self.finished(name)
        wrong += [f"{file} was written again" for file in second if third.get(file) != second[file]]
        left = len(TEXTS) - sum(documents for documents, _ in second.values())
        wrong += [f"{ended['encoded']} documents were encoded, not {left}"] * (ended["encoded"] != left)
        different = differing(contents(self.folder / name), self.expected)
        return wrong + [f"{different} files differ"] * (different > 0)

    def has_workers(self) -> bool:
        mark = f"TMPDIR={self.folder}\0".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # the process has ended, or is another user's
                if mark in path.read_bytes():
                    return True
        return False


@pytest.fixture(scope="module")
def preparation(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Preparation:
    return Preparation(tmp_path_factory.mktemp("preparation"), tokenizer)


@pytest.mark.parametrize("trials", [range(2), pytest.param(range(2, 52), marks=pytest.mark.campaign)])
@pytest.mark.skipif(sys.platform != "linux", reason="looks for workers in /proc")
def test_a_killed_preparation_is_continued(trials: range, preparation: Preparation, law: Law) -> None:
    wrong = [(number, found) for number in trials if (found := preparation.trial(number))]
    until(lambda: not preparation.has_workers(), 10)  # they end soon after their parents were killed
    assert preparation.kills >= 1.8 * len(trials), "most trials are killed twice"
    bar = f"{EQUAL}; no finished shard made again"
    law("a preparation that was killed and continued = an uninterrupted one: trials that differ", wrong, unit=bar)
