"""The flags of the command line that several verbs share, as dataclasses for tyro: where, what is trained, how to talk.

A verb whose flags are its own keeps them in the file of its stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quern import machine as machines
from quern.recipe import Recipe


def say(line: str) -> None:
    print(line, flush=True)


@dataclass
class Where:
    """Where things are and what computes."""

    out: Path = Path("out")
    """The folder that everything goes under."""
    run: str = "first"
    """The run's name."""
    device: Literal["cpu", "cuda", "mps"] | None = None
    """Default: the best there is."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Default: bf16 where it is measured to be faster."""
    threads: int | None = None
    """CPU threads. Default: one for each core."""
    compile: bool = True
    """--no-compile runs eagerly."""

    def machine(self, threads: int | None = None) -> machines.Machine:
        from quern.kernels.attention_pick import equip

        machine = equip(machines.detect(self.device, self.dtype, self.compile, threads or self.threads))
        for note in machine.notes:
            say(note)
        return machine


@dataclass
class Training:
    """Flags of the training verbs: the recipe's fields, and where it runs."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)
    resume: bool = False
    """Go on from the newest good checkpoint."""
    ranks: int = 1
    """Processes on this machine that train together."""
    tp: int = 1
    """How many of them share one replica of the model (tensor parallel); the others are data parallel."""
    restarts: int = 3
    """With several ranks: how often all start anew when one dies."""
    timeout: float = 60.0
    """With several ranks: seconds without progress in a training step until the rank that is the cause is looked for,
    and all start anew."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to these."""
    questions: int = 200
    """Held-out questions of each kind, for `run`."""

    def __post_init__(self) -> None:
        for name, value, least in (("ranks", self.ranks, 1), ("tp", self.tp, 1), ("restarts", self.restarts, 0)):
            if value < least:
                raise ValueError(f"--{name} must be at least {least}, not {value}")
        if self.timeout <= 0:
            raise ValueError(f"--timeout must be above 0 seconds, not {self.timeout:g}")


@dataclass
class Evaluating:
    """Flags of `quern evaluate`."""

    recipe: tyro.conf.Suppress[Recipe]
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)
    questions: int = 200
    """Held-out questions of each kind."""


@dataclass
class Talking:
    """Flags of `quern chat` and `quern serve`."""

    recipe: tyro.conf.Suppress[Recipe]
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)
    prompt: Annotated[str | None, tyro.conf.arg(aliases=["-p"])] = None
    """Ask this one question and leave."""
    stage: Literal["pretrain", "sft"] | None = None
    """Default: the last one the run has."""
    temperature: float = 0.7
    top_k: int = 50
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    host: str = "127.0.0.1"
    """`serve` listens here; anything but loopback lets others in, and there is no password."""
    port: int = 8000


@dataclass
class Reporting:
    """Flags of `quern report`."""

    out: Path = Path("out")
    """The folder that everything goes under."""
    run: str = "first"
    """The run's name."""
