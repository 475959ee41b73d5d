"""`quern lab`: reads the options of its tools, and runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from quern.cli.options import log
from quern.cli.summaries import EXAMPLES
from quern.estimate.options import PlanOptions
from quern.flags import check_flags
from quern.flags.recipe_flags import Arguments, parse, refuse_idle
from quern.lab.options import BoardOptions, CompareOptions, LogOptions, ScalingOptions, SweepOptions
from quern.recipes import chosen_recipe, load_recipe
from quern.records import read_json
from quern.terminal import listed
from quern.validate import extra, nearest

T = TypeVar("T", CompareOptions, SweepOptions, ScalingOptions, PlanOptions)


def _compare(
    rest: Arguments,
    help_text: str,
    tool: str = "compare",
    answers: Mapping[str, Sequence[str]] | None = None,
    typed: Arguments | None = None,
) -> int:
    names = rest.recipes
    if len(names) < 1 + (tool == "compare") and not rest.asks_for_help:
        ideas = " and at least one idea" if tool == "compare" else ""
        raise ValueError(f"name a baseline{ideas}, as recipes or .py files: quern lab {tool} {TOOLS[tool][2]}")
    files = [(name, *load_recipe(name)) for name in names or ["gpt"]]
    read = [(name, *_options(CompareOptions, f"lab {tool}", rest, help_text, file)) for name, *file in files]
    from quern.lab.arms import Arm
    from quern.lab.ladder import command

    paths = [None if source is None else Path(name) for name, _, source in read]
    arms = [
        Arm(path.stem if path else name, options.recipe, path, source)
        for path, (name, options, source) in zip(paths, read, strict=True)
    ]
    ideas = {name: recipe for name, recipe, source in files[1:] if source is not None}
    command.refuse_lost(files[0][1], ideas, rest.given, read[0][1].ladder)
    known = [arm.name for arm in arms]
    if twice := next((name for name in known if known.count(name) > 1), None):
        raise ValueError(f"two arms have the name {twice}: give every arm's file a name of its own")
    return command.run(arms, read[0][1], set(rest.given), (typed or rest).command(f"lab {tool}"), log, answers=answers)


def _calibrate(rest: Arguments, help_text: str) -> int:
    """Trains ideas whose outcome is known (`quern lab calibrate BASELINE ANSWERS.json`). Their files are in the folder
    of ANSWERS.json, or below it."""
    if rest.asks_for_help:
        return _compare(rest, help_text, "calibrate")
    if len(rest.recipes) != 2 or not rest[1].endswith(".json"):
        example = TOOLS["calibrate"][2]
        raise ValueError(f"name a baseline and the file of known answers, as in quern lab calibrate {example}")
    from quern.lab.verdict import Verdict

    form = 'write the right verdicts of each idea, as {"idea": ["worse", "no difference"]}'
    if not (answers := read_json(Path(rest[1]), dict[str, list[Verdict]], form)):
        raise ValueError(f"{rest[1]} names no idea: {form}")
    folder = Path(rest[1]).parent
    names = {idea: next(map(str, folder.rglob(f"{idea}.py")), "") for idea in answers}
    if lost := [idea for idea, name in names.items() if not name]:
        raise ValueError(f"{rest[1]} names '{lost[0]}', but no folder under {folder} has {lost[0]}.py: add it")
    arguments = Arguments((rest[0], *names.values(), "--ladder", "--study", "calibration", *rest[2:]))
    return _compare(arguments, help_text, "calibrate", answers, rest)


def _sweep(rest: Arguments, help_text: str) -> int:
    options, source = _options(SweepOptions, "lab sweep", rest, help_text)
    if options.workers > 1 and {"-", "--data=-"} & {*rest}:
        raise ValueError("--data - can be read by one process: save the text in a file for several --workers")
    if options.sampler == "grid" and "trials" in rest.given:
        raise ValueError("--trials does nothing with --sampler grid, which tries every combination: leave it out")
    from quern import machine as machines
    from quern.lab.arms import trainer_for
    from quern.lab.study import start_facts

    with extra("lab", "sweeps need extra packages"):
        from quern.lab.search import sweep

    sweep.space_of(options)  # refused before the machine is tried out, which compiles
    detected = machines.detect(**options.device_arguments(options.workers))
    trainer = trainer_for(options.recipe, options.out, detected, log)
    machine = trainer.machine
    worker = [sys.executable, "-m", "quern.cli.main", "lab", "sweep", *rest, "--threads", str(machine.threads)]
    facts = start_facts(machine, rest.command("lab sweep"))
    return sweep.run(options, log, trainer, worker, machines.worker_variables(machine), facts=facts, source=source)


def _scaling(rest: Arguments, help_text: str) -> int:
    options, source = _options(ScalingOptions, "lab scaling", rest, help_text)
    from quern.lab.arms import trainer_for
    from quern.lab.scaling import study as scaling
    from quern.lab.study import start_facts

    plan = scaling.planned(options, log)  # refuses flags before the machine is tried out, which compiles
    if options.plan:
        return 0
    trainer = None if options.fit else trainer_for(options.recipe, options.out, options.where.detect(), log)
    facts = trainer and start_facts(trainer.machine, rest.command("lab scaling"))
    return scaling.run(options, plan, trainer, log, source, facts=facts)


def _log(rest: Arguments, help_text: str) -> int:
    options = check_flags.read(LogOptions, rest, prog="quern lab log", description=help_text)
    from quern.lab.log import publish

    return publish.run(options, log)


def _board(rest: Arguments, help_text: str) -> int:
    options = check_flags.read(BoardOptions, rest, prog="quern lab board", description=help_text)
    from quern.lab.board import server

    return server.run(options, log)


def _plan(rest: Arguments, help_text: str) -> int:
    options, _ = _options(PlanOptions, "lab plan", rest, help_text)
    from quern.estimate import plan

    return plan.run(options, log)


TOOLS: dict[str, tuple[Callable[[Arguments, str], int], str, str]] = {
    "compare": (
        _compare,
        "compare ideas with a baseline over paired seeds, until the verdict",
        "experiments/baseline.py experiments/swiglu.py --ladder --data texts/",
    ),
    "ladder": (
        lambda rest, help_text: _compare(Arguments((*rest, "--ladder")), help_text, "ladder"),
        "train the baseline on the ladder's rungs, for compute multipliers (compare … --ladder)",
        "experiments/baseline.py --data texts/",
    ),
    "calibrate": (
        _calibrate,
        "test a rung of the ladder on ideas whose outcome is known",
        "experiments/baseline.py experiments/known_answers.json --data texts/",
    ),
    "sweep": (
        _sweep,
        "search over fields of the recipe",
        "--space optim.matrix-lr=0.005..0.08:log --train.steps 300 --trials 60",
    ),
    "scaling": (
        _scaling,
        "train an IsoFLOP grid, and fit scaling laws to it",
        "--data texts/ --budgets 1e13 3e13 1e14 --sizes 1 2 3 4 5 --plan",
    ),
    "log": (_log, "write the experiment log, a page per study and the ideas' verdicts, from records", "--study ladder"),
    "board": (_board, "show runs and studies on a local page", "--port 8010"),
    "plan": (_plan, "estimate time, memory and cost of a run on given GPUs", "--depth 20 --gpus 64 --gpu h100"),
}
"""Each tool, what it does, and the arguments of an example."""
WORDS = {"compare": "BASELINE IDEA …", "ladder": "BASELINE", "calibrate": "BASELINE ANSWERS", "log": "", "board": ""}


def main(arguments: Arguments, log: Callable[[str], None]) -> int:
    """Runs a tool and returns its exit code. Raises SystemExit after the help."""
    if not arguments or arguments[0] in check_flags.HELP:
        tools = listed({name: summary for name, (_, summary, _) in TOOLS.items()})
        log(f"usage: quern lab TOOL [RECIPE…] [FLAGS]\n\n{tools}\n\nexample: {EXAMPLES['lab']}")
        raise SystemExit(0)
    if arguments[0] not in TOOLS:
        raise ValueError(f"the lab has no '{arguments[0]}'{nearest(arguments[0], TOOLS)}; all of them: quern lab")
    tool = arguments[0]
    run, summary, example = TOOLS[tool]
    usage = " ".join(filter(None, ["usage: quern lab", tool, WORDS.get(tool, "[RECIPE]"), "[FLAGS]"]))
    return run(Arguments(arguments[1:]), f"{summary}\n\nexample: quern lab {tool} {example}\n\n{usage}")


def _options(
    kind: type[T], verb: str, rest: Arguments, help_text: str, file: Sequence[Any] = ()
) -> tuple[T, str | None]:
    """The options of a tool with a recipe (`file`, or the one that the command line begins with), and the source of
    the recipe's file."""
    recipe, source = file or chosen_recipe(verb, rest)
    options = parse(kind, recipe, rest, verb=verb, description=help_text)
    from quern.runs.public_data import with_local_data
    from quern.stages.prepare_tokens import is_tokens

    if (out := getattr(options, "out", None)) is not None:  # a plan reads no text
        options = replace(options, recipe=with_local_data(options.recipe, out, rest, log))
    refuse_idle(options.recipe, rest.given, is_tokens(options.recipe.data, out))
    return options, source
