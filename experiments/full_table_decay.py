"""Ablation: the decay of the head and of the value embeddings follows batch and horizon however often the text is read.

Hypothesis: where nothing is read twice, there is nothing to learn by heart, and so much decay only slows learning.
Source: AdamW should forget over a constant share of the run: Wang and Aitchison 2024 (arXiv 2405.13698).
Expected effect: worse, the less often the text is read.
Verdict: worse on rung 0 (+0.0618 bits per byte, 3 pairs); multiplier × 0.598 [0.574, 0.624]. Study ladder-2. Before:
old baseline: worse on rung 0 (+0.0622 bits per byte, 3 pairs); worse on rung 1 (+0.0252 bits per byte, 4 pairs);
multiplier × 0.802 [0.769, 0.836], grows. Study ladder-offset. Before: old baseline: worse on rung 0 (+0.0540 bits per
byte, 3 pairs); undecided on rung 1 (+0.0137 bits per byte, 3 pairs); undecided on rung 2 (+0.0064 bits per byte, 3
pairs); multiplier × 0.955 [0.930, 0.981], grows. Study ladder.

On text that is read once, [0.01](constant_table_decay.py) is better by 0.094 bits per byte. One seed, 200 steps of
2,048 tokens, on texts that are read 1.7, 2.9 and 4.7 times: 2.234, 2.287 and 2.388 bits per byte with this decay; with
a quarter of it 2.176, 2.235 and 2.367; with half of it, the last two, 2.255 and 2.360; with 0.01 2.168, 2.238 and
2.426. Half of it is too little in a longer run: 3.8 MB read five times in 1,140 steps of 4,096 tokens end at 1.841, and
at 1.792 with all of it. The default rises from 0.01 for one reading to this decay for five.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE as BASELINE


def rules(recipe: Resolved) -> dict[str, GroupRule]:
    """The baseline's rules with the decay scale of the matrices for all groups that have one."""
    return table(replace(recipe, optim=replace(recipe.optim, table_decay_scale=recipe.optim.decay_scale)))


RECIPE = replace(
    BASELINE, name="full_table_decay", make_rules=rules, unused=(*BASELINE.unused, "optim.table_decay_scale")
)
