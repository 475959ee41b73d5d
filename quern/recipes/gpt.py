"""The default recipe: the `gpt` architecture with Muon and AdamW, every number from `--depth`."""

from quern.model.gpt import GPT
from quern.optim.groups import table
from quern.optim.schedule import warmup_stable_decay
from quern.recipe import Recipe

RECIPE = Recipe(
    name="gpt",
    make_model=GPT,
    make_rules=table,
    make_schedule=warmup_stable_decay,
    unused=("model.mlp_width", "model.norm_eps", "model.dropout"),
)
