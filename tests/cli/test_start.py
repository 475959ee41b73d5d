"""Help and errors of the command line need no PyTorch: what a process imports, and the processor time that it takes."""

import resource
import subprocess
import sys

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
    heavy = {"torch", "jax", "transformers", "scipy", "fastapi", "ray"} & set(sys.modules)
    if heavy:
        sys.exit(f"quern {line} imported {heavy}")
"""


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
