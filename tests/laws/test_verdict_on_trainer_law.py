"""Law: comparing the baseline with itself on the real trainer seldom gives a verdict.

Runs of one recipe differ in their seeds only. Pairs of them share the order of the data, as in a study, and differ in
their initial weights, so that the differences are not 0.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quern.lab.evidence import decide, moments
from quern.lab.trainer import Trainer
from quern.recipe import ModelRecipe, TextRecipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from tests.support.toy_training import CPU, eager

__all__ = ["eager"]
PAIRS, STUDIES, LOOKS, ALPHA = 120, 2_000, 30, 0.05


@pytest.mark.campaign
@pytest.mark.usefixtures("eager")
def test_the_baseline_against_itself(tmp_path: Path, law: Callable[[str, float, str], None]) -> None:
    recipe = replace(
        RECIPE,
        depth=1,
        text=TextRecipe(vocab_size=512, tinyworld_megabytes=0.4, val_megabytes=0.02, tokenizer_megabytes=0.2),
        model=ModelRecipe(width=32, head_dim=16, context=64),
        train=TrainRecipe(steps=40, batch_tokens=512),
    )
    trainer = Trainer(tmp_path, CPU)
    scores = [
        [
            trainer.train(recipe, name=arm, seed=seed + shift, data_seed=seed).bpb
            for arm, shift in (("a", 0), ("b", 1_000))
        ]
        for seed in range(PAIRS)
    ]
    differences = np.diff(np.array(scores, float))[:, 0]
    assert np.isfinite(differences).all() and differences.std() > 0
    rng = np.random.default_rng(0)
    drawn = rng.choice(differences, (STUDIES, LOOKS)) * rng.choice([-1, 1], (STUDIES, LOOKS))  # either arm is the idea
    n, mean, sd = moments(drawn)
    codes = decide(n[:, None], mean[..., None], sd[..., None], 0.0, ALPHA)[..., 0]
    false = float((codes > 0).any(-1).mean())
    law(
        f"false verdicts on {PAIRS} real pairs, α 0.05, {STUDIES:,} studies of {LOOKS} looks; share of studies",
        false,
        "≤ 5e-2",
    )
    assert false <= ALPHA
    t = differences.mean() / differences.std(ddof=1) * np.sqrt(PAIRS)
    assert abs(t) < 4, "neither arm is favoured"
