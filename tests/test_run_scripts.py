"""The scripts under runs/: their commands are commands of the real CLI, and the whole way runs on two ranks.

A script runs with stand-ins for `quern` and for Slurm's programs, which only note their arguments.
"""

import json
import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quern.cli import verbs
from quern.cli.options import PretrainOptions
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


@pytest.fixture
def commands(tmp_path: Path) -> Commands:
    """Runs a script, and returns the arguments of each of its calls of `quern`."""
    for name, body in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def run(script: list[str], **variables: str) -> list[list[str]]:
        notes = tmp_path / "notes"
        notes.write_bytes(b"")
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "NOTES": str(notes)} | variables
        subprocess.run(["bash", *script], check=True, env=env, cwd=RUNS.parent, timeout=60)
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
    options, _ = verbs.parse(verb, rest, PretrainOptions)
    assert (options.ranks, options.nodes, options.rendezvous) == expected
    assert options.recipe.depth == (12 if script == "speedrun.sh" else 20)


def test_the_file_for_a_rented_machine_starts_the_whole_way(commands: Commands) -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    task = yaml.safe_load((RUNS / "skypilot.yaml").read_text(encoding="utf-8"))
    assert task["resources"]["accelerators"]["H100"] == 8
    variables = {name: str(value) for name, value in task["envs"].items()}
    # The machine's .venv comes first in its PATH; here the stand-in does.
    line = task["run"].replace("PATH=$PWD/.venv/bin:$PATH", "").strip()
    found = commands(["-c", line], SKYPILOT_NUM_GPUS_PER_NODE="8", **variables)
    assert [rest[0] for rest in found] == ["prepare", "pretrain", "evaluate", "sft", "evaluate", "report"]
    _, pretrain, *_ = found
    options, _ = verbs.parse("pretrain", pretrain[1:], PretrainOptions)
    assert (options.recipe.data, options.recipe.depth, options.ranks) == ("climbmix", 24, 8)
    assert options.where.run == "speedrun-gpt"


TOY = {
    "DEPTH": "2",
    "GPUS": "2",
    "DATA": "text.jsonl",
    "TEXT": "--text.vocab-size 320",
    "CONVERSATIONS": "spelling,limit=60 tinyworld,limit=60",
    "SFT": "--sft.steps 4 --sft.batch-tokens 512",
    "MACHINE": "--no-compile --dtype fp32 --threads 1 --device cpu",
}
PRETRAIN = """--model.width 32 --model.head-dim 16 --model.context 256 --train.batch-tokens 512 --train.steps 6
 --train.log-every 2""".split()


def test_the_whole_way_on_two_ranks(commands: Commands, faulty_server: FaultyRanks, tmp_path: Path) -> None:
    """Every command of runs/speedrun-gpt.sh, at toy size, with the files of two tasks."""
    files: dict[str, list[dict[str, Any]]] = {"copa": rows_of("choice", 12, random.Random(0))}
    files["mmlu"] = [{"question": f"{n} and {n}?", "choices": ["1", "2", "3"], "answer": n % 3} for n in range(12)]
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    variables = TOY | {"CORE": f"--bundle {tmp_path} --limit 8", "CHAT": "--limit 6", "CHAT_DATA": str(tmp_path)}
    script = [str(RUNS / "speedrun-gpt.sh"), *PRETRAIN]
    said = []
    for arguments in commands(script, **variables):
        ranks = 2 if "--ranks" in arguments else 1
        found = faulty_server(arguments, ranks=ranks)
        assert found["result"] in (0, None) and found["exits"] == [[0] * ranks], (arguments, found["said"])
        said.append(found["said"])
    prepared, pretrained, core, tuned, chat, reported = said
    # Another test of this server may have prepared the text already.
    assert lines_with("tokens: ", prepared) and lines_with("is up to date", pretrained), "the ranks find it prepared"
    assert "pretraining: 6 steps of 512 tokens" in pretrained and "fine-tuned on" in tuned
    assert lines_with("copa", core) and lines_with("mean of 1 of CORE's 22 tasks", core)
    assert lines_with("chat/mmlu", chat) and lines_with("chat/spelling", chat)
    run = faulty_server.folder / "out/runs/speedrun-gpt"
    scores = (json.loads(line) for line in (run / "evaluate.jsonl").read_text(encoding="utf-8").splitlines())
    assert {("pretrain", "core/copa", 8), ("sft", "chat/mmlu", 6)} <= {
        (s["stage"], s["task"], s["count"]) for s in scores
    }
    report = (run / "report.md").read_text(encoding="utf-8")
    assert lines_with("report: ", reported) and "core/copa" in report and "chat/mmlu" in report
