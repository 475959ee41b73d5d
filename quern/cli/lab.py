"""`quern lab`: reads the options of its tools, and runs them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import tyro

from quern import machine as machines
from quern.cli.options import log
from quern.cli.summaries import EXAMPLES
from quern.flags import check_flags
from quern.flags.recipe_flags import named, parse
from quern.kernels.attention.autotune import select_attention
from quern.lab.board import server
from quern.lab.devices import DeviceOptions
from quern.lab.ladder.command import run_calibrate, run_compare
from quern.lab.log import publish
from quern.lab.names import start_facts
from quern.lab.scaling import study as scaling
from quern.lab.search import sweep
from quern.lab.trainer import Trainer
from quern.recipe import Recipe
from quern.recipes import load_recipe
from quern.stages.prepare_tokens import is_tokens
from quern.unavailable import refuse_idle

FLAT = tyro.conf.arg(name="")
T = TypeVar("T", bound=sweep.SweepOptions | scaling.ScalingOptions)


@dataclass(frozen=True)
class _SweepOptions(sweep.SweepOptions):
    where: Annotated[DeviceOptions, FLAT] = field(default_factory=DeviceOptions)


@dataclass(frozen=True)
class _ScalingOptions(scaling.ScalingOptions):
    where: Annotated[DeviceOptions, FLAT] = field(default_factory=DeviceOptions)


def _compare(rest: list[str], help_text: str) -> int:
    return run_compare("compare", rest, log, help_text)


def _ladder(rest: list[str], help_text: str) -> int:
    return run_compare("ladder", [*rest, "--ladder"], log, help_text)


def _calibrate(rest: list[str], help_text: str) -> int:
    return run_calibrate(rest, log, help_text)


def _sweep(rest: list[str], help_text: str) -> int:
    options, source = _options(_SweepOptions, "lab sweep", rest, help_text)
    device = options.where.arguments(options.workers)
    machine = machines.detect(**device)
    worker = [sys.executable, "-m", "quern.cli.main", "lab", "sweep", *rest, "--threads", str(device["threads"])]
    facts = start_facts(machine, shlex.join(["quern", "lab", "sweep", *rest]))
    trainer = _trainer(options, device)
    return sweep.run(options, log, trainer, worker, machines.worker_variables(machine), facts=facts, source=source)


def _scaling(rest: list[str], help_text: str) -> int:
    options, source = _options(_ScalingOptions, "lab scaling", rest, help_text)
    trainer = _trainer(options, options.where.arguments())
    facts = start_facts(trainer.machine, shlex.join(["quern", "lab", "scaling", *rest]))
    return scaling.run(options, trainer, log, source, facts=facts)


def _log(rest: list[str], help_text: str) -> int:
    options = check_flags.read(publish.LogOptions, rest, prog="quern lab log", description=help_text)
    return publish.run(options, log)


def _board(rest: list[str], help_text: str) -> int:
    options = check_flags.read(server.BoardOptions, rest, prog="quern lab board", description=help_text)
    return server.run(options, log)


def _plan(rest: list[str], help_text: str) -> int:
    from quern.estimate import plan

    recipe, _, flags = _recipe(rest)
    return plan.main(flags, log, recipe, help_text)


TOOLS: dict[str, tuple[Callable[[list[str], str], int], str]] = {
    "compare": (_compare, "compare ideas with a baseline over paired seeds, until the verdict"),
    "ladder": (_ladder, "train the baseline on the ladder's rungs, for compute multipliers (compare … --ladder)"),
    "calibrate": (_calibrate, "test a rung of the ladder on ideas whose outcome is known"),
    "sweep": (_sweep, "search over fields of the recipe"),
    "scaling": (_scaling, "train an IsoFLOP grid, and fit scaling laws to it"),
    "log": (_log, "write the experiment log, a page per study and the ideas' verdicts, from records"),
    "board": (_board, "show runs and studies on a local page"),
    "plan": (_plan, "estimate time, memory and cost of a run on given GPUs"),
}


def main(arguments: Sequence[str]) -> int:
    """Runs a tool and returns its exit code. Raises SystemExit after the help."""
    if not arguments or arguments[0] in ("-h", "--help"):
        tools = [f"  {name:9} {summary}" for name, (_, summary) in TOOLS.items()]
        log("\n".join(["usage: quern lab TOOL [RECIPE…] [FLAGS]", "", *tools, "", f"example: {EXAMPLES['lab']}"]))
        raise SystemExit(0)
    if arguments[0] not in TOOLS:
        raise ValueError(f"the lab has no '{arguments[0]}': use one of {', '.join(TOOLS)}")
    run, summary = TOOLS[arguments[0]]
    return run(list(arguments[1:]), summary)


def _recipe(rest: Sequence[str]) -> tuple[Recipe, str | None, list[str]]:
    """The recipe that a command line begins with, the source of its file, and the flags."""
    chosen = bool(rest) and not rest[0].startswith("-")
    recipe, source = load_recipe(rest[0] if chosen else "gpt")
    return recipe, source, list(rest[chosen:])


def _options(kind: type[T], verb: str, rest: Sequence[str], help_text: str) -> tuple[T, str | None]:
    """The options of a tool, and the source of the recipe's file."""
    recipe, source, flags = _recipe(rest)
    options = parse(kind, recipe, flags, verb=verb, description=help_text)
    refuse_idle(options.recipe, verb, set(named(flags)), is_tokens(options.recipe.data))
    return options, source


def _trainer(options: _SweepOptions | _ScalingOptions, device: dict[str, object]) -> Trainer:
    return Trainer(options.out, select_attention(machines.detect(**device)), log)  # pyright: ignore[reportArgumentType]
