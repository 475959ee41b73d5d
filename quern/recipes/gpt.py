"""The default recipe: the `gpt` architecture with Muon and AdamW, every number from `--depth`."""

from quern.field_types import Deferred
from quern.recipe import Recipe

RECIPE = Recipe(
    name="gpt",
    make_model=Deferred("quern.model.gpt:GPT"),
    make_rules=Deferred("quern.optim.groups:table"),
    make_schedule=Deferred("quern.optim.schedule:warmup_stable_decay"),
    unused=("model.mlp_width", "model.norm_eps", "model.dropout"),
)
