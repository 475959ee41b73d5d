"""Rollouts as batches: masks, weights, dropped groups, ranks, tools, what is refused; that the reward rises; and the
formulas: advantages, penalties, the clipped objective, pass@k."""

import re
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quern.eval.task import Item, question
from quern.mesh import alone
from quern.recipe import OptimRecipe
from quern.rl import rollouts as rl
from quern.rl.environment import Environment, draw_item, fingerprint, is_held_out, load_environment
from quern.text.tinyworld.skills import PRACTICE_WORDS
from quern.text.tinyworld.world import WORDS
from quern.train.state import build_model, build_state
from quern.train.step import train_step
from tests.rl.ranks import LETTERS, NEVER, SETTINGS, advanced, ask, rl_recipe, rl_state, rollouts_of
from tests.support.toy_training import CPU, toy_schedule

pytestmark = pytest.mark.usefixtures("eager")


def test_a_batch_holds_weighted_replies() -> None:
    rollouts = rollouts_of(rl_state(alone()))
    batch = rollouts.batch(0)
    assert batch.weight is not None and batch.mask.any(axis=1).all()
    rows, width = batch.tokens.shape
    assert rows % SETTINGS.samples == 0 and width <= 48
    for row in range(rows):
        weights = set(batch.weight[row][batch.mask[row]].tolist())
        assert len(weights) == 1  # one advantage for all tokens of a reply
    per_reply = [batch.weight[row][batch.mask[row]][0] for row in range(rows)]
    assert np.array(per_reply).reshape(-1, SETTINGS.samples).sum(axis=1) == pytest.approx(0, abs=1e-6)
    again = rollouts_of(rl_state(alone())).batch(0)
    assert (again.tokens == batch.tokens).all() and (again.weight == batch.weight).all()
    other = rollouts_of(rl_state(alone())).batch(1)
    assert other.tokens.shape != batch.tokens.shape or (other.tokens != batch.tokens).any()


def test_questions_without_a_difference_are_counted_replaced_and_left_out() -> None:
    asked: list[str] = []

    def reward(item: Item, reply: str) -> float:
        asked.append(item.question)
        return 0.0 if int(item.question[-1]) % 2 else float(len(reply))

    environment = Environment("odd", lambda seed: question(f"mill {sum(map(ord, seed)) % 10}", ""), reward)
    rollouts = rollouts_of(rl_state(alone()), replace(SETTINGS, resample=3), environment)
    batch = rollouts.batch(0)
    facts = rl.means(rollouts.totals)
    assert 0 < facts["dropped"] < 1
    assert len(asked) > SETTINGS.groups * SETTINGS.samples
    assert len(asked) == rollouts.totals["replies"]
    assert len(batch.tokens) <= SETTINGS.groups * SETTINGS.samples and batch.weight is not None
    assert (np.abs(batch.weight).sum(axis=1) > 0).any()


def test_a_round_without_any_difference_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = rl_state(alone())
    before = [parameter.clone() for parameter in state.model.parameters()]
    rollouts = rollouts_of(state, SETTINGS, NEVER)
    assert not rollouts.batch(0).mask.any()
    result = advanced(state, rollouts, alone(), 3, steps=2)
    assert result.verdict == "empty" and state.step == 2
    again = rl_state(alone())
    again.restore(state.tensors(), state.meta())
    assert again.go_on(state.tensors(), state.meta()) and (again.earlier_updates, again.empty_steps) == (0, 2)
    monkeypatch.setattr(again.optimizer, "step", lambda updates, multipliers: counts.append(updates))
    counts: list[int] = []
    assert advanced(again, rollouts_of(again), alone(), 3, steps=2).verdict == "step" and counts == [0, 1]
    assert all((old == new).all() for old, new in zip(before, state.model.parameters(), strict=True))
    assert rl.means(rollouts.totals)["dropped"] == 1


def test_what_a_tool_said_is_read_and_not_learned() -> None:
    rollouts = rollouts_of(rl_state(alone()))
    one = rl.Rollout(0, [1, 2, 3], [4, 5, 6, 7], [True, False, False, True], [0.0] * 4, 1.0, True, False, [0.5] * 4)
    batch = rollouts._batch([one])
    assert batch.tokens[0, :6].tolist() == [1, 2, 3, 4, 5, 6] and batch.targets[0, 2:6].tolist() == [4, 5, 6, 7]
    assert batch.mask[0, :8].tolist() == [False, False, True, False, False, True, False, False]


def test_the_pull_to_the_reference_is_the_gradient_of_the_divergence() -> None:
    state, reference = rl_state(alone()), rl_state(alone(), seed=2)
    near = rollouts_of(state, replace(SETTINGS, kl=0.5), reference=state.model).batch(0)
    far = rollouts_of(state, replace(SETTINGS, kl=0.5), reference=reference.model).batch(0)
    none = rollouts_of(state).batch(0)
    assert far.weight is not None and none.weight is not None
    assert near.weight == pytest.approx(none.weight, abs=1e-6)
    assert np.abs(far.weight - none.weight).max() > 0.01


def test_the_steps_of_a_round_share_its_replies() -> None:
    whole, parts = rollouts_of(rl_state(alone())), rollouts_of(rl_state(alone()), replace(SETTINGS, updates=2))
    first, second = [sorted(batch.targets.tolist()) for batch in (parts.batch(0), parts.batch(1))]
    assert first and second and sorted(first + second) == sorted(whole.batch(0).targets.tolist())


@pytest.mark.parametrize("kl", [0.0, 2.0])
def test_a_later_step_of_a_round_weighs_tokens_by_their_clipped_ratios(kl: float) -> None:
    """And pulls to the reference as the model of this step asks: as clipped are the advantages alone."""
    state, settings = rl_state(alone()), replace(SETTINGS, updates=2, kl=kl)
    reference = rl_state(alone()).model  # equal: in the round's first step nothing pulls
    rollouts = rollouts_of(state, settings, reference=reference)
    rollouts.batch(0)
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.mul_(2.0)
    batch = rollouts.batch(1)
    assert batch.weight is not None
    kept = {(*one.prompt, *one.ids): one for one in rollouts._kept}
    changed = 0
    for row in range(len(batch.tokens)):
        length = int(np.flatnonzero(batch.mask[row])[-1]) + 2
        one = kept[(int(batch.tokens[row, 0]), *batch.targets[row, : length - 1].tolist())]
        [now] = rollouts.logprobs([one])
        before, advantage = np.array(one.logprobs), np.array(one.weights)
        expected = rl.clipped_ratios(now, before, advantage, settings.clip_low, settings.clip_high)
        expected = expected + kl * (np.exp(before - now) - 1)
        assert batch.weight[row][one.span] == pytest.approx(expected, abs=1e-4)
        changed += int((np.abs(expected - advantage) > 0.01).sum())
    assert changed


def test_advantages_are_penalized_and_normalized_as_the_settings_say() -> None:
    state = rl_state(alone())
    plain, scaled = (rollouts_of(state, replace(SETTINGS, normalize=one)).batch(0).weight for one in (False, True))
    assert plain is not None and scaled is not None and np.abs(scaled).max() > 1.01 * np.abs(plain).max()
    long = Environment("long", ask, lambda item, reply: 0.5)
    rollouts = rollouts_of(state, replace(SETTINGS, overlong_tokens=4), long)
    rollouts.batch(0)
    rewards = [(one.reward, len(one.ids)) for one in rollouts._kept]
    assert rewards and {0.5 - rl.overlong_penalty(length, SETTINGS.max_tokens, 4) for _, length in rewards} > {0.5}
    assert all(found == 0.5 - rl.overlong_penalty(length, SETTINGS.max_tokens, 4) for found, length in rewards)


def test_a_round_computes_the_log_probabilities_of_its_replies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state, reference, asked = rl_state(alone()), rl_state(alone(), seed=2).model, list[Any]()
    rollouts = rollouts_of(state, replace(SETTINGS, kl=0.5, updates=2), reference=reference)
    computed = rollouts.logprobs
    monkeypatch.setattr(rollouts, "logprobs", lambda rows, model=None: asked.append(model) or computed(rows, model))
    rollouts.batch(0)
    assert asked == [None, reference]


def test_prompts_that_do_not_fit_are_left_out() -> None:
    long = Environment("long", lambda seed: question(f"{'mill ' * 90}{seed[-3:]}", ""), lambda item, reply: 1.0)
    rollouts = rollouts_of(rl_state(alone()), SETTINGS, long)
    assert not rollouts.batch(0).mask.any() and rollouts.totals["replies"] == 0


FAILS = "of environment 'broken' fails with"
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"reward": lambda item, reply: float("nan")}, "'broken' gave the reward nan: keep to ±1e.09"),
    ({"reward": lambda item, reply: -1e308}, r"gave the reward -1e\+308: keep to ±1e.09"),  # its square
    ({"reward": lambda item, reply: "good"}, rf"reward\(\) {FAILS} ValueError: could not convert"),
    ({"reward": lambda item, reply: 1 / 0}, rf"reward\(\) {FAILS} ZeroDivisionError: division by zero"),
    ({"reward": lambda item, reply: next(iter(()))}, rf"reward\(\) {FAILS} StopIteration: "),
    ({"reward": lambda item, reply: re.match("(", reply)}, rf"reward\(\) {FAILS} error: missing \)"),
    ({"reward": lambda item, reply: Path("none/here").read_text()}, rf"reward\(\) {FAILS} FileNotFoundError: "),
    ({"ask": lambda seed: 1 / 0}, rf"ask\(\) {FAILS} ZeroDivisionError: division by zero"),
    ({"ask": lambda seed: "What?"}, rf"ask\(\) {FAILS} AttributeError: 'str' object has no attribute 'messages'"),
    (
        {"ask": lambda seed: Item("k", [{"role": "assistant", "content": "What?"}], "")},
        rf"ask\(\) {FAILS} ValueError: message 1 is from the assistant",
    ),
]


@pytest.mark.parametrize(("slip", "message"), MISTAKES)
def test_a_slip_in_a_file_of_rewards_is_named(slip: dict[str, Any], message: str) -> None:
    broken = replace(Environment("broken", ask, lambda item, reply: 1.0), **slip)
    with pytest.raises(ValueError, match=message):
        rollouts_of(rl_state(alone()), SETTINGS, broken).batch(0)


@pytest.mark.parametrize("name", ["sums", "word_problems", "spelling", "counting"])
def test_built_in_questions_are_split_and_graded(name: str) -> None:
    environment = load_environment(name)
    practised = [draw_item(environment, str(seed)) for seed in range(50)]
    held_out = [draw_item(environment, str(seed), held_out=True) for seed in range(20)]
    assert not {item.question for item in practised} & {item.question for item in held_out}
    assert not any(map(is_held_out, practised)) and all(map(is_held_out, held_out))
    assert draw_item(environment, "7") == draw_item(environment, "7") != draw_item(environment, "8")
    for item in practised:
        right = "-".join(item.answer) if name == "spelling" else f"It is {item.answer}."
        assert environment.reward(item, right) == 1 and environment.reward(item, "I do not know") == 0
        if name in ("spelling", "counting"):
            asked = {*re.findall(r"\w+", item.question)} & {*WORDS} - {"letter"}  # "How many times is the letter …"
            assert asked and asked <= {*PRACTICE_WORDS}, asked


def test_an_environment_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text(
        "from quern.eval.task import question\nfrom quern.rl.environment import Environment\n"
        "ENVIRONMENT = Environment('short', lambda seed: question(seed, ''), lambda item, reply: -len(reply))\n"
    )
    found = load_environment(str(path))
    assert found.name == "short" and found.files == (path,)
    before = fingerprint([found])
    path.write_text(path.read_text() + "# another reward\n")
    assert fingerprint([load_environment(str(path))]) != before
    with pytest.raises(ValueError, match="there is no 'sorting': use .*, or the path of a .py file"):
        load_environment("sorting")
    single = Environment("single", lambda seed: question("always the same", ""), LETTERS.reward)
    with pytest.raises(ValueError, match="no question of 1000 seeds is"):
        [draw_item(single, "0", held_out=part) for part in (True, False)]


STEPS = 16


def test_no_reply_has_no_tokens() -> None:
    assert rl.means(Counter())["reply_tokens"] == 0


def test_the_reward_rises() -> None:
    optim = OptimRecipe(lr_scale=4.0, head_lr=0.016, decay_scale=0.0, width_scale=1.0, matrix_decay=0.0)
    recipe = replace(rl_recipe(), optim=optim)
    state = build_state(recipe, CPU, build_model(recipe, CPU, 0))
    rollouts, found = rollouts_of(state, replace(SETTINGS, groups=8, samples=8)), []
    schedule = toy_schedule(STEPS, warmup_steps=0, warmdown_share=0.0)
    for step in range(STEPS):
        batch = rollouts.batch(step)
        found.append(rl.means(rollouts.totals)["reward"])
        train_step(state, batch, schedule(step), CPU, micro_batch_rows=99)
    assert found[0] < 0.3 and found[-1] > 0.8, found


# Formulas, against plain definitions ---------------------------------------------------------------------------


def test_advantages_of_a_group_add_up_to_zero() -> None:
    rewards = np.array([[1.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    found = [rl.advantages(row).tolist() for row in rewards]
    assert found == [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5], [0, 0, 0, 0]]
    normalized = [rl.advantages(row, normalize=True) for row in rewards]
    assert [row.std() for row in normalized] == pytest.approx([1, 1, 0])
    assert [rl.is_uniform(row) for row in rewards] == [False, False, True]


def test_the_penalty_for_length_grows_to_one() -> None:
    assert [rl.overlong_penalty(length, 100, 20) for length in (10, 80, 85, 90, 100, 130)] == [0, 0, 0.25, 0.5, 1, 1]
    assert rl.overlong_penalty(100, 100, 0) == 0


def test_weights_of_clipped_ratios_give_the_gradient_of_the_clipped_objective() -> None:
    rng = np.random.default_rng(0)
    before, now = rng.normal(-1, 0.5, 400), rng.normal(-1, 0.5, 400)
    weights, low, high = rng.normal(0, 1, 400), 0.2, 0.28
    logprobs = torch.tensor(now, requires_grad=True)
    ratio = (logprobs - torch.tensor(before)).exp()
    advantage = torch.tensor(weights)
    torch.minimum(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage).sum().backward()
    assert logprobs.grad is not None
    found = rl.clipped_ratios(now, before, weights, low, high)
    assert found == pytest.approx(logprobs.grad.numpy(), abs=1e-12)
    assert 50 < (found == 0).sum() < 350
    assert rl.clipped_ratios(now, now, weights, low, high) == pytest.approx(weights)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_reply() -> None:
    for samples in range(1, 7):
        for right in range(samples + 1):
            for k in range(1, samples + 1):
                subsets = list(combinations(range(samples), k))
                share = sum(any(index < right for index in subset) for subset in subsets) / len(subsets)
                assert rl.pass_at_k(right, samples, k) == pytest.approx(share)
    for wrong in ((1, 3, 4), (4, 3, 1), (1, 3, 0)):
        with pytest.raises(ValueError, match="not defined"):
            rl.pass_at_k(*wrong)


def test_the_divergence_is_unbiased_and_its_gradient_is_the_weight() -> None:
    ours, theirs = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    estimate = rl.divergence(np.log(ours), np.log(theirs))
    assert (estimate >= 0).all()
    assert (ours * estimate).sum() == pytest.approx((ours * np.log(ours / theirs)).sum())
