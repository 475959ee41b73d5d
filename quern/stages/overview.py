"""What a training run is about to do, in a few lines before it starts: text, length, memory, time, and a warning."""

from __future__ import annotations

from quern.mesh import Mesh
from quern.recipe import Recipe
from quern.stages.prepare import Prepared
from quern.terminal import duration
from quern.train.loop import TrainingPlan

MANY_EPOCHS = 4
"""Up to about so many passes, repeated text is worth nearly as much as new text (Muennighoff et al., 2023, "Scaling
data-constrained language models")."""
TYPICAL_MFU = 0.5
"""Share of the measured matrix-product peak that training reaches, for a first estimate of the time."""


def overview(
    recipe: Recipe, total: int, plan: TrainingPlan, data: Prepared, memory: tuple[float, float] | None, mesh: Mesh
) -> list[str]:
    """Describes a pretraining run before its first step.

    Args:
        recipe: Resolved, with the tokenizer's vocabulary.
        total: Parameters of the model.
        plan: What the loop will do.
        data: The prepared text.
        memory: Bytes that a rank needs and may take, where they are known.
        mesh: The ranks.

    Returns:
        Lines for the user; the last one is a warning where the text is repeated often.
    """
    assert recipe.train.batch_tokens
    tokens = plan.steps * recipe.train.batch_tokens
    epochs = tokens / max(1, data.train.num_tokens)
    lines = [
        f"model: {total:,} parameters; text: {data.train.num_tokens:,} tokens to train on, {data.val.num_tokens:,} to "
        "validate on",
        f"length: {tokens:,} tokens, {_digits(epochs)} epochs of the text, {_digits(tokens / total)} tokens for each "
        "parameter",
        f"time: about {duration(tokens * plan.flops_per_token / (TYPICAL_MFU * plan.peak_flops))} of steps, by this "
        f"machine's speed in matrix products{_room(memory, mesh)}",
    ]
    if epochs > MANY_EPOCHS:
        fewer = max(1, int(MANY_EPOCHS * data.train.num_tokens / recipe.train.batch_tokens))
        lines.append(
            f"warning: the text is read {_digits(epochs)} times. After about {MANY_EPOCHS}, reading it again adds "
            f"little: give more text, or --train.steps {fewer}"
        )
    return lines


def _room(memory: tuple[float, float] | None, mesh: Mesh) -> str:
    if memory is None:
        return ""
    each = " for each rank" if mesh.world.size > 1 else ""
    return f"; memory: about {memory[0] / 1e9:.1f} of {memory[1] / 1e9:.1f} GB{each}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
