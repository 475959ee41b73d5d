"""Law: whatever happens to text, conversations and tokenizer between a stop and a resume, the run goes on as the one
that nobody touched, bit for bit, or it refuses and leaves every file as it was. And of two processes that train in one
run at the same time, one trains and the other is told who does.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import pytest

from quern.text.tinyworld import corpus
from tests.laws.table import Law
from tests.support.folder import contents
from tests.support.line_server import ENVIRONMENT
from tests.support.run_bench import PRETRAIN, SFT, Bench, differences

# Changes between stops ----------------------------------------------------------------------------------------


def append(path: Path, rng: random.Random) -> None:
    key = "messages" if path.name == "talks.jsonl" else "text"
    values = corpus.conversations(9, 1, "train") if key == "messages" else corpus.documents(9, 1e-4, "train")
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({key: value}) + "\n" for value in values)


def remove_a_line(path: Path, rng: random.Random) -> None:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    del lines[rng.randrange(len(lines))]
    path.write_text("".join(lines), encoding="utf-8")


def change_a_letter(path: Path, rng: random.Random) -> None:
    """Size and time of the file stay the same."""
    before, text = path.stat(), path.read_text(encoding="utf-8")
    at = rng.choice([i for i in range(len(text) - 1) if text[i] == "e" and text[i + 1] == " "])
    path.write_text(text[:at] + "a" + text[at + 1 :], encoding="utf-8")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def touch(path: Path, rng: random.Random) -> None:
    path.touch()


def write_again(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)


CHANGES = (append, remove_a_line, change_a_letter, touch, write_again)


def remove(path: Path, rng: random.Random) -> None:
    shutil.rmtree(path)


def replace(path: Path, rng: random.Random) -> None:
    """The tokenizer of a run by that of the run `other`."""
    shutil.copy(path.parents[1] / "other" / path.name, path)


def trial(bench: Bench, number: int, references: dict[str, tuple[Path, dict[str, int]]]) -> tuple[str, list[str]]:
    """One stop, one change and one resume → what was done, and what is wrong with the outcome."""
    rng = random.Random(number)
    command = PRETRAIN if number % 2 else SFT
    verb, name = command[0], bench.fresh(command, "fp32")
    run, (reference, events) = bench.stage(name, command).parent, references[verb]
    part = rng.choice(["train", "save"])
    answer = bench.run(command, name, "fp32", kill=[part, int(events[part] * rng.uniform(0.3, 1.1))])
    what = rng.choice(["text", "text", "shards", "tokenizer", "conversations", "conversations"])
    if verb == "pretrain" and what == "conversations":
        what = "text"
    places = {"text": bench.folder / "text.jsonl", "conversations": bench.folder / "talks.jsonl"}
    path = {**places, "tokenizer": run / "tokenizer.json", "shards": bench.folder / "out" / "data"}[what]
    kept = path.with_name(path.name + ".kept")
    (shutil.copytree if path.is_dir() else shutil.copy2)(path, kept)
    change = {"shards": remove, "tokenizer": replace}.get(what) or rng.choice(CHANGES)
    change(path, rng)
    named = what == "text" and rng.random() < 0.5 and verb == "pretrain"
    resume = [verb, "--resume", *(["--data", "text.jsonl"] if named else [])]
    differs = change not in (touch, write_again, remove)
    refused = differs and (named or what in ("conversations", "tokenizer"))
    before, wrong, known = contents(run), [], len(bench.log())
    bench.run(resume, name, "fp32", refused=refused)
    if refused:
        said = bench.log()[known:]
        expected = {"text": "has changed since", "conversations": "have changed since"}
        wrong += [] if expected.get(what, "the tokenizer has changed since") in said else [f"it says {said}"]
        wrong += [f"changed by a refusal: {file}" for file, _ in before.items() ^ contents(run).items()]
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    kept.rename(path)
    if refused:
        bench.run([verb, "--resume"], name, "fp32")
    wrong += differences(bench.stage(name, command), reference)
    end, outcome = "stopped" if answer["place"] else "finished", "refused" if refused else "went on"
    return f"{number}: {verb}, {what} {change.__name__}, {end}, {outcome}", wrong


@pytest.mark.parametrize("trials", [(0, 2, 5), pytest.param(range(50), marks=pytest.mark.campaign)])
def test_changes_between_stops(trials: Sequence[int], bench: Bench, law: Law) -> None:
    """Three that differ in what changes; fifty are a campaign."""
    references = {command[0]: bench.reference(command, "fp32") for command in (PRETRAIN, SFT)}
    other = [*PRETRAIN, "--text.vocab-size", "321", "--train.steps", "1"]
    bench.run(other, "other", "fp32")
    found = [trial(bench, number, references) for number in trials]
    done, wrong = [what for what, _ in found], [f"{what}: {line}" for what, lines in found for line in lines]
    law("a resume after a change of text, conversations or tokenizer: wrong outcomes", wrong)
    least = 15 if len(trials) == 50 else 1
    assert sum("refused" in what for what in done) >= least and sum("went on" in what for what in done) >= least


# Two processes on one run -------------------------------------------------------------------------------------


def test_two_processes_on_one_run(bench: Bench, law: Law) -> None:
    """The first one stands still while the second one begins."""
    (reference, _), name = bench.reference(PRETRAIN, "fp32"), bench.fresh(PRETRAIN, "fp32")
    lock, known = bench.stage(name, PRETRAIN).parent / ".lock", len(bench.log())
    command = [sys.executable, "-m", "quern.cli.main", *Bench.arguments(PRETRAIN, name, "fp32")]
    with Popen(command, stdout=PIPE, stderr=STDOUT, text=True, cwd=bench.folder, env=ENVIRONMENT) as first:
        while not (lock.exists() and lock.stat().st_size):
            assert first.poll() is None, first.communicate()
            time.sleep(0.005)
        first.send_signal(signal.SIGSTOP)
        try:
            bench.run(PRETRAIN, name, "fp32", refused=True)
        finally:
            first.send_signal(signal.SIGCONT)
        said = first.communicate(timeout=200)[0]
    assert f"is in use by process {first.pid} on" in bench.log()[known:] and first.returncode == 0, said
    differing = differences(bench.stage(name, PRETRAIN), reference)
    law("two processes on one run: wrong outcomes", differing)
