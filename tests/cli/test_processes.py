"""The command line as a process: it ends quietly at Ctrl-C, at a reader that closes the pipe, without an extra. Help
and errors need no PyTorch: what a process imports, and the processor time that it takes."""

import os
import re
import resource
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


@pytest.mark.parametrize(("start", "imported"), [("module", "torch.nn.functional"), ("script", "numpy")])
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
    )
    *said, last = done.stderr.splitlines()
    assert said == [f"141 {command}" for command in commands]
    assert last.startswith("quern: there is no 'nosuch'") and done.returncode == 141


CLOSED = """
import sys
from quern.cli.main import main
from quern.process import to_stderr
from quern.train.guard import Stop
assert main(["--version"]) == 0
with open(sys.argv[1], "w") as file, Stop():
    print("progress")
    to_stderr("waiting")
    file.write(str(file.fileno()))
"""
"""Prints as training does, and writes the number of a file that it opens."""


def test_closed_streams_are_nowhere_and_no_file_gets_their_numbers(tmp_path: Path) -> None:
    shell = 'exec "$@" <&- >&- 2>&-'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", CLOSED, str(tmp_path / "file")]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert int((tmp_path / "file").read_text(encoding="utf-8")) > 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_of_the_output_is_one_line() -> None:
    """Also where the first line is written by the thread that tells of a wait."""
    waits = "process.SILENT_SECONDS = 0\nwith process.waiting('a', log=print):\n    time.sleep(0.2)\n"
    script = f"import sys, time\nfrom quern import process\nfrom quern.cli.main import main\n{waits}sys.exit(main())"
    for arguments, verb in (["--version"], ""), (["lab", "--help"], " lab"):
        with open("/dev/full", "w", encoding="utf-8") as full:
            command = [sys.executable, "-u", "-c", script, *arguments]
            done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        told = f"quern{verb}: No space left on device: make room there, or choose another place\n"
        assert (done.returncode, done.stderr) == (1, told)


UNAWAITED = """
import sys, threading, torch
from quern import process
from quern.cli.main import main
def compute():
    while True:
        (torch.ones(9) @ torch.ones(9)).exp()
threading.Thread(target=compute, name=process.UNAWAITED, daemon=True).start()
sys.exit(main(["--version"]))
"""


def test_a_thread_that_still_computes_does_not_abort_the_process() -> None:
    """Python ends such a thread within C++, which then calls abort()."""
    done = subprocess.run([sys.executable, "-c", UNAWAITED], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("quern")


# What a process imports -----------------------------------------------------------------------------------------------


FORKS = """
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
    done = subprocess.run([sys.executable, "-c", FORKS], input="\n".join(commands), capture_output=True, text=True)
    rows = [line.split()[1:] for line in done.stderr.splitlines() if line.startswith("took ")]
    assert len(rows) == len(commands), done.stderr
    return [(float(seconds), set(heavy)) for seconds, *heavy in rows]


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


@pytest.mark.parametrize("argument", ["", "nosuch"])
def test_the_first_line_is_there_at_once(argument: str) -> None:
    """Processor time of a process, which PyTorch's import alone exceeds."""
    used = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "quern", *argument.split()], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if used[-1] <= 0.3:
            return
    raise AssertionError(used)
