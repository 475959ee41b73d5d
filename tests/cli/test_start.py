"""Help and errors of the command line need no PyTorch: what a process imports, and the processor time that it takes."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import HELP

STARTS = """
import os, sys, time
from quern.cli import main, verbs
from quern.cli.options import log
shared = time.process_time()
for line in sys.stdin.read().splitlines():
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            main.main(line.split())
        except SystemExit:
            pass
        heavy = {"numpy", "torch", "jax", "transformers", "scipy", "starlette", "ray"} & set(sys.modules)
        print("took", shared + time.process_time(), *heavy, file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
"""Runs each line of stdin in a process of its own, which prints its processor time and the large libraries it has."""


def starts(commands: list[str]) -> list[tuple[float, set[str]]]:
    """The processor time of each command, in seconds, and the large libraries that it imports."""
    done = subprocess.run([sys.executable, "-c", STARTS], input="\n".join(commands), capture_output=True, text=True)
    rows = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("took ")]
    assert len(rows) == len(commands), done.stderr
    return [(float(seconds), set(heavy)) for seconds, *heavy in rows]


TRAINS = """pretrain --depth 2 --model.width 32 --model.head-dim 16 --model.context 48 --text.vocab-size 320
 --text.tinyworld-megabytes 0.1 --text.val-megabytes 0.01 --train.steps 2 --train.batch-tokens 192
 --no-compile --dtype fp32 --threads 1 --device cpu --out""".split()
LOADED = """
import sys, torch
before = set(sys.modules)
from quern.cli.main import main
code = main(sys.argv[1:])
more = sorted(set(sys.modules) - before)
heavy = [name for name in more if name.startswith("torch.distributed.checkpoint")]
sys.exit(code or f"imported {heavy}" if heavy else code)
"""


def test_one_process_saves_without_torch_distributed_checkpoint_and_shows_what_it_learned(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADED, *TRAINS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, losses, title, first, second, following = re.sub(r"\n  +(?!.*▸).*", "", done.stdout).rstrip().splitlines()
    assert len(re.findall(r"^pretrain(?:ing: [12] of 2 steps|ed on .*), loss \d", done.stdout, re.MULTILINE)) == 3
    assert re.search(r"loss \d\.\d+, validation loss \d\.\d+, \d\.\d+ bits per byte → ", losses)
    assert title == "the model continues texts, from ▸ on:"
    assert first.startswith("  Once upon a time▸") and second.startswith("  The river▸")
    assert following == f"next: `quern sft first --out {tmp_path}`, `quern chat first --out {tmp_path}`"


def test_help_imports_no_large_library_and_takes_little_time() -> None:
    commands = [f"{verb} --help" for verb in HELP]
    found = dict(zip(commands, starts(commands), strict=True))
    assert {command: heavy for command, (_, heavy) in found.items() if heavy} == {}
    slow = [command for command, (seconds, _) in found.items() if seconds > 0.7]
    again = [starts(slow) for _ in range(2)] if slow else []  # other processes can slow one down
    for command, *repeated in zip(slow, *again, strict=True):
        assert min(seconds for seconds, _ in repeated) <= 0.7, command


def test_refusals_import_no_tensor_library() -> None:
    commands = ["pretrain --nosuch", "pretrain --depth 0", "chat --out no/such -p x", "sft --out no/such", "lab nosuch"]
    for command, (_, heavy) in zip(commands, starts(commands), strict=True):
        assert heavy <= {"numpy"}, command


@pytest.mark.parametrize("argument", ["", "--help", "--version", "nosuch"])
def test_the_first_line_is_there_at_once(argument: str) -> None:
    """Processor time of a process, which PyTorch's import alone exceeds."""
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "quern", *argument.split()], capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if used[-1] <= 0.3:
            return
    raise AssertionError(used)
