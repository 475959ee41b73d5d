"""Ablation: the decay of the head and of the value embeddings is 0.01, however often the text is read.

Hypothesis: with nanochat's 0.01 per unit of the rate, short runs hardly decay, and the tables learn a text that is
read several times by heart.
Source: nanochat decays these tables by 0.01, in runs that read no text twice. Text that is read several times needs
much more decay: Kim et al. 2025 (arXiv 2509.14786).
Expected effect: worse, the more often the text is read.
Verdict: no difference on rung 0 (+0.0000 bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study ladder-2.
Before: old baseline: no difference on rung 0 (+0.0000 bits per byte, 3 pairs); multiplier × 1.000 [1.000, 1.000]. Study
ladder.

The answer depends on how often the text is read. In 200 steps of 2,048 tokens, 0.01 is better than
[full_table_decay](full_table_decay.py) by 0.094 bits per byte on 1.6 MB read once (6 pairs), and worse by 0.058 on
0.3 MB read five times (7 pairs); on 0.44 MB read three times, 7 pairs against the default leave it open. Longer
single runs of one seed, 4,096 tokens a step, agree: 14.6 MB of English read once in 860 steps end at 1.657 bits per
byte with 0.01, at 1.682 with the decay that follows the horizon; 3.8 MB read five times in 1,140 steps at 1.820 and
1.716. Ten minutes on 15.4 MB, read five times (`quern bench quality`): 1.485 and 1.452.
"""

from dataclasses import replace

from quern.recipe import OptimRecipe
from quern.recipes.gpt import RECIPE as BASELINE

RECIPE = replace(BASELINE, name="constant_table_decay", optim=OptimRecipe(table_decay_scale=1.0))
