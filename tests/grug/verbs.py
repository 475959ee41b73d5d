"""Runs `quern grug` verbs in JAX's process (tests/support/jax_process.py) and checks their results with PyTorch."""

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

from quern.cli import lab
from quern.data.packing import windows
from quern.eval.bits_per_byte import bits_per_byte
from quern.flags.recipe_flags import Arguments
from quern.grug.mesh import BATCH, make_mesh, place
from quern.grug.model import forward, logits
from quern.lab.arms import Arm, in_process
from quern.mesh import alone
from quern.model.count import count, weightless
from quern.model.gpt import GPT
from quern.recipes import load_recipe
from quern.records import read_lines, read_metrics
from quern.resolve import resolve
from quern.runs.load import load
from quern.runs.origin import read_saved
from quern.runs.run_dir import RunDir
from quern.stages.jax import command
from quern.stages.jax import train as jax_stage
from quern.stages.jax.command import training
from quern.stages.prepare import data_of_run
from quern.stages.session import trained_already
from quern.train import checkpoint, manifest
from quern.train.loop import resume
from tests.grug.parity import EXPERIMENTS, relative
from tests.support.small_text import write_text
from tests.support.toy_training import CPU
from tests.support.train_here import train_here

BAR = 1e-5
WHERE = ["--out", "out"]
TRAIN = """train --data text.jsonl --depth 1 --text.vocab-size 320 --model.width 32 --model.head-dim 16
 --model.context 32 --train.batch-tokens 256 --train.micro-batch-tokens 256 --train.steps 4
 --optim.lr-scale 0.3""".split()


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """A temporary current folder with a small text."""
    with tempfile.TemporaryDirectory() as path, contextlib.chdir(path):
        write_text(Path(path))
        yield


def verb(*arguments: str) -> str:
    """Runs a verb; returns the message of its refusal, or "" where it succeeded."""
    dtype = ["--dtype", "fp32"] if arguments[0] in ("train", "eval") else []
    try:
        return "" if command.main(Arguments((*arguments, *WHERE, *dtype)), print) == 0 else "another exit code"
    except (ValueError, FileNotFoundError) as error:
        return str(error)


@contextlib.contextmanager
def on_one_device() -> Iterator[Mesh]:
    """A folder, and verbs that compute on one device, whose programs compile faster."""
    mesh = make_mesh(devices=jax.devices()[:1])
    peak = patch.object(jax_stage, "measure_peak_flops", lambda dtype, mesh: 1e12)
    with folder(), peak, patch.object(command, "open_mesh", lambda where: mesh):
        yield mesh


def check_models_move_both_ways() -> None:
    """train → eval → export → PyTorch's measure; PyTorch's checkpoint → import → equal logits; and what is refused."""
    with on_one_device() as mesh:
        twin, back = RunDir(Path("out"), "twin"), RunDir(Path("out"), "back")
        assert "no run 'twin'" in verb("export", "--run", "twin")
        assert [verb(*words, "--run", "twin") for words in (TRAIN, ["eval"], ["export"])] == ["", "", ""]
        assert "has a JAX model already" in verb("import", "--run", "twin")
        assert "--stage is for `quern grug import`" in verb("eval", "--run", "twin", "--stage", "sft")
        written = json.loads((twin.stage(jax_stage.STAGE) / "machine.json").read_text(encoding="utf-8"))
        assert written["command"].startswith("quern grug train --data text.jsonl --depth 1 ")
        loaded, known = load(twin, CPU, print), twin.facts()
        assert known["command"] == written["command"] and known["machine"]["devices"] == "1 x cpu"
        assert known["model"]["parameters"] == asdict(count(loaded.model)) and known["data"]["source"] == "text"
        with safe_open(twin.stage(jax_stage.STAGE) / "weights.safetensors", framework="pt") as file:
            facts, weights = json.loads(file.metadata()["quern"]), dict(loaded.model.named_parameters())
            assert facts.keys() == {"recipe", "tokenizer", "step"} and facts["step"] == 4
            assert weights.keys() == set(file.keys())  # noqa: SIM118
            assert all(torch.equal(file.get_tensor(name), p) for name, p in weights.items())
        prepared = data_of_run(loaded.recipe, twin, print, jax_stage.STAGE)
        measured = json.loads((twin.folder / "evaluate.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        batches, token_bytes = windows(prepared.val, 32, rows=8), loaded.tokenizer.token_bytes()
        assert relative(measured["value"], bits_per_byte(loaded.model, batches, token_bytes, CPU).bpb) <= BAR

        horizon = 2 * 256 / (12 * 32**2 + 320 * 32)  # of the parameters with the tokenizer's vocabulary: two steps
        words = " ".join(TRAIN).replace("--train.steps 4", f"--train.horizon-ratio {horizon}")
        words = words.replace("--text.vocab-size 320", f"--text.tokenizer {twin.folder}/tokenizer.json")
        assert verb(*words.split(), "--run", "named") == ""
        named = read_saved(RunDir(Path("out"), "named"), jax_stage.STAGE)
        assert named is not None and named.train.steps == 2

        shutil.copytree(twin.folder, back.folder)
        shutil.rmtree(back.stage(jax_stage.STAGE))
        assert verb("import", "--run", "back") == ""
        tokens = np.random.default_rng(0).integers(0, 320, (8, 32)).astype(np.int32)
        twice, _, _ = jax_stage.load(back, mesh, "float32", print)
        with jax.set_mesh(mesh):
            params, shape = twice.arrays.params, twice.cfg.model
            run = jax.jit(lambda params, tokens: logits(params, forward(params, tokens, shape), shape))
            ours = run(params, place(tokens, P(BATCH, None), mesh))
        with torch.no_grad():
            inputs = torch.from_numpy(tokens.astype(np.int64))
            theirs = loaded.model.logits(loaded.model(inputs, loaded.model.context(inputs))).numpy()
        assert loaded.step == twice.step == 4 and relative(ours, theirs) <= BAR

        newest = manifest.latest(back.checkpoints("pretrain"), print)  # now as PyTorch's own
        assert newest is not None
        tensors, meta = checkpoint.load(newest[0])
        assert "already: name a new --run, or train on from" in trained_already(back, "pretrain")
        with pytest.raises(manifest.CheckpointError, match="weights of a JAX model alone: .* --from"):
            resume(SimpleNamespace(mesh=alone()), back.checkpoints("pretrain"), print)  # pyright: ignore
        del meta["trained_by"]
        checkpoint.save(back.checkpoints("pretrain"), 5, tensors, meta, 1)
        assert f"PyTorch trained: move {back.stage('pretrain')} away" in verb("export", "--run", "back")


def check_several_processes_need_an_address() -> None:
    for words in (["--processes.count", "2"], ["--processes.id", "0"], ["--processes.coordinator", "localhost"]):
        assert "needs --processes.coordinator host:port" in verb("eval", *words)


def check_a_file_trains_on_data_and_its_run_keeps_it() -> None:
    """Trains a file of the twin, resumes, evaluates; and what is refused."""
    with on_one_device() as mesh:
        run_dir, train = RunDir(Path("out"), "idea"), ["train", "idea.py", *TRAIN[1:], "--run", "idea"]
        shutil.copy(EXPERIMENTS / "grug" / "attention_sink.py", "idea.py")
        more = ("--resume", "--train.steps", "6")
        assert verb(*train) == ""
        assert "make-model idea:Sinks" in verb("train", *train[2:], *more)
        assert verb(*train, *more) == ""
        Path("idea.py").unlink()  # the run has a copy
        assert verb("eval", "--run", "idea") == ""
        run, recipe, _ = jax_stage.load(run_dir, mesh, "float32", print)
        assert (run.step, recipe.name, run.cfg.core.__name__) == (6, "attention_sink", "Sinks")
        block: Any = run.arrays.params.blocks[0]
        assert np.any(np.asarray(block.sinks))
        assert "comes from a file ('attention_sink')" in verb("export", "--run", "idea")
        lines = [line for line in read_metrics(run_dir.stage(jax_stage.STAGE) / "metrics.jsonl") if "loss" in line]
        assert len(lines) == 2 and all(relative(x["perplexity"], math.exp(x["loss"])) <= 1e-6 for x in lines)
        wide = make_mesh(model=4, devices=jax.devices()[:4])
        with patch.object(command, "open_mesh", lambda where: wide):
            for words in ([*TRAIN, "--run", "wide"], ["export", "--run", "idea"]):
                assert "2 heads cannot be spread over --mesh.model 4: use one of [1, 2]" in verb(*words)
        shutil.rmtree("out")
        wide = make_mesh(devices=jax.devices()[:3])
        with patch.object(command, "open_mesh", lambda where: wide):
            assert "8 rows at a time cannot be spread over 3 parts of the batch" in verb(*TRAIN, "--run", "wide")
        assert not Path("out/data").exists()  # no text is prepared for it


ODD = """
from dataclasses import replace
from quern.grug.state import Grug
from quern.recipes.gpt import RECIPE

class Odd(Grug):
    def init_parameters(cfg, *, key):
        raise ValueError(f"no head of {cfg.head_dim} channels")

RECIPE = replace(RECIPE, name="odd", make_model=Odd)
"""
"""A file of the twin whose model refuses its sizes."""


def check_a_study_trains_files_of_the_twin() -> None:
    """A file of the twin here, twice; another one in a process of its own."""
    with folder():
        arms = {}
        for name in ("core", "attention_sink"):
            path = EXPERIMENTS / "grug" / f"{name}.py"
            recipe, source = load_recipe(str(path))
            arms[name] = Arm(name, training(Arguments((*TRAIN[1:], "--train.steps", "3")), recipe).recipe, path, source)
        machine = {"device": "cpu", "dtype": "fp32", "compile": False, "threads": 1}
        core, again = train_here(Path("out"), machine)(arms["core"], [(1, 1), (1, 1)])
        (sinks,) = in_process(Path("out"), machine)(arms["attention_sink"], [(1, 1)])
        recipe = resolve(arms["core"].recipe)
        counts = count(weightless(replace(recipe, make_model=GPT, model=replace(recipe.model, vocab_size=320))))
        how = "--device cpu --dtype fp32 --no-compile --space optim.matrix-lr=0.01..0.04 --trials 1 --seeds 1".split()
        words = ("sweep", str(arms["core"].path), *TRAIN[1:], "--train.steps", "3", *how)
        assert lab.main(Arguments(words), print) == 0
        (line,) = read_lines(Path("out/lab/sweep/sweep.jsonl"))
        Path("odd.py").write_text(ODD, encoding="utf-8")
        assert lab.main(Arguments(("sweep", "odd.py", *words[2:], "--study", "odd")), print) == 0
        (odd,) = read_lines(Path("out/lab/odd/sweep.jsonl"))
    assert (odd["outcome"], odd["reason"], odd["runs"]) == ("refused", "no head of 16 channels", [])
    assert core.bpb == again.bpb and core.bpb is not None and sinks.bpb is not None
    assert line["outcome"] == "finished" and line["runs"][0]["parameters"] == core.parameters
    assert core.parameters == asdict(counts)
    assert core.flops >= 6 * core.tokens * counts.kaplan
    assert [point.step for point in core.curve] == [2, 3]
    assert sinks.parameters["scalars"] - core.parameters["scalars"] == 2 and 0 < abs(core.bpb - sinks.bpb) < 0.3
