"""The loop around the steps: records, evaluators, skips, signals at its end. With dropout: resumed = uninterrupted, no
draw is repeated, nothing is dropped while a model is measured."""

import math
import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quern.data.loader import Batch, Loader
from quern.eval.bits_per_byte import batch_losses
from quern.mesh import Pending, ProcessGroup
from quern.optim.schedule import Multipliers
from quern.recipe import ModelRecipe, Recipe
from quern.recipes.llama import RECIPE
from quern.records import Records, StageFolder, read_events, read_metrics
from quern.resolve import resolve
from quern.runs.origin import Origin
from quern.runs.run_dir import RunDir
from quern.stages.session import Stage
from quern.train import checkpoint, manifest
from quern.train.guard import EXIT_DIVERGED, EXIT_DONE, EXIT_NOT_SAVED, EXIT_STOPPED
from quern.train.loop import Reporter, TrainingPlan, resume, train
from quern.train.state import TrainState, build_model, build_state
from quern.train.step import TorchBackend, train_step
from tests.support.full_disk import full_disk
from tests.support.run_bench import TIMED
from tests.support.toy_training import (
    CONTEXT,
    CPU,
    VOCABULARY,
    differing,
    poisoned_loader,
    snapshot,
    toy_backend,
    toy_corpus,
    toy_loader,
    toy_plan,
    toy_recipe,
    toy_schedule,
    toy_state,
)

pytestmark = pytest.mark.usefixtures("eager")


def go(
    path: Path,
    state: TrainState,
    plan: TrainingPlan | None = None,
    loader: Loader | None = None,
    again: bool = False,
    seed: int = 0,
    more_follows: bool = False,
    rates: str = "--optim.lr-scale",
) -> tuple[int, list[str]]:
    """Trains in the folder `path`; returns the exit code and what was said."""
    said, backend = list[str](), replace(toy_backend(state), seed=seed)
    with StageFolder(path) as folder:
        if again:
            resume(backend, folder.path / "checkpoints", said.append)
        reporter = Reporter(said.append, go_on="--resume", lower_rates=rates)
        code = train(backend, loader or toy_loader(), plan or toy_plan(), folder, reporter, more_follows)
    return code, said


def lines(path: Path) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    return [{k: v for k, v in line.items() if k not in TIMED} for line in read_metrics(path)]


def kinds(path: Path) -> list[str]:
    return [event["kind"] for event in read_events(path)]


# Records and evaluators -------------------------------------------------------------------------------------


def test_each_line_is_the_mean_over_the_targets_since_the_last_one(tmp_path: Path) -> None:
    loader, plan, twin = toy_loader(masked=True), toy_plan(11, log_every=4), toy_state()
    assert go(tmp_path, toy_state(), plan, loader) == (EXIT_DONE, [])
    results = [
        train_step(twin, loader.batch(step), plan.schedule(step), CPU, micro_batch_rows=plan.micro_batch_rows)
        for step in range(11)
    ]
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found] == [4, 8, 11]
    for line, first in zip(found, (0, 4, 8), strict=True):
        part = results[first : line["step"]]
        mean = sum(r.loss * r.tokens for r in part) / sum(r.tokens for r in part)
        assert line["loss"] == pytest.approx(mean, rel=1e-12)
        assert line["grad_norm"] == part[-1].grad_norm
        assert line["tokens"] == sum(r.tokens for r in results[: line["step"]])
        assert line["lr_multiplier"] == plan.schedule(line["step"] - 1).lr
    assert found[-1]["tokens_per_second"] > 0 and found[-1]["mfu"] >= 0


def test_it_evaluates_and_saves_when_due_and_at_the_end_on_the_trained_state(tmp_path: Path) -> None:
    seen: list[tuple[str, int, float]] = []

    def named(name: str) -> Any:
        def evaluate(state: TrainState) -> dict[str, float]:
            seen.append((name, state.step, float(state.model.head.weight.detach().norm())))
            return {name: float(state.step)}

        return evaluate

    plan = toy_plan(10, evaluators=[(4, named("often")), (7, named("rarely"))], save_every=4, keep=2)
    go(tmp_path, toy_state(), plan)
    due = [("often", 4), ("rarely", 7), ("often", 8), ("often", 10), ("rarely", 10)]
    assert [(name, step) for name, step, _ in seen] == due
    assert len({norm for _, _, norm in seen}) == 4
    evaluated = [line for line in read_metrics(tmp_path) if "often" in line]
    assert [(line["step"], line["often"]) for line in evaluated] == [(4, 4), (8, 8), (10, 10)]
    counts = {(line["tokens"], line["flops"], line["seconds"]) for line in read_metrics(tmp_path)}
    assert len(counts) == 10, "an evaluation has the counts of its step"
    assert manifest.steps(tmp_path / "checkpoints") == [8, 10]
    assert [event["step"] for event in read_events(tmp_path) if event["kind"] == "save"] == [4, 8, 10]
    assert kinds(tmp_path)[0] == "start" and kinds(tmp_path)[-1] == "finish"


def test_a_failing_reader_is_raised_and_a_run_that_died_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    class Failing(Loader):
        def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
            if step == 3:
                raise ValueError("shard 7 is damaged")
            return super().batch(step, rank, ranks)

    whole, state, again = toy_loader(), toy_state(), toy_state()
    with pytest.raises(ValueError, match="shard 7 is damaged"):
        go(tmp_path, toy_state(), loader=Failing(whole.corpus, whole.context, whole.batch_rows))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2], "a batch is sent before the step before it"
    assert go(tmp_path, state, again=True)[0] == EXIT_DONE
    before = lines(tmp_path)
    assert [line["step"] for line in before] == list(range(1, 13)), "no line is doubled"
    assert go(tmp_path, again, again=True)[0] == EXIT_DONE, "a finished run does nothing"
    assert lines(tmp_path) == before and differing(snapshot(again), snapshot(state)) == []


@pytest.mark.parametrize("room", [7, None])
def test_lines_for_which_the_disk_has_no_room_wait_for_the_next_checkpoint(room: int | None, tmp_path: Path) -> None:
    """The disk is full from step 5 on; room: the step from which it is not full any more."""
    disk, state = ExitStack(), toy_state()

    def change(state: TrainState) -> dict[str, float]:
        if state.step == 5:
            disk.enter_context(full_disk((tmp_path / "metrics.jsonl").stat().st_size + 100))
        elif state.step == room:
            disk.close()
        return {}

    with disk:
        code, said = go(tmp_path, state, toy_plan(evaluators=[(1, change)], save_every=4))
    if room is None:
        assert code == EXIT_NOT_SAVED and said == [
            f"stopped at step 8: cannot write {tmp_path / 'metrics.jsonl'}: File too large. Saved checkpoints "
            "are intact: make room, then resume."
        ]
        assert manifest.steps(tmp_path / "checkpoints") == [4]
        code, said = go(tmp_path, state, toy_plan(evaluators=[(1, lambda state: {})], save_every=4), again=True)
    go(tmp_path / "whole", whole := toy_state(), toy_plan(evaluators=[(1, lambda state: {})]))
    assert (code, said) == (EXIT_DONE, []) and differing(snapshot(state), snapshot(whole)) == []
    assert lines(tmp_path) == lines(tmp_path / "whole")


# Steps that are not finite ----------------------------------------------------------------------------------


def test_a_poisoned_step_is_skipped_recorded_and_training_goes_on(tmp_path: Path) -> None:
    state = toy_state()
    code, said = go(tmp_path, state, loader=poisoned_loader(5))
    assert (code, said) == (EXIT_DONE, [])
    skips = [event for event in read_events(tmp_path) if event["kind"] == "skip"]
    assert [(event["step"], event["loss"]) for event in skips] == [(6, None)]
    found = {line["step"]: line for line in read_metrics(tmp_path)}
    assert sorted(found) == list(range(1, 13))
    assert found[6]["loss"] is None and "skipped" not in found[5]
    assert all(found[step]["skipped"] == 1 for step in range(6, 13))
    assert all(math.isfinite(found[step]["loss"]) for step in found if step != 6)
    assert (state.guard.skips, state.guard.skips_in_row) == (1, 0)


@pytest.mark.parametrize(("saved", "rate"), [(True, 0.5), (True, None), (False, 0.5)])
def test_too_many_in_a_row_stop_and_name_the_last_good_checkpoint(
    saved: bool, rate: float | None, tmp_path: Path
) -> None:
    began = {"optim": {"lr_scale": rate}} | {name: {"lr_share": 0.5} for name in ("sft", "rl")}
    rates, *own = (
        Stage(stage=name, run_dir=RunDir(tmp_path, "r"))._lower_rates(Origin("", recipe=began))  # pyright: ignore[reportPrivateUsage]
        for name in ("pretrain", "sft", "rl")
    )
    assert own == ["--sft.lr-share 0.25", "--rl.lr-share 0.25"]
    first = 5 if saved else 1
    state = toy_state(toy_recipe(max_skips=2))
    # A save of every second step is due while the steps are not finite.
    code, said = go(tmp_path, state, toy_plan(save_every=2), loader=poisoned_loader(*range(first, 12)), rates=rates)
    assert code == EXIT_DIVERGED == 70
    (line,) = said
    good = tmp_path / "checkpoints" / "step-00000004"
    assert f"stopped at step {first + 3}: 3 steps in a row were not finite" in line
    assert (f"the last good checkpoint is {good}" if saved else "there is no checkpoint yet") in line
    again = "--resume" if rate is None else "--resume --optim.lr-scale 0.25"
    advice = f"go on from there with lower rates, `{again}`" if saved else "lower the rates"
    assert line.endswith(f"Next, {advice}")
    assert kinds(tmp_path)[-1] == "stop" and kinds(tmp_path).count("skip") == 3
    # Exactly the weights of the last clean step.
    clean = toy_state()
    go(tmp_path / "clean", clean, toy_plan(first, schedule=toy_schedule(12)))
    assert differing(snapshot(state), snapshot(clean)) == []
    if saved:
        tensors, meta = checkpoint.load(good)
        assert meta["state"]["step"] == 4 and all(t.isfinite().all() for t in tensors.values())


# Signals ----------------------------------------------------------------------------------------------------


def signalled(step: int, steps: int, **changes: Any) -> TrainingPlan:
    """A plan of so many steps, after one of which the process is asked to stop."""

    def evaluate(state: TrainState) -> dict[str, float]:
        if state.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    return toy_plan(steps, evaluators=[(1, evaluate)], **changes)


@pytest.mark.parametrize("more_follows", [False, True])
def test_a_signal_in_the_last_step_finishes_it_and_ends_what_would_follow(more_follows: bool, tmp_path: Path) -> None:
    code, said = go(tmp_path, toy_state(), signalled(2, 3), more_follows=more_follows)
    assert (code, said) == (
        (EXIT_STOPPED, ["stopped after step 3 as asked, and saved: continue with `--resume`"])
        if more_follows
        else (EXIT_DONE, [])
    )
    assert manifest.steps(tmp_path / "checkpoints") == [3]
    assert kinds(tmp_path)[-1] == "finish"


class Twins(ProcessGroup):
    """A group of two ranks with one process: both have the same."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]

    def broadcast_object(self, value: Any) -> Any:
        return value

    def barrier(self) -> None: ...

    def start(self, *_: Any, **__: Any) -> Pending:
        return Pending(None, self)


@dataclass
class OnTwins(TorchBackend):
    told: list[list[float]] = field(default_factory=list[list[float]])

    def step(self, sent: Any, multipliers: Any, tell: Sequence[float]) -> Any:
        self.told.append(list(tell))
        return super().step(sent, multipliers, ())[0], [list(tell), list(tell)]


def test_several_ranks_end_what_would_follow_and_count_no_compilation(tmp_path: Path) -> None:
    state = toy_state()
    backend = OnTwins(state, CPU)
    state.optimizer.mesh = replace(state.optimizer.mesh, world=Twins("world", 2, 0))
    said = list[str]()
    with StageFolder(tmp_path) as folder:
        assert train(backend, toy_loader(), signalled(2, 3), folder, Reporter(said.append), True) == EXIT_STOPPED
    assert said == ["stopped after step 3 as asked, and saved"]
    assert manifest.steps(tmp_path / "checkpoints") == [3] and kinds(tmp_path)[-1] == "finish"
    assert [own > 0 for _, own, *_ in backend.told] == [False, False, True]  # the first step compiles


def test_records_that_rank_0_cannot_write_at_the_end_stop_all_ranks(tmp_path: Path) -> None:
    class FullDisk(Twins):
        def gather_objects(self, value: Any) -> list[Any]:
            return [value, value or "no room"]

    state, said = toy_state(), list[str]()
    state.optimizer.mesh = replace(state.optimizer.mesh, world=FullDisk("world", 2, 1))
    plan = toy_plan(3, save_every=None)
    code = train(OnTwins(state, CPU), toy_loader(), plan, Records(tmp_path), Reporter(said.append), True)
    assert (code, said) == (EXIT_NOT_SAVED, ["stopped at step 3: no room"])


@pytest.mark.parametrize(
    ("asked", "code", "saved"), [(1, EXIT_STOPPED, [3]), (3, EXIT_STOPPED, [6]), (6, EXIT_DONE, [6, 8])]
)
def test_a_signal_stops_after_the_steps_that_belong_together(
    asked: int, code: int, saved: list[int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert go(tmp_path, toy_state(), signalled(asked, 8, together=3, save_every=6))[0] == code
    assert manifest.steps(tmp_path / "checkpoints") == saved
    assert "finishing this round" in capfd.readouterr().err


# Dropout ----------------------------------------------------------------------------------------------------


def dropping(dropout: float = 0.2) -> TrainState:
    shape = ModelRecipe(width=32, head_dim=16, context=CONTEXT, vocab_size=VOCABULARY, windows="L", dropout=dropout)
    recipe: Recipe = resolve(replace(RECIPE, depth=2, model=shape))
    return build_state(recipe, CPU, build_model(recipe, CPU, 0))


def test_a_resumed_run_drops_what_the_uninterrupted_one_does(tmp_path: Path) -> None:
    schedule = toy_schedule(8)
    whole, first, second = dropping(), dropping(), dropping()
    go(tmp_path / "whole", whole, toy_plan(8, schedule=schedule))
    go(tmp_path / "parts", first, toy_plan(4, schedule=schedule))
    torch.rand(1000)  # whatever else the process has drawn
    go(tmp_path / "parts", second, toy_plan(8, schedule=schedule), again=True)
    assert differing(snapshot(whole), snapshot(second)) == []


def test_every_step_and_every_seed_draws_anew(tmp_path: Path) -> None:
    """At a rate of zero the weights stay, so that losses on one batch differ by what is dropped alone."""

    class OneBatch(Loader):
        def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
            return super().batch(0, rank, ranks)

    def losses(dropout: float, seed: int) -> list[float]:
        path = tmp_path / f"{dropout}-{seed}"
        plan = toy_plan(4, schedule=lambda step: Multipliers(lr=0.0))
        go(path, dropping(dropout), plan, OneBatch(toy_corpus(), CONTEXT, 8, 0), seed=seed)
        return [line["loss"] for line in read_metrics(path)]

    assert len(set(losses(0.0, seed=0))) == 1
    drawn = losses(0.2, seed=0) + losses(0.2, seed=1)
    assert len(set(drawn)) == 8


def test_nothing_is_dropped_while_it_is_measured(tmp_path: Path) -> None:
    seen: list[tuple[bool, float, float]] = []

    def evaluate(state: TrainState) -> dict[str, Any]:
        batch = toy_loader().batch(99)
        one, other = (batch_losses(state.model, batch.tokens, batch.targets, CPU).mean() for _ in range(2))
        seen.append((state.model.training, one, other))
        return {"val_loss": float(one)}

    state, without = dropping(), dropping()
    go(tmp_path / "a", state, toy_plan(4, evaluators=[(1, evaluate)]))
    go(tmp_path / "b", without, toy_plan(4))
    assert len(seen) == 4 and all(not training and one == other for training, one, other in seen)
    assert state.model.training
    assert differing(snapshot(state), snapshot(without)) == []
