"""Runs `quern grug` verbs in JAX's process (tests/support/jax_process.py) and checks their results with PyTorch."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import torch
from jax.sharding import PartitionSpec as P

import quern.recipes.gpt
from quern.data.packing import windows
from quern.eval.bits_per_byte import bits_per_byte
from quern.flags.recipe_flags import Arguments
from quern.grug.mesh import BATCH, make_mesh, place
from quern.grug.model import forward, logits
from quern.lab.arms import Arm, in_process, train_here
from quern.model.count import count, weightless
from quern.model.gpt import GPT
from quern.recipe import Recipe
from quern.recipes import load_recipe
from quern.records import read_metrics
from quern.resolve import resolve
from quern.runs.load import load
from quern.runs.run_dir import RunDir
from quern.stages.jax import command
from quern.stages.jax import train as jax_stage
from quern.stages.jax.command import training
from quern.stages.open_data import data_of_run
from quern.train import checkpoint, manifest
from tests.grug.parity import EXPERIMENTS, relative
from tests.support.small_text import write_text
from tests.support.toy_training import CPU

WHERE = ["--out", "out", "--dtype", "fp32"]
TRAIN = """train --data text.jsonl --depth 1 --text.vocab-size 320 --model.width 32 --model.head-dim 16
 --model.context 32 --train.batch-tokens 256 --train.micro-batch-tokens 256 --train.steps 4
 --optim.lr-scale 0.3""".split()


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """A temporary current folder with a small text."""
    before, path = Path.cwd(), Path(tempfile.mkdtemp())
    os.chdir(path)
    try:
        write_text(path)
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(path)


def verb(*arguments: str) -> str:
    """Runs a verb; returns the message of its refusal, or "" where it succeeded."""
    try:
        return "" if command.main(Arguments((*arguments, *WHERE)), print) == 0 else "another exit code"
    except (ValueError, FileNotFoundError) as error:
        return str(error)


def chain() -> dict[str, Any]:
    """train → eval → export → PyTorch's measure; PyTorch's checkpoint → import → equal logits; and what is refused."""
    mesh = make_mesh(devices=jax.devices()[:1])  # programs for one device compile faster
    peak = patch.object(jax_stage, "measure_peak_flops", lambda dtype, mesh: 1e12)
    with folder(), peak, patch.object(command, "open_mesh", lambda where: mesh):
        twin, back = RunDir(Path("out"), "twin"), RunDir(Path("out"), "back")
        found: dict[str, Any] = {"export before training": verb("export", "--run", "twin")}
        found["verbs"] = [verb(*TRAIN, "--run", "twin"), verb("eval", "--run", "twin"), verb("export", "--run", "twin")]
        found["import over a JAX model"] = verb("import", "--run", "twin")
        loaded = load(twin, CPU, print)
        prepared = data_of_run(loaded.recipe, twin, print, jax_stage.STAGE)
        batches = windows(prepared.val, 32, rows=8)
        measured = json.loads((twin.folder / "evaluate.jsonl").read_text(encoding="utf-8").splitlines()[-1])
        expected = bits_per_byte(loaded.model, batches, loaded.tokenizer.token_bytes(), CPU).bpb
        found["step"], found["bits per byte"] = loaded.step, relative(measured["value"], expected)

        shutil.copytree(twin.folder, back.folder)
        shutil.rmtree(back.stage(jax_stage.STAGE))
        found["import"] = verb("import", "--run", "back")
        tokens = np.random.default_rng(0).integers(0, 320, (8, 32)).astype(np.int32)
        twice = jax_stage.load(back, mesh, "float32", print)
        with jax.set_mesh(mesh):
            params, shape = twice.run.arrays.params, twice.run.cfg.model
            run = jax.jit(lambda params, tokens: logits(params, forward(params, tokens, shape), shape))
            ours = run(params, place(tokens, P(BATCH, None), mesh))
        with torch.no_grad():
            inputs = torch.from_numpy(tokens.astype(np.int64))
            theirs = loaded.model.logits(loaded.model(inputs, loaded.model.context(inputs))).numpy()
        found["imported step"], found["logits"] = twice.run.step, relative(ours, theirs)
        found |= refusals(back)
    return found


def from_a_file() -> dict[str, Any]:
    """Trains a file of the twin, resumes, evaluates; what is refused; and a trial of it in a study."""
    mesh = make_mesh(devices=jax.devices()[:1])
    peak = patch.object(jax_stage, "measure_peak_flops", lambda dtype, mesh: 1e12)
    with folder(), peak, patch.object(command, "open_mesh", lambda where: mesh):
        file, run_dir = "idea.py", RunDir(Path("out"), "idea")
        shutil.copy(EXPERIMENTS / "grug" / "attention_sink.py", file)
        train = ["train", file, *TRAIN[1:], "--run", "idea"]
        found: dict[str, Any] = {"verbs": [verb(*train)]}
        found["without the file"] = verb("train", *TRAIN[1:], "--run", "idea", "--resume", "--train.steps", "6")
        found["verbs"] += [verb(*train, "--resume", "--train.steps", "6")]
        Path(file).unlink()  # the run has a copy
        found["verbs"] += [verb("eval", "--run", "idea")]
        loaded = jax_stage.load(run_dir, mesh, "float32", print)
        found["trained"] = [loaded.run.step, loaded.recipe.name, loaded.run.cfg.core.__name__]
        block: Any = loaded.run.arrays.params.blocks[0]
        found["sinks move"] = bool(np.any(np.asarray(block.sinks)))
        found["export"] = verb("export", "--run", "idea")
        lines = read_metrics(run_dir.stage(jax_stage.STAGE) / "metrics.jsonl")
        found["perplexity"] = [relative(x["perplexity"], math.exp(x["loss"])) for x in lines if "loss" in x]
        wide = make_mesh(model=4, devices=jax.devices()[:4])
        with patch.object(command, "open_mesh", lambda where: wide):
            found["axis"] = [verb(*train[:1], *TRAIN[1:], "--run", "wide"), verb("export", "--run", "idea")]
        return found


def trials() -> dict[str, Any]:
    """A file of the twin in a process of its own, twice; another one here."""
    with folder():
        arms = {}
        for name in ("core", "attention_sink"):
            path = EXPERIMENTS / "grug" / f"{name}.py"
            recipe, source = load_recipe(str(path))
            arms[name] = Arm(name, training(Arguments((*TRAIN[1:], "--train.steps", "3")), recipe).recipe, path, source)
        machine = {"device": "cpu", "threads": 1}
        core, again = in_process(Path("out"), machine)(arms["core"], [(1, 1), (1, 1)])
        (sinks,) = train_here(Path("out"), machine)(arms["attention_sink"], [(1, 1)])
        recipe = resolve(arms["core"].recipe)
        counts = count(weightless(replace(recipe, make_model=GPT, model=replace(recipe.model, vocab_size=320))))
        return {
            "repeats": core.bpb == again.bpb,
            "counts": [
                core.parameters == asdict(counts.parameters),
                core.flops >= 6 * core.tokens * counts.parameters.kaplan,
            ],
            "curve": [point.step for point in core.curve],
            "added": sinks.parameters["scalars"] - core.parameters["scalars"],
            "gap": abs((core.bpb or 9) - (sinks.bpb or 0)),
        }


def refusals(run_dir: RunDir) -> dict[str, str]:
    """Saves the run's base model as PyTorch's own, then as one of another architecture."""
    newest = manifest.latest(run_dir.checkpoints("pretrain"), print)
    assert newest is not None
    tensors, meta = checkpoint.load(newest[0])
    del meta["trained_by"]
    checkpoint.save(run_dir.checkpoints("pretrain"), 5, tensors, meta, 1)
    found = {"export over PyTorch's model": verb("export", "--run", "back")}
    shutil.rmtree(run_dir.stage(jax_stage.STAGE))
    meta["recipe"]["make_model"] = "quern.model.unet:UNet"
    checkpoint.save(run_dir.checkpoints("pretrain"), 6, tensors, meta, 1)
    return found | {"import of another architecture": verb("import", "--run", "back")}


def changed(part: Any) -> Any:
    """The same recipe with every number changed."""
    values = {f.name: getattr(part, f.name) for f in fields(part)}
    numbers = {name: value * 2 + 1 for name, value in values.items() if type(value) in (int, float)}
    return replace(part, **numbers, **{name: changed(value) for name, value in values.items() if is_dataclass(value)})


def recipes() -> dict[str, list[str]]:
    """Fields in which the recipe that `quern grug train` trains differs from the `gpt` recipe, as it is and with every
    number changed; and that the comparison names a changed number."""
    run, recipe, seen = jax_stage.run, quern.recipes.gpt.RECIPE, []
    jax_stage.run = lambda recipe, *rest, **more: seen.append(recipe) or 0  # type: ignore[assignment]
    try:
        found = {}
        for name, expected in (("as it is", recipe), ("every number changed", changed(recipe))):
            quern.recipes.gpt.RECIPE = expected
            assert verb("train") == ""
            found[name] = differences(seen[-1], expected)
    finally:
        jax_stage.run, quern.recipes.gpt.RECIPE = run, recipe
    one = replace(recipe, optim=replace(recipe.optim, gate_lr=0.03))
    return found | {"one number": differences(one, recipe), "all": differences(changed(recipe), recipe)}


def differences(one: Recipe, other: Recipe) -> list[str]:
    def flat(body: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        items = [flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {prefix + k: v} for k, v in body.items()]
        return {key: value for item in items for key, value in item.items()}

    ours, theirs = flat(one.to_json()), flat(other.to_json())
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
