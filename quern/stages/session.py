"""`Stage`: what every training stage shares, from the checks before it to its exit code; `Session`: a stage in PyTorch.

A stage prepares its data, model and plan, and hands them to `Stage.train`. Batches, schedule and evaluators are the
stage's own (pretrain.py, sft.py, rl.py, jax/train.py).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quern.data.batch import BatchSource
from quern.machine import Machine, measure_peak_flops
from quern.mesh import FOR_MAIN, Mesh, PeersLostError, alone
from quern.model.count import flop_counter
from quern.process import to_stderr, waiting
from quern.recipe import Recipe, Resolved
from quern.records import MakeTracker, Records, StageFolder, git_hash, read_events, read_metrics
from quern.runs.load import Start, open_start
from quern.runs.origin import FILE, Origin, flat, newest_meta, read_origin, refuse_second_tokenizer, require_same
from quern.runs.run_dir import NEWEST, STAGES, RunDir, trust
from quern.runs.run_lock import run_lock
from quern.runs.training import plan_of
from quern.stages.encode import ENOUGH_WORKERS
from quern.stages.prepare import Prepared, open_data, prepare
from quern.stages.tokenizers import require_tokenizer
from quern.temporaries import write_whole
from quern.terminal import Meter, counted, silent
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, loop, manifest
from quern.train.guard import EXIT_DONE
from quern.train.launch import place
from quern.train.state import Counters
from quern.train.step import Evaluator
from quern.validate import flag

POLL_SECONDS = 0.1
RESULT = {
    "loss": ", loss {:.3f}",
    "reward": ", reward {:.3f}",
    "val_loss": ", validation loss {:.3f}",
    "val_bpb": ", {:.3f} bits per byte",
    "val_pass_1": ", validation pass@1 {:.3f}",
}
"""Metrics of the last step that the user is told."""
CLEARLY_WORSE = 1.02  # the ratio of the last validation loss to the lowest one above which a stage warns
WORDS = {
    "pretrain": ("pretraining", "pretrained", "name a new --run, or train on from its model with `quern pretrain {}`"),
    "sft": ("fine-tuning", "fine-tuned", "fine-tune again under another name with `quern sft {}`"),
    "rl": ("reinforcement learning", "trained by reinforcement", "begin again under another name with `quern rl {}`"),
    "grug": ("training", "trained", "name another with --run"),
}
"""A stage for the user: the noun, the participle, and what to do instead with a run that has it."""
FIELDS = {stage: (f"{stage}.steps", f"{stage}.lr_share") for stage in ("sft", "rl")}
FIELDS |= dict.fromkeys(("pretrain", "grug"), ("train.steps", "optim.lr_scale"))
"""The recipe's fields with the number of each stage's steps, and with a factor of all its rates."""


def loss_and_speed(loss: float, tokens_per_second: float | None) -> str:
    """Describes a step on the progress line."""
    speed = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s"
    return f"loss {round(loss, 3) + 0.0:.3f}{speed}"  # + 0.0: no -0.000


def past_its_best(folder: Path) -> list[str]:
    """A warning if the last validation loss of a stage is clearly above its lowest one, else nothing."""
    lines = ((line.get("val_loss"), line.get("step")) for line in read_metrics(folder))
    found = [(loss, step) for loss, step in lines if isinstance(loss, float) and isinstance(step, int)]
    if not found or found[-1][0] <= CLEARLY_WORSE * min(found)[0]:
        return []
    loss, step = min(found)
    return [
        f"warning: the validation loss was lowest at step {step:,} ({loss:.3f}). After that step the model learned its "
        "texts by heart, or its rates were too high: start a new run of about "
        f"{counted(step, 'step')}, add texts, or lower the rates"
    ]


def trained_already(run_dir: RunDir, stage: str) -> str:
    """The message for a stage that was trained before, when no --resume continues it."""
    _, participle, instead = WORDS[stage]
    other = instead.format(run_dir.start_flags)
    resume = "" if "trained_by" in newest_meta(run_dir.stage(stage)) else "continue with --resume, or "
    return f"run '{run_dir.run}' has been {participle} already: {resume}{other}"


def _last_names(value: Any) -> Any:
    """The value with the last name alone of each path in it; a text has one in each line."""
    if isinstance(value, dict):
        return {name: _last_names(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_last_names(one) for one in value]
    return [Path(line).name for line in value.split("\n")] if isinstance(value, str) else value


class Opening(NamedTuple):
    """The lines and records of a stage before its first step."""

    lines: Sequence[str]  # for the user
    changed: Sequence[str]  # the fields that the user changed in the recipe of a stage that is resumed, as lines
    tokenizer: Tokenizer
    facts: dict[str, Any] | None
    """Facts on the run. A stage that begins writes them, if there are any, and the tokenizer; None writes neither."""
    data: dict[str, Any] | None = None  # facts on the data, for the stage's events


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One call of a training stage."""

    stage: str  # its name: pretrain, sft, rl or grug
    run_dir: RunDir
    command: str = ""  # the command line, for the records
    resume: bool = False  # continue from the newest good checkpoint
    source: str | None = None  # the text of the recipe's own Python file, if the user named one
    log: Callable[[str], None] = silent
    trackers: Sequence[MakeTracker] = ()  # functions that make the further destinations of metrics
    mesh: Mesh = field(default_factory=alone)
    named: Collection[str] = ()  # recipe fields that the user named in this command
    start: Start | None = None  # the checkpoint of another run that this stage begins with
    go_on: str = ""  # the command that continues after a stop, for messages
    locked: bool = False  # the caller holds the run's lock
    shown: Callable[[float, float | None], str] = loss_and_speed
    """Takes a step's loss and the speed, and returns what the progress line says."""

    @property
    def folder(self) -> Path:
        return self.run_dir.stage(self.stage)

    def main_first(self) -> AbstractContextManager[None]:
        """Runs the body on rank 0 first, then on the other ranks."""
        return main_first(self.mesh)

    def describe(self, facts: dict[str, Any]) -> None:
        """Writes facts on a run that begins."""

    def require_alike(self, values: dict[str, Any]) -> None:
        """Raises ValueError if values of flags, by name, differ between the ranks, as where each machine has a command
        of its own. Of a path, the last name counts."""
        first, *others = self.mesh.world.gather_objects(flat(_last_names(values)))
        for rank, other in enumerate(others, start=1):
            if names := sorted(name for name in first | other if first.get(name) != other.get(name)):
                other_flags = ", ".join(f"--{flag(name)}" for name in names)
                raise ValueError(f"rank {rank} has another {other_flags} than rank 0: start all with the same flags")

    def text(self, recipe: Resolved, began: Origin | None, workers: int = 1) -> Prepared:
        """The text that the stage began with, or for a stage that begins, the recipe's. Rank 0 prepares it."""
        with self.main_first():
            first = began or (self.start and self.start.origin)
            own = self.run_dir.tokenizer() if began else self.start and self.start.tokenizer
            if first and own and "text.tokenizer" in self.named:
                require_tokenizer(recipe.text.tokenizer, own, flat(first.recipe).get("text.tokenizer"))
            if began is not None:
                named = bool({"data", "val", "shards"} & set(self.named))
                return open_data(recipe, self.run_dir, began, self.log, self.stage, named=named, workers=workers)
            prepared = prepare(recipe, self.run_dir.out, self.log, own, workers)
            refuse_second_tokenizer(self.run_dir, prepared.tokenizer)
            return prepared

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Refuses a stage that was trained already, or a start for a run that has a model; holds the run's lock."""
        self.mesh.progress.begin()
        self.require_alike({"run": self.run_dir.run, "resume": self.resume, "tp": self.mesh.tp, "zero": self.mesh.zero})
        with ExitStack() as held:
            with self.main_first():  # behind the lock: while another process trains, that one is named
                if not self.locked:
                    held.enter_context(run_lock(self.run_dir, self.command, self.mesh))
                if self.run_dir.has_stepped(self.stage) and not self.resume:
                    raise ValueError(trained_already(self.run_dir, self.stage))
            trained = [stage for stage in STAGES if self.run_dir.has_stepped(stage)]
            if self.start is not None and not self.resume and trained:
                raise ValueError(
                    f"run '{self.run_dir.run}' has a model of its own ({', '.join(trained)}): name a new --run"
                )
            yield

    def train(
        self, backend: loop.Backend, batches: BatchSource, plan: loop.TrainingPlan, origin: Origin, opening: Opening
    ) -> int:
        """Resumes or begins the stage, runs the loop, logs the result, and returns an exit code of `train.guard`.

        Args:
            backend: Its state is fresh, with the weights to begin with.
            origin: Every checkpoint holds it.
        """
        noun, changed = WORDS[self.stage][0], opening.changed
        self.require_alike(origin.recipe)
        state, plan = backend.run, replace(plan, meta=origin.meta())
        resumed = self._resume(backend, plan, origin, changed)
        end = state.plans[-1][1] if state.plans else plan.steps
        if resumed and state.step == end and not changed and self._has_finished():
            with open_folder(self.folder, origin, self.source, mesh=self.mesh):
                pass  # the files of the folder that were lost are written again
            self.log(f"{noun}: finished already, after {counted(end, 'step')}")
            return EXIT_DONE
        if not resumed:
            self._begin(backend, plan, opening)
        with open_folder(self.folder, origin, self.source, self.trackers, self.mesh) as folder:
            if resumed:
                self.log(f"resumed at step {state.step:,}")
            if resumed or opening.facts is None:  # run.json has the command of a run's first stage
                folder.event("command", command=self.command, changed=list(changed) if resumed else None)
            if opening.data is not None:
                folder.event("data", **opening.data)
            for line in (*changed, *opening.lines):
                self.log(line)
            with Meter(noun, plan.steps, "steps", silent=not self.mesh.main, keeps=True) as meter:

                def advance(loss: float, tokens_per_second: float | None) -> None:
                    meter.total = state.plans[-1][1] if state.plans else plan.steps
                    meter.at(state.step, self.shown(loss, tokens_per_second))

                reporter = loop.Reporter(meter.log, advance, self.go_on, self._lower_rates(origin))
                code = loop.train(backend, batches, plan, folder, reporter, more_follows=self.locked)  # by `quern run`
        if code == EXIT_DONE and self.mesh.main:
            self._tell_end(state)
        return code

    def _tell_end(self, state: Counters) -> None:
        """Logs what a stage that has ended spent and reached, and warns of what went wrong."""
        spent = f"{state.tokens:,} tokens in {state.seconds:,.0f} s of steps"
        last = {name: value for line in read_metrics(self.folder) for name, value in line.items()}
        told = [form.format(last[name]) for name, form in RESULT.items() if isinstance(last.get(name), float)]
        self.log(f"{WORDS[self.stage][1]} on {spent}{''.join(told)} → {self.folder}")
        for line in past_its_best(self.folder):
            self.log(line)
        if state.guard.skips:
            self.log(
                f"warning: {counted(state.guard.skips, 'step')} had a loss or gradients that were not finite, and "
                "changed nothing: if they are many, train again with lower rates"
            )

    def _lower_rates(self, origin: Origin) -> str:
        """The flag that halves the stage's rates; "" for a recipe whose rules use none."""
        _, name = FIELDS[self.stage]
        rate = flat(origin.recipe)[name]
        return "" if rate is None else f"--{flag(name)} {rate / 2:.3g}"

    def _has_finished(self) -> bool:
        """Whether the stage's last event is its end. A process that is killed after the last save leaves none."""
        events = read_events(self.folder) if self.mesh.main else []
        return self.mesh.world.broadcast_object(bool(events) and events[-1]["kind"] == "finish")

    def _begin(self, backend: loop.Backend, plan: loop.TrainingPlan, opening: Opening) -> None:
        """Writes what a new stage begins with: the run's facts and tokenizer, and the weights of another run."""
        if self.mesh.main and opening.facts:
            self.describe(opening.facts)
        if self.mesh.main and opening.facts is not None:
            opening.tokenizer.save(self.run_dir.folder / "tokenizer.json")
        if self.start is not None or plan.keep_step == 0:  # the run never needs the other one again
            meta = plan.meta | {"state": backend.run.meta(), "kept": plan.keep_step == 0}
            checkpoint.save(self.folder / "checkpoints", 0, backend.save(), meta, plan.keep, mesh=self.mesh)

    def _resume(self, backend: loop.Backend, plan: loop.TrainingPlan, origin: Origin, changed: Sequence[str]) -> bool:
        """Restores the newest good checkpoint, if `resume` asks for it. Returns whether there was one."""
        name, state, (steps, _) = self.run_dir.run, backend.run, FIELDS[self.stage]

        def check(meta: dict[str, Any], path: Path) -> None:
            require_same(Origin.of_checkpoint(meta), origin, self.run_dir, self.stage, what=str(path))

        resumed = self.resume and loop.resume(backend, self.folder / "checkpoints", self.log, check)
        ended = bool(state.plans) and state.step == state.plans[-1][1]
        if ended and plan.budget_seconds is not None and any(line.startswith("train.minutes") for line in changed):
            raise ValueError(
                f"run '{name}' has spent its minutes and ended: train on from its model with `quern pretrain "
                f"{self.run_dir.start_flags} --train.minutes N`"
            )
        if plan.budget_seconds is None and state.step > plan.steps:
            raise ValueError(
                f"run '{name}' was {WORDS[self.stage][1]} for {state.step:,} steps, so {steps} {plan.steps:,} is "
                f"behind it: give more steps, or leave --{steps} out"
            )
        if not resumed and self.start is None and (begun := (origin.base or {}).get("run")) is not None:
            raise ValueError(
                f"run '{name}' has no checkpoint, not even of run '{begun}', which it began with: remove "
                f"{self.folder}, and begin again with {self.run_dir.with_out('--from', begun)}"
            )
        return resumed


@dataclass(frozen=True, kw_only=True)
class Session(Stage):
    """One call of a stage that trains in PyTorch."""

    machine: Machine
    workers: int | None = None
    """Processes that encode text; None is one for each CPU thread of all ranks of this machine, up to a number beyond
    which more are of no use."""

    @property
    def encoders(self) -> int:
        """Processes that encode text for this rank. The other ranks wait for rank 0, which has all of them."""
        if not self.mesh.main:
            return 1
        return self.workers or min(ENOUGH_WORKERS, self.machine.threads * place().ranks_here)

    def describe(self, facts: dict[str, Any]) -> None:
        describe_run(self.run_dir, self.machine, self.command, facts)

    def begin(self, asked: Recipe, before: str) -> tuple[Session, Origin, Resolved, Tokenizer, Start | None]:
        """Reads what a stage after pretraining continues with, or begins with: `start`, else the stage `before`.

        Returns the session with the source of the model's recipe; the origin on disk, or of the first model of a stage
        that begins; the recipe and the tokenizer of the model; the checkpoint to begin with, None for a stage that
        continues.
        """
        run_dir, callables = self.run_dir, asked.callables() if self.source else None
        if not (self.resume and run_dir.has_trained(self.stage)):
            start = self.start or open_start(run_dir, (before,), self.log, NEWEST, callables)
            refuse_second_tokenizer(run_dir, start.tokenizer)
            if start.run_dir != run_dir:
                self.log(f"weights: step {start.step:,} of {start.stage} in run '{start.run_dir.run}'")
            session = replace(self, source=self.source or start.run_dir.kept_source(start.stage))
            return session, start.origin_in(run_dir), start.recipe, start.tokenizer, start
        origin, tokenizer = read_origin(self.folder), run_dir.tokenizer()
        if origin is None:
            raise FileNotFoundError(f"{self.folder} has no recipe, and its checkpoints cannot be read: remove it")
        require_same(origin, replace(origin, tokenizer=tokenizer.fingerprint), run_dir, self.stage)
        self._warn_of_later_steps(origin.base or {})
        return self, origin, run_dir.read_recipe(origin.recipe, self.stage, origin.source, callables), tokenizer, None

    def _warn_of_later_steps(self, base: dict[str, Any]) -> None:
        """Warns if the stage of this run that provided the initial weights has trained on since. base: as in Origin."""
        there = manifest.steps(self.run_dir.checkpoints(base["stage"])) if base.get("run", "") is None else []
        if there and there[-1] > base["step"]:
            self.log(
                f"warning: {WORDS[self.stage][0]} began with step {base['step']:,} of {base['stage']}, which has step "
                f"{there[-1]:,} now: {WORDS[self.stage][2].format(self.run_dir.start_flags)}"
            )

    def plan(self, recipe: Resolved, evaluator: Evaluator, **changes: Any) -> loop.TrainingPlan:
        """Collects the settings of the loop. changes: fields of the plan that are not the recipe's."""
        plan = plan_of(recipe, flop_counter(recipe), [(recipe.train.eval_every, evaluator)])
        return replace(plan, peak_flops=measure_peak_flops(self.machine) * self.mesh.world.size, **changes)


def describe_run(run_dir: RunDir, machine: Machine, command: str, facts: dict[str, Any]) -> None:
    """Writes run.json: how the run was started, on which machine, and the facts on its model and data."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    own = {"command": command, "git": git_hash(Path(__file__).parent), "machine": machine.describe()}
    run_dir.write("run.json", own | {"versions": versions} | facts)


@contextmanager
def open_folder(
    path: Path, origin: Origin, source: str | None, trackers: Sequence[MakeTracker] = (), mesh: Mesh | None = None
) -> Iterator[Records]:
    """The stage's records, with its recipe and origin written. Only rank 0 writes. source: the recipe's own file."""
    if mesh is not None and not mesh.main:
        yield Records(path)
        return
    with StageFolder(path, [make(path, origin.recipe) for make in trackers]) as folder:
        write_whole(path / FILE, json.dumps(origin.to_json(), indent=2) + "\n")
        folder.write_recipe(origin.recipe, source)
        trust(path.parents[2], None if source is None else origin.source)
        yield folder


@contextmanager
def main_first(mesh: Mesh) -> Iterator[None]:
    """Runs the body on rank 0 first, then on the other ranks, which find what rank 0 has written.

    The other ranks poll the store without a time limit; train/heartbeat.py ends them when rank 0 is gone. Every rank
    passes here equally often. Raises PeersLostError if the body raised on rank 0.
    """
    if mesh.world.size == 1:
        yield
        return
    with mesh.progress.during(FOR_MAIN), mesh.progress.calling("a wait for rank 0", begins=False):
        key = f"main first/{mesh.store.add(f'main first/rank {mesh.rank}', 1)}"
        with waiting("rank 0, which prepares what all ranks read", log=to_stderr if mesh.rank == 1 else silent):
            while not mesh.main and not mesh.store.check([key]):
                time.sleep(POLL_SECONDS)
        if not mesh.main and mesh.store.get(key) != b"done":
            raise PeersLostError("rank 0 failed")
    outcome = "failed"
    try:
        yield
        outcome = "done"
    finally:
        if mesh.main:
            mesh.store.set(key, outcome)
