"""Ablation: the decay of the head and of the value embeddings does not follow batch and horizon.

Hypothesis: with nanochat's 0.01 per unit of the rate, short runs hardly decay, and the tables learn a text that is
read several times by heart.
Source: nanochat decays these tables by 0.01, in runs that read no text twice. Text that is read several times needs
much more decay: Kim et al. 2025 (arXiv 2509.14786).
Expected effect: worse, the more often the text is read.
Verdict: undecided at equal steps (-0.0961 bits per byte, 5 pairs). Study fresh. Before: worse at equal steps (+0.0579
bits per byte, 7 pairs); worse at equal flops (+0.0579 bits per byte, 7 pairs); worse at equal seconds (+0.0579 bits per
byte, 7 pairs). Study readings.

So the answer depends on how often the text is read, which the default does not know. The study fresh reads 1.6 MB once;
it was stopped after five pairs, in all of which 0.01 is better, by 0.074 to 0.117. The study readings, of the same
length, reads 0.3 MB five times: there 0.01 is worse by 0.058 bits per byte (7 pairs). Single runs of one seed, before
both: 3.8 MB of English, 1,140 steps of 4,096 tokens (five readings), validation held out of the same text: 1.820 bits
per byte with 0.01, 1.716 with a decay that follows the horizon. Ten minutes on 15.4 MB (`quern bench quality`): 1.485
and 1.452.
"""

from dataclasses import replace

from quern.optim.groups import GroupRule, table
from quern.recipe import Recipe
from quern.recipes.gpt import RECIPE as BASELINE

CONSTANT = 0.01


def rules(recipe: Recipe) -> dict[str, GroupRule]:
    """The baseline's rules with another decay of two groups."""
    made = table(recipe)
    for name in ("head", "value_embeddings"):
        made[name] = made[name]._replace(rule=replace(made[name].rule, weight_decay=CONSTANT))
    return made


RECIPE = replace(BASELINE, name="constant_table_decay", make_rules=rules)
