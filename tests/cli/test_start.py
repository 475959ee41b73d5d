"""Help and errors of the command line need no PyTorch: what a process imports, and the processor time that it takes."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_cli import HELP

MODULES = """
import sys
from quern.cli.main import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit:
        pass
    heavy = {"torch", "jax", "transformers", "scipy", "starlette", "ray"} & set(sys.modules)
    if heavy:
        sys.exit(f"quern {line} imported {heavy}")
"""


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


def test_one_process_saves_without_torch_distributed_checkpoint(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADED, *TRAINS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_and_refusals_import_no_tensor_library() -> None:
    commands = ["", "--version", "nosuch", *(f"{verb} --help" for verb in HELP if verb != "bench gpu")]
    commands += [
        "pretrain --nosuch",
        "pretrain --depth 0",
        "chat --out no/such -p x",
        "sft --out no/such",
        "lab nosuch",
    ]
    done = subprocess.run([sys.executable, "-c", MODULES], input="\n".join(commands), capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (0, 6), done.stderr


@pytest.mark.parametrize(("arguments", "seconds"), [([], 0.3), (["nosuch"], 0.3), (["pretrain", "--help"], 1.0)])
def test_the_first_line_is_there_at_once(arguments: list[str], seconds: float) -> None:
    """Processor time of a process, which PyTorch's import alone exceeds. Measured: 0.1, 0.1 and 0.5 s."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "quern", *arguments], capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= seconds
