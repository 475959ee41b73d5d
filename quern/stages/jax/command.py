"""`quern grug`: the verbs of the JAX twin, their flags and the mesh. The other files of this folder, and grug/, do the
work.

The flags are those of the PyTorch side, from the same dataclasses. A YAML or JSON file of the same fields (`--config`)
is read before the flags. One file can serve all verbs but gauntlet: each takes the fields that it uses.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Interval

from quern.field_types import Few, Threads
from quern.flags import check_flags
from quern.flags.check_flags import Mark, negated
from quern.flags.recipe_flags import FINE_TUNING, FOLLOWING, RL, WORKERS, Arguments, Refusal, parse, refuse_idle
from quern.recipe import Recipe
from quern.recipes import chosen_recipe, load_recipe
from quern.records import find_trackers, read_regular
from quern.runs.run_dir import RunDir
from quern.terminal import listed, silent
from quern.validate import extra, flag, nearest, refuse_set

VERBS = {
    "train": "train the `gpt` recipe, or that of a file, in JAX",
    "eval": "bits per byte of a run's JAX model",
    "export": "convert a run's JAX model to PyTorch (safetensors), for chat, serve and sft",
    "import": "convert a run's PyTorch model to JAX",
    "gauntlet": "check and measure a single-file experiment",
}


@dataclass
class Axes:
    """Sizes of the mesh axes; see quern/grug/mesh.py."""

    replica_dcn: Few = 1
    """Copies of the model on groups of machines that a slow network connects."""
    replica: Few = 1
    """Copies of the model within a group."""
    data: Few | None = None
    """Shards of the batch, the parameters and the optimizer's state. Default: all devices that remain for this axis."""
    model: Few = 1
    """Shards of heads, feed-forward channels and vocabulary (tensor parallelism)."""


@dataclass
class Processes:
    """Several processes with one mesh: give each the `coordinator`, or use a `scheduler`."""

    coordinator: str | None = None
    """host:port of process 0. Default: a single process."""
    count: Few | None = None
    """The number of processes. Default: that of the cluster, if JAX detects one."""
    id: Annotated[int, Interval(ge=0, le=10**6)] | None = None
    """The number of this process, from 0. Default: that of the cluster, if JAX detects one."""
    scheduler: bool = False
    """Ask Slurm, Open MPI, Kubernetes or the TPU pod for the above."""


@dataclass
class JaxRunOptions:
    """The run, and the devices that compute."""

    out: Path = Path("out")
    """The output folder; all files of a run are below it."""
    run: str = "first"
    """The run's name."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Default: bf16 on accelerators, and on CPUs if it is measured to be clearly faster."""
    cpu_devices: Threads | None = None
    """Split the CPU into this many devices, to try a mesh. Default: one device."""
    mesh: Axes = field(default_factory=Axes)
    processes: Processes = field(default_factory=Processes)


@dataclass
class JaxTrainOptions:
    """Flags of `quern grug train`."""

    refusals: ClassVar = (
        RL,
        WORKERS,
        *FOLLOWING,
        Refusal(FINE_TUNING, "is for fine-tuning: export the model, and give it to `quern sft`"),
        Refusal("train.minutes", "is for `quern pretrain`: the JAX twin trains for --train.steps"),
        Refusal("train.fp8", "is for `quern pretrain`: the JAX twin has no FP8"),
        Refusal("train.recompute", "is for `quern pretrain`: the JAX twin keeps all activations"),
        Refusal("train.optimizer_memory", "is for `quern pretrain`: the JAX twin keeps all state on its devices"),
        Refusal("train.grad_dtype", "is for `quern pretrain`: the JAX twin sums gradients in fp32"),
    )

    recipe: Annotated[Recipe, Mark.FLAT]
    where: Annotated[JaxRunOptions, Mark.FLAT] = field(default_factory=JaxRunOptions)
    resume: bool = False
    """Continue from the newest good checkpoint, or begin where there is none; the mesh may differ."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to these."""
    config: Path | None = None
    """A YAML or JSON file of these flags, such as {"depth": 4, "train": {"steps": 300}, "run": "twin"}; flags override
    it. Default: no file."""


@dataclass
class JaxMoveOptions:
    """Flags of `quern grug eval`, `export` and `import`."""

    where: Annotated[JaxRunOptions, Mark.FLAT] = field(default_factory=JaxRunOptions)
    config: Path | None = None
    """The configuration file of `quern grug train`. Default: no file."""
    stage: Literal["pretrain", "sft", "rl"] | None = None
    """Only `import`: the PyTorch stage. Default: the run's last stage."""


LIMITED = {
    "dtype": (("eval",), "writes fp32"),
    "processes": (("eval", "import"), "runs in one process, which reads the files of all"),
}
"""Fields of `JaxRunOptions` that not all verbs of `JaxMoveOptions` take: the verbs that do, and what the others do."""


@dataclass
class GauntletOptions:
    """Flags of `quern grug gauntlet`."""

    file: Annotated[str, Mark.POSITIONAL]
    """A Python file that ends in a recipe of the JAX twin (docs/grug.md), or gpt for the core as it is."""
    out: Path = Path("out")
    """The output folder; the record is <out>/gauntlet/<name of the recipe>.json."""
    steps: Few = 10
    """Timed steps."""
    cpu_devices: Threads = 4
    """On a CPU: split it into this many devices, to compare sharded with unsharded training."""


def main(arguments: Arguments, log: Callable[[str], None]) -> int:
    """Runs a verb and returns its exit code. Raises ImportError naming the extra if JAX is missing."""
    if not arguments or arguments[0] in check_flags.HELP:
        log(f"usage: quern grug VERB [FLAGS]\n\n{listed(VERBS)}\n\nexample: quern grug train --data tinyworld")
        raise SystemExit(0)
    verb, rest = arguments[0], Arguments(arguments[1:])
    if verb not in VERBS:
        raise ValueError(f"there is no 'grug {verb}'{nearest(verb, VERBS)}; all of them: quern grug")
    if verb in ("train", "gauntlet"):
        return (_train if verb == "train" else _gauntlet)(rest, log)
    known = {f.name for f in fields(JaxRunOptions) if f.name not in LIMITED or verb in LIMITED[f.name][0]}
    body = {str(name).replace("-", "_"): value for name, value in read_config(rest).items()}
    told = as_flags({name: value for name, value in body.items() if name.partition(".")[0] in known})
    prog, description = f"quern grug {verb}", VERBS[verb]
    return _move(verb, check_flags.read(JaxMoveOptions, [*told, *rest], prog=prog, description=description), log)


def _need_jax() -> None:
    """Raises ImportError naming the extra. Called after the flags are read: help needs no extra."""
    with extra("jax", "the JAX twin needs extra packages"):
        for package in ("jax", "optax"):
            import_module(package)


def _train(rest: Arguments, log: Callable[[str], None]) -> int:
    if rest.recipes and rest[0] != "gpt":
        _need_jax()
    recipe, source = chosen_recipe("grug train", rest)
    given = with_config(rest)
    options = training(given, recipe)
    from quern.runs.public_data import with_local_data
    from quern.stages.prepare_tokens import is_tokens

    out = options.where.out
    options.recipe = with_local_data(options.recipe, out, given, log)
    if "data" in given.given or not options.resume:  # which takes the data of its run
        refuse_idle(options.recipe, given.given, is_tokens(options.recipe.data, out))
    _need_jax()
    from quern.grug.evaluate import choose_dtype
    from quern.stages.jax import train
    from quern.stages.jax.backend import processes

    mesh, dtype = open_mesh(options.where), choose_dtype(options.where.dtype)
    run_dir, ranks = RunDir(out, options.where.run), processes()  # rank 0 alone prints and tracks
    stage = train.JaxStage(
        stage=train.STAGE,
        run_dir=run_dir,
        command=rest.command("grug train"),
        resume=options.resume,
        source=source,
        log=log if ranks.main else silent,
        trackers=find_trackers(options.track if ranks.main else ()),
        mesh=ranks,
        named=set(given.given),
        go_on=rest.command("grug train") + " --resume" * (not options.resume),  # the flags say what to train
        shown=train.loss_and_perplexity,
    )
    return train.run(options.recipe, mesh, stage, dtype=dtype)


def with_config(arguments: Arguments) -> Arguments:
    """The flags of a configuration file that the command line does not give itself, then its own."""
    told = Arguments(as_flags(read_config(arguments)))
    return Arguments((*told.repeated(told.given.keys() - arguments.given.keys()), *arguments.flags))


def training(arguments: Arguments, recipe: Recipe) -> JaxTrainOptions:
    """The options of `quern grug train`: the recipe, changed by the flags, those of `with_config` among them."""
    try:
        options = parse(JaxTrainOptions, recipe, arguments, verb="grug train", description=VERBS["train"])
    except ValueError as error:
        path = arguments.value("config")
        raise ValueError(f"{error} (with the fields of {path})" if path else str(error)) from error
    refuse_set(recipe, JaxTrainOptions.refusals)
    return options


def _move(verb: str, options: JaxMoveOptions, log: Callable[[str], None]) -> int:
    if options.stage is not None and verb != "import":
        raise ValueError(f"--stage is for `quern grug import`: leave it out, {verb} takes the run's JAX model")
    for name, (verbs, does) in LIMITED.items():
        if verb not in verbs and getattr(options.where, name) != getattr(JaxRunOptions(), name):
            raise ValueError(f"--{name} is for `quern grug {' and '.join(verbs)}`: leave it out, {verb} {does}")
    _need_jax()
    from quern.grug.evaluate import choose_dtype
    from quern.stages.jax import train

    mesh, run_dir = open_mesh(options.where), RunDir(options.where.out, options.where.run)
    if verb == "eval":
        train.evaluate(run_dir, mesh, dtype=choose_dtype(options.where.dtype), log=log)
    elif verb == "export":
        train.export(run_dir, mesh, log)
    else:
        train.bring_over(run_dir, mesh, options.stage, log)
    return 0


def _gauntlet(rest: Arguments, log: Callable[[str], None]) -> int:
    options = check_flags.read(GauntletOptions, rest, prog="quern grug gauntlet", description=VERBS["gauntlet"])
    _need_jax()
    import jax

    from quern.grug import gauntlet
    from quern.grug.mesh import keep_freed_memory
    from quern.stages.jax.train import core_of

    keep_freed_memory()
    jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    recipe = load_recipe(options.file)[0]
    return 0 if gauntlet.run(core_of(recipe), recipe.name, options.out, options.steps, log) else 1


def open_mesh(where: JaxRunOptions) -> Any:
    """Joins the other processes, if any, and makes the mesh. It must be the first use of JAX."""
    import jax

    from quern.grug.mesh import join_processes, keep_freed_memory, make_mesh

    processes = where.processes
    several = processes.coordinator is not None or processes.scheduler
    no_port = processes.coordinator is not None and ":" not in processes.coordinator
    if no_port or (not several and (processes.count, processes.id) != (None, None)):
        raise ValueError("each of several processes needs --processes.coordinator host:port, the address of process 0")
    keep_freed_memory()
    if where.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", where.cpu_devices)
    if several:
        join_processes(processes.coordinator, processes.count, processes.id)
    return make_mesh(**vars(where.mesh))


def read_config(rest: Arguments) -> dict[str, Any]:
    """The fields in the YAML or JSON file of --config, which is read before the flags are; none without a file."""
    path = rest.value("config")
    if path is None:
        return {}
    import yaml

    text = read_regular(Path(path))
    try:
        body = yaml.safe_load(text) if path.endswith((".yaml", ".yml")) else json.loads(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read ({error}): correct it") from error
    if not isinstance(body, dict):
        raise ValueError(f"{path} must hold recipe fields by name, such as depth: 4")
    return body


def as_flags(body: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields of a file as flags, so that one parser checks both."""
    flags: list[str] = []
    for field_name, value in body.items():
        name = flag(f"{prefix}{field_name}")
        if isinstance(value, dict):
            flags += as_flags(value, f"{prefix}{field_name}.")
        elif isinstance(value, list):
            flags += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            flags.append(f"--{name}" if value else negated(f"--{name}"))
        elif value is not None:
            flags.append(f"--{name}={value}")
    return flags
