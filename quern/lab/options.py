"""Flags of the tools of `quern lab`."""

from __future__ import annotations

import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from quern.field_types import Few, Port, Positive, Rate
from quern.flags.check_flags import DeviceOptions, Mark
from quern.flags.recipe_flags import FINE_TUNING, FOLLOWING, RL, Refusal
from quern.recipe import Recipe

TRIALS = (
    RL,
    Refusal(FINE_TUNING, "is for fine-tuning, and a study compares pretraining"),
    Refusal(
        "train.minutes train.save_every train.keep train.log_every train.eval_every data_seed",
        "does nothing in a study: its trials have a fixed number of steps, no checkpoints, and the study's seeds",
    ),
    *FOLLOWING,
)
"""The refusals of the verbs that train trials."""
OF_TEXT = (
    "data val include exclude shards text.val_megabytes text.tinyworld_megabytes text.column text.separator "
    "text.encoding text.split"
)
"""Fields that decide which text is read and which validates. Trials must agree in them."""


def refuse_name(study: str) -> None:
    """Raises ValueError if a study cannot have this name, which is its folder's."""
    if not re.fullmatch(r"\w[\w.-]*", study):
        raise ValueError(f"a study cannot be called '{study}': give --study letters, digits, - _ and .")


@dataclass(frozen=True)
class StudyOptions:
    """Flags of every tool that trains trials: the fields of the recipe, and the study."""

    refusals: ClassVar = TRIALS

    recipe: Annotated[Recipe, Mark.FLAT]
    where: Annotated[DeviceOptions, Mark.FLAT] = field(default_factory=DeviceOptions, kw_only=True)
    out: Path = field(default=Path("out"), kw_only=True)
    """The output folder; studies are in its folder lab."""
    study: str | None = field(default=None, kw_only=True)
    """The study's name; an existing study continues, also in several processes at a time. Default: from the arms,
    "ladder", "calibration", a sweep's .toml files, or the tool."""

    def __post_init__(self) -> None:
        refuse_name(self.study or self.default)
        if self.recipe.train.minutes is not None:
            raise ValueError("a trial trains for steps, so that trials are comparable: leave out train.minutes")

    def device_arguments(self, workers: int) -> dict[str, Any]:
        """Arguments of `machine.detect` for one of some workers, which share the CPU's threads."""
        import torch

        machine = self.where.detect()
        if machine.device.type == "cuda" and workers > torch.cuda.device_count():
            raise ValueError(f"--workers {workers} needs as many GPUs, and there are {torch.cuda.device_count()}")
        return asdict(self.where) | {"device": machine.device.type, "threads": max(1, machine.threads // workers)}

    @property
    def folder(self) -> Path:
        return self.out / "lab" / (self.study or self.default)

    @property
    def out_flag(self) -> str:
        """The output folder as the end of a command; "" for the default."""
        return "" if self.out == Path("out") else f" --out {shlex.quote(str(self.out))}"

    @property
    def default(self) -> str:
        return "ladder"


@dataclass(frozen=True)
class CompareOptions(StudyOptions):
    """Flags of `quern lab compare`: fields of every arm's recipe, and the rules of the study."""

    workers: Few = 1
    """Arms that train at the same time: on GPUs each worker has one, on a CPU they share its threads."""
    ray: str | None = None
    """A Ray cluster whose machines train the arms: auto or HOST:PORT. Default: this machine."""
    ladder: bool = False
    """Compare on the ladder's sizes, for compute multipliers and their trend."""
    rungs: tuple[Annotated[int, Interval(ge=0, le=100)], ...] = (0,)
    """With --ladder: the rungs to climb. An idea goes up unless it is clearly worse or makes no difference."""
    every: bool = False
    """With --ladder: take every idea up, whatever its verdict."""
    speeds: bool = False
    """Also measure the speed of each idea against the baseline, both alternating in one process, for the multipliers by
    seconds. It needs no quiet machine."""
    tune: str = ""
    """A rate, such as matrix_lr, of which every arm tries the same multiples on the lowest rung."""
    delta: Rate = 0.005
    """Bits per byte. A smaller difference does not matter."""
    alpha: Annotated[float, Interval(ge=1e-06, lt=0.5)] = 0.05
    """The share of the ideas called better or worse that may be expected to make no difference."""
    most_pairs: Annotated[int, Interval(ge=3, le=100)] = 8  # at least verdict.FIRST_LOOK
    """An idea that is not decided after so many pairs stays undecided."""
    any_delta: bool = False
    """Train ideas although, by the baseline's noise, so many pairs cannot show a change of less than delta."""


@dataclass(frozen=True)
class LogOptions:
    """Flags of `quern lab log`."""

    study: tuple[str, ...] = ()
    """Studies under out/lab to publish. Default: those that were published before, from their records."""
    out: Path = Path("out")
    """The output folder, which has the studies."""
    folder: Path = Path(".")
    """The project's folder. It has experiments/; docs/experiments/ is made in it."""

    def __post_init__(self) -> None:
        for name in self.study:
            refuse_name(name)


@dataclass(frozen=True)
class SweepOptions(StudyOptions):
    """Flags of `quern lab sweep`: the fields of the recipe, and the search."""

    space: tuple[str, ...] = ()
    """The fields to vary: FIELD=LOW..HIGH, FIELD=LOW..HIGH:log, FIELD=LOW..HIGH:STEP, FIELD=A,B,C; or .toml files."""
    sampler: Literal["tpe", "gp", "random", "grid"] = "tpe"
    """gp: a Gaussian process, for up to about 100 costly trials. grid: all combinations, without --trials."""
    pruner: Literal["none", "wilcoxon", "hyperband"] = "none"
    """wilcoxon: a trial ends after the seed at which it is worse than the best one. hyperband: a trial's first run ends
    at the validation at which it falls behind."""
    trials: Few = 50
    """Trials that are to finish, those of earlier starts included."""
    seeds: Few = 3
    """Runs of each trial, with the same seeds in every trial."""
    evaluations: Few = 8
    """Validations of each run, at most."""
    workers: Few = 1
    """Processes on this machine that run trials at the same time. On another machine that shares the folder, run the
    same command."""

    @property
    def default(self) -> str:
        return "-".join(Path(entry).stem for entry in self.space if entry.endswith(".toml")) or "sweep"


@dataclass(frozen=True)
class ScalingOptions(StudyOptions):
    """Flags of `quern lab scaling`: the fields of the recipe, and the grid."""

    budgets: tuple[Annotated[float, Interval(gt=0, le=1e30)], ...] = (1e13, 3e13, 1e14, 3e14)
    """Training FLOPs of a run."""
    sizes: tuple[str, ...] = ("1", "2", "3", "4", "5", "6", "7")
    """Models of each budget: a depth, or DEPTHxWIDTH."""
    seeds: Few = 1
    """Runs of each cell, with seeds 0, 1, …"""
    tokens_per_second: Positive | None = None
    """Training speed that a run of the recipe at its own --depth prints, to estimate the time. Default: no estimate
    before the first run."""
    resamples: Annotated[int, Interval(ge=100, le=10**6)] = 1000
    """Resamples of the bootstrap."""
    plan: bool = False
    """Print the plan and stop."""
    fit: bool = False
    """Fit the finished runs without training, also while another process trains."""

    check: str | None = None
    """A study whose prediction is compared with this one's optimum; --budgets must have the budget that it predicts.
    Default: no comparison."""

    @property
    def default(self) -> str:
        return "scaling"


@dataclass(frozen=True)
class BoardOptions:
    """Flags of `quern lab board`."""

    out: Path = Path("out")
    """The output folder: runs are in its folder runs, studies in its folder lab."""
    port: Port = 8010
    """The port to listen on; 0 picks a free one."""
    host: str = "127.0.0.1"
    """The address to listen on. Other hosts can connect to any address but loopback, and there is no password."""
