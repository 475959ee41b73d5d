"""`quern sft` and `quern rl`: what they take from the command, what from their model's recipe, what they refuse."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quern.machine import Machine
from quern.mesh import Mesh
from quern.model.base import LanguageModel
from quern.optim.groups import table
from quern.optim.muon import MuonH, norms
from quern.optim.schedule import Multipliers
from quern.recipe import IN_FINE_TUNING, ConversationSource, Resolved, RlRecipe, SftRecipe, TrainRecipe
from quern.recipes import gpt, llama
from quern.resolve import REFERENCE_BATCH_TOKENS, resolve
from quern.rl.environment import draw_item, load_environment
from quern.stages import sft
from quern.stages.rl import rl_recipe
from quern.stages.sft import fit_to_conversations, sft_recipe
from quern.train.state import build_model, build_state
from quern.train.step import train_step
from tests.support.command import Told
from tests.support.exported import toy_recipe as exported_recipe
from tests.support.exported import write_run
from tests.support.memory_corpus import memory_corpus
from tests.support.toy_training import CPU, ROWS, toy_loader, toy_recipe, toy_state

pytestmark = pytest.mark.usefixtures("eager")

SHAPE = replace(llama.RECIPE.model, width=32, context=48, dropout=0.1)
TRAIN = TrainRecipe(steps=9, batch_tokens=96, keep=7, log_every=3, save_every=2, fp8="head", clip_norm=0.5)
BASE = resolve(replace(llama.RECIPE, depth=2, seed=3, model=SHAPE, train=TRAIN))
OTHER: dict[str, Any] = {"micro_batch_tokens": 96, "log_every": 4, "eval_every": 5, "save_every": 6, "keep": 8}
OTHER |= {"max_skips": 11, "recompute": 3, "optimizer_memory": "cpu", "clip_norm": 1.5, "fp8": "all"}


def test_how_it_is_trained_comes_from_the_command_and_what_is_trained_from_the_base() -> None:
    assert {f"train.{name}" for name in OTHER} == IN_FINE_TUNING
    shape, told = replace(gpt.RECIPE.model, width=640), TrainRecipe(warmup_steps=77, final_lr=0.5, **OTHER)
    asked = replace(gpt.RECIPE, depth=6, conversations="talks.jsonl", model=shape, train=told)
    asked = replace(asked, sft=SftRecipe(steps=5, batch_tokens=144, lr_share=0.5))
    followed = fit_to_conversations(sft_recipe(asked, BASE), toy_loader().corpus, 3)
    assert (followed.model, followed.text, followed.seed, followed.depth) == (BASE.model, BASE.text, 3, 2)
    assert followed.callables() == BASE.callables() and followed.conversations == (ConversationSource("talks.jsonl"),)
    for name in (field.name for field in fields(TrainRecipe)):
        assert getattr(followed.train, name) == OTHER.get(name, getattr(BASE.train, name)), name
    assert followed.sft == replace(asked.sft)
    assert followed.optim.lr_scale == pytest.approx(0.5 * (144 / REFERENCE_BATCH_TOKENS) ** 0.5)
    assert followed.optim.matrix_decay == followed.optim.decay_scale == 0 and followed.optim.table_decay_scale is None


def test_what_is_not_asked_is_the_commands_default_not_the_bases() -> None:
    followed = sft_recipe(gpt.RECIPE, BASE)
    assert (followed.train.keep, followed.train.log_every, followed.train.fp8) == (2, 10, "off")
    assert followed.train.clip_norm is None and followed.sft.batch_tokens is None
    assert fit_to_conversations(followed, toy_loader().corpus, 1).sft.batch_tokens == 96, "pretraining's"
    assert fit_to_conversations(followed, toy_loader().corpus, 3).sft.batch_tokens == 144, "a row for each rank"
    with pytest.raises(ValueError, match="sft.batch-tokens must hold a row of 48 tokens for each of 3 replicas: at "):
        fit_to_conversations(replace(followed, sft=SftRecipe(batch_tokens=96)), toy_loader().corpus, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": SftRecipe(batch_tokens=100)}, "since rows have 48 tokens: 96 or 144, not 100"),
        ({"sft": SftRecipe(epochs=0.0)}, "sft.epochs must be a number above 0"),
        ({"train": TrainRecipe(keep=0)}, "train.keep must be a whole number between 1 and"),
        ({"rl": RlRecipe(samples=1)}, "rl.samples must be a whole number between 2 and"),
        ({"rl": RlRecipe(updates=17)}, "rl.updates must be at most rl.groups, 16, not 17"),
        ({"rl": RlRecipe(updates=3, steps=7)}, "rl.steps must be a multiple of rl.updates, 3, not 7: set 9"),
        ({"rl": RlRecipe(rewards=())}, "rl.rewards is empty: name what to practise"),
        ({"rl": RlRecipe(overlong_tokens=97)}, "rl.overlong-tokens must be at most rl.max-tokens, 96, not 97"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        (rl_recipe if "rl" in changes else sft_recipe)(replace(gpt.RECIPE, **changes), BASE)


def test_another_optimizer_begins_with_the_weights_it_was_given() -> None:
    """MuonH keeps the norms of the weights; those of the random ones that were built would undo the training."""

    def on_a_sphere(recipe: Resolved) -> Any:
        rules = table(recipe)
        return rules | {"matrices": rules["matrices"]._replace(rule=MuonH())}

    recipe = replace(toy_recipe(), make_rules=on_a_sphere)
    base, tuned = toy_state(), build_state(recipe, CPU, build_model(recipe, CPU, 7))
    assert not tuned.go_on(base.tensors(), base.meta())
    own = [bucket for bucket in tuned.optimizer.buckets if bucket.rule.stacked]
    assert own and all(torch.equal(bucket.state["radius"], norms(bucket.masters)) for bucket in own)


def test_gradients_that_a_base_model_held_are_dropped() -> None:
    recipe = toy_recipe()
    every = replace(recipe, make_rules=lambda of: {name: rule._replace(every=2) for name, rule in table(of).items()})
    base, tuned = toy_state(every), toy_state(every)
    train_step(base, toy_loader().batch(0), Multipliers(), CPU, micro_batch_rows=ROWS)
    tensors = base.tensors()
    assert any(name.startswith("held.") for name in tensors) and tuned.go_on(tensors, base.meta())
    assert all(bucket.held is None and bucket.held_steps == 0 for bucket in tuned.optimizer.buckets)


def test_the_optimizer_goes_on_where_the_base_models_was() -> None:
    """The first update is the one that the base model's own optimizer would have made."""
    base, tuned = toy_state(), toy_state()
    loader = toy_loader()
    for step in range(5):
        train_step(base, loader.batch(step), Multipliers(), CPU, micro_batch_rows=ROWS)
    tensors = {name: tensor.clone() for name, tensor in base.tensors().items()}
    assert tuned.go_on(tensors, base.meta()) and (tuned.step, tuned.tokens, tuned.earlier_updates) == (0, 0, 5)
    resumed = toy_state()
    resumed.restore(tuned.tensors(), tuned.meta())
    fresh = toy_state()
    fresh.optimizer.load_state_tensors(tensors)
    for state in (base, tuned, resumed, fresh):
        train_step(state, loader.batch(9), Multipliers(), CPU, micro_batch_rows=ROWS)
    for name, tensor in base.tensors().items():
        assert torch.equal(tensor, tuned.tensors()[name]) and torch.equal(tensor, resumed.tensors()[name]), name
    assert any(not torch.equal(tensor, fresh.tensors()[name]) for name, tensor in base.tensors().items())


@pytest.mark.parametrize("rows", [2, 4, 32])
def test_the_held_out_loss_counts_every_conversation_once(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The loss of a token is its id, so that the mean says how often each of the five was counted."""
    talks = [[0, *[number] * 40] for number in (1, 2, 4, 8, 16)]  # two do not fit a row
    held_out = memory_corpus(talks, [[False] + [True] * 40] * 5)
    monkeypatch.setattr(sft, "batch_losses", lambda model, tokens, targets, machine: targets.astype(np.float64))
    recipe = replace(BASE, train=replace(BASE.train, micro_batch_tokens=48 * rows))
    evaluate = sft._held_out_loss(held_out, recipe, CPU)  # pyright: ignore[reportPrivateUsage]
    assert recipe.micro_batch_rows == rows and evaluate(toy_state()) == {"val_loss": 31 / 5}


def test_the_held_out_loss_does_not_depend_on_the_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = memory_corpus([[0, *[number] * 40] for number in range(1, 31)], [[False] + [True] * 40] * 30)
    monkeypatch.setattr(sft, "batch_losses", lambda model, tokens, targets, machine: targets.astype(np.float64))
    monkeypatch.setattr(sft, "VAL_TOKENS", 20 * 48)
    found = list[float]()
    for rows in (1, 3, 32):
        recipe = replace(BASE, train=replace(BASE.train, micro_batch_tokens=48 * rows))
        evaluate = sft._held_out_loss(held_out, recipe, CPU)  # pyright: ignore[reportPrivateUsage]
        found.append(evaluate(toy_state())["val_loss"])
    assert found[0] == found[1] == found[2]


def test_what_grows_in_pretraining_has_grown() -> None:
    """Windows and annealed losses follow `progress`, which fine-tuning does not begin again."""
    schedule = sft.rates_fall(5, 1.0)
    assert [schedule(step).progress for step in range(5)] == [1.0] * 5 and schedule(4).lr < schedule(0).lr


# Reinforcement learning -----------------------------------------------------------------------------------------------


PRETRAINED = TrainRecipe(steps=9, batch_tokens=1024, keep=7, clip_norm=0.5)
TUNED = resolve(replace(gpt.RECIPE, depth=2, seed=3, train=PRETRAINED))
ROOT = Path(__file__).parents[2]


def test_the_model_comes_from_the_run_and_the_stage_from_the_command(here: Path) -> None:
    Path("mine.py").touch()
    Path("sums").mkdir()  # no file of rewards
    asked = replace(gpt.RECIPE, depth=6, rl=RlRecipe(steps=12, rewards=("sums", "mine.py"), lr_share=0.2))
    found = rl_recipe(asked, TUNED)
    assert (found.model, found.text, found.seed, found.sft) == (TUNED.model, TUNED.text, 3, TUNED.sft)
    assert found.rl == replace(asked.rl, rewards=("sums", str(Path("mine.py").absolute())))
    assert (found.train.keep, found.train.clip_norm, found.train.eval_every, found.train.save_every) == (2, None, 3, 3)
    assert found.optim.lr_scale == pytest.approx(0.2 * (1024 / REFERENCE_BATCH_TOKENS) ** 0.5)
    assert found.optim.matrix_decay == found.optim.decay_scale == found.optim.table_decay_scale == 0
    assert Resolved.from_json(found.to_json()) == found
    every = replace(asked, train=replace(asked.train, eval_every=5, save_every=4))
    assert (rl_recipe(every, TUNED).train.eval_every, rl_recipe(every, TUNED).train.save_every) == (5, 4)


def test_the_example_is_that_of_the_documentation_and_works() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/rl.md").read_text(encoding="utf-8"), re.DOTALL)
    example = ROOT / "experiments/reward_backwards.py"
    assert code is not None and example.read_text(encoding="utf-8").endswith(code.group(1))
    environment = load_environment(str(example))
    item = draw_item(environment, "0")
    number = re.findall(r"\d+", item.question)[0]
    assert environment.reward(item, f"It is {number[::-1]}.") == 1
    assert environment.reward(item, "I do not know.") == 0


def test_practice_drops_nothing(tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replies are sampled without dropout, and their probabilities are those of training."""

    def refuse(recipe: Resolved, machine: Machine, model: LanguageModel, mesh: Mesh) -> None:
        raise ValueError(f"dropout of {recipe.model.dropout}, training: {model.training}")

    monkeypatch.setattr("quern.stages.rl.build_state", refuse)
    stage = write_run(tmp_path, exported_recipe("llama", dropout=0.1)).stage("pretrain")
    stage.rename(stage.with_name("sft"))
    words = "--rl.rewards counting --device cpu --dtype fp32 --threads 1 --no-compile".split()
    assert "dropout of 0.1, training: False" in told("rl", "first", *words, "--out", tmp_path, code=1)
