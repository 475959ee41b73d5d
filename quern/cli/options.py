"""The flags of the verbs that take a recipe or open a run, as dataclasses for tyro, and which fields a verb uses.

A verb whose flags are its own keeps them in the file of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quern import machine as machines
from quern.flags.check_flags import UNSAID
from quern.flags.recipe_flags import field_names, named
from quern.recipe import FOR_FINE_TUNING, IN_FINE_TUNING, Recipe
from quern.runs.saved import NEWEST
from quern.validate import flag


def log(line: str) -> None:
    print(line, flush=True)


@dataclass
class RunOptions:
    """Where things are and what computes."""

    out: Path = Path("out")
    """The folder that everything goes under."""
    run: str = "first"
    """The run's name."""
    device: Annotated[Literal["cpu", "cuda", "mps"] | None, UNSAID] = None
    """Default: the best there is."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, UNSAID] = None
    """Default: bf16 where it is measured to be faster."""
    threads: Annotated[int | None, UNSAID] = None
    """CPU threads. Default: one for each core."""
    compile: bool = True
    """--no-compile runs eagerly."""

    def machine(self, threads: int | None = None, log: Callable[[str], None] = log) -> machines.Machine:
        from quern.kernels.attention.autotune import select_attention

        machine = select_attention(machines.detect(self.device, self.dtype, self.compile, threads or self.threads))
        for note in machine.notes:
            log(note)
        return machine


@dataclass
class PrepareOptions:
    """Flags of `quern prepare` and `quern tokenizer`."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: Path = Path("out")
    """The folder that everything goes under."""


@dataclass
class RunAllOptions:
    """Flags of `quern run`."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    where: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    questions: int = 200
    """Held-out questions of each kind, to evaluate with."""
    sft: bool = True
    """--no-sft leaves a base model: no fine-tuning on conversations."""
    resume: bool = False
    """Go on with a run that there is: its recipe, text and tokenizer. Without it, a run that there is goes on too."""


@dataclass
class TrainOptions:
    """Flags of `quern pretrain` and `quern sft`."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    where: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    resume: bool = False
    """Go on from the newest good checkpoint, with the recipe, text and tokenizer that the run has."""
    start: Annotated[str | None, tyro.conf.arg(name="from", help_behavior_hint="")] = None
    """Begin with the model of this run; --run names the new run. With --resume: unless that has begun already. Default:
    random weights, or the run's base model."""
    from_step: str = NEWEST
    """Which checkpoint of it: newest, before-warmdown (kept from before the rates fell), or a step."""
    ranks: int = 1
    """Processes on this machine that train together."""
    nodes: int = 1
    """Machines that run this command together, with as many ranks each."""
    rendezvous: str = ""
    """With several nodes: host:port, a free port of one of them, where they meet."""
    tp: int = 1
    """How many of them share one replica of the model (tensor parallel); the others are data parallel."""
    restarts: int = 3
    """With several ranks: how often all start anew when one dies."""
    timeout: float = 60.0
    """With several ranks: seconds without progress in a training step until all start anew."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to these."""

    def __post_init__(self) -> None:
        if self.nodes > 1 and ":" not in self.rendezvous:
            raise ValueError(f"--nodes {self.nodes} needs --rendezvous host:port, the same on every node")


@dataclass
class EvaluateOptions:
    """Flags of `quern evaluate`."""

    recipe: tyro.conf.Suppress[Recipe]
    where: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    questions: int = 200
    """Held-out questions of each kind."""
    tasks: tuple[str, ...] = ()
    """Built-in tasks by name, or task files (.py). Default: the built-in tasks that suit the run's data. The base model
    answers questions only with --tasks or --stage pretrain."""
    stage: Annotated[Literal["pretrain", "sft"] | None, UNSAID] = None
    """Evaluate only this stage. Default: the untrained model and every stage of the run."""


@dataclass
class Generating:
    """Flags of both `quern complete` and `quern chat`."""

    recipe: tyro.conf.Suppress[Recipe]
    where: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    temperature: float = 0.7
    """0 picks the likeliest token."""
    top_k: int = 50
    """Choose among so many of the likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    max_tokens: int = 256
    """Tokens of a reply at most."""
    seed: int = 0
    """Of the choice."""


@dataclass
class CompleteOptions(Generating):
    """Flags of `quern complete`."""

    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"], help_behavior_hint="")] = None
    """The beginning of the text, which is printed before its continuation; "" for the beginning of a document. Default,
    and with -: standard input."""
    stage: Literal["pretrain", "sft"] = "pretrain"
    """The stage whose model continues the text."""
    samples: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 1
    """Completions of the prompt, with a line --- between two of them."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """End a completion before this text. Repeat the flag for several texts; $'\\n' is a newline in most shells."""

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError("--stop is empty: give the text to stop before, or leave it out")


@dataclass
class ChatOptions(Generating):
    """Flags of `quern chat`."""

    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"], help_behavior_hint="")] = None
    """Ask this one question and leave; a base model continues it. Default: a conversation."""
    complete: bool = False
    """Continue texts instead of answering questions; by default with the base model."""
    stage: Annotated[Literal["pretrain", "sft"] | None, UNSAID] = None
    """Default: the last one the run has; with --complete, pretrain."""

    def __post_init__(self) -> None:
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("--prompt is empty: ask something, or leave it out to chat")


@dataclass
class ServeOptions:
    """Flags of `quern serve`."""

    recipe: tyro.conf.Suppress[Recipe]
    where: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    stage: Annotated[Literal["pretrain", "sft"] | None, UNSAID] = None
    """Default: the last one the run has."""
    host: str = "127.0.0.1"
    """Listen here; anything but loopback lets others in, and there is no password."""
    port: int = 8000


@dataclass
class ReportOptions:
    """Flags of `quern report`."""

    out: Path = Path("out")
    """The folder that everything goes under."""
    run: str = "first"
    """The run's name."""


# Which of the recipe's fields a verb uses ---------------------------------------------------------------------

SFT_TRAINING = tuple(sorted(IN_FINE_TUNING))
IN_ONE_PROCESS = "is for `quern pretrain` and `quern sft`: `quern run` trains in one process"


def without(verb: str, recipe: Recipe) -> dict[str, str]:
    """The fields and flags that a verb has no use for, and what to say of them: the others are its flags."""
    names = list(field_names(recipe))
    if verb in ("prepare", "tokenizer"):
        hidden = _but(names, ("depth", "data", "val", "seed", "text")) + _of(names, FOR_FINE_TUNING)
        return dict.fromkeys(hidden, f"does nothing in `quern {verb}`: give it to the verb that trains")
    follows = {
        "model.depth": "follows from --depth",
        "model.vocab_size": "follows from the tokenizer: set --text.vocab-size",
        "model.bos": "follows from the tokenizer",
    }
    if verb == "pretrain":
        later = dict.fromkeys(_of(names, FOR_FINE_TUNING), "is for fine-tuning: give it to `quern sft` or `quern run`")
        return follows | later | {"questions": "is for `quern evaluate` and `quern run`"}
    if verb == "sft":
        decided = (
            "is decided by the base run, whose model, text and seed `quern sft` takes over: leave it out, "
            "or pretrain another run with it (`quern pretrain --run NAME`) and fine-tune that one"
        )
        return dict.fromkeys(_but(names, (*FOR_FINE_TUNING, *SFT_TRAINING)), decided) | {
            "questions": "is for `quern evaluate` and `quern run`"
        }
    if verb == "run":
        alone = dict.fromkeys(("ranks", "tp", "restarts", "timeout"), IN_ONE_PROCESS)
        return (
            follows
            | alone
            | {
                "track": "is for `quern pretrain` and `quern sft`",
            }
        )
    own = ("seed",) if verb in ("complete", "chat") else ()  # the seed of the choice
    return dict.fromkeys(_but(names, own), "belongs to the run's recipe, which is the run's for good: leave it out")


def _of(names: list[str], parts: tuple[str, ...]) -> list[str]:
    return [name for name in names if any(f"{name}.".startswith(f"{part}.") for part in parts)]


def _but(names: list[str], parts: tuple[str, ...]) -> list[str]:
    kept = _of(names, parts)
    return [name for name in names if name not in kept]


# Which fields do nothing beside others ------------------------------------------------------------------------


def _from_tokens(recipe: Recipe) -> bool:
    from quern.stages.prepare_tokens import is_tokens

    return is_tokens(recipe.data)


OTHER_TOKENIZER = "does nothing with data that is tokens already: their tokenizer is --text.tokenizer"
IDLE: tuple[tuple[str, Callable[[Recipe], bool], str], ...] = (
    (
        "text.tokenizer",
        lambda recipe: not _from_tokens(recipe),
        "is for data that is tokens already (.bin); of text, the tokenizer is trained: leave it out",
    ),
    (
        "text.column",
        lambda recipe: recipe.data == "tinyworld" or _from_tokens(recipe),
        "names what holds the text in a --data of your own that is text: leave it out",
    ),
    ("text.vocab_size", _from_tokens, OTHER_TOKENIZER),
    ("text.digits", _from_tokens, OTHER_TOKENIZER),
    ("text.tokenizer_megabytes", _from_tokens, OTHER_TOKENIZER),
    (
        "text.tinyworld_megabytes",
        lambda recipe: recipe.data != "tinyworld",
        "is the size of the built-in world, and --data names another text: leave one of them out",
    ),
    (
        "text.tinyworld_conversations",
        lambda recipe: recipe.conversations is not None,
        "is for the built-in conversations, and --conversations names others: leave one of them out",
    ),
    (
        "val",
        lambda recipe: recipe.data == "tinyworld",
        "is for a --data of your own: the built-in world makes its own validation text",
    ),
    (
        "train.steps",
        lambda recipe: recipe.train.minutes is not None,
        "and --train.minutes contradict each other: give one of them",
    ),
    (
        "train.horizon_ratio",
        lambda recipe: recipe.train.minutes is not None or None not in (recipe.train.steps, recipe.train.batch_tokens),
        "does nothing where the length of the run is given: leave it out",
    ),
    (
        "sft.epochs",
        lambda recipe: recipe.sft.steps is not None,
        "and --sft.steps contradict each other: give one of them",
    ),
)
"""A field, when it would be without effect, and what to say where it is set all the same."""


def refuse_idle(recipe: Recipe, arguments: Sequence[str], saved: bool = False) -> None:
    """Raises ValueError for a field that is set, by a flag or by the recipe's file, and would do nothing.

    saved: the recipe is that of a run, whose fields are all set: only those that the flags name count.
    """
    given = set(named(arguments))
    for name, idle, why in IDLE:
        part, _, field_name = name.rpartition(".")
        body = getattr(recipe, part) if part else recipe
        default = next(f.default for f in fields(body) if f.name == field_name)
        set_here = name in given or (not saved and getattr(body, field_name) != default)
        if set_here and idle(recipe):
            raise ValueError(f"--{flag(name)} {why}")
