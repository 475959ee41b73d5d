"""The unchanged core on the blocked path of attention: the baseline of every idea of the JAX twin.

The core itself chooses cuDNN's or splash's kernel on accelerators (`quern grug gauntlet gpt`). Ideas in attention have
the blocked path everywhere, and so has their baseline: on every device the two differ by the idea alone.
"""

from dataclasses import replace
from functools import partial

from quern.grug import model
from quern.grug.attention import blocked_attention
from quern.grug.state import Grug
from quern.recipes.gpt import RECIPE as GPT_RECIPE


class Core(Grug):
    attention = blocked_attention
    forward = partial(model.forward, attend=blocked_attention)


RECIPE = replace(GPT_RECIPE, name="core", make_model=Core)
