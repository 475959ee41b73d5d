"""The JAX twin's stage: it trains a base model on prepared text, evaluates it, and moves it to PyTorch or from there.

Records and checkpoints are in out/runs/<run>/grug/, beside those of the other stages.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save

from quern.data.batch import Batch
from quern.data.packing import windows
from quern.eval.bits_per_byte import BitsPerByte, sums
from quern.field_types import code_path
from quern.grug.evaluate import flops_per_token, group_sizes, measure_peak_flops
from quern.grug.mesh import BATCH, batch_shards, check_model_axis, check_rows, first_process_first, place
from quern.grug.model import Params, layout
from quern.grug.state import Grug, StepConfig, eval_step, init_state, state_of, step_config
from quern.model.base import KINDS
from quern.model.count import Flops, Parameters, of_kinds
from quern.model.gpt import GPT
from quern.recipe import Recipe, Resolved, ResolvedModel
from quern.recipes import gpt
from quern.records import git_hash
from quern.resolve import resolve
from quern.runs.load import open_checkpoint
from quern.runs.origin import FILE, Origin, compare, read_origin, source_digest, with_absolute_paths
from quern.runs.public_data import with_shards
from quern.runs.run_dir import STAGES, RunDir
from quern.runs.training import fit_to_text, make_batches, plan_of
from quern.stages.jax.backend import JaxBackend, JaxRun, Tensors, arrays_of, known, name_of, processes
from quern.stages.prepare import Prepared, data_of_run, fit_vocabulary, own_megabytes
from quern.stages.session import Opening, Stage, loss_and_speed
from quern.temporaries import whole_file, write_whole
from quern.terminal import counted
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, loop, manifest
from quern.train.guard import Guard
from quern.train.state import weights_of
from quern.train.step import Evaluator
from quern.validate import check_body

STAGE = "grug"
OF_TEXT = ("data", "val", "shards")  # fields that a resumed run takes from its saved recipe, unless they are named


class JaxStage(Stage):
    """One call of the stage. Its ranks are the processes of JAX."""

    def main_first(self) -> AbstractContextManager[None]:
        return first_process_first()


def run(asked: Recipe, mesh: Mesh, stage: JaxStage, *, dtype: str) -> int:
    """Trains to the recipe's horizon and returns an exit code of `train.guard`. Every process of the mesh calls this.

    asked: the `gpt` recipe, or one whose `make_model` is a `Grug`; dtype: dtype of weights and activations in a step.

    Raises:
        ValueError: On every process, the run exists and `resume` is false, or its recipe, text or tokenizer differs, or
            the recipe does not fit the mesh.
    """
    run_dir, path = stage.run_dir, stage.folder
    core, asked = core_of(asked), with_absolute_paths(asked)
    asked = fit_vocabulary(asked, own_megabytes(asked, run_dir.out))
    recipe = resolve(asked)
    refuse_dropout(recipe)  # before the text is prepared
    check_model_axis(recipe.model, mesh)
    check_rows(mesh, recipe.micro_batch_rows)
    with stage.opened(), jax.set_mesh(mesh):
        began = read_origin(path) if stage.resume and (path / FILE).exists() else None  # an imported model has none
        recipe, prepared = _with_text(asked, began, stage)
        mark = source_digest(stage.source) or (began and began.source)
        origin = replace(prepared.origin, recipe=recipe.to_json(), source=mark)
        changed = compare(began, origin, run_dir, STAGE)
        cfg = step_config(recipe, dtype, core)
        if stage.mesh.main:
            _write_facts(stage, cfg, mesh, prepared.facts)
        evaluators = [(recipe.train.eval_every, lambda run: validate_run(run, recipe, prepared, mesh))]
        plan = make_plan(recipe, cfg, evaluators)
        plan = replace(plan, peak_flops=measure_peak_flops(cfg.dtype, mesh))
        steps = f"{counted(plan.steps, 'step')} of {recipe.train.batch_tokens:,} tokens"
        told = f"training: {steps} in {dtype} on {describe(mesh)}"
        opening = Opening([told], changed, prepared.tokenizer, {} if began is None else None)
        backend, batches = JaxBackend(fresh_run(recipe, cfg, mesh), stage.mesh), make_batches(recipe, prepared.train)
        return stage.train(backend, batches, plan, origin, opening)


def loss_and_perplexity(loss: float, tokens_per_second: float | None) -> str:
    """Describes a step on the progress line."""
    perplexity = math.exp(min(loss, 700))  # e^710 exceeds a float
    return f"{loss_and_speed(loss, tokens_per_second)}, perplexity {perplexity:,.1f}"


def _with_text(recipe: Recipe, began: Origin | None, stage: JaxStage) -> tuple[Resolved, Prepared]:
    """The recipe fitted to its text, which process 0 prepares: the run's own, unless the user names another."""
    if began is not None:
        body = began.recipe
        check_body(body)
        recipe = replace(recipe, **{name: body[name] for name in OF_TEXT if name not in stage.named and name in body})
        recipe = replace(recipe, model=replace(recipe.model, vocab_size=body["model"]["vocab_size"]))
    prepared = stage.text(resolve(recipe), began)
    return fit_to_text(with_shards(recipe, prepared.public), prepared.tokenizer, prepared.train), prepared


def refuse_dropout(recipe: Resolved) -> None:
    """Raises ValueError for a recipe that leaves out pairs in training, which the twin does not."""
    if recipe.model.bigram_dropout:
        raise ValueError("the JAX twin trains with all pairs: leave --model.bigram-dropout out, or train with PyTorch")


def fresh_run(recipe: Resolved, cfg: StepConfig, mesh: Mesh) -> JaxRun:
    """A state at step 0, on the current mesh."""
    refuse_dropout(recipe)
    return JaxRun(init_state(recipe.seed, cfg), cfg, mesh, guard=Guard(recipe.train.max_skips))


def make_plan(recipe: Resolved, cfg: StepConfig, evaluators: Sequence[tuple[int, Evaluator]]) -> loop.TrainingPlan:
    """The settings of the loop. A mesh must be set."""
    each = flops_per_token(cfg)
    return plan_of(recipe, lambda batch, progress: Flops(products=batch.tokens.size * each), evaluators)


def evaluate(run_dir: RunDir, mesh: Mesh, *, dtype: str, log: Callable[[str], None]) -> dict[str, Any]:
    """Measures the run's newest JAX state, and appends its bits per byte to evaluate.jsonl."""
    run, recipe, _ = load(run_dir, mesh, dtype, log)
    prepared = data_of_run(recipe, run_dir, lambda line: None, STAGE)
    with jax.set_mesh(mesh):
        score = validate_run(run, recipe, prepared, mesh)
    line = {"stage": STAGE, "step": run.step, "task": "validation", "metric": "bpb"}
    if jax.process_index() == 0:
        run_dir.append("evaluate.jsonl", [line | {"value": score["val_bpb"]}])
    nats = score["val_loss"]
    log(
        f"step {run.step:,}: {score['val_bpb']:.4f} bits per byte, {nats:.4f} nats per token, "
        f"perplexity {math.exp(nats):,.2f}"
    )
    return score


def load(run_dir: RunDir, mesh: Mesh, dtype: str, log: Callable[[str], None]) -> tuple[JaxRun, Resolved, Tokenizer]:
    """Loads the run's newest good JAX state, sharded over the mesh, with its recipe and tokenizer. Raises
    FileNotFoundError without one, CheckpointError if all are damaged, ValueError if another tokenizer than the run's
    trained it."""
    if not run_dir.has_trained(STAGE):
        raise FileNotFoundError(run_dir.has_no("JAX model", "grug train"))
    start = open_checkpoint(run_dir, STAGE, log)
    recipe = start.recipe
    cfg = step_config(recipe, dtype, core_of(recipe))
    with jax.set_mesh(mesh):
        arrays = arrays_of(known(start.tensors), jax.eval_shape(lambda: init_state(recipe.seed, cfg)), mesh)
    run = JaxRun(arrays, cfg, mesh, guard=Guard(recipe.train.max_skips))
    run.count_from(start.state)
    return run, recipe, start.tokenizer


def core_of(recipe: Recipe) -> type[Grug]:
    """Returns the functions of a recipe's model: the core's for `gpt`. Raises ValueError for other PyTorch recipes."""
    made, own = recipe.make_model, isinstance(recipe.make_model, type) and issubclass(recipe.make_model, Grug)
    for field in ("make_rules",) if own else ("make_model", "make_rules"):
        if code_path(getattr(recipe, field)) != code_path(getattr(gpt.RECIPE, field)):
            raise ValueError(
                f"recipe '{recipe.name}' has {field} = {recipe.to_json()[field]}, which is PyTorch's: train it with "
                "`quern pretrain`, or write the idea for the JAX twin (docs/grug.md)"
            )
    return made if own else Grug  # pyright: ignore[reportReturnType]


def describe(mesh: Mesh) -> str:
    """Returns the mesh as text, such as "8 x cpu (data 4, model 2)"."""
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    return f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}" + (f" ({axes})" if axes else "")


def validate_run(run: JaxRun, recipe: Resolved, prepared: Prepared, mesh: Mesh) -> dict[str, Any]:
    """Measures a state on the validation text, in batches of about a micro-batch: a multiple of its shards."""
    shards, context = batch_shards(mesh), recipe.model.context
    rows = max(1, recipe.micro_batch_rows // shards) * shards

    def losses(batch: Batch) -> np.ndarray:
        inputs, targets = (place(x, P(BATCH, None), mesh) for x in (batch.tokens, batch.targets))
        return np.asarray(eval_step(run.arrays.params, inputs, targets, run.cfg), dtype=np.float64)

    # Widths are multiples of `multiple`; each width is compiled once.
    batches = windows(prepared.val, context, rows=rows, multiple=max(64, context // 4))
    score = BitsPerByte.of(*sums(batches, prepared.tokenizer.token_bytes(), losses))
    return {"val_bpb": score.bpb, "val_loss": score.nats_per_token}


def count(cfg: StepConfig) -> Parameters:
    """Counts the parameters of a model."""
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    for group, size in group_sizes(cfg).items():
        kinds[group if group in KINDS else GPT.group_kinds.get(group, "scalars")] += size
    return of_kinds(kinds)


def _write_facts(stage: JaxStage, cfg: StepConfig, mesh: Mesh, facts: dict[str, Any]) -> None:
    """Writes machine.json: the command, the devices, the versions, the model. With facts on its text, a run that
    PyTorch has not trained also gets run.json."""
    devices = {"devices": describe(mesh), "processes": jax.process_count(), "mesh": dict(mesh.shape)}
    body = {
        "command": stage.command,
        "git": git_hash(Path(__file__).parent),
        "machine": {**devices, "dtype": cfg.dtype},
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "model": {"parameters": vars(count(cfg)), "flops_per_token": flops_per_token(cfg)},
    }
    write_whole(stage.folder / "machine.json", json.dumps(body, indent=2) + "\n")
    if facts and not any(map(stage.run_dir.has_trained, STAGES)):
        stage.run_dir.write("run.json", body | facts)


# To PyTorch and back ----------------------------------------------------------------------------------------
#
# Weights are copied, optimizer state is not: training continues with fresh moments. Both sides store weights as
# (outputs, inputs) in fp32, so parameters are only renamed, and a round trip changes no bit.

_TORCH_NAMES = {name: f"{name}.weight" for name in ("embedding", "head", "bigrams", "smear_gate")}
_TORCH_NAMES |= {name: f"attention.{name}.weight" for name in ("query", "key", "value", "out", "value_gate")}
_TORCH_NAMES |= {name: f"mlp.{name}.weight" for name in ("up", "down")}


def _torch_name(path: Any) -> str:
    """Returns the name in the PyTorch model of the parameter at a path in `Params`."""
    *block, field = name_of(path).split(".")
    if field == "value_embedding":
        return f"value_embeddings.{block[1]}.weight"
    return ".".join([*block, _TORCH_NAMES.get(field, field)])


def to_torch(params: Params) -> dict[str, np.ndarray]:
    """Returns the parameters by their names in the PyTorch model, fp32, on the host."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {_torch_name(path): np.asarray(value, dtype=np.float32) for path, value in leaves}


def from_torch(tensors: Tensors, cfg: ResolvedModel, mesh: Mesh) -> Params:
    """Converts arrays, by their names in the PyTorch model, into parameters on the mesh. Raises ValueError naming one
    that is missing, unknown or of another shape."""
    return arrays_of(tensors, layout(cfg, mesh), mesh, _torch_name)


def export(run_dir: RunDir, mesh: Mesh, log: Callable[[str], None]) -> Path:
    """Writes the newest JAX state as weights.safetensors, and as a base model that the other verbs find, whose path is
    returned. Raises ValueError if PyTorch has trained one in this run, or the model comes from a file of its own."""
    target = run_dir.checkpoints("pretrain")
    run, recipe, tokenizer = load(run_dir, mesh, "float32", log)
    if run.cfg.core is not Grug:
        raise ValueError(
            f"the model of run '{run_dir.run}' comes from a file ('{recipe.name}'), which PyTorch cannot read: "
            "export a run of the `gpt` recipe (`quern grug train` without a file)"
        )
    known = manifest.latest(target, log)
    if known is not None and known[1]["meta"].get("trained_by") != STAGE:
        raise ValueError(
            f"run '{run_dir.run}' has a base model that PyTorch trained: move {run_dir.stage('pretrain')} away, "
            "or train the JAX model under another name (--run)"
        )
    meta = Origin(tokenizer.fingerprint, recipe=recipe.to_json()).meta()
    weights = {name: np.array(value, order="C") for name, value in to_torch(run.arrays.params).items()}
    file, facts = run_dir.stage(STAGE) / "weights.safetensors", {name: meta[name] for name in ("recipe", "tokenizer")}
    with whole_file(file) as part:
        part.write_bytes(save(weights, {"quern": json.dumps(facts | {"step": run.step})}))
    tensors = {f"master.{name}": torch.from_numpy(value) for name, value in weights.items()}
    meta |= {"state": run.meta(), "trained_by": STAGE}
    path = checkpoint.save(target, run.step, tensors, meta, recipe.train.keep)
    log(f"exported step {run.step:,} → {file} and {path}")
    return path


def bring_over(run_dir: RunDir, mesh: Mesh, stage: str | None, log: Callable[[str], None]) -> Path:
    """Writes the newest PyTorch model, by default of the last stage, as a JAX checkpoint with fresh moments; returns
    its folder. Raises FileNotFoundError or CheckpointError without a model, ValueError for another architecture or a
    run with a JAX model."""
    target = run_dir.checkpoints(STAGE)
    if manifest.steps(target):
        raise ValueError(f"run '{run_dir.run}' has a JAX model already: move {run_dir.stage(STAGE)} away first")
    start = open_checkpoint(run_dir, run_dir.require_trained(stage)[-1], log)
    recipe, core = start.recipe, core_of(start.recipe)
    with jax.set_mesh(mesh):
        cfg = step_config(recipe, "float32", core)
        arrays = state_of(from_torch(weights_of(start.tensors), recipe.model, mesh), cfg)
    run = JaxRun(arrays, cfg, mesh, guard=Guard(0), step=start.step, tokens=start.state["tokens"])
    meta = Origin(start.tokenizer.fingerprint, recipe=recipe.to_json()).meta() | {"state": run.meta()}
    ranks = processes()
    checkpoint.save(target, run.step, JaxBackend(run, ranks).save(), meta, recipe.train.keep, ranks)
    log(f"imported step {run.step:,} of {start.stage} → {target}")
    return target
