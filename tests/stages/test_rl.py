"""What `quern rl` takes from the command and what from the fine-tuned model's recipe, and what it refuses."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quern.recipe import Resolved, RlRecipe, TrainRecipe
from quern.recipes import gpt
from quern.resolve import REFERENCE_BATCH_TOKENS, resolve
from quern.rl.environment import draw_item
from quern.rl.environments import load_environment
from quern.stages.rl import rl_recipe

BASE = resolve(
    replace(gpt.RECIPE, depth=2, seed=3, train=TrainRecipe(steps=9, batch_tokens=1024, keep=7, clip_norm=0.5))
)
ROOT = Path(__file__).parents[2]


def test_the_model_comes_from_the_run_and_the_stage_from_the_command() -> None:
    asked = replace(gpt.RECIPE, depth=6, rl=RlRecipe(steps=12, rewards=("sums", "mine.py"), lr_share=0.2))
    found = rl_recipe(asked, BASE)
    assert (found.model, found.text, found.seed, found.sft) == (BASE.model, BASE.text, 3, BASE.sft)
    assert found.rl == replace(asked.rl, rewards=("sums", str(Path("mine.py").absolute())))
    assert (found.train.keep, found.train.clip_norm, found.train.eval_every, found.train.save_every) == (2, None, 3, 3)
    assert found.optim.lr_scale == pytest.approx(0.2 * (1024 / REFERENCE_BATCH_TOKENS) ** 0.5)
    assert found.optim.matrix_decay == found.optim.decay_scale == found.optim.table_decay_scale == 0
    assert Resolved.from_json(found.to_json()) == found
    every = replace(asked, train=replace(asked.train, eval_every=5, save_every=4))
    assert (rl_recipe(every, BASE).train.eval_every, rl_recipe(every, BASE).train.save_every) == (5, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 1}, "rl.samples must be a whole number between 2 and"),
        ({"updates": 17}, "rl.updates must be at most rl.groups, 16, not 17"),
        ({"rewards": ()}, "rl.rewards is empty: name what to practise"),
        ({"overlong_tokens": 97}, "rl.overlong-tokens must be at most rl.max-tokens, 96, not 97"),
    ],
)
def test_values_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rl_recipe(replace(gpt.RECIPE, rl=RlRecipe(**changes)), BASE)


def test_the_example_is_that_of_the_documentation_and_works() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/rl.md").read_text(encoding="utf-8"), re.DOTALL)
    example = ROOT / "experiments/reward_backwards.py"
    assert code is not None and example.read_text(encoding="utf-8").endswith(code.group(1))
    environment = load_environment(str(example))
    item = draw_item(environment, "0")
    number = re.findall(r"\d+", item.question)[0]
    assert environment.reward(item, f"It is {number[::-1]}.") == 1
    assert environment.reward(item, "I do not know.") == 0
