"""`Session`: what every training stage shares, from the checks before it to its exit code.

A stage prepares its data, model and plan, and hands them to `Session.train`. Batches, schedule and evaluators are the
stage's own (pretrain.py, sft.py, rl.py).
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quern.data.batch import BatchSource
from quern.machine import Machine, measure_peak_flops
from quern.mesh import FOR_MAIN, Mesh, PeersLostError, alone
from quern.model.count import Counts, FlopCounter
from quern.optim.schedule import Multipliers
from quern.recipe import Recipe
from quern.records import MakeTracker, Nowhere, Records, StageFolder, git_hash, read_events
from quern.runs.origin import FILE, Origin, require_same, source_digest
from quern.runs.run_dir import STAGES, RunDir, refuse_unwritable
from quern.runs.run_lock import run_lock
from quern.runs.saved import Start
from quern.runs.trust import trust
from quern.temporaries import write_whole
from quern.terminal import Meter, counted, silent
from quern.text.encode.pool import ENOUGH_WORKERS
from quern.text.tokenizer import Tokenizer
from quern.train import checkpoint, loop
from quern.train.backend import Evaluator, TorchBackend
from quern.train.guard import EXIT_DONE
from quern.train.state import TrainState
from quern.waits.waiting import to_stderr, waiting

POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Session:
    """One call of a training stage.

    Args:
        stage: Its name: pretrain, sft or rl.
        machine: The machine that computes.
        run_dir: The run.
        command: The command line, for the records.
        resume: Continue from the newest good checkpoint.
        source: The text of the recipe's own Python file, if the user named one.
        log: Takes lines for the user.
        trackers: What makes the further destinations of metrics.
        mesh: The ranks.
        named: Recipe fields that the user named in this command.
        start: The checkpoint of another run that this stage begins with.
        go_on: The command that continues after a stop, for messages.
        locked: The caller holds the run's lock.
        workers: Processes that encode text; None is one for each CPU thread of all ranks of this machine, up to a
            number beyond which more are of no use.
    """

    stage: str
    machine: Machine
    run_dir: RunDir
    command: str = ""
    resume: bool = False
    source: str | None = None
    log: Callable[[str], None] = silent
    trackers: Sequence[MakeTracker] = ()
    mesh: Mesh = field(default_factory=alone)
    named: Collection[str] = ()
    start: Start | None = None
    go_on: str = ""
    locked: bool = False
    workers: int | None = None

    @property
    def resume_command(self) -> str:
        """The command that continues the stage after a stop."""
        return self.go_on or f"quern {self.stage} --resume {self.run_dir.flags}"

    @property
    def encoders(self) -> int:
        """Processes that encode text for this rank. The other ranks wait for rank 0, which has all of them."""
        if not self.mesh.main:
            return 1
        return self.workers or min(ENOUGH_WORKERS, self.machine.threads * self.mesh.world.size)

    @property
    def folder(self) -> Path:
        """The stage's folder in the run."""
        return self.run_dir.stage(self.stage)

    @contextmanager
    def opened(self, already: str) -> Iterator[None]:
        """Checks that the stage may train, and holds the run's lock.

        Args:
            already: What to tell a user who trains the stage a second time without --resume.

        Raises:
            ValueError: The stage was trained already, or `start` was given for a run that has a model.
            RunInUseError: Another process trains in the run.
        """
        self.mesh.progress.begin_stage()
        refuse_unwritable(self.run_dir.out)
        with nullcontext() if self.locked else run_lock(self.run_dir, self.command, self.mesh):
            # Behind the lock: while another process trains, that one is named. Rank 0 alone takes the lock.
            done = self.mesh.world.broadcast_object(self.run_dir.has_trained(self.stage))
            if done and not self.resume:
                raise ValueError(f"run '{self.run_dir.run}' has been {already}")
            trained = [name for name in STAGES if self.run_dir.has_trained(name)]
            if self.start is not None and not self.resume and trained:
                raise ValueError(
                    f"run '{self.run_dir.run}' has a model of its own ({', '.join(trained)}): name a new run with "
                    "--run, to begin it with the model that --from names"
                )
            yield

    def plan(
        self,
        recipe: Recipe,
        origin: Origin,
        *,
        steps: int | None,
        schedule: Callable[[float], Multipliers],
        evaluator: Evaluator,
        keep_step: int | None = None,
    ) -> loop.TrainingPlan:
        """Collects the settings of the loop.

        Args:
            recipe: Resolved.
            origin: What the stage is made from.
            steps: Optimizer steps.
            schedule: Multipliers by step.
            evaluator: Runs every `train.eval_every` steps.
            keep_step: A step whose checkpoint is never removed.
        """
        train = recipe.train
        assert steps and train.save_every and train.eval_every
        return loop.TrainingPlan(
            steps=steps,
            schedule=schedule,
            micro_batch_rows=recipe.micro_batch_rows,
            log_every=train.log_every,
            save_every=train.save_every,
            keep=train.keep,
            save_in_background=train.save_in_background,
            flops=FlopCounter(recipe),
            peak_flops=measure_peak_flops(self.machine) * self.mesh.world.size,
            evaluators=[(train.eval_every, evaluator)],
            keep_step=keep_step,
            meta={
                "recipe": recipe.to_json(),
                "tokenizer": origin.tokenizer,
                "seed": recipe.seed,
                "origin": origin.to_json(),
            },
        )

    def train(
        self,
        recipe: Recipe,
        state: TrainState,
        batches: BatchSource,
        plan: loop.TrainingPlan,
        origin: Origin,
        *,
        words: tuple[str, str],
        lines: Sequence[str],
        counts: Counts,
        facts: dict[str, Any] | None,
        tokenizer: Tokenizer,
        source: str | None,
        changed: Sequence[str],
        data: dict[str, Any] | None = None,
        shown: Callable[[dict[str, Any]], str] | None = None,
    ) -> int:
        """Resumes or begins the stage, runs the loop, and logs the result.

        Args:
            recipe: Resolved; saved with the stage.
            state: Fresh, with the weights to begin with.
            batches: What to train on.
            plan: What the loop does.
            origin: What the stage is made from.
            words: The stage for the user as a noun and a participle, such as ("pretraining", "pretrained").
            lines: For the user, before the first step.
            counts: Of the model.
            facts: For run.json. A stage that begins writes it and the tokenizer; None writes neither.
            tokenizer: The run's tokenizer.
            source: The recipe's own Python file, saved with the stage.
            changed: What the user changed in the recipe of a stage that is resumed, as lines.
            data: Facts on the data, for the stage's events.
            shown: Takes a step's loss and speed, and returns what the progress line says. Default: both.

        Returns:
            An exit code of `train.guard`.

        Raises:
            ValueError: The run is beyond the plan's steps, or has lost the weights that it began with.
        """
        backend = TorchBackend(state, self.machine, recipe.train.clip_norm, recipe.seed)
        resumed = self._resume(backend, plan, origin, words[1], changed)
        end = state.plans[-1][1] if state.plans else plan.steps
        if resumed and state.step == end and not changed and self._has_finished():
            with open_folder(self.folder, recipe, source, mesh=self.mesh, origin=origin):
                pass  # the files of the folder that were lost are written again
            self.log(f"{words[0]}: finished already, after {counted(end, 'step')}")
            return EXIT_DONE
        if self.mesh.main and facts and not resumed:
            describe_run(recipe, counts, self.machine, self.run_dir, facts, self.command)
            tokenizer.save(self.run_dir.folder / "tokenizer.json")
        if (self.start is not None or self.stage == "rl") and not resumed:
            # The weights of another run are saved first: the run never needs the other one again. Reinforcement
            # learning keeps its first weights, since it measures its divergence from them to the end.
            meta = plan.meta | {"state": state.meta(), "kept": self.stage == "rl"}
            checkpoint.save(self.folder / "checkpoints", 0, state.slices(), meta, plan.keep, mesh=self.mesh)
        with open_folder(self.folder, recipe, source, self.trackers, self.mesh, origin) as folder:
            if resumed:
                self.log(f"resumed at step {state.step:,}")
                folder.event("command", command=self.command, changed=list(changed))
            if data is not None:
                folder.event("data", **data)
            for line in (*changed, *lines):
                self.log(line)
            with Meter(words[0], plan.steps, "steps", silent=not self.mesh.main) as meter:

                def advance(line: dict[str, Any]) -> None:
                    meter.total = state.plans[-1][1] if state.plans else plan.steps
                    meter.at(state.step, (shown or loss_and_speed)(line))

                def explain(outcome: loop.Outcome) -> str:
                    return outcome.advice(self.resume_command, self._lower_rates(recipe))

                code = loop.train(backend, batches, plan, folder, meter.log, advance, explain)
        if code == EXIT_DONE:
            self.log(f"{words[1]} on {state.tokens:,} tokens in {state.seconds:,.0f} s of steps → {self.folder}")
        return code

    def _lower_rates(self, recipe: Recipe) -> str:
        """The flag that halves the stage's rates, for messages."""
        flag, value = {
            "pretrain": ("optim.lr-scale", recipe.optim.lr_scale),
            "sft": ("sft.lr-share", recipe.sft.lr_share),
            "rl": ("rl.lr-share", recipe.rl.lr_share),
        }[self.stage]
        return f"--{flag} {(value or 0) / 2:.3g}"

    def _has_finished(self) -> bool:
        """Whether the stage's last event is its end. A process that is killed after the last save leaves none."""
        events = read_events(self.folder) if self.mesh.main else []
        return self.mesh.world.broadcast_object(bool(events) and events[-1]["kind"] == "finish")

    def _resume(
        self, backend: TorchBackend, plan: loop.TrainingPlan, origin: Origin, trained: str, changed: Sequence[str]
    ) -> bool:
        """Restores the newest good checkpoint, if `resume` asks for it. Returns whether there was one."""
        name, steps = self.run_dir.run, f"{'train' if self.stage == 'pretrain' else self.stage}.steps"
        state = backend.run
        resumed = self.resume and loop.resume(
            backend, self.folder / "checkpoints", self.log, lambda meta, path: require_same(meta, origin, path)
        )
        ended = bool(state.plans) and state.step == state.plans[-1][1]
        if ended and plan.budget_seconds is not None and any(line.startswith("train.minutes") for line in changed):
            raise ValueError(
                f"run '{name}' has spent its minutes and ended: train on from its model with `quern pretrain --from "
                f"{name} --run NAME --train.minutes N`"
            )
        if plan.budget_seconds is None and state.step > plan.steps:
            raise ValueError(
                f"run '{name}' was {trained} for {state.step:,} steps, so {steps} {plan.steps:,} is behind it: give "
                f"more steps, or leave --{steps} out"
            )
        base = origin.base if origin.base is not None and origin.base["run"] is not None else None
        if not resumed and self.start is None and base is not None:
            raise ValueError(
                f"run '{name}' has no checkpoint, not even of what it began with, step {base['step']:,} of run "
                f"'{base['run']}': remove {self.folder}, and begin again with --from {base['run']}"
            )
        return resumed


def describe_run(
    recipe: Recipe, counts: Counts, machine: Machine, run_dir: RunDir, facts: dict[str, Any], command: str
) -> None:
    """Writes run.json: how the run was started, on which machine, with which model."""
    run_dir.write(
        "run.json",
        {
            "command": command,
            "git": git_hash(Path(__file__).parent),
            "machine": machine.describe(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "model": {
                "parameters": vars(counts.parameters),
                "flops_per_token": FlopCounter(recipe).per_token(),
                "kv_bytes_per_token": counts.kv_elements_per_token * machine.dtype.itemsize,
            },
            **facts,
        },
    )


def loss_and_speed(line: dict[str, Any]) -> str:
    speed = f", {line['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in line else ""
    return f"loss {round(line['loss'], 3) + 0.0:.3f}{speed}"  # + 0.0: no -0.000


@contextmanager
def open_folder(
    path: Path,
    recipe: Recipe,
    source: str | None,
    trackers: Sequence[MakeTracker] = (),
    mesh: Mesh | None = None,
    origin: Origin | None = None,
) -> Iterator[Records]:
    """The stage's records, with its recipe and origin written. Only rank 0 writes."""
    if mesh is not None and not mesh.main:
        yield Nowhere(path)
        return
    with StageFolder(path, [make(path, recipe.to_json()) for make in trackers]) as folder:
        if origin is not None:
            write_whole(path / FILE, json.dumps(origin.to_json(), indent=2) + "\n")
        folder.write_recipe(recipe.to_json(), source)
        trust(path.parents[2], source_digest(source))
        yield folder


@contextmanager
def main_first(mesh: Mesh) -> Iterator[None]:
    """Runs the body on rank 0 first, then on the other ranks, which find what rank 0 has written.

    The body may take hours. So the other ranks poll the store without a time limit, instead of waiting in a collective;
    train/heartbeat.py ends them when rank 0 is gone. Every rank passes here equally often.

    Raises:
        PeersLostError: on the other ranks, without running the body, when the body raised on rank 0.
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
