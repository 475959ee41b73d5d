"""The verbs: each function reads its options and runs its stage. `VERBS` maps a verb's name to its function."""

from __future__ import annotations

import contextlib
import functools
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quern.cli.options import (
    TRAINING,
    ChatOptions,
    CompleteOptions,
    EncodingOptions,
    EvaluateOptions,
    PrepareOptions,
    ReportOptions,
    RunAllOptions,
    ServeOptions,
    TokenizerOptions,
    TrainOptions,
    log,
)
from quern.cli.summaries import OF_A_RUN, described
from quern.flags.check_flags import read
from quern.flags.recipe_flags import Arguments, refuse_idle
from quern.flags.recipe_flags import parse as parse_flags
from quern.process import to_stderr as log_to_stderr
from quern.recipes import chosen_recipe, recipe_names
from quern.records import find_trackers
from quern.runs.run_dir import NAME, RunDir
from quern.terminal import silent
from quern.validate import extra

if TYPE_CHECKING:
    from quern.stages.session import Session


def parse(verb: str, rest: Arguments, flags: type) -> tuple[Any, str | None]:
    """The options of a verb, and the source of the recipe's file if it came from one."""
    if rest.recipes and verb in OF_A_RUN:
        if verb in ("complete", "chat") and not rest[0].endswith(".py") and rest[0] not in recipe_names():
            raise ValueError(f"the text needs -p before it: quern {verb} -p {shlex.quote(rest[0])}")
        raise ValueError(f"the run has its recipe already: leave '{rest[0]}' out, and name the run with --run")
    recipe, source = chosen_recipe(verb, rest)
    found = None
    if not rest.asks_for_help:
        from quern.runs.origin import find_saved

        found = find_saved(verb, rest, recipe, source)
        recipe, source = found or (recipe, source)
    options = parse_flags(flags, recipe, rest, verb=verb, description=described(verb))
    from quern.runs.public_data import with_local_data
    from quern.stages.prepare_tokens import is_tokens

    out = getattr(options, "where", options).out
    options.recipe = with_local_data(options.recipe, out, rest, log)
    refuse_idle(options.recipe, rest.given, is_tokens(options.recipe.data, out), saved=found is not None)
    return options, source


def with_run(verb: str, words: Arguments) -> Arguments:
    """Puts --run before the run's name that a command line begins with.

    Raises ValueError for a run that is named twice, or that `run` or `pretrain` would begin.
    """
    at = int(verb == "grug")
    name = next(iter(words[at : at + 1]), "-")
    if not re.fullmatch(NAME, name) or name.endswith(".py") or name in recipe_names() or (verb, name) == KEYS:
        return words
    known = verb in (*OF_A_RUN, "report", "export") or (verb == "grug" and words[0] in ("eval", "export", "import"))
    if verb in ("run", "pretrain"):
        known = RunDir(Path(words.value("out") or "out"), name).folder.is_dir()
        if not known and not Path(name).exists():
            raise ValueError(
                f"there is no run and no recipe '{name}': --run {name} gives a new run this name; recipes are "
                f"{', '.join(recipe_names())}, or the path of a .py file"
            )
    if known and words.value("run") is not None:
        raise ValueError(f"the run is named twice, as {name} and by --run: leave one of them out")
    return Arguments((*words[:at], "--run", *words[at:])) if known else words


OF_THE_MACHINE = tuple(
    "ranks tp zero nodes rendezvous restarts timeout track device dtype threads workers compile sft chat questions "
    "for".split()
)
"""Flags that a run does not save: the command that continues the run repeats them."""


def verb_prepare(verb: str, rest: Arguments) -> int:
    options, _ = parse(verb, rest, TokenizerOptions if verb == "tokenizer" else PrepareOptions)
    from quern.data.bin_files import MODDED_NANOGPT, NANOGPT, refuse_ids, refuse_written
    from quern.resolve import resolve
    from quern.stages.prepare import fit_vocabulary, open_source, own_megabytes, prepare
    from quern.stages.prepare_tokens import write_tokens
    from quern.stages.tokenizers import for_comparison, train_tokenizer
    from quern.text.tokenizer import compression_report

    recipe = resolve(fit_vocabulary(options.recipe, own_megabytes(options.recipe, options.out)))
    if verb == "tokenizer":
        source = open_source(recipe, options.out, log)
        tokenizer = train_tokenizer(recipe, source, options.out, log)
        text, compared = "\n".join(islice(source.read("val"), 200)), {"held-out text": tokenizer, **for_comparison()}
        rows = [row for kind, one in compared.items() for row in compression_report(one, {kind: text})]
    else:
        if options.to is not None:
            refuse_written(options.dir)
        workers, start_workers = options.encoders()
        prepared = prepare(
            recipe, options.out, log, None, workers, start_workers, lambda one: refuse_ids(one.bos if options.to else 0)
        )
        rows = prepared.facts["tokenizer"]["compression"]
        if options.to is not None:
            form = {"bin": MODDED_NANOGPT, "nanogpt": NANOGPT}[options.to]
            splits, name = {"train": prepared.train, "val": prepared.val}, prepared.facts["data"]["source"]
            write_tokens(splits, prepared.tokenizer, options.dir, name, form, log)
    for row in rows:
        log(f"  {row['kind']:18} {row['bytes_per_token']:.2f} bytes per token")
    if verb == "prepare":
        data = ["--data", *options.recipe.data.split("\n")] if "data" in rest.given else []  # not "-", which is read
        more = rest.repeated(rest.given.keys() - {"data", "to", "dir", "engine", "ray"})
        log(f"next: `{shlex.join(['quern', 'pretrain', *rest.recipes, *data, *more])}`")
    return 0


def on_ranks(
    verb: str,
    rest: Arguments,
    options: TrainOptions | RunAllOptions,
    source: str | None,
    run: Callable[[Session], int],
    stopped: str,
) -> int:
    """Calls `run` in this process, or starts the ranks that call it, or is one of them. Returns the exit code.

    source: the text of the recipe's own Python file; stopped: when a signal stopped ranks without an outcome.
    """
    from quern.mesh import refuse_uneven
    from quern.mixture.sources import require_source
    from quern.resolve import resolve
    from quern.rl.environment import require_environment
    from quern.runs.run_lock import refuse_in_use
    from quern.stages.pretrain import refuse_unfit
    from quern.stages.session import Session, trained_already
    from quern.train import launch

    where, here, ranks = options.where, launch.place(), options.nodes * options.ranks
    trackers = find_trackers(options.track if here.main else ())
    if here.ranks == 1:  # before the machine is tried out, which may compile, and before other ranks could wait
        refuse_uneven(ranks, options.tp, options.zero)
        if options.nodes == 1:  # else another node may train this run already, and waits for this one
            refuse_in_use(where.run_dir)
            if verb != "run" and where.run_dir.has_stepped(verb) and not (options.resume or here.restart):
                raise ValueError(trained_already(where.run_dir, verb))
        if verb in ("pretrain", "run"):
            if not (getattr(options, "start", None) or where.run_dir.has_trained("pretrain")):
                refuse_unfit(options.recipe, where.out)
            resolve(options.recipe, ranks // options.tp)  # refuses bad values
        learns_talks = getattr(options, "sft", verb == "sft") and not where.run_dir.has_trained("sft")
        for asked in options.recipe.conversation_sources if learns_talks else ():
            require_source(asked)
        for name in options.recipe.rl.rewards if verb == "rl" else ():
            require_environment(name)
    if ranks > 1 and here.ranks == 1:
        return launch.launch([verb, *rest], options.ranks, options.restarts, options.nodes, options.rendezvous, stopped)
    rank_log = log if here.main else silent
    detect = functools.partial(where.machine, log=rank_log)
    joined = launch.joined(f"quern {verb}", options.tp, detect, where.threads, options.timeout, options.zero)
    again = ["quern", verb, "--resume", where.run_dir.flags, *map(shlex.quote, rest.repeated(OF_THE_MACHINE))]
    with joined as (machine, mesh):
        session = Session(
            stage="pretrain" if verb == "run" else verb,
            machine=machine,
            run_dir=where.run_dir,
            resume=launch.restarted(mesh) or options.resume,  # every rank asks the others
            source=source,
            command=rest.command(verb),
            log=rank_log,
            trackers=trackers,
            mesh=mesh,
            named=set(rest.given),
            go_on=" ".join(again),
            workers=options.workers if isinstance(options, EncodingOptions) else None,
        )
        return launch.finish(run(session))


def verb_train(verb: str, rest: Arguments) -> int:
    """Runs a training stage, on ranks if there are several."""
    options, source = parse(verb, rest, TRAINING[verb])
    recipe, where = options.recipe, options.where
    if options.start == where.run:
        raise ValueError(f"--from {options.start} names the run itself: give the new run another name with --run")
    if options.start is None and rest.value("from_step") is not None:
        raise ValueError("--from-step chooses a checkpoint of another run: name that run with --from")
    base = RunDir(where.out, options.start or where.run)
    if options.start or verb != "pretrain":  # before the machine is tried out, which may compile
        goes_on = options.resume and where.run_dir.has_trained(verb)
        needed = "sft" if verb == "rl" and not where.run_dir.has_trained(verb) and options.start is None else None
        (where.run_dir if goes_on else base).require_trained(needed)
    from quern.runs.load import Start, open_start
    from quern.stages import pretrain, rl, sft

    stage = {"pretrain": pretrain.run, "sft": sft.run, "rl": rl.run}[verb]

    def begin(session: Session) -> Start | None:
        """The checkpoint of another run to start from, unless this run already has its own."""
        if options.start is None or (session.resume and session.run_dir.has_trained(verb)):
            return None
        stages = {"pretrain": ("pretrain",), "sft": ("pretrain", "sft"), "rl": ("sft", "rl")}[verb]
        return open_start(base, stages, session.log, options.from_step, recipe.callables() if source else None)

    begun = "before training began"
    return on_ranks(verb, rest, options, source, lambda one: stage(recipe, replace(one, start=begin(one))), begun)


KEYS = ("serve", "keys")  # no run of that name, which takes --run
PEER_SECONDS = 60.0
"""A rank that waits for rank 0 to prepare data gives up after this time without a sign of life."""


def verb_evaluate(verb: str, rest: Arguments) -> int:
    options, _ = parse(verb, rest, EvaluateOptions)
    from quern.mesh import alone
    from quern.stages import evaluate
    from quern.train import launch

    where, here = options.where, launch.place()
    asked = evaluate.Questions(**{field.name: getattr(options, field.name) for field in fields(evaluate.Questions)})
    if options.check:
        asked.find(where.run_dir.out, alone(), log)
        return 0
    where.run_dir.require_trained(options.stage)
    if options.ranks > 1 and here.ranks == 1:
        return launch.launch([verb, *rest], options.ranks, restarts=0, stopped="before the evaluation ended")
    rank_log = log if here.main else silent
    where.compile = False  # as in `open_engine`
    detect = functools.partial(where.machine, log=rank_log)
    with launch.joined("quern evaluate", 1, detect, where.threads, PEER_SECONDS) as (machine, mesh):
        evaluate.run(where.run_dir, machine, asked, rank_log, mesh=mesh)
        return launch.finish(0)


def verb_run(verb: str, rest: Arguments) -> int:
    from quern.interop import command as interop

    options, source = parse(verb, rest := interop.plan(rest), RunAllOptions)
    interop.refuse_plan(options.program, options.recipe)
    from quern.stages import run_all
    from quern.train import launch

    asked = {"questions": options.questions, "chat": options.chat, "sft": options.sft}
    work = functools.partial(run_all.run, options.recipe, **asked)
    code = on_ranks(verb, rest, options, source, work, "before the report was written: the same command continues")
    if code == 0 and launch.place().ranks == 1:
        interop.export_plan(options.program, options.where.run_dir, log)
    return code


def open_engine(options: CompleteOptions | ChatOptions) -> Any:
    """The engine of the run's model, and the loaded model. Standard output is for replies alone."""
    options.where.run_dir.require_trained(options.stage)
    options.where.compile = False  # here nothing is compiled, and to try the compiler takes seconds
    from quern.generate.engine import Engine
    from quern.runs.load import load

    machine = options.where.machine(log=log_to_stderr)
    loaded = load(options.where.run_dir, machine, log_to_stderr, options.stage)
    return Engine(loaded.model, loaded.tokenizer, machine), loaded


def verb_complete(verb: str, rest: Arguments) -> int:
    options, _ = parse(verb, rest, CompleteOptions)
    from quern.stages.complete import complete, read_prompt

    prompt = read_prompt(options.prompt, sys.stdin)
    engine, _ = open_engine(options)
    how = {"sampling": options.sampling, "max_tokens": options.max_tokens, "seed": options.seed}
    put = functools.partial(print, end="", flush=True)
    complete(engine, prompt, put=put, samples=options.samples, stop=options.stop, **how)
    return 0


def verb_chat(verb: str, rest: Arguments) -> int:
    options, _ = parse(verb, rest, ChatOptions)
    if options.complete and options.stage is None:
        options.stage = "pretrain"
    engine, loaded = open_engine(options)
    from quern.chat.commands import run

    how = {"sampling": options.sampling, "max_tokens": options.max_tokens, "seed": options.seed}
    history = options.where.run_dir.chat_history
    run(engine, loaded.stage, options.prompt, options.complete, history, log_to_stderr, **how)
    return 0


def verb_serve(verb: str, rest: Arguments) -> int:
    if (verb, *rest[:1]) == KEYS:  # it has its own flags
        from quern.serve.access import keys_command

        return keys_command(rest[1:], log)
    options, _ = parse(verb, rest, ServeOptions)
    with extra("serve", "serving needs extra packages"):
        from quern.serve import replicas, server
        from quern.serve.access import Hosts, KeysFile, admit_lan
        from quern.serve.gate import Gate
        from quern.serve.metrics import append_to
    here = replicas.join()
    if here is None:  # a port that is taken is refused before the machine is tried out, which may compile
        server.listen(options.host, options.port).close()
    keys = None if options.keys is None else KeysFile(options.keys, log)
    keys, invite = admit_lan(keys) if options.lan else (keys, None)
    run_dirs = [RunDir(options.where.out, run) for run in (options.where.run, *options.also)]
    for one in run_dirs:
        one.require_trained(options.stage)
    if options.replicas > 1 and here is None:
        again, machine = [sys.executable, "-m", "quern.cli.main", verb, *rest], options.where.machine(log=log)
        scheme = "https" if options.tls else "http"
        replicas.run(again, options.replicas, scheme, options.host, options.port, machine, log)
        return 0
    machine, kept = options.where.machine(here and here.threads, log=log), options.prefix_megabytes
    sources = {f"quern-{one.run}": server.Source(one, options.stage, machine, kept) for one in run_dirs}
    with options.access_log.open("ab", 0) if options.access_log else contextlib.nullcontext() as file:
        access = file and append_to(file, log)
        rates = options.requests_per_minute, options.requests_at_once
        hosts = Hosts(options.host, options.allowed_hosts)
        gate = Gate(hosts, keys, access, *rates, options.cors, options.trusted_proxy)
        server.run(
            sources, options.host, options.port, gate, options.request_seconds, log,
            watch_seconds=options.watch_seconds, tls=options.tls, replica=here, invite=invite,
        )  # fmt: skip
    return 0


def verb_report(verb: str, rest: Arguments) -> int:
    run_dir = read(ReportOptions, rest, prog="quern report", description=described(verb)).run_dir
    if not run_dir.folder.is_dir():
        raise FileNotFoundError(run_dir.has_no("records"))
    from quern.report import build

    for path in build.build(run_dir.folder):
        log(f"report: {path}")
    return 0


def verb_bench(verb: str, rest: Arguments) -> int:
    from quern.bench.options import BenchOptions

    options = read(BenchOptions, rest, prog="quern bench")
    from quern.bench import command

    return command.run(options, log, rest.command("bench"))


def in_file(path: str, told: bool = True) -> Callable[[str, Arguments], int]:
    """A verb whose file, module:function, reads its own flags. told: it takes the verb's description, too."""

    def run(verb: str, rest: Arguments) -> int:
        module, _, function = path.partition(":")
        return getattr(import_module(module), function)(rest, log, *([described(verb)] if told else []))

    return run


VERBS: dict[str, Callable[[str, Arguments], int]] = {
    "run": verb_run,
    "prepare": verb_prepare,
    "tokenizer": verb_prepare,
    "pretrain": verb_train,
    "sft": verb_train,
    "rl": verb_train,
    "evaluate": verb_evaluate,
    "complete": verb_complete,
    "chat": verb_chat,
    "serve": verb_serve,
    "report": verb_report,
    "runs": in_file("quern.runs.manage:main"),
    "bench": verb_bench,
    "export": in_file("quern.interop.command:export"),
    "import": in_file("quern.interop.command:import_model"),
    "grug": in_file("quern.stages.jax.command:main", told=False),
    "lab": in_file("quern.cli.lab:main", told=False),
}
