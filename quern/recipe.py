"""What to train: one frozen Recipe, whose every number follows from `depth` unless it is set.

A Recipe says nothing about where it runs (`machine.py`, `mesh.py`). A field that is None is filled in by `resolve`,
the one place that derives numbers and refuses bad ones. Behaviour is handed over as callables (`make_model`,
`make_rules`, …), never named by strings. Units stand in the names; token counts are tokens, not bytes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class TextRecipe:
    """How text becomes token ids."""

    vocab_size: int | None = None
    """Tokens in the vocabulary, special ones included."""
    tokenizer: str | None = None
    """For data that is tokens already (.bin): the file of the tokenizer that made them, .json or .tiktoken."""
    digits: int = 2
    """Digits that may share one token (1, 2 or 3); 2 measured best at a vocabulary of 32,768."""
    tokenizer_megabytes: float = 16.0
    """Text read to train the tokenizer."""
    tinyworld_megabytes: float = 24.0
    """Size of the built-in corpus when it is the data."""
    tinyworld_conversations: int = 12000
    """Conversations of the built-in world to fine-tune on."""
    val_megabytes: float = 0.5
    """Text held out for validation when no validation source is given."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe:
    """The model's shape."""

    depth: int | None = None
    """Layers. Set by the recipe's dial."""
    width: int | None = None
    """Residual stream; 64 per layer."""
    head_dim: int | None = None
    """128, or 64 for widths below 512."""
    heads: int | None = None
    """Query heads: width / head_dim."""
    kv_heads: int | None = None
    """Key and value heads; fewer than heads is grouped-query attention."""
    context: int | None = None
    """Tokens in a training row."""
    vocab_size: int | None = None
    """Rows of the embedding; taken from the tokenizer."""
    bos: int | None = None
    """Id of the token that every document begins with; taken from the tokenizer."""
    windows: str = "SSSL"
    """Attention windows by layer, repeated; S sees a quarter of the context, L all; the last layer is always L."""
    rope_base: float = 100_000.0
    """Base of the rotary frequencies."""
    softcap: float = 15.0
    """Logits are softcap · tanh(logits / softcap)."""
    mlp_width: int | None = None
    """llama: width of gate and up; 8/3 of the width."""
    norm_eps: float | None = None
    """llama: added to the mean square under the norms' root; 1e-5."""
    dropout: float | None = None
    """llama: share of the residual stream's inputs that is dropped in training; none."""

    def window_sizes(self) -> list[int | None]:
        """For each layer, the tokens that a query sees, itself included; None is all of them."""
        assert self.depth is not None and self.context is not None
        short = max(1, self.context // 4)
        return [short if kind == "S" else None for kind in self.window_kinds()]

    def window_kinds(self) -> list[str]:
        """S or L for each layer."""
        assert self.depth is not None
        kinds = [self.windows[i % len(self.windows)] for i in range(self.depth)]
        return [*kinds[:-1], "L"]


@dataclass(frozen=True, kw_only=True)
class OptimRecipe:
    """Learning rates at a batch of 2^19 tokens and a width of 768, and how they scale from there."""

    matrix_lr: float = 0.02
    head_lr: float = 0.008
    embedding_lr: float = 0.3
    value_embedding_lr: float = 0.15
    residual_lr: float = 0.005
    x0_lr: float = 0.5
    smear_lr: float = 0.2
    gate_lr: float = 0.02
    matrix_decay: float = 0.28
    """Weight decay of the matrices at the reference batch and horizon."""
    lr_scale: float | None = None
    """Multiplies every rate: sqrt(batch / 2^19). (nanochat leaves the smear's unscaled; at batches of some thousand
    tokens its loss then spikes, and scaled it measured 0.003 and 0.019 bits per byte better over two seeds.)"""
    decay_scale: float | None = None
    """Multiplies matrix_decay: sqrt(batch / 2^19) · (reference horizon / horizon)."""
    width_scale: float | None = None
    """Multiplies the embeddings' and the head's rate: sqrt(768 / width)."""
    eps: float = 1e-10
    muon_beta2: float = 0.9
    muon_steps: int = 5
    """Iterations of the orthogonalisation."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """The pretraining loop."""

    steps: int | None = None
    """Optimizer steps; by default horizon_ratio tokens for each parameter of the matrices and the head."""
    minutes: float | None = None
    """Train for this long instead: the step time is measured first and `steps` follows from it."""
    horizon_ratio: float = 12.0
    batch_tokens: int | None = None
    """Tokens in one optimizer step."""
    micro_batch_tokens: int | None = None
    """Tokens in one forward pass; the rest of the batch is accumulated."""
    warmup_steps: int | None = None
    """40, or a twentieth of short runs."""
    warmdown_share: float = 0.65
    final_lr: float = 0.05
    """Rate at the end of the warm-down, as a share of the peak."""
    clip_norm: float | None = None
    """Global gradient norm to clip to; off by default, since it measured as no help."""
    packing: str = "best-fit"
    """best-fit, greedy-crop, greedy-pad or first-fit-decreasing; stream cuts rows from documents put end to end."""
    log_every: int = 10
    eval_every: int | None = None
    """Steps between validations; an eighth of the run."""
    save_every: int | None = None
    """Steps between checkpoints; a tenth of the run."""
    keep: int = 2
    """Checkpoints kept."""
    save_in_background: bool = False
    """Copy the state and go on training while it is written; takes the memory of masters and moments once more."""
    max_skips: int = 10
    """Non-finite steps in a row before the run stops."""
    fp8: str = "off"
    """off, head or all: which matrix products are in FP8 where gradients are recorded; evaluation and generation keep
    the compute dtype."""


@dataclass(frozen=True, kw_only=True)
class SftRecipe:
    """Fine-tuning on conversations."""

    epochs: float = 2.0
    steps: int | None = None
    """Optimizer steps; by default from epochs."""
    batch_tokens: int | None = None
    lr_share: float = 0.6
    """Peak rate as a share of what pretraining would use at this batch."""
    warmdown_share: float = 1.0
    too_long: str = "crop"
    """What happens to a conversation longer than the context: crop or drop."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run: data, text, model, optimizer, training. See the parts for their fields."""

    make_model: Callable[..., Any]
    """(ModelRecipe) → the model."""
    make_rules: Callable[..., Any]
    """(OptimRecipe) → for each optimizer group of the model its update rule and peak learning rate."""
    make_schedule: Callable[..., Any]
    """(TrainRecipe) → what the update of each step is told (`optim.schedule.Multipliers`)."""
    name: str = "gpt"
    depth: int = 4
    """The one dial: layers, and through them width, vocabulary, context, batch, rates and horizon."""
    data: str = "tinyworld"
    """tinyworld, a file, a folder (.txt, .jsonl, .parquet, .gz, .zst; .bin of tokens) or a public data set's name."""
    val: str | None = None
    """Where validation text comes from; by default it is held out from the data."""
    conversations: str | None = None
    """A .jsonl of conversations to fine-tune on; by default the built-in world's."""
    seed: int = 0
    text: TextRecipe = field(default_factory=TextRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    sft: SftRecipe = field(default_factory=SftRecipe)

    def callables(self) -> dict[str, Callable[..., Any]]:
        """What is handed over as code, by field: `from_json` needs it back when it lives outside quern."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name.startswith("make_")}

    def to_json(self) -> dict[str, Any]:
        """JSON types only; a callable becomes "module:name"."""
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in body.items():
            if callable(value):
                body[name] = f"{value.__module__}:{value.__qualname__}"
            elif hasattr(value, "__dataclass_fields__"):
                body[name] = asdict(value)
        return {"schema": SCHEMA, **body}

    @staticmethod
    def from_json(body: dict[str, Any], **callables: Callable[..., Any]) -> Recipe:
        """The inverse of `to_json`; `callables` replace those named in the body (a recipe file's own classes).

        Raises ValueError for a body of a newer schema or with unknown fields.
        """
        body = dict(body)
        if body.pop("schema", None) != SCHEMA:
            raise ValueError(f"this recipe was written by another version of quern (expected schema {SCHEMA})")
        parts = {
            "text": TextRecipe,
            "model": ModelRecipe,
            "optim": OptimRecipe,
            "train": TrainRecipe,
            "sft": SftRecipe,
        }
        try:
            for name, part in parts.items():
                body[name] = part(**body[name])
            for name, value in body.items():
                if name.startswith("make_") and isinstance(value, str):
                    body[name] = callables.get(name) or _import(value)
            return Recipe(**body)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a recipe this version can read: {error}") from error


def _import(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if not module.startswith("quern."):
        raise ValueError(f"'{name}' lives outside quern: hand over the recipe's Python file as well")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


# The reference point of the batch, rate and decay rules: depth 12, width 768, vocabulary 32,768, 12 tokens per
# parameter, at a batch of 2^19 tokens.
REFERENCE_BATCH_TOKENS = 2**19
REFERENCE_HORIZON_TOKENS = 12 * (12 * 12 * 768**2 + 32_768 * 768)


def resolve(recipe: Recipe) -> Recipe:
    """Fills every None from `depth` and checks every value. Raises ValueError saying what to do instead."""
    _check(recipe)
    depth = recipe.depth
    small = depth < 8
    text = replace(recipe.text, vocab_size=recipe.text.vocab_size or (8192 if small else 32_768))
    shape = recipe.model
    width = shape.width or 64 * depth
    head_dim = shape.head_dim or (64 if width < 512 else 128)
    heads = shape.heads or max(1, width // head_dim)
    model = replace(
        shape,
        depth=depth,
        width=width,
        head_dim=head_dim,
        heads=heads,
        kv_heads=shape.kv_heads or heads,
        context=shape.context or (512 if small else 2048),
        vocab_size=shape.vocab_size or text.vocab_size,
    )
    _check_shape(model)
    train = _resolve_train(recipe.train, model)
    assert train.steps is not None and train.batch_tokens is not None
    batch_ratio = train.batch_tokens / REFERENCE_BATCH_TOKENS
    horizon_tokens = train.steps * train.batch_tokens
    optim = recipe.optim
    optim = replace(
        optim,
        lr_scale=optim.lr_scale if optim.lr_scale is not None else math.sqrt(batch_ratio),
        decay_scale=optim.decay_scale
        if optim.decay_scale is not None
        else math.sqrt(batch_ratio) * REFERENCE_HORIZON_TOKENS / horizon_tokens,
        width_scale=optim.width_scale if optim.width_scale is not None else math.sqrt(768 / width),
    )
    sft = replace(
        recipe.sft,
        batch_tokens=recipe.sft.batch_tokens or min(train.batch_tokens, max(model.context or 0, SFT_BATCH_TOKENS)),
    )
    return replace(recipe, text=text, model=model, optim=optim, train=train, sft=sft)


def _resolve_train(train: TrainRecipe, model: ModelRecipe) -> TrainRecipe:
    assert model.depth and model.width and model.vocab_size and model.context
    parameters = 12 * model.depth * model.width**2 + model.vocab_size * model.width
    if train.steps is not None and train.batch_tokens is not None:
        horizon_tokens = float(train.steps * train.batch_tokens)
    else:
        horizon_tokens = train.horizon_ratio * parameters
    batch_tokens = train.batch_tokens or batch_rule(horizon_tokens, model.context)
    steps = train.steps or max(1, round(horizon_tokens / batch_tokens))
    return replace(
        train,
        steps=steps,
        batch_tokens=batch_tokens,
        micro_batch_tokens=train.micro_batch_tokens or min(batch_tokens, max(model.context, MICRO_BATCH_TOKENS)),
        warmup_steps=train.warmup_steps if train.warmup_steps is not None else min(40, steps // 20),
        eval_every=train.eval_every or max(1, -(-steps // 8)),
        save_every=train.save_every or max(1, steps // 10),
    )


MICRO_BATCH_TOKENS = 4096
MINIMUM_STEPS = 2000
MINIMUM_BATCH_TOKENS = 4096
SFT_BATCH_TOKENS = 4096  # conversations are few: larger batches would leave too few steps


def batch_rule(horizon_tokens: float, context: int) -> int:
    """Tokens in a batch for a horizon: 2^round(log2(2^19 · (D / D_reference)^0.383)), and few enough for 2,000 steps.

    The power law was fitted from depth 12 to 26; on horizons of a few million tokens it would leave too few steps
    to learn in, which is what the second bound repairs. Not below 4,096, under which processors idle, nor one row.
    """
    fitted = REFERENCE_BATCH_TOKENS * (horizon_tokens / REFERENCE_HORIZON_TOKENS) ** 0.383
    wanted = min(fitted, horizon_tokens / MINIMUM_STEPS)
    return max(context, MINIMUM_BATCH_TOKENS, 2 ** round(math.log2(max(1.0, wanted))))


ABOVE_ZERO = {
    "model": ("width", "head_dim", "heads", "kv_heads", "context", "softcap", "mlp_width", "norm_eps"),
    "train": (
        "steps",
        "minutes",
        "horizon_ratio",
        "batch_tokens",
        "micro_batch_tokens",
        "log_every",
        "eval_every",
        "save_every",
    ),
    "sft": ("epochs", "steps", "batch_tokens"),
}


def _check(recipe: Recipe) -> None:
    train, sft = recipe.train, recipe.sft
    _refuse(recipe.depth < 1, f"depth must be at least 1, not {recipe.depth}")
    _refuse(recipe.seed < 0, f"seed must not be negative, not {recipe.seed}: use 0 or more")
    _refuse(recipe.text.digits not in (1, 2, 3), f"text.digits must be 1, 2 or 3, not {recipe.text.digits}")
    vocab_size = recipe.text.vocab_size
    _refuse(
        vocab_size is not None and not 300 <= vocab_size <= 2**20,
        f"text.vocab-size must lie between 300 and 1,048,576, not {vocab_size}",
    )
    packings = ("best-fit", "greedy-crop", "greedy-pad", "first-fit-decreasing", "stream")
    _refuse(
        train.packing not in packings,
        f"train.packing must be one of {', '.join(packings)}, not {train.packing}",
    )
    _refuse(train.fp8 not in ("off", "head", "all"), f"train.fp8 must be off, head or all, not {train.fp8}")
    _refuse(sft.too_long not in ("crop", "drop"), f"sft.too-long must be crop or drop, not {sft.too_long}")
    for part, names in ABOVE_ZERO.items():
        for name in names:
            value = getattr(getattr(recipe, part), name)
            flag = f"{part}.{name.replace('_', '-')}"
            _refuse(value is not None and value <= 0, f"{flag} must be above 0, not {value}")
    for name, value in [("train.warmup-steps", train.warmup_steps), ("train.final-lr", train.final_lr)]:
        _refuse(value is not None and value < 0, f"{name} must not be negative, not {value}")
    _refuse(train.keep < 1, f"train.keep must be at least 1, not {train.keep}")
    _refuse(not 0 <= train.warmdown_share <= 1, "train.warmdown-share must lie between 0 and 1")
    _refuse(
        train.clip_norm is not None and train.clip_norm <= 0,
        f"train.clip-norm must be above 0, not {train.clip_norm}: leave it out for no clipping",
    )


def _check_shape(model: ModelRecipe) -> None:
    assert model.heads and model.kv_heads and model.head_dim and model.width and model.context
    _refuse(
        set(model.windows) - set("SL") != set() or not model.windows,
        f"model.windows is a pattern of S (short) and L (long), such as SSSL, not '{model.windows}'",
    )
    _refuse(model.head_dim % 2 != 0, f"model.head-dim must be even for rotary embeddings, not {model.head_dim}")
    divisors = [n for n in range(1, model.heads + 1) if model.heads % n == 0]
    _refuse(
        model.kv_heads not in divisors,
        f"model.kv-heads must divide the {model.heads} heads: one of {divisors}, not {model.kv_heads}",
    )
    _refuse(model.context < 2, f"model.context must be at least 2 tokens, not {model.context}")
    _refuse(
        model.dropout is not None and not 0 <= model.dropout < 1,
        f"model.dropout must be at least 0 and below 1, not {model.dropout}",
    )


def _refuse(wrong: bool, message: str) -> None:
    if wrong:
        raise ValueError(message)
