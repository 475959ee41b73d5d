"""Quiet ends: Ctrl-C during imports, a reader that closes the pipe, and help where an extra is not installed."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cli.test_cli import HELP

ROOT = Path(__file__).parents[2]
STARTS = {
    "module": ["-m", "quern.cli.main"],
    "script": ["-c", "import sys; from quern.cli.main import main; sys.exit(main())"],
}


@pytest.mark.parametrize(
    ("start", "imported"),
    [("module", "torch.nn.functional"), ("script", "numpy")],
)
def test_ctrl_c_during_the_imports_is_one_line(start: str, imported: str) -> None:
    """The interpreter tells of each module that it has imported: SIGINT comes when it has told of this one."""
    command = [sys.executable, "-X", "importtime", *STARTS[start], "bench", "train", "--quick"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        next(line for line in process.stderr if line.split("|")[-1].strip() == imported)
        process.send_signal(signal.SIGINT)
        said = [line for line in process.stderr if not line.startswith("import time:")]
    assert (process.returncode, said) == (130, ["interrupted\n"])


ENDS = """
import os, sys
missing = sys.argv.pop(1).split()

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from quern.cli.main import main
reader, writer = os.pipe()
os.close(reader)
told = os.fdopen(os.dup(2), "w")

def code_of(line):
    streams, *arguments = line.split()
    for file in range(1, int(streams) + 1):
        os.dup2(writer, file)
    try:
        return main(arguments)
    except SystemExit as done:
        return done.code
    finally:
        sys.stdout.flush()
        os.dup2(told.fileno(), 2)

for line in sys.stdin.read().splitlines():
    print(code_of(line), line, file=told, flush=True)
os.dup2(writer, 1)
print("not flushed")
sys.exit(main(["nosuch"]))
"""
"""Runs each line of stdin, a command whose stdout (1) or both streams (2) are pipes without a reader. The packages in
the argument are not installed."""


def test_a_reader_that_leaves_ends_help_quietly_also_where_no_extra_is_installed() -> None:
    """Oracle of the extras: pyproject.toml. What an extra is missing for is an error on stderr, and exit code 1."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [row for name, rows in project["optional-dependencies"].items() if name != "dev" for row in rows]
    own, more = ({re.split("[<>=;]", row)[0] for row in rows} for rows in (project["dependencies"], extras))
    missing = {"pyyaml": "yaml"}
    packages = " ".join(missing.get(name, name.replace("-", "_")) for name in more - own)
    commands = [f"1 {verb} --help" for verb in HELP] + ["2", "2 nosuch", "2 serve --help", "2 pretrain --nosuch"]
    done = subprocess.run(
        [sys.executable, "-c", ENDS, packages],
        input="\n".join(commands),
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        capture_output=True,
        text=True,
        check=False,
    )
    *said, last = done.stderr.splitlines()
    assert said == [f"141 {command}" for command in commands]
    assert last.startswith("quern: there is no 'nosuch'") and done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_one_line_without_a_traceback() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "quern", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "quern: the output cannot be written (No space left on device): send it elsewhere\n"
    assert (done.returncode, done.stderr) == (1, said)
