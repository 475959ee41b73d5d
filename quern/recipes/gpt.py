"""The default recipe: the `gpt` architecture with Muon and AdamW, every number from `--depth`."""

from quern.model.gpt import GPT
from quern.recipe import Recipe

RECIPE = Recipe(name="gpt", make_model=GPT)
