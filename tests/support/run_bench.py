"""A bench for laws about runs: a folder with a small text and conversations, real commands in forked processes that can
be killed at a chosen event (fork_server.py), and the comparison of what two runs left."""

import itertools
import json
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.records import read_metrics
from quern.text.tinyworld import corpus
from quern.train import checkpoint, manifest
from quern.train.guard import EXIT_STOPPED
from tests.support.jax_process import environment
from tests.support.line_server import ROOT, LineServer
from tests.support.rows import write_rows
from tests.support.small_text import write_text

TIMED = {"seconds", "tokens_per_second", "mfu"}
PRETRAIN = """pretrain --data text.jsonl --depth 2 --text.vocab-size 320 --model.width 32 --model.head-dim 16
 --model.kv-heads 1 --model.context 48 --train.batch-tokens 192 --train.micro-batch-tokens 144 --train.steps 23
 --optim.lr-scale 0.3 --train.log-every 3 --train.eval-every 8 --train.save-every 5""".split()
GRUG = ["grug", "train", *PRETRAIN[1:]]
SFT = "sft --conversations talks.jsonl --sft.steps 19 --sft.batch-tokens 192 --train.log-every 2".split()
RL = """rl --rl.rewards vowels.py --rl.steps 8 --rl.groups 3 --rl.samples 3 --rl.max-tokens 10 --rl.updates 2
 --rl.kl 0.1 --rl.lr-share 2 --rl.val-questions 2 --rl.val-samples 2 --train.log-every 2 --train.save-every 1""".split()
BASE = "base"  # the run that is fine-tuned
TUNED = "tuned"  # the run for reinforcement learning
VOWELS = """
from quern.eval.task import question
from quern.rl.environment import Environment

ENVIRONMENT = Environment("vowels", lambda seed: question(seed[-3:], "e"), lambda item, reply: reply.count("e") / 4)
"""


class Bench(LineServer):
    """A folder with a small text, a few conversations and the runs of a test; and the process that forks runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = (f"run-{number}" for number in itertools.count())
        self.references: dict[tuple[str, str], tuple[Path, dict[str, int]]] = {}
        write_text(folder)
        talks = sorted(corpus.conversations(0, 40, "train"), key=lambda talk: len(str(talk)))[:20]
        write_rows(folder / "talks.jsonl", ({"messages": talk} for talk in talks))
        server = [str(ROOT / "tests/support/fork_server.py"), str(folder / "log.txt")]
        env = environment(folder / "compiled", devices=1)
        super().__init__([*server, *self.arguments(PRETRAIN, BASE, "fp32")], folder, env)
        self.ask({"arguments": ["--version"]}, gone={})  # it answers when the base model is there

    def run(
        self, command: Sequence[str], name: str, dtype: str, *, refused: bool = False, **request: Any
    ) -> dict[str, Any]:
        """Runs a command to its end, or to where the request kills it. refused: it is expected to end with 1."""
        answer = self.ask({"arguments": self.arguments(command, name, dtype), **request}, gone={})
        stopped = EXIT_STOPPED if "signal" in request else -signal.SIGKILL
        expected = (int(refused), stopped) if "kill" in request else (int(refused),)
        assert answer.get("status") in expected, (command, answer, self.log()[-3000:])
        return answer

    @staticmethod
    def arguments(command: Sequence[str], name: str, dtype: str) -> list[str]:
        of_torch = [] if command[0] == "grug" else ["--no-compile", "--threads", "1"]
        return [*command, "--out", "out", "--run", name, *of_torch, "--dtype", dtype]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(encoding="utf-8")

    def stage(self, name: str, command: Sequence[str]) -> Path:
        return self.folder / "out" / "runs" / name / command[0]

    def fresh(self, command: Sequence[str], dtype: str) -> str:
        """The name of a run that can be begun: for fine-tuning, one with a base model."""
        name, runs = f"{next(self.names)}-{command[0]}-{dtype}", self.folder / "out" / "runs"
        if command[0] == "sft":
            shutil.copytree(runs / BASE, runs / name)
        if command[0] == "rl":
            if not (runs / TUNED).exists():
                (self.folder / "vowels.py").write_text(VOWELS, encoding="utf-8")
                tuned = self.fresh(SFT, dtype)
                self.run(SFT, tuned, dtype)
                (runs / tuned).rename(runs / TUNED)
            shutil.copytree(runs / TUNED, runs / name)
        return name

    def reference(self, command: Sequence[str], dtype: str) -> tuple[Path, dict[str, int]]:
        """The stage of a run that nothing disturbs, made once, and how many events its parts have.

        Resumed when it is done, it does nothing.
        """
        key = " ".join(command), dtype
        if key not in self.references:
            name = self.fresh(command, dtype)
            stage = self.stage(name, command)
            events = self.run(command, name, dtype, counted=True)["events"]
            before = logged(stage)
            resumed = self.run([*command, "--resume"], name, dtype, counted=True)["events"]
            assert logged(stage) == before and resumed["save"] == 0
            assert min(events["train"], events["save"], resumed["resume"]) > 50
            self.references[key] = stage, events | {"resume": resumed["resume"]}
        return self.references[key]

    def copied(self, command: Sequence[str], dtype: str) -> str:
        """The name of a run that is a copy of the reference."""
        name = f"{next(self.names)}-copy"
        shutil.copytree(self.reference(command, dtype)[0].parent, self.folder / "out" / "runs" / name)
        return name


# What is compared -------------------------------------------------------------------------------------------


def logged(stage: Path) -> list[str]:
    """The lines of metrics.jsonl without what a clock says; JSON writes every bit of a number."""
    lines = [{k: v for k, v in line.items() if k not in TIMED} for line in read_metrics(stage)]
    return [json.dumps(line, sort_keys=True) for line in lines]


def final(stage: Path) -> dict[str, Any]:
    """Every tensor of the last checkpoint as bytes, its JSON, and which checkpoints are kept (two, see `keep`).

    One that died while it pruned after its last save leaves an older one, or the rest of it, until the next save.
    """
    newest = manifest.latest(stage / "checkpoints", pytest.fail)
    assert newest is not None
    tensors, meta = checkpoint.load(newest[0])
    meta["state"].pop("seconds")
    flat = {name: tensor.reshape(-1).view(torch.uint8) for name, tensor in tensors.items()}
    found: dict[str, Any] = {name: tensor.numpy().tobytes() for name, tensor in flat.items()}
    return found | {"json": meta, "kept": manifest.steps(stage / "checkpoints")[-2:]}


def differences(stage: Path, reference: Path, ignored: str = "") -> list[str]:
    """Lines that are missing, doubled or other, and the names of what differs in a bit in the final state."""
    pairs = itertools.zip_longest(logged(stage), logged(reference))
    lines = [f"{ours} instead of {theirs}" for ours, theirs in pairs if ours != theirs]
    mine, expected = final(stage), final(reference)
    names = sorted((mine.keys() | expected.keys()) - {ignored})
    return lines + [name for name in names if mine.get(name) != expected.get(name)]
