"""`quern grug`: the JAX twin's verbs. Flags, the mesh, and which function runs; what they do stands beside this file.

Flags are those of the PyTorch side, from the same dataclasses; a YAML or JSON file of the same fields (`--config`) is
read before them. One file can serve every verb: each takes from it what it has a use for.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from quern.flags import check_flags
from quern.flags.check_flags import UNSAID
from quern.flags.recipe_flags import field_names, named, parse
from quern.recipe import FOR_FINE_TUNING, Recipe
from quern.runs.run_dir import STAGES, RunDir
from quern.validate import flag, install

VERBS = {
    "train": "train the `gpt` recipe in JAX",
    "eval": "bits per byte of a run's JAX model",
    "export": "turn a run's JAX model into a PyTorch one (safetensors), for chat, serve and sft",
    "import": "turn a run's PyTorch model into a JAX one",
    "gauntlet": "check and measure a single-file experiment",
}

WITHOUT = {
    "model.depth": "follows from --depth",
    "model.vocab_size": "follows from the tokenizer: set --text.vocab-size",
    "model.bos": "follows from the tokenizer",
    "train.minutes": "is for `quern pretrain`: the JAX twin trains for --train.steps",
    "train.fp8": "is for `quern pretrain`: the JAX twin has no FP8",
    "train.grad_dtype": "is for `quern pretrain`: the JAX twin sums gradients in fp32",
    "train.save_in_background": "is not needed: the JAX twin always saves beside the training",
}
"""Fields of the recipe that `train` has no flag for, and what to say of them."""


@dataclass
class Axes:
    """Sizes of the mesh; see quern/grug/mesh.py."""

    replica_dcn: int = 1
    replica: int = 1
    data: Annotated[int | None, UNSAID] = None
    """Default: all devices that the other axes leave."""
    model: int = 1


@dataclass
class Processes:
    """Several processes with one mesh: `coordinator` on each of them, or none where a scheduler says it."""

    coordinator: Annotated[str | None, UNSAID] = None
    """host:port of process 0."""
    count: Annotated[int | None, UNSAID] = None
    """How many, with --processes.coordinator."""
    id: Annotated[int | None, UNSAID] = None
    """Which of them this is, from 0."""
    scheduler: bool = False
    """Ask Slurm, Open MPI, Kubernetes or the TPU pod."""


@dataclass
class JaxRunOptions:
    """Where things are and what computes."""

    out: Path = Path("out")
    """The folder that everything goes under."""
    run: str = "first"
    """The run's name."""
    dtype: Annotated[Literal["bf16", "fp32"] | None, UNSAID] = None
    """Default: bf16 on accelerators, and on CPUs where it is measured to be clearly faster."""
    cpu_devices: Annotated[int | None, UNSAID] = None
    """Split the CPU into this many devices, to try a mesh."""
    mesh: Axes = field(default_factory=Axes)
    processes: Processes = field(default_factory=Processes)


@dataclass
class JaxTrainOptions:
    """Flags of `quern grug train`."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    where: Annotated[JaxRunOptions, tyro.conf.arg(name="")] = field(default_factory=JaxRunOptions)
    resume: bool = False
    """Go on from the newest good checkpoint; the mesh may be another one."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to these."""
    config: Annotated[Path | None, UNSAID] = None
    """A YAML or JSON file of these flags, such as {"depth": 4, "train": {"steps": 300}, "run": "twin"}; what is typed
    comes after it."""


@dataclass
class JaxMoveOptions:
    """Flags of `quern grug eval`, `export` and `import`."""

    where: Annotated[JaxRunOptions, tyro.conf.arg(name="")] = field(default_factory=JaxRunOptions)
    config: Annotated[Path | None, UNSAID] = None
    """The file that `quern grug train` was given: where the run is, what computes."""
    stage: Annotated[Literal["pretrain", "sft"] | None, UNSAID] = None
    """`import`: which PyTorch stage; default: the last one the run has."""


@dataclass
class GauntletOptions:
    """Flags of `quern grug gauntlet`."""

    file: tyro.conf.Positional[Path]
    """A Python file that defines build_cfg, init_fn, fwd_fn, loss_fn and train_step (docs/grug.md)."""
    out: Path = Path("out")
    """The record goes to <out>/gauntlet/<file>.json."""
    steps: int = 10
    """Timed steps."""
    cpu_devices: int = 4
    """On a CPU: how many devices it is split into, to compare sharded with unsharded."""


def main(arguments: list[str], log: Callable[[str], None]) -> int:
    """Runs a verb; returns the exit code. Raises ImportError naming the extra when JAX is missing."""
    if not arguments or arguments[0] in ("-h", "--help"):
        verbs = [f"  {verb:9} {text}" for verb, text in VERBS.items()]
        log("\n".join(["usage: quern grug VERB [FLAGS]", "", *verbs, "", "example: quern grug train --data tinyworld"]))
        raise SystemExit(0)
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        raise ValueError(f"there is no 'grug {verb}': use one of {', '.join(VERBS)}")
    try:
        import jax
        import optax
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"the JAX twin needs extra packages ({error}): {install('jax')}") from error
    for package in (jax, optax, orbax.checkpoint):
        assert package
    if verb == "gauntlet":
        return _gauntlet(rest, log)
    if verb == "train":
        return _train(rest, log)
    known = {f.name for f in fields(JaxRunOptions)}
    told = {name: value for name, value in read_config(_config_of(rest)).items() if name in known}
    arguments = [*as_flags(JaxRunOptions(), told, "the file"), *rest]
    options = check_flags.read(JaxMoveOptions, arguments, prog=f"quern grug {verb}", description=VERBS[verb])
    return _move(verb, options, log)


def _train(rest: list[str], log: Callable[[str], None]) -> int:
    from quern.grug.dtype import choose_dtype
    from quern.grug.recipe import RECIPE
    from quern.stages.jax import train

    options = training(rest, RECIPE)
    run_dir = RunDir(options.where.out, options.where.run)
    mesh = open_mesh(options.where)
    return train.run(
        options.recipe,
        mesh,
        run_dir,
        dtype=choose_dtype(options.where.dtype),
        resume=options.resume,
        command=shlex.join(["quern", "grug", "train", *rest]),
        log=_first_only(log),
        trackers=_trackers(options, run_dir),
        named=set(named(rest)),
    )


def training(arguments: list[str], recipe: Recipe) -> JaxTrainOptions:
    """The flags of `quern grug train`, those of its file first. recipe: what they start from."""
    path = _config_of(arguments)
    told = as_flags(JaxTrainOptions(recipe), read_config(path), path.name if path else "")
    parts = tuple(f"{part}." for part in FOR_FINE_TUNING)
    later = [name for name in field_names(recipe) if f"{name}.".startswith(parts)]
    without = WITHOUT | dict.fromkeys(later, "is for fine-tuning: export the model, and give it to `quern sft`")
    return parse(
        JaxTrainOptions,
        recipe,
        [*told, *arguments],
        prog="quern grug train",
        without=without,
        description=VERBS["train"],
    )


def _move(verb: str, options: JaxMoveOptions, log: Callable[[str], None]) -> int:
    from quern.grug.dtype import choose_dtype
    from quern.stages.jax import bridge, train

    assert options.stage is None or options.stage in STAGES
    mesh, run_dir = open_mesh(options.where), RunDir(options.where.out, options.where.run)
    if verb == "eval":
        train.evaluate(run_dir, mesh, dtype=choose_dtype(options.where.dtype), log=log)
    elif verb == "export":
        bridge.export(run_dir, mesh, log)
    else:
        bridge.bring_over(run_dir, mesh, options.stage, log)
    return 0


def _gauntlet(rest: list[str], log: Callable[[str], None]) -> int:
    from quern.grug import gauntlet
    from quern.grug.mesh import keep_freed_memory

    keep_freed_memory()
    options = check_flags.read(GauntletOptions, rest, prog="quern grug gauntlet", description=VERBS["gauntlet"])
    _split_cpu(options.cpu_devices)
    passed = gauntlet.run(options.file, options.out, options.steps, log)
    return 0 if passed else 1


def open_mesh(where: JaxRunOptions) -> Any:
    """Joins the other processes, if there are any, and makes the mesh. The first thing of JAX that happens."""
    from quern.grug.mesh import join_processes, keep_freed_memory, make_mesh

    keep_freed_memory()
    if where.cpu_devices is not None:
        _split_cpu(where.cpu_devices)
    processes = where.processes
    if processes.coordinator is not None or processes.scheduler:
        join_processes(processes.coordinator, processes.count, processes.id)
    axes = where.mesh
    return make_mesh(replica_dcn=axes.replica_dcn, replica=axes.replica, data=axes.data, model=axes.model)


def read_config(path: Path | None) -> dict[str, Any]:
    """The fields that a YAML or JSON file gives; none without a file. Raises ValueError for anything but fields."""
    if path is None:
        return {}
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError as error:
            raise ImportError("reading YAML needs a package: pip install pyyaml, or give JSON") from error
        body = yaml.safe_load(text)
    else:
        body = json.loads(text)
    if not isinstance(body, dict):
        raise ValueError(f"{path} must hold recipe fields by name, such as depth: 4")
    return body


def as_flags(part: Any, body: dict[str, Any], where: str, prefix: str = "") -> list[str]:
    """The fields as they would be typed, so that one parser refuses what is wrong in either place.

    part: an object with those fields; those of its `recipe` and `where` count as its own. Raises ValueError naming
    fields there are not.
    """
    known = {f.name: getattr(part, f.name) for f in fields(part) if not f.name.startswith("make_")}
    for own in ("recipe", "where"):
        if own in known:
            inside = known.pop(own)
            known |= {f.name: getattr(inside, f.name) for f in fields(inside) if not f.name.startswith("make_")}
    flags: list[str] = []
    for name, value in body.items():
        if name not in known:
            raise ValueError(f"{where} has no field '{name}': use one of {', '.join(sorted(known))}")
        if is_dataclass(known[name]):
            if not isinstance(value, dict):
                raise ValueError(f"{where}: {name} must hold fields by name, not {value!r}")
            flags += as_flags(known[name], value, f"{where}: {name}", f"{prefix}{name}.")
        elif isinstance(value, bool):
            flags.append(f"--{flag(prefix + ('' if value else 'no_') + name)}")
        elif isinstance(value, list):
            flags += [f"--{flag(prefix + name)}", *map(str, value)]
        elif value is not None:
            flags.append(f"--{flag(prefix + name)}={value}")
    return flags


def _config_of(rest: list[str]) -> Path | None:
    """--config's value, which is needed before the flags are parsed: its fields come before them."""
    for at, argument in enumerate(rest):
        if argument == "--config" and at + 1 < len(rest):
            return Path(rest[at + 1])
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
    return None


def _split_cpu(devices: int) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", devices)


def _first_only(log: Callable[[str], None]) -> Callable[[str], None]:
    """With several processes only the first one talks."""
    import jax

    return log if jax.process_index() == 0 else lambda line: None


def _trackers(options: JaxTrainOptions, run_dir: RunDir) -> tuple[Any, ...]:
    """Those asked for; of several processes the first one's."""
    import jax

    from quern.records import TensorBoardTracker, WandbTracker
    from quern.stages.jax.train import STAGE

    folder = run_dir.stage(STAGE)
    makers: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: TensorBoardTracker(folder / "tensorboard"),
        "wandb": lambda: WandbTracker("quern", run_dir.run, folder, options.recipe.to_json()),
    }
    return tuple(makers[name]() for name in options.track) if jax.process_index() == 0 else ()
