"""What each verb does: its options are read, then its stage runs. `VERBS` maps a verb's name to its function."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quern.cli.options import (
    ChatOptions,
    CompleteOptions,
    EvaluateOptions,
    PrepareOptions,
    ReportOptions,
    RunAllOptions,
    RunOptions,
    ServeOptions,
    TrainOptions,
    log,
    refuse_idle,
    without,
)
from quern.cli.summaries import OF_A_RUN, described
from quern.mesh import refuse_uneven
from quern.recipes import load_recipe, recipe_names
from quern.validate import install

if TYPE_CHECKING:
    from quern.recipe import Recipe
    from quern.stages.session import Session


def parse(verb: str, rest: list[str], flags: type) -> tuple[Any, str | None]:
    """The flags of a verb, and the source of the recipe if it came from a file."""
    from quern.flags import recipe_flags
    from quern.runs import saved

    chosen = bool(rest) and not rest[0].startswith("-")
    if chosen and verb in OF_A_RUN and rest[0] in recipe_names():
        raise ValueError(f"the run has its recipe already: leave '{rest[0]}' out, and name the run with --run")
    recipe, source = load_recipe(rest[0] if chosen else "gpt")
    arguments = rest[chosen:]
    helps = "-h" in arguments or "--help" in arguments
    found = None if helps else saved.find_saved(verb, arguments, recipe, source, chosen)
    recipe, source = found or (recipe, source)
    hidden, description = without(verb, recipe), described(verb)
    parsed = recipe_flags.parse(flags, recipe, arguments, prog=f"quern {verb}", without=hidden, description=description)
    refuse_idle(parsed.recipe, arguments, saved=found is not None)
    return parsed, source


def trackers(options: TrainOptions, run_dir: Any, stage: str) -> tuple[Any, ...]:
    from quern.records import TensorBoardTracker, WandbTracker

    makers: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: TensorBoardTracker(run_dir.stage(stage) / "tensorboard"),
        "wandb": lambda: WandbTracker("quern", run_dir.run, run_dir.stage(stage), options.recipe.to_json()),
    }
    return tuple(makers[name]() for name in options.track)


def run_dir_of(where: RunOptions | ReportOptions) -> Any:
    from quern.runs.run_dir import RunDir

    return RunDir(where.out, where.run)


def command_line(verb: str, rest: list[str]) -> str:
    return shlex.join(["quern", verb, *rest])


OF_THE_MACHINE = tuple(
    "ranks tp nodes rendezvous restarts timeout track device dtype threads no-compile no-sft questions".split()
)
"""Flags that a run does not save: who goes on with it gives them again."""


def go_on(verb: str, rest: list[str], run_dir: Any) -> str:
    """The command that goes on with a run that was stopped, for messages."""
    from quern.flags.recipe_flags import repeated

    kept = shlex.join(repeated(rest, OF_THE_MACHINE))
    return f"quern {verb} --resume {run_dir.flags}{' ' if kept else ''}{kept}"


def verb_prepare(verb: str, rest: list[str]) -> int:
    from quern.resolve import resolve
    from quern.stages.prepare import open_source, prepare, train_tokenizer
    from quern.text.tokenizer import compression_report

    options, _ = parse(verb, rest, PrepareOptions)
    recipe = resolve(options.recipe)
    if verb == "tokenizer":
        source = open_source(recipe, options.out, log)
        tokenizer = train_tokenizer(recipe, source, options.out, log)
        text = "\n".join(next_texts(source.read("val"), 200))
        rows = compression_report(tokenizer, {"held-out text": text})
    else:
        prepared = prepare(recipe, options.out, log)
        rows = prepared.facts["tokenizer"]["compression"]
    for row in rows:
        log(f"  {row['kind']:18} {row['bytes_per_token']:.2f} bytes per token")
    return 0


def next_texts(texts: Any, count: int) -> list[str]:
    return [text for _, text in zip(range(count), texts, strict=False)]


def verb_pretrain(verb: str, rest: list[str]) -> int:
    from quern.stages import pretrain

    return train_on_ranks(verb, rest, pretrain.run)


def verb_sft(verb: str, rest: list[str]) -> int:
    from quern.stages import sft

    return train_on_ranks(verb, rest, sft.run)


def train_on_ranks(verb: str, rest: list[str], stage: Callable[[Recipe, Session], int]) -> int:
    """Runs a training stage in this process, or starts the ranks that do, or is one of them."""
    from quern.flags.recipe_flags import named
    from quern.resolve import resolve
    from quern.runs import saved
    from quern.runs.run_dir import RunDir
    from quern.stages.session import Session
    from quern.train import launch

    arguments = [verb, *rest]
    options, source = parse(verb, rest, TrainOptions)
    here = launch.place()
    if here.ranks == 1:
        refuse_uneven(options.nodes * options.ranks, options.tp)
    if options.nodes * options.ranks > 1 and here.ranks == 1:
        if verb == "pretrain":
            resolve(options.recipe)  # refuses bad values before any rank is started
        return launch.launch(arguments, options.ranks, options.restarts, options.nodes, options.rendezvous)
    run_dir = run_dir_of(options.where)
    where = options.where
    if options.start == where.run:
        raise ValueError(f"--from {options.start} names the run itself: give the new run another name with --run")
    said = log if here.main else lambda line: None

    def begin(resume: bool) -> saved.Start | None:
        """The checkpoint of another run to begin with, unless the run has begun already."""
        if options.start is None or (resume and run_dir.has_trained(verb)):
            return None
        other, stages = RunDir(where.out, options.start), ("pretrain",) if verb == "pretrain" else ("pretrain", "sft")
        code = options.recipe.callables() if source else None
        return saved.read_start(other, stages, options.from_step, said, code)

    with launch.joined(f"quern {verb}", options.tp, where.machine, where.threads, options.timeout) as (machine, mesh):
        resume = options.resume or launch.restarted(mesh)
        session = Session(
            stage=verb,
            machine=machine,
            run_dir=run_dir,
            command=command_line(verb, rest),
            resume=resume,
            source=source,
            log=said,
            trackers=trackers(options, run_dir, verb) if mesh.main else (),
            mesh=mesh,
            named=set(named(rest)),
            start=begin(resume),
            go_on=go_on(verb, rest, run_dir),
        )
        return launch.finish(stage(options.recipe, session))


def verb_evaluate(verb: str, rest: list[str]) -> int:
    from quern.stages import evaluate

    options, source = parse(verb, rest, EvaluateOptions)
    callables = options.recipe.callables() if source else None
    run_dir = run_dir_of(options.where)
    evaluate.run(
        run_dir,
        options.where.machine(),
        questions=options.questions,
        log=log,
        callables=callables,
        tasks=options.tasks,
        stage=options.stage,
    )
    return 0


def verb_run(verb: str, rest: list[str]) -> int:
    from quern.flags.recipe_flags import named
    from quern.stages import run_all

    command = command_line(verb, rest)
    options, source = parse(verb, rest, RunAllOptions)
    run_dir = run_dir_of(options.where)
    return run_all.run(
        options.recipe,
        options.where.machine(),
        run_dir,
        questions=options.questions,
        fine_tune=options.sft,
        source=source,
        command=command,
        named=set(named(rest)),
        go_on=go_on(verb, rest, run_dir),
        log=log,
    )


def open_engine(
    options: CompleteOptions | ChatOptions | ServeOptions, source: str | None, log: Callable[[str], None] = log
) -> Any:
    from quern.generate.engine import Engine
    from quern.runs.load import load

    machine = options.where.machine(log=log)
    callables = options.recipe.callables() if source else None
    loaded = load(run_dir_of(options.where), machine, log, options.stage, callables)
    return Engine(loaded.model, loaded.tokenizer, machine), loaded


def put(text: str) -> None:
    print(text, end="", flush=True)


def log_to_stderr(line: str) -> None:
    """To standard error, which leaves standard output to what the model generates."""
    print(line, file=sys.stderr, flush=True)


def verb_complete(verb: str, rest: list[str]) -> int:
    from quern.generate.sample import Sampling
    from quern.stages.complete import complete, read_prompt

    if rest and not rest[0].startswith("-") and not rest[0].endswith(".py") and rest[0] not in recipe_names():
        raise ValueError(f"the text needs -p before it: quern complete -p {shlex.quote(rest[0])}")
    options, source = parse(verb, rest, CompleteOptions)
    prompt = read_prompt(options.prompt, sys.stdin)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    engine, _ = open_engine(options, source, log_to_stderr)
    complete(
        engine,
        prompt,
        max_tokens=options.max_tokens,
        sampling=sampling,
        seed=options.seed,
        put=put,
        samples=options.samples,
        stop=options.stop,
    )
    return 0


BASE_MODEL = (
    "This is a base model, which was never taught the chat format: it continues texts. "
    "`quern sft` teaches it to answer."
)


def verb_chat(verb: str, rest: list[str]) -> int:
    from quern.generate.sample import Sampling
    from quern.stages import chat
    from quern.stages.complete import complete

    options, source = parse(verb, rest, ChatOptions)
    if options.complete and options.stage is None:
        options.stage = "pretrain"
    engine, loaded = open_engine(options, source)
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    completing = options.complete or loaded.stage == "pretrain"
    if completing and not options.complete:
        log_to_stderr(BASE_MODEL)
    if completing and options.prompt is not None:
        complete(engine, options.prompt, max_tokens=options.max_tokens, sampling=sampling, seed=options.seed, put=put)
        return 0
    if options.prompt is not None:
        messages: list[Any] = [{"role": "user", "content": options.prompt}]
        chat.ask(engine, messages, max_tokens=options.max_tokens, sampling=sampling, seed=options.seed, put=put)
        put("\n")
        return 0
    chat.chat(
        engine,
        max_tokens=options.max_tokens,
        sampling=sampling,
        seed=options.seed,
        read=lambda: input("> "),
        put=put,
        completing=completing,
    )
    return 0


def verb_serve(verb: str, rest: list[str]) -> int:
    options, source = parse(verb, rest, ServeOptions)
    try:
        from quern.serve.server import listen, serve
    except ImportError as error:
        raise ImportError(f"serving needs extra packages ({error}): {install('serve')}") from error
    with listen(options.host, options.port) as listener:  # clients that come before it is warm wait in line
        engine, loaded = open_engine(options, source)
        engine.warm_up()
        name, port = f"quern-{options.where.run}", listener.getsockname()[1]
        log(f"serving {name} (step {loaded.step:,} of {loaded.stage}) at http://{options.host}:{port}")
        serve(engine, loaded.tokenizer, name, listener, options.host)
    return 0


def verb_report(verb: str, rest: list[str]) -> int:
    from quern.flags import check_flags
    from quern.report import build

    options = check_flags.read(ReportOptions, rest, prog="quern report", description=described(verb))
    run_dir = run_dir_of(options)
    if not run_dir.folder.is_dir():
        raise FileNotFoundError(run_dir.has_no("records"))
    for path in build.build(run_dir.folder):
        log(f"report: {path}")
    return 0


def verb_bench(verb: str, rest: list[str]) -> int:
    if rest[:1] == ["gpu"]:  # with flags of its own
        from quern.bench.gpu import command as gpu_bench

        return gpu_bench.main(rest[1:], log)
    from quern.bench import command as bench

    return bench.main(rest, log)


def verb_export(verb: str, rest: list[str]) -> int:
    from quern.interop import export_hf

    return export_hf.main(rest, log, described(verb))


def verb_import(verb: str, rest: list[str]) -> int:
    from quern.interop import import_hf

    return import_hf.main(rest, log, load_recipe("llama")[0], described(verb))


def verb_grug(verb: str, rest: list[str]) -> int:
    from quern.stages.jax import command as jax_command

    return jax_command.main(rest, log)


def verb_lab(verb: str, rest: list[str]) -> int:
    from quern.estimate import plan

    if rest[:1] not in (["plan"], ["-h"], ["--help"]):
        raise ValueError("say what of it: quern lab plan [RECIPE] [FLAGS]")
    rest = rest[rest[0] == "plan" :]
    name = rest.pop(0) if rest and not rest[0].startswith("-") else "gpt"
    return plan.main(rest, log, load_recipe(name)[0], described(verb))


VERBS: dict[str, Callable[[str, list[str]], int]] = {
    "run": verb_run,
    "prepare": verb_prepare,
    "tokenizer": verb_prepare,
    "pretrain": verb_pretrain,
    "sft": verb_sft,
    "evaluate": verb_evaluate,
    "complete": verb_complete,
    "chat": verb_chat,
    "serve": verb_serve,
    "report": verb_report,
    "bench": verb_bench,
    "export": verb_export,
    "import": verb_import,
    "grug": verb_grug,
    "lab": verb_lab,
}
