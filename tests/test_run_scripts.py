"""The scripts under runs/: their commands are commands of the real CLI, the flagship can be laid out on the ranks, and
the whole way runs on three ranks.

A copy of a script runs with stand-ins for `quern` and for Slurm's programs, which only note their arguments.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.cli import verbs
from quern.cli.options import PretrainOptions, RunAllOptions
from quern.estimate.layout import lay_out
from quern.flags.recipe_flags import Arguments
from quern.resolve import resolve
from tests.eval.test_core import rows_of
from tests.parallel.test_faults import lines_with
from tests.support.faulty_ranks import FaultyRanks

RUNS = Path(__file__).parents[1] / "runs"
STAND_INS = {
    "quern": 'printf "%s\\0" "$@" >> "$NOTES"; printf "\\n" >> "$NOTES"',
    "scontrol": "printf 'first\\nsecond\\n'",
    "srun": 'shift; exec "$@"',
}
SLURM = {"SLURM_JOB_NODELIST": "nodes", "SLURM_JOB_ID": "123", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4"}
Commands = Callable[..., list[list[str]]]


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Runs a script, and returns the arguments of each of its calls of `quern`."""
    shutil.copytree(RUNS, tmp_path / "runs")  # beside which there is no .venv
    for name, body in STAND_INS.items():
        program(tmp_path / name, body)

    def run(script: list[str], **variables: str) -> list[list[str]]:
        notes = tmp_path / "notes"
        notes.write_bytes(b"")
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "NOTES": str(notes)} | variables
        subprocess.run(["bash", *script], check=True, env=env, cwd=tmp_path, timeout=60)
        return [line.split("\0")[:-1] for line in notes.read_text(encoding="utf-8").splitlines()]

    return run


@pytest.mark.parametrize(
    ("script", "arguments", "variables", "expected"),
    [
        ("speedrun.sh", "fineweb10B r50k_base.tiktoken --ranks 8 --train.fp8 head", {}, (8, 1, "")),
        ("multinode.sh", "gpt --depth 20 --run big", {"MEET": "host:29500", "GPUS": "3"}, (3, 2, "host:29500")),
        ("slurm.sbatch", "gpt --depth 20 --run big", SLURM, (4, 2, "first:20123")),
    ],
)
def test_the_command_is_one_of_pretrain(
    commands: Commands,
    script: str,
    arguments: str,
    variables: dict[str, str],
    expected: tuple[int, int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ((verb, *rest),) = commands([f"runs/{script}", *arguments.split()], **variables)
    assert verb == "pretrain"
    (tmp_path / "fineweb10B").mkdir()
    (tmp_path / "fineweb10B/fineweb_val_000000.bin").touch()
    monkeypatch.chdir(tmp_path)
    options, _ = verbs.parse(verb, Arguments(rest), PretrainOptions)
    assert (options.ranks, options.nodes, options.rendezvous) == expected
    assert options.recipe.depth == (12 if script == "speedrun.sh" else 20)


@pytest.mark.parametrize("place", [".venv/bin/quern", "bin/quern", "bin/python", "bin/python3"])
def test_quern_is_found_without_an_active_environment(place: str, tmp_path: Path) -> None:
    """In the .venv of the clone, in PATH, or as a module of Python."""
    shutil.copytree(RUNS, tmp_path / "runs")
    found = program(tmp_path / place, '[ "$1" = -c ] || echo "$0 $*"')
    env = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    script = [tmp_path / "runs/speedrun.sh", "tokens", "--help"]
    told = subprocess.run(script, env=env, cwd="/", capture_output=True, text=True, timeout=60)
    assert told.stdout.startswith(f"{found}{' -m quern' * ('python' in place)} pretrain unet --run speedrun ")


def test_the_file_for_a_rented_machine_starts_the_whole_way(commands: Commands) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    task = yaml.safe_load((RUNS / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["resources"]["accelerators"]["H100"] == 8
    variables = {name: str(value) for name, value in task["envs"].items()}
    found = commands(["-c", task["run"].strip()], SKYPILOT_NUM_GPUS_PER_NODE="8", **variables)
    assert [rest[0] for rest in found] == [*["evaluate"] * 2, "prepare", "run", *["evaluate"] * 2, "report"]
    options, _ = verbs.parse("run", Arguments(found[3][1:]), RunAllOptions)
    assert (options.recipe.data, options.recipe.depth, options.ranks) == ("climbmix", 24, 8)
    assert options.where.run == "speedrun-gpt"


def test_the_program_inside_the_script_for_a_gpu_runs() -> None:
    """At toy size, without the compiler, which takes most of its time."""
    program = re.split(r" << 'END'\n|\nEND\n", (RUNS / "first-gpu.sh").read_text(encoding="utf-8"))[-2]
    env = os.environ | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-c", program, "toy"]
    told = subprocess.run(call, env=env, cwd=RUNS.parent, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0 and "decoded = read at once" in told.stdout, told.stderr


def test_a_part_that_fails_or_hangs_does_not_stop_the_next_one(tmp_path: Path) -> None:
    shutil.copytree(RUNS, tmp_path / "runs")
    body = 'echo "$@" >> calls; case "$*" in *exactness*) exit 3;; "bench grug"*) sleep 60;; esac'
    program(tmp_path / "quern", body)
    program(tmp_path / "python", "cat > program")  # which finds nothing missing
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SCALE": "0.01", "RECORDS": "records"}
    script = [tmp_path / "runs/first-gpu.sh", "texts"]
    assert subprocess.run([*script, "idea"], env=env, cwd=tmp_path, timeout=60).returncode == 2
    assert subprocess.run(script, env=env, cwd=tmp_path, timeout=60).returncode == 1
    parts = [json.loads(line) for line in (tmp_path / "records/parts.jsonl").read_text("utf-8").splitlines()]
    assert [(one["part"], one["exit"]) for one in parts] == [
        *(("bench-train", 0), ("bench-attention", 0), ("exact", 123), ("bench-decode", 0)),
        *(("laws-resume", 1), ("laws-decode", 0), ("laws-jax", 0), ("jax", 124)),  # no checkpoint is there to resume
        *((f"bench-{name}", 0) for name in ("kernels", "fp8", "quality")),
        *(("ladder", 0), ("ideas", 0), ("serve", 0)),
    ]
    (tmp_path / "calls").rename(tmp_path / "all")
    calls = (tmp_path / "all").read_text(encoding="utf-8").splitlines()
    assert calls.count(next(call for call in calls if call.startswith("lab ladder "))) == 2
    assert calls.count(next(call for call in calls if call.startswith("lab compare ") and "--rungs 2 3" in call)) == 6
    assert all(" --device cuda" in call for call in calls if "gauntlet" not in call)
    (tmp_path / "records/model.safetensors").touch()
    asked = [*script, "bench-fp8", "serve"]
    again = partial(subprocess.run, asked, cwd=tmp_path, timeout=60)
    assert again(env=env | {"OUT": "home"}).returncode == 0
    assert [call.split()[1] for call in (tmp_path / "calls").read_text("utf-8").splitlines()] == ["fp8", "serve"]
    with tarfile.open(tmp_path / "home/first-gpu.tar.gz") as kept:
        names = set(kept.getnames())
    assert {"parts.jsonl", "exact.log", "serve.log"} < names and "model.safetensors" not in names
    assert again(env=env | {"LIMIT": "0"}).returncode == 1, "no time is left"
    assert len((tmp_path / "calls").read_text("utf-8").splitlines()) == 2


def test_what_a_machine_lacks_is_said_before_its_time_is_spent(tmp_path: Path) -> None:
    shutil.copytree(RUNS, tmp_path / "runs")
    shutil.copy(RUNS.parent / "pyproject.toml", tmp_path)
    program(tmp_path / "quern", "touch called")
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(RUNS.parent), "TOY": "1"}
    run = partial(subprocess.run, cwd=tmp_path, env=env, timeout=120, capture_output=True, text=True)
    asked = [tmp_path / "runs/first-gpu.sh", "texts", "serve"]
    program(tmp_path / "python", f'exec {sys.executable} -S "$@"')  # without the installed packages
    told = run(asked)
    assert told.returncode == 1 and not (tmp_path / "called").exists() and told.stderr.count("\n") == 1
    assert all(f" {name}," in told.stderr for name in ("msgspec", "annotated-types", "rustbpe", "starlette"))
    program(tmp_path / "python", f'exec {sys.executable} "$@"')
    told = run(asked)
    assert told.returncode == 0 and (tmp_path / "called").exists(), told.stderr


@pytest.mark.parametrize("ranks", [3, 8])
def test_the_flagship_can_be_laid_out_on_the_ranks(ranks: int, commands: Commands) -> None:
    """The script's own command at several depths: model, optimizer and the rows of a batch, without memory."""
    *_, run, _, _, _ = commands(["runs/speedrun-gpt.sh"], GPUS=str(ranks))
    options, _ = verbs.parse("run", Arguments(run[1:]), RunAllOptions)
    for depth in (4, 7, 8, 11, 26):
        made = resolve(replace(options.recipe, depth=depth), options.ranks // options.tp)
        lay_out(made, torch.bfloat16, options.ranks, options.tp)


TOY = {
    "DEPTH": "2",
    "GPUS": "3",
    "DATA": "text.jsonl",
    "TEXT": "--text.vocab-size 320",
    "CONVERSATIONS": "spelling,limit=60 tinyworld,limit=60",
    "MACHINE": "--no-compile --dtype fp32 --threads 1 --device cpu",
}
SIZES = "--model.width 32 --model.head-dim 16 --model.context 2048 --train.steps 3 --sft.steps 2 --questions 2".split()
"""Below depth 8 the context is shorter; that of the flagship leaves few rows in a batch."""


def test_the_whole_way_on_three_ranks(commands: Commands, faulty_server: FaultyRanks, tmp_path: Path) -> None:
    """Every command of runs/speedrun-gpt.sh, at toy size, with the files of two tasks."""
    files: dict[str, list[dict[str, Any]]] = {"copa": rows_of("choice", 12, random.Random(0))}
    files["mmlu"] = [{"question": f"{n} and {n}?", "choices": ["1", "2", "3"], "answer": n % 3} for n in range(12)]
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    variables = TOY | {"CORE": f"--bundle {tmp_path} --limit 8", "CHAT": "--limit 6", "CHAT_DATA": str(tmp_path)}
    said = []
    for arguments in commands(["runs/speedrun-gpt.sh", *SIZES], **variables):
        ranks = 3 if "--ranks" in arguments and "--check" not in arguments else 1
        found = faulty_server(arguments, ranks=ranks)
        assert found["result"] in (0, None) and found["exits"] == [[0] * ranks], (arguments, found["said"])
        said.append(found["said"])
    _, _, prepared, ran, core, chat, reported = said
    # Another test of this server may have prepared the text already.
    assert lines_with("tokens: ", prepared) and lines_with("is up to date", ran), "the ranks find it prepared"
    assert "pretraining: 3 steps of 6,144 tokens" in ran and "fine-tuned on" in ran
    assert lines_with("copa", core) and lines_with("mean of 1 of CORE's 22 tasks", core)
    assert lines_with("chat/mmlu", chat) and lines_with("chat/spelling", chat)
    run = faulty_server.folder / "out/runs/speedrun-gpt"
    tuned = json.loads((run / "sft/recipe.json").read_text(encoding="utf-8"))
    assert tuned["sft"]["batch_tokens"] == 6144, "a row for each rank"
    scores = (json.loads(line) for line in (run / "evaluate.jsonl").read_text(encoding="utf-8").splitlines())
    asked = {(score["stage"], score["task"], score["count"]) for score in scores}
    assert asked >= {("pretrain", "core/copa", 8), ("sft", "chat/mmlu", 6)}
    report = (run / "report.md").read_text(encoding="utf-8")
    assert lines_with("report: ", reported) and "core/copa" in report and "chat/mmlu" in report
