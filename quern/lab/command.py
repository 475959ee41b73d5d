"""`quern lab compare` on the command line: its options, its arms, and the registration of its study."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from quern import machine as machines
from quern.cluster.connect import connect
from quern.flags.check_flags import UNSAID
from quern.flags.recipe_flags import named, parse
from quern.lab.arms import Arm
from quern.lab.compare import Workers, compare
from quern.lab.devices import DeviceOptions
from quern.lab.evidence import detectable_effect
from quern.lab.names import check_name, locked, start_facts
from quern.lab.results import HEAD
from quern.lab.study import AXES, Registration, Study, register
from quern.machine import machine_flags
from quern.recipe import Recipe, TrainRecipe
from quern.recipes import load_recipe
from quern.resolve import resolve
from quern.stages.open_data import SHOWN
from quern.stages.prepare import prepare
from quern.stages.prepare_tokens import is_tokens
from quern.terminal import counted, grid
from quern.unavailable import refuse_idle


@dataclass(frozen=True)
class CompareOptions:
    """Flags of `quern lab compare`: fields of every arm's recipe, and the rules of the study."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    where: Annotated[DeviceOptions, tyro.conf.arg(name="")] = field(default_factory=DeviceOptions)
    out: Path = Path("out")
    """The output folder; studies are in its folder lab."""
    study: Annotated[str | None, UNSAID] = None
    """The study's name; an existing study continues. Default: from the names of the arms."""
    workers: int = 1
    """Ideas that are compared at the same time: on GPUs each worker has one, on a CPU they share its threads."""
    ray: Annotated[str | None, UNSAID] = None
    """A Ray cluster whose machines train the arms: auto or HOST:PORT. Default: this machine."""
    axes: tuple[Literal["steps", "flops", "seconds"], ...] = AXES
    """What the arms have equal; each axis has a verdict of its own."""
    delta: float = 0.002
    """Bits per byte. A smaller difference does not matter."""
    alpha: float = 0.05
    """On each axis, the expected share of ideas without effect among those that are called better or worse."""
    tau2: float = 1.0
    """Variance of the effect size, in standard deviations of the pairs' differences, that the test is tuned for."""
    most_pairs: int = 12
    """An idea that is not decided after so many pairs stays undecided."""
    vary: Literal["both", "init", "data"] = "both"
    """What differs between the pairs: the initial weights, the order of the data, or both."""
    first_seed: int = 0
    """The seed of the first pair; the next pairs count up."""
    same_time: float = 0.05
    """Arms whose times of a step differ by at most this share count as equally fast."""
    evaluations: int = 4
    """Validations in a trial, for the curves. Each scores the whole validation text."""
    horizons: tuple[float, ...] = (0.75, 1.33)
    """The baseline is also trained for these shares of its steps: an effect is then told as steps saved."""
    horizon_pairs: int = 3
    """Pairs that are trained for the other horizons."""


def run_compare(rest: list[str], log: Callable[[str], None], description: str) -> int:
    """Reads the command line after `quern lab compare`, and runs the study. Returns the exit code."""
    count = next((at for at, argument in enumerate(rest) if argument.startswith("-")), len(rest))
    names, flags = rest[:count], rest[count:]
    if len(names) < 2 and not {"-h", "--help"} & set(flags):
        raise ValueError(
            "name a baseline and at least one idea, as recipes or .py files: "
            "quern lab compare experiments/baseline.py experiments/swiglu.py"
        )
    arms, options = [], None
    for name in names or ["gpt"]:
        recipe, source = load_recipe(name)
        parsed = parse(CompareOptions, recipe, flags, verb="lab compare", description=description)
        options = options or parsed
        refuse_idle(parsed.recipe, "lab compare", set(named(flags)), is_tokens(parsed.recipe.data))
        path = Path(name) if source is not None else None
        arms.append(Arm(path.stem if path else name, parsed.recipe, path, source))
    assert options is not None
    if len({arm.name for arm in arms}) < len(arms):
        raise ValueError("two arms have one name: give every arm's file a name of its own")
    command = shlex.join(["quern", "lab", "compare", *rest])
    return _compare(arms, options, command, log)


def _compare(arms: list[Arm], options: CompareOptions, command: str, log: Callable[[str], None]) -> int:
    base, device = arms[0], options.where.arguments(1 if options.ray else options.workers)
    machine = machines.detect(**device)
    train = resolve(base.recipe).train
    assert train.steps
    arms = [_same_length(arm, train) for arm in arms]
    name = check_name(options.study or "-".join(arm.name for arm in arms)[:60])
    if not options.axes:
        raise ValueError("--axes is empty: name at least one of steps, flops, seconds")
    if train.steps < 2:
        raise ValueError("--train.steps must be at least 2, since the first step is not timed")
    detectable = detectable_effect(options.most_pairs, options.alpha / (len(arms) - 1), tau2=options.tau2)
    if math.isinf(detectable):
        raise ValueError(
            f"{options.most_pairs} pairs cannot decide at --alpha {options.alpha:g} over {len(arms) - 1} ideas: give "
            "more with --most-pairs"
        )
    if options.ray:
        connect(options.ray)
    prepared = prepare(resolve(base.recipe), options.out, log)
    registration = Registration(
        base=base.name,
        ideas=tuple(arm.name for arm in arms[1:]),
        recipes={arm.name: arm.recipe.to_json() for arm in arms},
        sources={arm.name: arm.source for arm in arms if arm.source is not None},
        steps=train.steps,
        axes=tuple(axis for axis in AXES if axis in options.axes),
        horizons=options.horizons,
        horizon_pairs=options.horizon_pairs,
        evaluations=options.evaluations,
        delta=options.delta,
        alpha=options.alpha,
        tau2=options.tau2,
        most_pairs=options.most_pairs,
        vary=options.vary,
        seed=options.first_seed,
        text=prepared.text[:SHOWN],
        same_time=options.same_time,
        detectable_sd=round(detectable, 2),
    )
    folder = options.out / "lab" / name
    with locked(folder):
        study = register(folder, registration, start_facts(machine, command), log)
        return _run(study, arms, options, machine, log)


def _run(
    study: Study, arms: list[Arm], options: CompareOptions, machine: machines.Machine, log: Callable[[str], None]
) -> int:
    registered = study.registration
    log(
        f"study {study.name}: {registered.metric}, {registered.steps:,} steps; margin ±{registered.delta:g}, "
        f"α {registered.alpha:g}, at most {registered.most_pairs} pairs, which find an effect of "
        f"{registered.detectable_sd:g} standard deviations of the pairs' differences with a probability of 80 %; "
        f"{counted(len(study.entries), 'trial')} there already"
    )
    own = 1 if options.ray else options.workers  # workers that share this machine
    device = machine_flags(machine) | {"threads": options.where.arguments(own)["threads"]}
    variables = machines.worker_variables(machine)
    workers = Workers(options.workers, options.out, device, variables, cluster=options.ray is not None)
    results, failed = compare(study, arms, workers, log)
    for line in grid(("equal", *HEAD), [[one.axis, *one.cells()] for one in results]):
        log(line)
    for one in results:
        if one.paired.outliers:
            numbers = ", ".join(str(one.pairs[at] + 1) for at in one.paired.outliers)
            log(f"outliers, which count like the others: {one.idea}, equal {one.axis}, pairs {numbers}")
    return 1 if failed else 0


def _same_length(arm: Arm, base: TrainRecipe) -> Arm:
    """The arm with the baseline's number of steps, and with its batch unless the idea has one of its own."""
    train = arm.recipe.train
    train = replace(train, steps=base.steps, batch_tokens=train.batch_tokens or base.batch_tokens)
    return replace(arm, recipe=replace(arm.recipe, train=train))
