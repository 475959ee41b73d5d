"""`quern grug`: the JAX twin's verbs. Flags, the mesh, and which function runs; what they do stands beside this file.

Flags are those of the PyTorch side, from the same dataclasses; a YAML or JSON file of the same fields (`--config`) is
read before them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from quern.recipe import Recipe
from quern.stages.places import STAGES, Places

VERBS = {
    "train": "train the `gpt` recipe in JAX",
    "eval": "bits per byte of a run's JAX model",
    "export": "turn a run's JAX model into a PyTorch one (safetensors), for chat, serve and sft",
    "import": "turn a run's PyTorch model into a JAX one",
    "gauntlet": "check and measure a single-file experiment",
}


@dataclass
class Axes:
    """Sizes of the mesh; see quern/grug/mesh.py."""

    replica_dcn: int = 1
    replica: int = 1
    data: int | None = None
    """Default: all devices that the other axes leave."""
    model: int = 1


@dataclass
class Processes:
    """Several processes with one mesh: `coordinator` on each of them, or none where a scheduler says it."""

    coordinator: str | None = None
    """host:port of process 0."""
    count: int | None = None
    id: int | None = None
    scheduler: bool = False
    """Ask Slurm, Open MPI, Kubernetes or the TPU pod."""


@dataclass
class Where:
    """Where things are and what computes."""

    out: Path = Path("out")
    """The folder that everything goes under."""
    run: str = "first"
    """The run's name."""
    dtype: Literal["bf16", "fp32"] | None = None
    """Default: bf16 on accelerators, fp32 on CPUs."""
    cpu_devices: int | None = None
    """Split the CPU into this many devices, to try a mesh."""
    mesh: Axes = field(default_factory=Axes)
    processes: Processes = field(default_factory=Processes)


@dataclass
class Training:
    """Flags of `quern grug train`."""

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)
    resume: bool = False
    """Go on from the newest good checkpoint; the mesh may be another one."""
    track: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also send metrics to these."""
    config: Path | None = None
    """A YAML or JSON file of recipe fields, such as {"depth": 4, "train": {"steps": 300}}; flags come after it."""


@dataclass
class Moving:
    """Flags of `quern grug eval`, `export` and `import`."""

    where: Annotated[Where, tyro.conf.arg(name="")] = field(default_factory=Where)
    stage: Literal["pretrain", "sft"] | None = None
    """`import`: which PyTorch stage; default: the last one the run has."""


@dataclass
class Running:
    """Flags of `quern grug gauntlet`."""

    file: tyro.conf.Positional[Path]
    """A Python file that defines build_cfg, init_fn, fwd_fn, loss_fn and train_step (docs/grug.md)."""
    out: Path = Path("out")
    """The record goes to <out>/gauntlet/<file>.json."""
    steps: int = 10
    """Timed steps."""
    cpu_devices: int = 4
    """On a CPU: how many devices it is split into, to compare sharded with unsharded."""


def main(arguments: list[str], say: Callable[[str], None]) -> int:
    """Runs a verb; returns the exit code. Raises ImportError naming the extra when JAX is missing."""
    if not arguments or arguments[0] in ("-h", "--help"):
        verbs = [f"  {verb:9} {text}" for verb, text in VERBS.items()]
        say("\n".join(["usage: quern grug VERB [FLAGS]", "", *verbs, "", "example: quern grug train --data tinyworld"]))
        raise SystemExit(0)
    verb, rest = arguments[0], arguments[1:]
    if verb not in VERBS:
        raise ValueError(f"there is no 'grug {verb}': use one of {', '.join(VERBS)}")
    try:
        import jax
        import optax
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(f"the JAX twin needs extra packages ({error}): pip install 'quern[jax]'") from error
    for package in (jax, optax, orbax.checkpoint):
        assert package
    if verb == "gauntlet":
        return _gauntlet(rest, say)
    if verb == "train":
        return _train(rest, say)
    options = tyro.cli(Moving, prog=f"quern grug {verb}", args=rest, description=VERBS[verb])
    return _move(verb, options, say)


def _train(rest: list[str], say: Callable[[str], None]) -> int:
    from quern.grug.recipe import RECIPE
    from quern.stages import grug_train

    default = with_config(RECIPE, _config_of(rest))
    options = tyro.cli(Training, prog="quern grug train", args=rest, default=Training(default))
    places = Places(options.where.out, options.where.run)
    mesh = open_mesh(options.where)
    return grug_train.run(
        options.recipe,
        mesh,
        places,
        dtype=grug_train.choose_dtype(options.where.dtype),
        resume=options.resume,
        command=shlex.join(["quern", "grug", "train", *rest]),
        say=_first_only(say),
        trackers=_trackers(options, places),
    )


def _move(verb: str, options: Moving, say: Callable[[str], None]) -> int:
    from quern.stages import grug_bridge, grug_train

    assert options.stage is None or options.stage in STAGES
    mesh, places = open_mesh(options.where), Places(options.where.out, options.where.run)
    if verb == "eval":
        grug_train.evaluate(places, mesh, dtype=grug_train.choose_dtype(options.where.dtype), say=say)
    elif verb == "export":
        grug_bridge.export(places, mesh, say)
    else:
        grug_bridge.bring_over(places, mesh, options.stage, say)
    return 0


def _gauntlet(rest: list[str], say: Callable[[str], None]) -> int:
    from quern.grug import gauntlet

    options = tyro.cli(Running, prog="quern grug gauntlet", args=rest, description=VERBS["gauntlet"])
    _split_cpu(options.cpu_devices)
    passed = gauntlet.run(options.file, options.out, options.steps, say)
    return 0 if passed else 1


def open_mesh(where: Where) -> Any:
    """Joins the other processes, if there are any, and makes the mesh. The first thing of JAX that happens."""
    from quern.grug.mesh import join_processes, make_mesh

    if where.cpu_devices is not None:
        _split_cpu(where.cpu_devices)
    processes = where.processes
    if processes.coordinator is not None or processes.scheduler:
        join_processes(processes.coordinator, processes.count, processes.id)
    axes = where.mesh
    return make_mesh(replica_dcn=axes.replica_dcn, replica=axes.replica, data=axes.data, model=axes.model)


def with_config(recipe: Recipe, path: Path | None) -> Recipe:
    """The recipe with the fields that a YAML or JSON file gives. Raises ValueError naming fields there are not."""
    if path is None:
        return recipe
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
    return _filled(recipe, body, path.name)


def _filled(part: Any, body: dict[str, Any], where: str) -> Any:
    known = {f.name for f in fields(part) if not f.name.startswith("make_")}
    changes = {}
    for name, value in body.items():
        if name not in known:
            raise ValueError(f"{where} has no field '{name}': use one of {', '.join(sorted(known))}")
        inner = getattr(part, name)
        changes[name] = _filled(inner, value, f"{where}: {name}") if is_dataclass(inner) else value
    return replace(part, **changes)


def _config_of(rest: list[str]) -> Path | None:
    """--config's value, which is needed before the flags are parsed: its fields are their defaults."""
    for at, argument in enumerate(rest):
        if argument == "--config" and at + 1 < len(rest):
            return Path(rest[at + 1])
        if argument.startswith("--config="):
            return Path(argument.partition("=")[2])
    return None


def _split_cpu(devices: int) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", devices)


def _first_only(say: Callable[[str], None]) -> Callable[[str], None]:
    """With several processes only the first one talks."""
    import jax

    return say if jax.process_index() == 0 else lambda line: None


def _trackers(options: Training, places: Places) -> tuple[Any, ...]:
    from quern.records import TensorBoardTracker, WandbTracker
    from quern.stages.grug_train import STAGE

    folder = places.stage(STAGE)
    makers: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: TensorBoardTracker(folder / "tensorboard"),
        "wandb": lambda: WandbTracker("quern", places.run, folder, options.recipe.to_json()),
    }
    return tuple(makers[name]() for name in options.track)
