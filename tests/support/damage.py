"""Damages files in every way that a disk, another program or an attacker does, and runs the command that reads them.

    python tests/support/damage.py FOLDER SEED TRIALS [ONLY]      a JSON line on stdout for each trial

ONLY is a part of the paths of the files to damage; by default all are.

Every trial runs a command of `quern` in a forked child on its own copy of the files, with limits: SECONDS of time and
MEGABYTES of memory beyond those of the parent. An outcome is "read" (the command took the file as it is), "refused"
(one clear line, nothing published) or "failed": an exception, an unclear end, too much time or memory, a death.
"""

import contextlib
import csv
import gc
import gzip
import importlib
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import torch
from safetensors import safe_open

from quern.cli.main import main
from quern.lab.ladder import command as ladder
from quern.lab.ladder.study import FILES as STUDY
from quern.serve.access import KeysFile
from quern.stages import session
from quern.text.tinyworld import corpus
from quern.text.tokenizer import Tokenizer
from tests.support.line_server import forked
from tests.support.rows import write_rows
from tests.support.small_text import read_source, token_shard, write_text, write_tiktoken
from tests.support.train_here import train_here

SECONDS, MEGABYTES = 2.0, 200
EAGER = ["--no-compile", "--dtype", "fp32", "--threads", "1"]
TRAIN = """--data text.jsonl --depth 2 --text.vocab-size 320 --model.width 32 --model.head-dim 16 --model.kv-heads 1
 --model.context 48 --train.batch-tokens 192 --train.micro-batch-tokens 192 --train.steps 4 --optim.lr-scale 0.3
 --train.log-every 1 --train.save-every 2""".split()
ODD: Sequence[Any] = (
    None, True, -1, 0, 1.5, 10**7, 2**63, 10**30, 1e308, "", "x", "../../x", "/etc/passwd", "/dev/zero", "\ud800", [],
    {}, [None], {"x": {}}, [[1]], "(a*)*b", "[",
)  # fmt: skip
"""Values of a wrong type or size for a JSON leaf."""


Kind = tuple[str, Sequence[Sequence[str]]]
"""A kind of file: the path of an example, relative to the folder, and the commands that read it."""


def run(*arguments: str) -> int:
    """Runs a command; "keys" reads the file of a server's keys, as `quern serve` does before it loads the model."""
    if arguments[0] != "keys":
        return main([*arguments])
    try:
        KeysFile(Path(arguments[1]), print)
    except ValueError as error:
        print(f"quern serve: {error}", file=sys.stderr)
        return 1
    return 0


COMPLETE = ["complete", "-p", "a", "--max-tokens", "1", "--run", "r", *EAGER]
RESUME = ["pretrain", "--resume", "--run", "r", "--train.steps", "5", *EAGER]
REPORT = ["report", "--run", "r"]
IMPORT = ["import", "hf", "--run", "new"]
SFT = ["sft", "--run", "r", "--sft.steps", "1", "--sft.batch-tokens", "192", *EAGER, "--conversations"]
RL = "rl --run tuned --rl.steps 1 --rl.samples 2 --rl.groups 1 --rl.val-questions 1 --rl.max-tokens 2".split() + EAGER
COMPARE = "lab compare experiments/base.py experiments/idea.py --study s --most-pairs 3 --any-delta".split()
COMPARE += [*TRAIN[:-4], *EAGER]
FORMATS = ("jsonl", "json", "csv", "tsv", "parquet", "txt", "jsonl.gz", "jsonl.zst", "csv.gz")


def kinds(folder: Path) -> list[Kind]:
    """Every kind of file that a command reads, with an example that is whole."""
    run_folder, step = "out/runs/r", "out/runs/r/pretrain/checkpoints/step-00000004"
    data = next(folder.glob("out/data/text-*")).relative_to(folder)
    tensors = next((folder / step).glob("*.safetensors")).name
    found: list[Kind] = [
        (f"{run_folder}/run.json", [COMPLETE, REPORT, RESUME]),
        (f"{run_folder}/tokenizer.json", [COMPLETE, RESUME]),
        (f"{run_folder}/pretrain/recipe.json", [COMPLETE, REPORT, RESUME]),
        (f"{run_folder}/pretrain/origin.json", [COMPLETE, RESUME]),
        *((f"{run_folder}/pretrain/{name}.jsonl", [REPORT, RESUME]) for name in ("metrics", "events")),
        *((f"{run_folder}/{name}.jsonl", [REPORT]) for name in ("evaluate", "samples")),
        (f"{step}/manifest.json", [COMPLETE, RESUME]),
        (f"{step}/{tensors}", [COMPLETE, RESUME]),
        *((f"{data}/{name}", [RESUME]) for name in ("manifest.json", "train-00000.bin", "train-00000.starts.npy")),
        ("out/data/digests.json", [["prepare", *TRAIN[:2], "--text.vocab-size", "320", "--workers", "1"]]),
        *((f"hf/{name}", [IMPORT]) for name in ("config.json", "tokenizer.json", "model.safetensors")),
        ("split/model.safetensors.index.json", [["import", "split", "--run", "new"]]),
        ("tokens.bin", [["prepare", "--data", "tokens.bin", "--text.tokenizer", "vocabulary.json"]]),
    ]
    for name in ("vocabulary.json", "hf/tokenizer.json", "words.tiktoken"):
        found.append((name, [["prepare", *TRAIN[:2], "--text.tokenizer", name, "--workers", "1"]]))
    for ending in FORMATS:
        texts, talks = f"texts.{ending}", f"talks.{ending}"
        found.append((texts, [["prepare", "--data", texts, "--text.vocab-size", "300", "--workers", "1"]]))
        if not ending.startswith(("csv", "tsv", "txt")):
            found.append((talks, [[*SFT, talks]]))
    asked = ["evaluate", "--run", "r", "--limit", "1", *EAGER, "--tasks"]
    found += [
        ("core/copa.jsonl", [[*asked, "core/copa", "--bundle", "core"]]),
        ("chat/gsm8k_test.jsonl", [[*asked, "chat/gsm8k", "--chat-data", "chat"]]),
        ("problems/train.jsonl", [[*RL, "--rl.rewards", "gsm8k", "--rl.data", "problems"]]),
        ("keys.txt", [["keys", "keys.txt"]]),
        *((f"out/lab/s/{name}", [["lab", "log", "--study", "s"]]) for name in STUDY),
    ]
    return found


def build(folder: Path, *asked: Any) -> None:
    """Writes a whole example of each kind of file, and if a trial draws one, those of a study; see `warm`."""
    os.chdir(folder)
    write_text(folder)
    _write_formats(folder)
    assert run("pretrain", "llama", "--run", "r", *TRAIN, *EAGER) == 0
    assert run("evaluate", "--run", "r", "--questions", "2", *EAGER) in (0, 1)
    assert run("export", "--run", "r", "--dir", "hf") == 0
    shutil.copytree("out/runs/r", "out/runs/tuned")
    assert run(*[word if word != "r" else "tuned" for word in SFT], "talks.jsonl") == 0
    shutil.copytree("hf", "split")
    with safe_open("hf/model.safetensors", "numpy") as file:
        weights = list(file.keys())
    shutil.copy("hf/model.safetensors", "split/one.safetensors")
    (folder / "split/model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "one.safetensors")}
    (folder / "split/model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    vocabulary = Path(shutil.copy("out/runs/r/tokenizer.json", "vocabulary.json"))
    (folder / "tokens.bin").write_bytes(token_shard(Tokenizer.load(vocabulary), read_source(folder / "texts.jsonl")))
    if any(path.startswith("out/lab/") for path, _, _ in drawn(folder, *asked)):
        build_study(folder)
    warm(folder, *asked)


def build_study(folder: Path) -> None:
    os.chdir(folder)
    (folder / "experiments").mkdir()
    for name in ("base", "idea"):
        Path(f"experiments/{name}.py").write_text("from quern.recipes.gpt import RECIPE\n", encoding="utf-8")
    ladder.in_process = lambda out, machine, variables: train_here(out, machine)
    assert run(*COMPARE) == 0


def _write_formats(folder: Path) -> None:
    texts = [text for number in range(20) for text in corpus.documents(number, 2e-4, "train")][:60]
    talks = [talk for talk in corpus.conversations(0, 60, "train") if all(isinstance(m["content"], str) for m in talk)]
    talks = sorted(talks, key=lambda talk: len(str(talk)))[:20]
    for name, key, values in (("texts", "text", texts), ("talks", "messages", talks)):
        rows = [{key: value} for value in values]
        for ending in ("jsonl", "jsonl.gz", "parquet"):
            write_rows(folder / f"{name}.{ending}", rows)
        lines = (folder / f"{name}.jsonl").read_bytes()
        (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")
        (folder / f"{name}.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    for ending, mark in (("csv", ","), ("tsv", "\t")):
        with (folder / f"texts.{ending}").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter=mark).writerows([["id", "text"], *([n, t] for n, t in enumerate(texts))])
    (folder / "texts.csv.gz").write_bytes(gzip.compress((folder / "texts.csv").read_bytes()))
    (folder / "texts.txt").write_text("\n".join(texts), encoding="utf-8")
    write_tiktoken(folder / "words.tiktoken", 260, [b"th", b"he", b"in", b"the"])
    rows = [{"query": f"it rains {n}", "choices": ["so", "but"], "gold": n % 2} for n in range(4)]
    write_rows(folder / "core/copa.jsonl", rows)
    problems = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}. #### {2 * n}"} for n in range(9)]
    for name in ("chat/gsm8k_test.jsonl", "problems/train.jsonl"):
        write_rows(folder / name, problems)
    (folder / "keys.txt").write_text(f"# of a server\n{'0a' * 32} anna\n{'1b' * 32} ben\n", encoding="utf-8")


# Damage -----------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON body is, objects and lists included. A list has one or two of its items."""
    yield path
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:2] if isinstance(value, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def damaged_json(body: Any, rng: random.Random) -> tuple[str, str]:
    """A JSON body with one wrong place → what was done, the text."""
    body = deepcopy(body)
    path = rng.choice(list(leaves(body)))
    name = "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    value, how = rng.choice(ODD), rng.choice("replaced replaced replaced deleted doubled nested added".split())
    if not path:
        return f"{name} = {value!r}", json.dumps(value)
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    if how == "deleted":
        del parent[path[-1]]
    elif how == "added" and isinstance(parent, dict):
        parent["odd"] = value
    elif how == "nested":
        parent[path[-1]] = "@@"
        return f"{name} nested deeply", json.dumps(body).replace('"@@"', "[" * 100_000 + "]" * 100_000)
    elif how == "doubled":
        text = json.dumps(body)
        mark = json.dumps(path[-1]) + ": " if isinstance(path[-1], str) else ""
        return f"{name} twice", text.replace(mark, f"{mark}{json.dumps(value)}, {mark}", 1) if mark else text + text
    else:
        parent[path[-1]] = value
        how = f"= {value!r}"
    return f"{name} {how}", json.dumps(body)


def damaged_bytes(content: bytes, rng: random.Random) -> tuple[str, bytes]:
    how = rng.choice(["flipped", "cut", "zeroed", "inserted", "removed", "empty", "noise", "numbers", "head"])
    size = len(content)
    at = rng.choice([rng.randrange(max(1, size)), rng.randrange(max(1, min(size, 64)))])
    if how == "flipped" and size:
        content = content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    elif how == "cut":
        content = content[:at]
    elif how == "zeroed":
        content = content[:at] + bytes(min(64, size - at)) + content[at + 64 :]
    elif how == "inserted":
        content = content[:at] + rng.randbytes(rng.randrange(1, 20)) + content[at:]
    elif how == "removed":
        content = content[:at] + content[at + rng.randrange(1, 20) :]
    elif how == "numbers":
        content = content[:at] + struct.pack("<q", rng.choice([-1, 2**31 - 1, 2**62, 0, 10**7])) + content[at + 8 :]
    elif how == "head":
        content = struct.pack("<q", rng.choice([-1, 2**31 - 1, 2**62, 0, 10**7])) + content[8:]
    else:
        content = b"" if how == "empty" else rng.randbytes(rng.randrange(1, 3000))
    return f"{how} at {at}", content


def damage_in_place(path: Path, rng: random.Random) -> str:
    """Something else than a regular file in its place."""
    how = rng.choice(["folder", "fifo", "/dev/zero", "loop", "missing", "/etc/passwd"])
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "loop":
        path.symlink_to(path.name)
    elif how.startswith("/"):
        path.symlink_to(how)
    return how


def reseal(path: Path) -> None:
    """Writes the own hash of a checkpoint's manifest again, as an attacker would."""
    from quern.train import manifest

    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        body = json.loads(path.read_text(encoding="utf-8"))
        body.pop("sha256", None)
        body["sha256"] = manifest._content_hash(body)
        path.write_text(json.dumps(body), encoding="utf-8")


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file, and returns what was done."""
    draw = rng.random()
    if draw < 0.08:
        return damage_in_place(path, rng)
    if path.suffix == ".safetensors" and draw < 0.6:  # one wrong place in the header, whose length is right
        raw = path.read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        done, text = damaged_json(json.loads(raw[8 : 8 + size]), rng)
        path.write_bytes(struct.pack("<Q", len(header := text.encode())) + header + raw[8 + size :])
        return f"header {done}"
    if path.suffix in (".json", ".jsonl") and draw < 0.75:
        lines = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
        number = rng.randrange(len(lines)) if lines else 0
        if lines:
            done, lines[number] = damaged_json(json.loads(lines[number]), rng)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            if path.parent.name.startswith("step-") and rng.random() < 0.8:
                reseal(path)
            return f"line {number + 1} {done}" if path.suffix == ".jsonl" else done
    if path.suffixes[-1] == ".gz" and draw < 0.4:
        done, content = damaged_bytes(gzip.decompress(path.read_bytes()), rng)
        path.write_bytes(gzip.compress(content))
        return f"inside, {done}"
    done, content = damaged_bytes(path.read_bytes(), rng)
    path.write_bytes(content)
    return done


# Trials -----------------------------------------------------------------------------------------------------


def child(arguments: Sequence[str], answer: IO[str]) -> int:
    """Runs a command with limits, and writes its outcome and its last words."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEGABYTES * 10**6
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.alarm(round(15 * SECONDS))  # other programs share the processor, whose time is the bar
    sys.stdout, sys.stderr, code = io.StringIO(), io.StringIO(), None
    try:
        code = run(*arguments)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = next((frame for frame in reversed(frames) if "/quern/" in frame.filename), frames[-1])
        place = f"{ours.filename.rpartition('/quern/')[2]}:{ours.lineno}"
        print(f"\n{type(error).__name__}: {str(error)[:150]!r} [{place}]", file=sys.stderr)
    said = sys.stderr.getvalue()[-4000:]
    lines = [line for line in said.splitlines() if line.strip()]
    clear = lines and lines[-1].startswith("quern ") and not re.search("Traceback|bad_alloc|MemoryError|allocate", said)
    outcome = "read" if code in (0, 75) else "refused" if clear else "failed"
    json.dump({"outcome": outcome, "said": "\n".join(lines[-3:])[-600:]}, answer)
    answer.flush()
    return 0


def trial(arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a command in a child of its own → its outcome, its last words and its seconds."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as answer:
        _, status, used = os.wait4(forked(partial(child, arguments, answer)), 0)
        answer.seek(0)
        found = json.loads(answer.read() or json.dumps({"outcome": "failed", "said": f"ended with status {status}"}))
    seconds = used.ru_utime + used.ru_stime
    if seconds > SECONDS:
        found["outcome"] = "failed"
    return found | {"seconds": round(seconds, 2)}


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of the files, which is the working directory inside."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    os.chdir(copy)
    try:
        yield copy
    finally:
        os.chdir("/")
        shutil.rmtree(copy)


def drawn(folder: Path, seed: int, count: int, only: str = "") -> Iterator[tuple[str, Sequence[str], random.Random]]:
    """Draws files, each kind in turn where there are trials enough, and for each a command that reads it."""
    there = [kind for kind in kinds(folder) if only in kind[0]]
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        path, commands = there[number * max(1, len(there) // count) % len(there)]
        yield path, rng.choice(list(commands)), rng


def trials(folder: Path, seed: int, count: int, only: str = "") -> Iterator[dict[str, Any]]:
    """Damages files, and runs for each one of the commands that read it."""
    for path, command, rng in drawn(folder, seed, count, only):
        with copied(folder) as copy:
            done = damage(copy / path, rng)
            found = trial(command)
            if found["outcome"] == "refused" and (copy / "experiments/records/s").exists():
                found |= {"outcome": "failed", "said": "it published"}
            yield {"kind": path, "damage": done, "command": command[0], **found}


def warm(folder: Path, seed: int, count: int, only: str = "") -> None:
    """Checks that each command reads the whole files, and notes the modules that it imports."""
    names = set[str]()
    for command in {tuple(command) for _, command, _ in drawn(folder, seed, count, only)}:
        with copied(folder):
            assert run(*command) in (0, 75), command
        names |= sys.modules.keys()
    folder.with_name("modules").write_text("\n".join(sorted(names)), encoding="utf-8")


def begin(folder: Path, *trials: Any) -> None:
    if not folder.exists():
        folder.mkdir(parents=True)
        # In a child, so that no pool of threads is started here: a fork would not have its threads.
        builder = multiprocessing.get_context("fork").Process(target=build, args=(folder, *trials))
        with contextlib.redirect_stdout(sys.stderr):
            builder.start()
        builder.join()
        assert builder.exitcode == 0
    for name in folder.with_name("modules").read_text(encoding="utf-8").split():
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    torch.set_num_threads(1)
    session.measure_peak_flops = lambda machine: 1e12  # takes a second of each run, for a column
    whole, asked = Path(sys.argv[1]) / "whole", (int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    begin(whole, *asked)
    for line in trials(whole, *asked):
        print(json.dumps(line), flush=True)
    os._exit(0)
