"""Describes a run: one frozen Recipe, whose every number follows from `depth` unless it is set.

A Recipe is what the user said; it says nothing about where it runs (`machine.py`, `mesh.py`). `resolve` (`resolve.py`),
the one place that derives numbers, makes a Resolved of it, in which no field marked `Gap` is None, unless it is unused.
`validate.py` checks both. Behaviour is handed over as callables (`make_model`, `make_rules`, …), never named by a text.
Units stand in the names; token counts are tokens, not bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, Self, TypeAlias, TypeVar

from annotated_types import Interval

from quern.field_types import Amount, ConversationSource, Count, Deferred, Few, Positive, Rate, Seed, Share, code_path
from quern.records import strict, typed

SCHEMA = 1
BUILT_IN_CONVERSATIONS = ("tinyworld", "spelling")
SMALL_DEPTH = 8
"""Below this depth, vocabulary, context, and how rates and the tables' decay scale are ours; from it on nanochat's."""

if TYPE_CHECKING:
    from typing import Generic

    from typing_extensions import TypeVar as TypeVarWithDefault

    Gap = TypeVarWithDefault("Gap", covariant=True, default=None)
else:  # types only: at run time a field may always be None, and ModelRecipe[Never] is ModelRecipe

    class Generic:
        def __class_getitem__(cls, _):
            return cls

    Gap = None
"""None in a part that the user gave, Never in a resolved one: `int | Gap` is a number that `resolve` fills in."""
FOLLOWS: Any = None


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Generic[Gap]):
    """The text and its tokenizer."""

    vocab_size: Annotated[int, Interval(ge=300, le=2**20)] | Gap = FOLLOWS
    """Tokens in the vocabulary, special ones included; fewer for a small text of your own."""
    tokenizer: str | None = None
    """A tokenizer that is there already: its file (tokenizer.json, .tiktoken), or gpt2, cl100k_base or o200k_base."""
    column: str = "text"
    """The name of the text: a column (.parquet, .csv, .tsv) or a key (.jsonl, .json)."""
    separator: str | None = None
    """The mark that ends a document in text and code, such as <|endoftext|>; it is no part of the text."""
    encoding: str = "utf-8"
    """The encoding of text, tables and JSON, such as cp1252; auto recognizes it."""
    split: str = "train"
    """The split of a data set of the Hugging Face Hub (hf:…); its validation split validates."""
    digits: Annotated[int, Interval(ge=1, le=3)] = 2
    """Digits that may share one token (1, 2 or 3); 2 measured best at a vocabulary of 32,768, llama.cpp needs 1."""
    tokenizer_megabytes: Amount = 16.0
    """Text that the tokenizer is trained on: a sample, drawn from up to 2 GB of a larger text."""
    tinyworld_megabytes: Amount = 24.0
    """Size of the built-in corpus when it is the data."""
    tinyworld_conversations: Annotated[int, Interval(ge=1, le=10**8)] = 12000
    """Conversations of the built-in world to fine-tune on, and of the source "spelling"."""
    val_megabytes: Amount = 0.5
    """Text for validation: the first of the validation source, or held out from the data. Training scores it often."""


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(Generic[Gap]):
    """The model's shape."""

    depth: Annotated[int, Interval(ge=1, le=1000)] | Gap = FOLLOWS
    """Layers. Set by the recipe's dial."""
    width: Annotated[int, Interval(ge=12, le=2**17)] | Gap = FOLLOWS
    """Residual stream, in whole heads; 64 per layer."""
    head_dim: Annotated[int, Interval(ge=2, le=2**14)] | Gap = FOLLOWS
    """128, or 64 for widths below 512."""
    heads: Annotated[int, Interval(ge=1, le=2**14)] | Gap = FOLLOWS
    """Query heads: width / head_dim."""
    kv_heads: Annotated[int, Interval(ge=1, le=2**14)] | Gap = FOLLOWS
    """Key and value heads; fewer than heads is grouped-query attention."""
    context: Annotated[int, Interval(ge=2, le=2**24)] | Gap = FOLLOWS
    """Tokens in a training row."""
    vocab_size: Annotated[int, Interval(ge=1, le=2**24)] | Gap = FOLLOWS
    """Rows of the embedding; taken from the tokenizer."""
    bos: Annotated[int, Interval(ge=0, le=2**24)] | None = None
    """Id of the token that every document begins with; taken from the tokenizer."""
    windows: str = "SSSL"
    """Attention windows by layer, repeated; S sees a quarter of the context, L all; the last layer is always L. In
    unet, S sees half of what L does, 1,792 tokens at most."""
    rope_base: Annotated[float, Interval(gt=1, le=1e12)] | Gap = FOLLOWS
    """Base of the rotary frequencies: 100,000; 1,024 with key_offset."""
    key_offset: bool | Gap = FOLLOWS
    """gpt: half of a key's channels in layers L are the token before's, half of all have no position. On by default."""
    bigrams: bool = False
    """gpt: add an embedding of each pair of tokens before every block, from five hashed rows for each token. It helps
    small texts most, and doubles a small model's file."""
    bigram_dropout: Annotated[float, Interval(ge=0, lt=1)] = 0.0
    """gpt, with bigrams: share of the pairs that are left out in training, such as 0.5 (docs/your-own-text.md)."""
    softcap: Annotated[float, Interval(gt=0, le=60)] = 15.0
    """Logits are softcap · tanh(logits / softcap), in unet a sigmoid that is 2 · softcap high. The loss sums
    exponentials of them in fp32."""
    mlp_width: Annotated[int, Interval(ge=1, le=2**20)] | None = None
    """llama: width of gate and up; 8/3 of the width."""
    norm_eps: Annotated[float, Interval(gt=0, le=1)] | None = None
    """llama: added to the mean square under the norms' root; 1e-5."""
    dropout: Annotated[float, Interval(ge=0, lt=1)] | None = None
    """llama: share of the residual stream's inputs that is dropped in training; none."""

    def window_sizes(self: ResolvedModel) -> list[int | None]:
        """Returns the tokens that a query sees in each layer, itself included; None is all of them."""
        short = max(1, self.context // 4)
        return [short if kind == "S" else None for kind in self.window_kinds()]

    def window_kinds(self: ResolvedModel) -> list[str]:
        """S or L for each layer."""
        kinds = [self.windows[i % len(self.windows)] for i in range(self.depth)]
        return [*kinds[:-1], "L"]


@dataclass(frozen=True, kw_only=True)
class OptimRecipe(Generic[Gap]):
    """Learning rates at a batch of 2^19 tokens and a width of 768, and how they scale from there."""

    matrix_lr: Rate = 0.02
    """Peak rate of the hidden matrices, which Muon updates; in llama_adamw of every parameter, which AdamW does."""
    head_lr: Rate = 0.008
    """Peak rate of the head, which makes logits."""
    embedding_lr: Rate = 0.3
    """Peak rate of the token embeddings."""
    value_embedding_lr: Rate = 0.15
    """Peak rate of the embeddings that are added to attention's values."""
    residual_lr: Rate = 0.005
    """Peak rate of the scales of the residual stream, in llama of the norms."""
    x0_lr: Rate = 0.5
    """Peak rate of the scales with which each layer adds the first embedding."""
    smear_lr: Rate = 0.2
    """Peak rate of the mix of each embedding with the token before it, and of the backout."""
    gate_lr: Rate = 0.02
    """Peak rate of the gates of the value embeddings."""
    matrix_decay: Rate = 0.28
    """Weight decay of the matrices at the reference batch and horizon."""
    batch_exponent: Share | Gap = FOLLOWS
    """How rates fall with the batch, an exponent of (batch / 2^19): 1/3 below depth 8, else 1/2."""
    lr_scale: Positive | Gap = FOLLOWS
    """Multiplies every rate: (batch / 2^19)^batch_exponent; gpt: the head's by the root of it below depth 8."""
    decay_scale: Annotated[float, Interval(ge=0, le=1e12)] | None = None
    """Multiplies matrix_decay: sqrt(batch / 2^19) · (reference horizon / horizon)."""
    table_decay_scale: Annotated[float, Interval(ge=0, le=1e12)] | None = None
    """gpt: multiplies the decay of the head and of the value embeddings, 0.01. By default 1; below depth 8 up to
    decay_scale for a text that is read five times."""
    width_scale: Positive | Gap = FOLLOWS
    """Multiplies the embeddings' and the head's rate, in llama_adamw every rate: sqrt(768 / width)."""
    eps: Annotated[float, Interval(gt=0, le=1)] = 1e-10
    """AdamW's epsilon."""
    muon_beta2: Annotated[float, Interval(ge=0, lt=1)] = 0.9
    """Decay of Muon's mean of squared updates."""
    muon_steps: Annotated[int, Interval(ge=1, le=100)] = 5
    """Iterations of the orthogonalisation."""


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Generic[Gap]):
    """The training loop."""

    steps: Count | Gap = FOLLOWS
    """Optimizer steps of pretraining; by default horizon_ratio tokens for each parameter of the matrices and the head.
    Fine-tuning has sft.steps."""
    minutes: Amount | None = None
    """Train for this long instead: time in steps, without compilation, validation and saves. The steps follow."""
    horizon_ratio: Amount = 12.0
    """Tokens for each parameter, where neither steps nor minutes say how long; with steps alone, decides the batch."""
    batch_tokens: Count | Gap = FOLLOWS
    """Tokens in one optimizer step; few enough for about 2,000 steps of the default horizon."""
    micro_batch_tokens: Count | Gap = FOLLOWS
    """Tokens in one forward pass; the rest of the batch is accumulated."""
    warmup_steps: Annotated[int, Interval(ge=0, le=10**12)] | Gap = FOLLOWS
    """40, or a twentieth of short runs."""
    warmdown_share: Share = 0.4
    """The rate falls over this share of the steps, the last ones: modded-nanogpt's (nanochat's is 0.65)."""
    final_lr: Rate = 0.05
    """Rate at the end of the warm-down, as a share of the peak."""
    clip_norm: Annotated[float, Interval(gt=0, le=1e9), "give a large one, such as 1e9, for no clipping"] | None = None
    """Global gradient norm to clip to; off by default, since it measured as no help; 1 in llama_adamw."""
    packing: Literal["best-fit", "greedy-crop", "greedy-pad", "first-fit-decreasing", "stream"] = "best-fit"
    """How documents fill rows; stream cuts rows from documents put end to end."""
    log_every: Count = 10
    """Steps between lines of the log."""
    eval_every: Count | Gap = FOLLOWS
    """Steps between validations; an eighth of the run, in fine-tuning a quarter."""
    save_every: Count | Gap = FOLLOWS
    """Steps between checkpoints; a tenth of the run, in fine-tuning a quarter."""
    keep: Few = 2
    """Checkpoints kept."""
    max_skips: Annotated[int, Interval(ge=0, le=10**6)] = 10
    """Non-finite steps in a row before the run stops."""
    fp8: Literal["off", "head", "all"] = "off"
    """Which matrix products are in FP8 in training; evaluation and generation keep the dtype."""
    recompute: Annotated[int, Interval(ge=0, le=1000)] = 0
    """The first so many blocks run again in the backward pass: less memory, more time, the same numbers."""
    optimizer_memory: Literal["device", "cpu"] = "device"
    """Where masters and moments are kept; from the CPU, those of a bucket visit a GPU for its update."""
    grad_dtype: Literal["compute", "fp32"] = "compute"
    """The dtype in which gradients are summed over micro-batches, steps and ranks."""


OPERATIONAL = frozenset(
    f"train.{name}"
    for name in "micro_batch_tokens log_every eval_every save_every keep max_skips recompute optimizer_memory".split()
)
"""Fields that say how training goes, not what is learned: they may change when a run is resumed."""
FOR_FINE_TUNING = ("sft", "conversations", "text.tinyworld_conversations")
FOR_RL = ("rl",)
"""Parts and fields that pretraining does not use; `FOR_RL`: that fine-tuning does not use either."""
IN_FINE_TUNING = OPERATIONAL | {"train.clip_norm", "train.fp8"}
"""Fields that fine-tuning has of its own; the base model's recipe decides the others of `train`."""


@dataclass(frozen=True, kw_only=True)
class SftRecipe:
    """Fine-tuning on conversations."""

    epochs: Amount = 2.0
    """How often every conversation is seen."""
    steps: Count | None = None
    """Optimizer steps; by default from epochs."""
    batch_tokens: Count | None = None
    """Tokens in one optimizer step; pretraining's, or fewer where the conversations would not last for 1,000 steps."""
    lr_share: Rate = 0.3
    """Share of sqrt(batch / 2^19) that multiplies every peak rate; below depth 8 gpt's head gets its root."""
    warmdown_share: Share = 1.0
    """The rate falls over this share of the steps, the last ones, to nothing."""
    too_long: Literal["crop", "drop"] = "crop"
    """Whether a conversation longer than the context is cropped or dropped."""
    tests: str | None = None
    """A folder of test files (.jsonl, .json, .parquet) of tasks: a conversation with one of their questions is refused.
    Files with the word "train" or "training" in their name are not read."""


@dataclass(frozen=True, kw_only=True)
class RlRecipe:
    """Reinforcement learning on rewards that a function computes."""

    rewards: tuple[str, ...] = ("counting",)
    """Exercises: sums, word_problems, counting, spelling, gsm8k, programs, or files (.py)."""
    data: str | None = None
    """The folder with the files of gsm8k (train.jsonl) and programs (programs.jsonl)."""
    seed: Seed | None = None
    """Draws the questions and the replies; by default the run's."""
    steps: Count = 60
    """Optimizer steps."""
    groups: Few = 16
    """Questions in one step."""
    samples: Annotated[int, Interval(ge=2, le=10**6)] = 8
    """Replies to each question; their mean reward is the baseline of its group."""
    max_tokens: Count = 96
    """The most tokens in a reply."""
    lr_share: Rate = 0.012
    """Share of sqrt(batch / 2^19), by pretraining's batch, that multiplies every rate of the first step; below depth 8
    gpt's head gets its root."""
    warmdown_share: Share = 1.0
    """The rate falls over this share of the steps, the last ones, to nothing."""
    resample: Annotated[int, Interval(ge=0, le=1000)] = 2
    """How often a question whose replies all got the same reward is replaced by another one."""
    normalize: bool = False
    """Divide the advantages of a question by the standard deviation of its rewards."""
    kl: Rate = 0.0
    """Weight of the divergence from the model that the stage began with, per token, in units of the reward."""
    overlong_tokens: Annotated[int, Interval(ge=0, le=10**12)] = 0
    """The reward falls by up to 1 over the last tokens before max_tokens, this many of them."""
    updates: Few = 1
    """Optimizer steps on the replies of one model; above 1 the ratio of the probabilities is clipped."""
    clip_low: Share = 0.2
    """With several updates: a reply's token counts while its ratio is above 1 - clip_low, or its advantage above 0."""
    clip_high: Rate = 0.28
    """With several updates: a reply's token counts while its ratio is below 1 + clip_high, or its advantage below 0."""
    val_questions: Few = 64
    """Held-out questions of each kind in a validation."""
    val_samples: Few = 4
    """Replies to each of them; pass@k is given for 1 and for this number."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Generic[Gap]):
    """A whole run: data, text, model, optimizer, training. See the parts for their fields."""

    make_model: Callable[..., Any]
    """(ResolvedModel) → the model."""
    make_rules: Callable[..., Any]
    """(Resolved) → for each optimizer group of the model its rule, peak rate and cadence (`optim.groups.GroupRule`)."""
    make_schedule: Callable[..., Any]
    """(ResolvedTrain) → what the update of each step, maybe a fraction, is told (`optim.schedule.Multipliers`)."""
    make_batches: Callable[..., Any] | None = None
    """(Resolved, Corpus) → `data.batch.Batches`; by default rows packed as `train.packing` says."""
    make_documents: Callable[..., Any] | None = None
    """(texts, split) → texts: filters or mixes the documents of "train" or "val"; by default all, in order."""
    name: str = "gpt"
    depth: Annotated[int, Interval(ge=1, le=1000)] = 4
    """The one dial: layers, and through them width, vocabulary, context, batch, rates and horizon. Open for a text of
    your own, it follows from the time."""
    data: str = "tinyworld"
    """tinyworld, files, folders or patterns (text, code, tables, papers; .bin of tokens), - for standard input,
    https://…, a public data set by name, or hf:OWNER/NAME[:CONFIG][@REVISION]; in a recipe file, one in each line."""
    include: str | None = None
    """Patterns, separated by spaces, of which a file in a folder of --data must match one, such as '*.py'."""
    exclude: str | None = None
    """Patterns of the files in a folder of --data that are ignored."""
    shards: Few | None = None
    """Training files of a public data set to fetch; by default as many as the run needs at 4 bytes a token."""
    val: str | None = None
    """Where validation text comes from; by default it is held out from the data."""
    conversations: tuple[ConversationSource, ...] | None = None
    """Conversations to fine-tune on: files or folders (.jsonl, .json, .csv, .tsv, .parquet), smoltalk, smol-smoltalk,
    gsm8k, mmlu, hf:OWNER/NAME, tinyworld, spelling; each as NAME[,repeats=4][,limit=1000]. By default tinyworld's."""
    seed: Seed = 0
    """Draws the first weights, the order of the batches and the built-in world."""
    data_seed: Seed | Gap = FOLLOWS
    """Draws the order of the batches alone; by default the seed."""
    unused: tuple[str, ...] = ()
    """Fields, such as model.softcap, that the callables above do not read: setting one is refused."""
    text: TextRecipe[Gap] = field(default_factory=TextRecipe)
    model: ModelRecipe[Gap] = field(default_factory=ModelRecipe)
    optim: OptimRecipe[Gap] = field(default_factory=OptimRecipe)
    train: TrainRecipe[Gap] = field(default_factory=TrainRecipe)
    sft: SftRecipe = field(default_factory=SftRecipe)
    rl: RlRecipe = field(default_factory=RlRecipe)

    def __post_init__(self) -> None:
        for name, code in self.callables().items():
            object.__setattr__(self, name, Deferred.of(code))
        given: Any = self.conversations  # a recipe file may name one source, or sources as text
        if given is not None:
            several = (given,) if isinstance(given, str | ConversationSource) else given
            parsed = tuple(ConversationSource.parse(one) if isinstance(one, str) else one for one in several)
            object.__setattr__(self, "conversations", parsed)

    @property
    def conversation_sources(self) -> tuple[ConversationSource, ...]:
        """The sources to fine-tune on, the default included."""
        return self.conversations or (ConversationSource("tinyworld"),)

    @property
    def has_built_in_conversations(self) -> bool:
        """Whether the model is fine-tuned on conversations of the built-in world."""
        return any(one.source in BUILT_IN_CONVERSATIONS for one in self.conversation_sources)

    def callables(self) -> dict[str, Callable[..., Any]]:
        """The fields that hold code: `from_json` needs it back when it lives outside quern."""
        names = [f.name for f in fields(self) if f.name.startswith("make_")]
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def to_json(self) -> dict[str, Any]:
        """JSON types only; a callable becomes "module:name"."""
        code = {name: code_path(value) for name, value in self.callables().items()}
        numbers = asdict(replace(self, **dict.fromkeys(code)))  # which would copy the code
        return strict({"schema": SCHEMA, **numbers, **code}, "recipe")

    @classmethod
    def from_json(cls, body: dict[str, Any], **callables: Callable[..., Any]) -> Self:
        """The inverse of `to_json`; `callables` replace those in the body. Raises ValueError for another schema's."""
        body = {**body, "unused": tuple(body.get("unused", ()))}
        if body.pop("schema", None) != SCHEMA:
            raise ValueError(f"this recipe was written by another version of quern (expected schema {SCHEMA})")
        try:
            body["model"] = {"key_offset": False, "bigrams": False} | body["model"]  # a saved run may be older, or have
            body["train"] = {name: one for name, one in body["train"].items() if name != "save_in_background"}  # more
            body |= {name: typed(body[name], part, exact=True) for name, part in PARTS.items()}
            if body["conversations"] is not None:
                body["conversations"] = tuple(typed(one, ConversationSource) for one in body["conversations"])
            for name, value in body.items():
                if name.startswith("make_") and isinstance(value, str):
                    body[name] = callables.get(name) or Deferred.read(value)
            return cls(**body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a recipe this version can read: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Resolved(Recipe[Never]):
    """A recipe of which `resolve` filled in every number that follows from others."""

    @classmethod
    def of(cls, recipe: Recipe, **values: Any) -> Resolved:
        """Returns the recipe with these values in its gaps."""
        return cls(**{f.name: getattr(recipe, f.name) for f in fields(Recipe)} | values)

    @property
    def micro_batch_rows(self) -> int:
        """Rows in one forward pass."""
        return max(1, self.train.micro_batch_tokens // self.model.context)


Made = TypeVar("Made", bound=Recipe)
ResolvedModel: TypeAlias = ModelRecipe[Never]
ResolvedOptim: TypeAlias = OptimRecipe[Never]
ResolvedTrain: TypeAlias = TrainRecipe[Never]

PARTS: Mapping[str, Any] = {f.name: f.default_factory for f in fields(Recipe) if f.default_factory is not MISSING}
