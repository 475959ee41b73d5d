"""Reinforcement learning: a fine-tuned model practises questions whose answers a program checks.

The loop, the optimizer and the checkpoints are the same as in other stages. Only the batches differ: the model's own
replies, weighted by their advantages (quern/rl/). The model is not compiled: replies are short and of many lengths, and
compiling each shape, or padding all to the context, takes longer than it saves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from quern.compiler import eager
from quern.generate.engine import Engine
from quern.mesh import Mesh
from quern.parallel.plan import shard_model
from quern.recipe import FOR_RL, IN_FINE_TUNING, Recipe, Resolved, RlRecipe
from quern.resolve import fine_tuning_rates, resolve
from quern.rl.environment import Environment, draw_item, fingerprint, load_environment
from quern.rl.rollouts import Rollouts, divergence, means, pass_at_k
from quern.runs.load import Start, open_checkpoint
from quern.runs.origin import compare, overlay, source_digest, with_absolute_paths
from quern.runs.run_dir import require_trusted, trust
from quern.runs.training import rates_fall, ready_model
from quern.stages.session import Opening, Session
from quern.temporaries import sha256_of
from quern.terminal import counted
from quern.train import manifest
from quern.train.state import TrainState, build_model, build_state, weights_of
from quern.train.step import Evaluator, TorchBackend

VALIDATIONS = 4
VAL_SEED = "validation"


def run(recipe: Recipe, session: Session) -> int:
    """Trains a fine-tuned model on rewards, and returns an exit code of `train.guard`. On a mesh every rank calls this.

    It begins with the session's start, by default the fine-tuned model of the run. Of the recipe count `rl` and the
    fields `IN_FINE_TUNING`.

    Raises:
        FileNotFoundError, CheckpointError: There is no fine-tuned model, or no good checkpoint of it; the folder of
            `rl.data` lacks a file; or a resumed stage has lost its step 0.
        ValueError: An environment does not exist, replicas share parameters, or `resume` is off and the run practised.
        RunInUseError: Another process trains in the run.
    """
    if session.mesh.zero == 3:
        raise ValueError("--zero 3 shares the parameters, and each replica samples replies by itself: leave it out")
    with session.opened():
        return _run(recipe, session)


def _run(asked: Recipe, session: Session) -> int:
    machine, run_dir, mesh, log = session.machine, session.run_dir, session.mesh, session.log
    session, first, base, tokenizer, start = session.begin(asked, "sft")
    recipe = rl_recipe(asked, base)
    environments = _environments(recipe.rl, session)
    rewards, digest = fingerprint(environments), source_digest(session.source) or first.source
    origin = replace(first, recipe=recipe.to_json(), rewards=rewards, source=digest)
    changed = compare(None if start else first, origin, run_dir, session.stage)
    weights = weights_of((start or _kept_start(session)).tensors)
    model, facts, precision = ready_model(recipe, tokenizer, machine, mesh, log, weights=weights, compiled=False)
    reference = build_model(recipe, machine, None, weights)
    shard_model(reference, mesh)
    state = build_state(recipe, machine, model.eval(), mesh)  # dropout would part sampled from trained probabilities
    if start is not None and not state.go_on(start.tensors, start.state):
        log("the optimizer begins without the fine-tuned model's state, which is another optimizer's")
    rollouts = Rollouts(
        Engine(state.model, tokenizer, machine),
        environments,
        recipe.rl,
        recipe.seed if recipe.rl.seed is None else recipe.rl.seed,
        micro_batch_rows=recipe.micro_batch_rows,
        reference=reference.eval(),
        mesh=mesh,
    )

    def tally(state: TrainState | None = None) -> dict[str, float]:
        totals = Counter[str]()
        for own in mesh.data.gather_objects(dict(rollouts.totals)):
            totals.update(own)
        return means(totals)

    plan = session.plan(
        recipe,
        validation(rollouts, mesh),
        steps=recipe.rl.steps,
        schedule=rates_fall(recipe.rl.steps, recipe.rl.warmdown_share),
        keep_step=0,  # the divergence from the first weights is measured to the end
        row_tokens=recipe.model.context,
        together=recipe.rl.updates,
    )
    plan = replace(plan, evaluators=[(1, tally), *plan.evaluators])
    told = (
        f"reinforcement learning: {counted(plan.steps, 'step')} of {recipe.rl.groups * recipe.rl.samples} replies to "
        f"{counted(recipe.rl.groups, 'question')} ({', '.join(recipe.rl.rewards)})"
    )
    data = {"environments": list(recipe.rl.rewards)} | precision
    opening = Opening([told], changed, tokenizer, start and start.facts_in(run_dir, facts), data)
    backend = TorchBackend(state, machine, recipe.train.clip_norm, recipe.seed)
    session = replace(session, shown=lambda *step: f"reward {tally()['reward']:.3f}")
    with eager():  # the loss too would be compiled for each number of tokens, and from a certain one on no more
        return session.train(backend, rollouts, plan, origin, opening)


def _environments(rl: RlRecipe, session: Session) -> list[Environment]:
    """Loads what is practised. A file is executed where this output folder trusts it, or the user named it just now."""
    out, folder = session.run_dir.out, Path(rl.data) if rl.data else None
    for path in (Path(name) for name in rl.rewards if name.endswith(".py") and Path(name).is_file()):
        if "rl.rewards" in session.named:
            trust(out, sha256_of(path))
        require_trusted(out, path)
    environments = [load_environment(name, folder) for name in rl.rewards]
    if len({one.name for one in environments}) < len({*rl.rewards}):
        names = ", ".join(one.name for one in environments)
        raise ValueError(f"two of --rl.rewards have the same name ({names}): their scores would be one; rename one")
    for environment in environments:
        for note in environment.notes:
            session.log(f"{environment.name}: {note}")
    return environments


def _kept_start(session: Session) -> Start:
    """The model that a resumed stage began with, which is kept as its step 0."""
    folder = session.run_dir.checkpoints("rl")
    if 0 not in manifest.steps(folder):
        raise FileNotFoundError(f"{folder} has lost step 0, its first model: remove {folder.parent}, and begin again")
    return open_checkpoint(session.run_dir, "rl", session.log, "0")


def rl_recipe(asked: Recipe, base: Resolved) -> Resolved:
    """The fine-tuned model's recipe with what is asked for reinforcement learning; resolved.

    `rl.lr_share` of sqrt(batch / 2^19), by pretraining's batch, multiplies every rate. Validations and checkpoints
    follow every quarter, unless their number was asked for. Raises ValueError for values that contradict each other.
    """
    rl = asked.rl
    if not rl.rewards:
        raise ValueError("rl.rewards is empty: name what to practise, such as counting")
    if rl.overlong_tokens > rl.max_tokens:
        raise ValueError(f"rl.overlong-tokens must be at most rl.max-tokens, {rl.max_tokens}, not {rl.overlong_tokens}")
    if rl.updates > rl.groups:
        raise ValueError(f"rl.updates must be at most rl.groups, {rl.groups}, not {rl.updates}: each needs a group")
    recipe = overlay(base, with_absolute_paths(asked), (*FOR_RL, *IN_FINE_TUNING))
    quarter = max(1, rl.steps // VALIDATIONS)
    every = {name: getattr(recipe.train, name) or quarter for name in ("eval_every", "save_every")}
    recipe = resolve(replace(recipe, train=replace(recipe.train, **every)))
    if rl.steps % rl.updates:
        whole = -(-rl.steps // rl.updates) * rl.updates
        raise ValueError(f"rl.steps must be a multiple of rl.updates, {rl.updates}, not {rl.steps}: set {whole}")
    rounds = -(-recipe.train.save_every // rl.updates)  # checkpoints are between rounds
    recipe = replace(recipe, train=replace(recipe.train, save_every=rounds * rl.updates))
    return fine_tuning_rates(recipe, recipe.rl.lr_share, recipe.train.batch_tokens)


def validation(rollouts: Rollouts, mesh: Mesh) -> Evaluator:
    """Scores held-out questions of every environment, sampled at temperature 1 as in training.

    Records pass@1 and pass@k, the divergence from the model that the stage began with in nats per token, and the
    largest difference between a token's log-probability in sampling and in training. Raises ValueError for an
    environment without a held-out question, one to practise, or one that fits the context.
    """
    settings = rollouts.settings
    samples, indices = settings.val_samples, range(mesh.data.rank, settings.val_questions, mesh.data.size)
    for environment in rollouts.environments:
        rollouts.refuse_unusable(environment)
    asked = [
        (number, environment, f"{VAL_SEED}:{index}", draw_item(environment, f"{VAL_SEED}:{index}", held_out=True))
        for number, environment in enumerate(rollouts.environments)
        for index in indices
    ]

    def evaluate(state: TrainState) -> dict[str, float]:
        groups = rollouts.ask([(one, item) for _, one, _, item in asked], samples, [seed for *_, seed, _ in asked])
        found = [(number, group) for (number, *_), group in zip(asked, groups, strict=True) if group]
        rows = [one for _, group in found for one in group]
        own = np.array([flag for one in rows for flag in one.sampled], dtype=bool)
        sampled = np.array([value for one in rows for value in one.logprobs])
        now = np.concatenate([*rollouts.logprobs(rows), np.zeros(0)])
        first = np.concatenate([*rollouts.logprobs(rows, rollouts.reference), np.zeros(0)])
        sums = np.zeros((len(rollouts.environments), 3))
        for number, group in found:
            right = sum(one.right for one in group)
            sums[number] += 1, pass_at_k(right, samples, 1), pass_at_k(right, samples, samples)
        facts = [float(divergence(now, first)[own].sum()), float(own.sum())]
        own_totals = mesh.data.gather_objects([*sums.ravel().tolist(), *facts])
        *flat, nats, tokens = np.sum(own_totals, axis=0).tolist()
        gap = max(mesh.data.gather_objects(float(np.abs(now - sampled)[own].max(initial=0.0))))
        sums = np.array(flat).reshape(-1, 3)
        _, one, many = sums.sum(axis=0) / max(1.0, sums[:, 0].sum())
        told = {
            "val_pass_1": one,
            f"val_pass_{samples}": many,
            "val_kl": nats / max(1.0, tokens),
            "val_logprob_gap": gap,
        }
        if len(sums) > 1:
            for environment, (count, one, _) in zip(rollouts.environments, sums, strict=True):
                told[f"val_pass_1/{environment.name}"] = one / max(1.0, count)
        return told

    return evaluate
