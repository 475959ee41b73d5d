"""The batches, the model and the evaluator of the training loop, from a resolved recipe and prepared text.

Pretraining, fine-tuning, the JAX stage and the lab's trials all take them from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from quern.data.batch import Batch, Batches
from quern.data.loader import Loader, groups_of
from quern.data.packing import windows
from quern.data.shards import Corpus
from quern.eval.bits_per_byte import bits_per_byte
from quern.field_types import imported
from quern.machine import Machine
from quern.mesh import Mesh, ProcessGroup
from quern.model.base import LanguageModel, recompute
from quern.model.count import Flops, count, flop_counter, kv_elements_per_token
from quern.model.fp8 import use_fp8
from quern.optim.schedule import Multipliers, warmup_stable_decay
from quern.parallel.plan import shard_model
from quern.recipe import Recipe, Resolved, TrainRecipe
from quern.resolve import resolve, table_decay_rule
from quern.text.tokenizer import Tokenizer
from quern.train.loop import TrainingPlan
from quern.train.state import TrainState, build_model, compile_model
from quern.train.step import Evaluator


def with_vocabulary(recipe: Recipe, tokenizer: Tokenizer | None) -> Recipe:
    """Returns a recipe with its model's vocabulary, from which the length and the batch follow when it is resolved.

    A tokenizer of another size than the recipe's is one that came with the text, or one that a small text kept below
    the size that was asked for: its vocabulary is filled up to a multiple (`LanguageModel.vocabulary_multiple`). A
    recipe that already has the tokenizer's BOS belongs to a model, such as an imported one, and keeps its vocabulary.

    tokenizer: of the text; None for one of the size that the recipe asks for.
    """
    model = resolve(recipe).model
    size = model.vocab_size
    if tokenizer is not None and model.bos != tokenizer.bos and tokenizer.vocab_size != size:
        multiple = getattr(imported(recipe.make_model), "vocabulary_multiple", 1)
        size = -(-tokenizer.vocab_size // multiple) * multiple
    return replace(recipe, model=replace(recipe.model, vocab_size=size))


def fit_to_text(asked: Recipe, tokenizer: Tokenizer, corpus: Corpus, replicas: int = 1) -> Resolved:
    """Resolves a recipe with what depends on its text: vocabulary, BOS, decay of the head and value embeddings.

    corpus: the training tokens. A text of several groups counts as read once.
    """
    recipe = resolve(with_vocabulary(asked, tokenizer), replicas)
    optim = recipe.optim
    if optim.table_decay_scale is None and "optim.table_decay_scale" not in recipe.unused:
        one_group = groups_of(corpus) == 1
        optim = replace(optim, table_decay_scale=table_decay_rule(recipe, corpus.num_tokens) if one_group else 1.0)
    return replace(recipe, model=replace(recipe.model, bos=tokenizer.bos), optim=optim)


def make_batches(recipe: Resolved, corpus: Corpus, rows: int | None = None) -> Batches:
    """The recipe's batches; of `rows` rows, in the default order, where that is given."""
    context, batch_tokens = recipe.model.context, recipe.train.batch_tokens
    if recipe.make_batches is not None and rows is None:
        return recipe.make_batches(recipe, corpus)
    rows = rows or max(1, batch_tokens // context)
    return Loader(corpus, context, rows, recipe.data_seed, recipe.train.packing)


def ready_model(
    recipe: Resolved,
    tokenizer: Tokenizer,
    machine: Machine,
    mesh: Mesh,
    log: Callable[[str], None],
    *,
    weights: dict[str, Tensor] | None = None,
    compiled: bool = True,
) -> tuple[LanguageModel, dict[str, Any], dict[str, Any]]:
    """Makes a model that is ready to train: cut for the mesh, and set up as `set_up_training` says.

    Args:
        recipe: Resolved, with the tokenizer's vocabulary.
        weights: fp32 weights by parameter name; None draws them from the recipe's seed.
        compiled: Whether the machine may compile it.

    Returns:
        The model, facts for run.json, and the facts among them that say how its precision is lowered.
    """
    model = build_model(recipe, machine, recipe.seed if weights is None else None, weights)
    facts = {"model": model_facts(recipe, model, machine)}
    shard_model(model, mesh)
    precision = set_up_training(recipe, model, tokenizer, machine, log, compiled=compiled)
    return model, facts | precision, precision


def plan_of(
    recipe: Resolved, flops: Callable[[Batch, float], Flops], evaluators: Sequence[tuple[int, Evaluator]]
) -> TrainingPlan:
    """The settings of the loop that a recipe has, for a machine whose speed is not known."""
    train = recipe.train
    return TrainingPlan(
        steps=train.steps,
        schedule=recipe.make_schedule(train),
        micro_batch_rows=recipe.micro_batch_rows,
        log_every=train.log_every,
        save_every=train.save_every,
        keep=train.keep,
        flops=flops,
        peak_flops=math.inf,
        evaluators=evaluators,
    )


def model_facts(recipe: Resolved, model: LanguageModel, machine: Machine) -> dict[str, Any]:
    """The size of a whole model, and what a token costs, for run.json."""
    return {
        "parameters": vars(count(model)),
        "flops_per_token": flop_counter(recipe).per_token(),
        "kv_bytes_per_token": kv_elements_per_token(model) * machine.dtype.itemsize,
    }


def set_up_training(
    recipe: Resolved,
    model: LanguageModel,
    tokenizer: Tokenizer,
    machine: Machine,
    log: Callable[[str], None],
    *,
    compiled: bool = True,
) -> dict[str, Any]:
    """Gives a new model its vocabulary, FP8, compilation and recomputation, as recipe and machine say. Returns facts
    for the records: how the precision is lowered, if it is."""
    model.read_vocabulary(tokenizer.vocabulary())
    facts: dict[str, Any] = {}
    if recipe.train.fp8 != "off":
        report = use_fp8(model, head_only=recipe.train.fp8 == "head")  # before the model is compiled
        log(str(report))
        facts["fp8"] = asdict(report)
    if compiled:
        compile_model(model, machine)
    recompute(model, recipe.train.recompute)
    return facts


def validation(recipe: Resolved, tokenizer: Tokenizer, corpus: Corpus, machine: Machine) -> Evaluator:
    """Bits per byte on the fixed validation set, every byte once; the replicas share its batches."""
    token_bytes, context, rows = tokenizer.token_bytes(), recipe.model.context, recipe.micro_batch_rows

    def evaluate(state: TrainState) -> dict[str, Any]:
        replicas = state.optimizer.mesh.data
        batches = _shared_out(windows(corpus, context, rows=rows), replicas)
        score = bits_per_byte(state.model, batches, token_bytes, machine, replicas)
        return {"val_bpb": score.bpb, "val_loss": score.nats_per_token}

    return evaluate


def _shared_out(batches: Iterator[Batch], replicas: ProcessGroup) -> Iterator[Batch]:
    """This replica's batches; one without targets where others have one more, so that all run equally many passes."""
    while several := list(islice(batches, replicas.size)):
        empty = replace(several[0], mask=np.zeros_like(several[0].mask))
        yield (several + [empty] * replicas.size)[replicas.rank]


def rates_fall(steps: int, share: float) -> Callable[[float], Multipliers]:
    """Rates that fall to zero over this share of the steps; what grows in pretraining (`progress`) has grown."""
    train: Any = TrainRecipe(steps=steps, warmup_steps=0, warmdown_share=share, final_lr=0.0)
    told = warmup_stable_decay(train)
    return lambda step: told(step)._replace(progress=1.0)
