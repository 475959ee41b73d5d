"""Trials of the real trainer: the same as pretraining, the same again, and a whole comparison from the command line."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quern.cluster import connect
from quern.flags.check_flags import DeviceOptions
from quern.flags.recipe_file import read_recipe_file
from quern.lab.arms import Arm, Seeds, Train, in_process, on_cluster
from quern.lab.ladder.study import Comparison, one_size
from quern.lab.options import CompareOptions
from quern.lab.trainer import Trainer, Trial
from quern.model.gpt import GPT
from quern.recipe import ModelRecipe, Recipe, TextRecipe, TrainRecipe
from quern.recipes import unet
from quern.recipes.gpt import RECIPE
from quern.records import read_events, read_metrics, typed
from quern.resolve import resolve
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages.prepare import prepare
from quern.stages.session import Session
from quern.train.guard import EXIT_STOPPED
from tests.support.command import Told, run
from tests.support.toy_training import CPU
from tests.support.train_here import train_here

pytestmark = pytest.mark.usefixtures("eager")
EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def toy(text: Path, **train: Any) -> Recipe:
    words = TextRecipe(vocab_size=304, val_megabytes=0.004)  # FP8 needs a multiple of 16
    model, trained = ModelRecipe(width=32, head_dim=16, context=32), {"steps": 6, "batch_tokens": 128, **train}
    return replace(RECIPE, depth=1, data=str(text), text=words, model=model, train=TrainRecipe(**trained))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts are prepared once for all tests."""
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def trainer(out: Path) -> Trainer:
    return Trainer(out, CPU)


def pretrained(recipe: Recipe, out: Path, run: str) -> list[dict[str, Any]]:
    """The metrics of `quern pretrain`."""
    run_dir = RunDir(out, run)
    pretrain.run(recipe, Session(stage="pretrain", machine=CPU, run_dir=run_dir, named=("train.horizon_ratio",)))
    return read_metrics(run_dir.stage("pretrain"))


def test_a_trial_is_the_pretraining_with_its_seeds(text: Path, out: Path, trainer: Trainer) -> None:
    recipe = toy(text)
    seen: list[int] = []
    trial = trainer.train(recipe, name="toy", seed=3, data_seed=4, on_step=lambda step, _: seen.append(step))
    last = {key: line[key] for line in pretrained(replace(recipe, seed=3, data_seed=4), out, "seeds") for key in line}
    assert trial.bpb == last["val_bpb"] and trial.tokens == last["tokens"] and trial.flops == last["flops"]
    assert seen == [1, 2, 3, 4, 5, 6] and trial.curve[-1].bpb == trial.bpb
    assert trial.parameters["total"] > trial.parameters["transformer"] > 0

    other = trainer.train(recipe, name="toy", seed=3, data_seed=5)
    again = trainer.train(recipe, name="toy", seed=3, data_seed=4, evaluations=3)
    assert other.bpb != trial.bpb == again.bpb, "the model of the last trial leaves nothing behind"
    assert [point.step for point in again.curve] == [2, 4, 6]
    assert typed(json.loads(json.dumps(asdict(again))), Trial) == again


@pytest.mark.parametrize("change", [{"fp8": "all"}, {"clip_norm": 0.01}, {"packing": "stream"}, "prefix_token"])
def test_a_trial_computes_what_pretraining_computes(text: Path, out: Path, trainer: Trainer, change: Any) -> None:
    recipe = toy(text, **(change if isinstance(change, dict) else {}))
    if isinstance(change, str):  # its model is told the vocabulary
        recipe = replace(recipe, make_model=read_recipe_file(EXPERIMENTS / f"{change}.py")[0].make_model)
    trial = trainer.train(recipe, name="toy", seed=0, data_seed=0)
    run = "-".join(map(str, change.values())) if isinstance(change, dict) else change
    scores = [line["val_bpb"] for line in pretrained(recipe, out, run) if "val_bpb" in line]
    assert trial.bpb == scores[-1] != trainer.train(toy(text), name="plain", seed=0, data_seed=0).bpb


def test_the_length_follows_from_the_vocabulary_of_a_named_tokenizer(
    text: Path, out: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quern.process.SILENT_SECONDS", 0.0)  # and a trial tells no one that its first step begins
    recipe = toy(text, steps=None, horizon_ratio=3 * 128 / (12 * 32**2 + 304 * 32))
    named = prepare(resolve(recipe), out, print).tokenizer.save(out / "named.json")
    recipe = replace(recipe, text=replace(recipe.text, vocab_size=None, tokenizer=str(named)))
    capfd.readouterr()
    assert trainer.train(recipe, name="named", seed=0, data_seed=0).steps == 3
    assert capfd.readouterr().err == "" and one_size(recipe)[0].steps == 3
    assert pretrained(recipe, out, "named")[-1]["step"] == 3


def test_a_kept_model_is_told_the_vocabulary_of_another_text(text: Path, tmp_path: Path) -> None:
    recipe = replace(toy(text), make_model=read_recipe_file(EXPERIMENTS / "prefix_token.py")[0].make_model)
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join(text.read_text(encoding="utf-8").upper().split("\n\n")), encoding="utf-8")
    trainer, elsewhere = Trainer(tmp_path / "out", CPU), replace(recipe, data=str(other))
    trainer.train(recipe, name="prefix_token", seed=0, data_seed=0)
    after = trainer.train(elsewhere, name="prefix_token", seed=0, data_seed=0)
    alone = Trainer(tmp_path / "out", CPU).train(elsewhere, name="prefix_token", seed=0, data_seed=0)
    assert after.bpb == alone.bpb


def test_values_that_only_the_model_refuses_are_found_before_a_trial(trainer: Trainer) -> None:
    trainer.check(replace(unet.RECIPE, depth=2))
    with pytest.raises(ValueError, match="depth must be even, not 3"):
        trainer.check(replace(unet.RECIPE, depth=3))


def test_the_compiler_forgets_the_models_before(text: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps eight versions of a function, and would run the blocks of later sizes as they are written."""
    resets: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(None))
    monkeypatch.setattr("quern.lab.trainer.set_up_training", lambda *_: None)
    trainer, sizes = Trainer(out, replace(CPU, compile=True)), (16, 16, 32)
    for width in sizes:
        recipe = resolve(replace(toy(text), model=ModelRecipe(width=width, head_dim=16, context=32)))
        trainer._ready_model(recipe, SimpleNamespace(fingerprint=""))  # pyright: ignore
    assert len(resets) == 2


def test_a_trial_ends_early_and_a_diverged_one_has_no_score(text: Path, trainer: Trainer) -> None:
    def prune(point: object) -> None:
        raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration):
        trainer.train(toy(text), name="toy", seed=0, data_seed=0, evaluations=3, on_eval=prune)

    class Lost(GPT):
        def loss(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            total, losses = super().loss(*arguments)
            return total * float("nan"), losses

    lost = replace(toy(text, max_skips=2), make_model=Lost)
    assert trainer.train(lost, name="lost", seed=0, data_seed=0).bpb is None


def test_a_signal_ends_the_study_and_in_the_last_step_quern_run(
    text: Path, trainer: Trainer, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def send(*_: object) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return ""

    with pytest.raises(KeyboardInterrupt):
        trainer.train(toy(text), name="toy", seed=0, data_seed=0, on_eval=send)
    said = list[str]()
    with pytest.raises(KeyboardInterrupt):
        Trainer(out, CPU, said.append).train(toy(text), name="toy", seed=0, data_seed=0, evaluations=2, on_eval=send)
    assert said[-1] == "the runs that have finished are kept: the same command goes on with the study"
    assert "SIGINT: finishing this step, then exiting" in capfd.readouterr().err
    last, session = toy(text, steps=1), Session(stage="pretrain", machine=CPU, run_dir=RunDir(out, "last"), shown=send)
    assert pretrain.run(last, replace(session, locked=True)) == EXIT_STOPPED
    assert [event["kind"] for event in read_events(out / "runs" / "last" / "pretrain")][-1] == "finish"


def test_a_comparison_from_the_command_line(
    here: Path, text: Path, monkeypatch: pytest.MonkeyPatch, told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = partial(told, "lab", code=1)
    for name, cap in (("base", 15.0), ("idea", 20.0)):
        Path(f"{name}.py").write_text(
            "from dataclasses import asdict, replace\nfrom quern.recipes.gpt import RECIPE as GPT\n"
            f"RECIPE = replace(GPT, model=replace(GPT.model, softcap={cap}))\n",
            encoding="utf-8-sig",  # as Windows' editor writes it
        )
    assert "name a baseline, as recipes or .py files: quern lab ladder exp" in refused("ladder")
    assert "name a baseline and at least one idea" in refused("compare", "base.py")
    minutes = refused("compare", "base.py", "idea.py", "--train.minutes", "3")
    assert "--train.minutes does nothing in a study" in minutes
    command = "compare base.py idea.py --model.width 32 --model.head-dim 16 --model.context 32 --text.vocab-size 300 "
    command += "--train.steps 4 --train.batch-tokens 128 --text.val-megabytes 0.004 --depth 1 --optim.lr-scale 0.015625"
    command += " --most-pairs 3 --alpha 0.4 --study cap --no-compile --dtype fp32 --threads 1 --device cpu"
    given = [*command.split(), "--data", str(text)]
    assert "--most-pairs must be a whole number between 3 and 100, not 2" in refused(*given, "--most-pairs=2")
    long, idea = Path("my long.py"), Path("idea.py").read_text("utf-8")
    long.write_text(f"{idea}RECIPE = replace(RECIPE, train=replace(GPT.train, minutes=1))\n", "utf-8")
    assert "comparable: leave out train.minutes" in refused("compare", "base.py", long)
    broken = "def odd(*_):\n    raise ValueError('odd')\nRECIPE = replace(RECIPE, make_batches=odd)\n"
    long.write_text(f"{idea}{broken}", "utf-8")
    tiny = (
        "--no-compile --dtype fp32 --threads 1 --device cpu --depth 1 --text.vocab-size 300 --text.val-megabytes 0.004"
    )
    said = told("pretrain", long, *tiny.split(), "--train.steps", "4", "--data", text, code=1)
    assert said.endswith("quern pretrain: my long.py, line 5: odd\n")
    long.write_text(idea, "utf-8")
    assert "'base-my long': give --study letters" in refused("compare", "base.py", long)
    assert "a rung sets depth, model.context" in refused(*given, "--ladder")
    assert "--every are for the ladder" in refused(*given, "--rungs", "2") and not Path("out/lab").exists()

    def train(out: Path, machine: Any, variables: Any) -> Train:
        """The idea in a process, as the command does; the baseline, whose process would be the same, in this one."""
        child, here = in_process(out, machine, variables), train_here(out, machine)
        return lambda arm, seeds: (child if arm.name == "idea" else here)(arm, seeds)

    def killed(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        if arm.name == "idea":
            raise RuntimeError("the arm idea process failed: it ended with code -9")
        return train_here(Path("out"), {"device": "cpu", "dtype": "fp32", "compile": False, "threads": 1})(arm, seeds)

    monkeypatch.setattr("quern.lab.ladder.command.in_process", lambda *_: killed)
    run("lab", *given, code=1)
    assert "code -9; the same command tries again" in capsys.readouterr().out
    monkeypatch.setattr("quern.lab.ladder.command.in_process", train)
    said = told("lab", *given)
    assert "trigram" in said and "multiplier by FLOPs" in said
    study = Comparison(Path("out/lab/cap"))
    assert study.plan.facts["command"].startswith("quern lab compare base.py idea.py")
    counts = {(arm, rung): len(runs) for (arm, rung, _), runs in study.trials.items()}
    assert counts == {("base", 0): 6, ("idea", 0): 3, ("base", 1): 3}
    trials = [one for runs in study.trials.values() for one in runs.values()]
    assert len({one.bpb for one in trials}) == len(trials) and {one.steps for one in trials} == {4, 6}
    before = (study.folder / "trials.jsonl").read_text()
    told("lab", *given)
    assert (study.folder / "trials.jsonl").read_text() == before, "a study that is complete trains nothing"
    assert str(text.parent) not in before
    assert "experiments is no folder" in refused("log", "--study", "cap") and not Path("experiments").exists()
    Path("experiments").mkdir()
    Path("experiments/idea.py").write_text('"""An idea.\n\nVerdict: none.\n"""\n', encoding="utf-8")
    told("lab", "log", "--study", "cap")
    page = Path("docs/experiments/cap.md").read_text(encoding="utf-8")
    assert "(cap-multipliers.svg)" in page and str(text.parent) not in page
    verdict = r"^Verdict: .+ at 1x32, 4 steps \(.+, 3 pairs\); multiplier × "
    assert re.search(verdict, Path("experiments/idea.py").read_text("utf-8"), re.M)
    log = Path("experiments/LOG.md").read_text(encoding="utf-8")
    assert "| idea | " in log and "old one" not in log and "; it is 1x32, vocabulary 300, context 32, 4 steps" in log
    plan = Path("experiments/records/cap/study.json")
    plan.write_text(re.sub(r'"0": "\w+"', '"0": "other"', plan.read_text()))
    told("lab", "log")
    assert "old one" in Path("experiments/LOG.md").read_text(encoding="utf-8")


def test_calibration_records_the_command_as_typed(here: Path, monkeypatch: pytest.MonkeyPatch, told: Told) -> None:
    refused = partial(told, "lab", code=1)
    for name in ("base", "idea"):
        Path(f"{name}.py").write_text("from quern.recipes.gpt import RECIPE\n", encoding="utf-8")
    Path("answers.json").write_text('{"idea": ["no difference"]}', encoding="utf-8")
    seen: list[object] = []
    monkeypatch.setattr("quern.lab.ladder.command.run", lambda *given, **more: seen.extend((*given, more)) or 0)
    assert "name a baseline and the file of known answers" in refused("calibrate", "base.py", "idea.py")
    for text, expected in (
        ('{"none": ["no difference"]}', "lost.json names 'none', but no folder under . has none.py"),
        ('{"idea": ["wrose"]}', "Invalid enum value 'wrose' - at `$[...][0]`): write the right verdicts"),
    ):
        Path("lost.json").write_text(text, encoding="utf-8")
        assert expected in refused("calibrate", "base.py", "lost.json")
    told("lab", "calibrate", "base.py", "answers.json", "--delta", "0.01")
    assert "quern lab calibrate base.py answers.json --delta 0.01" in seen
    assert seen[-1] == {"answers": {"idea": ["no difference"]}}


def test_a_cluster_is_asked_for_the_device_that_was_found() -> None:
    where = DeviceOptions(dtype="fp32", compile=False)
    assert CompareOptions(RECIPE, where=where).device_arguments(1)["device"] == where.detect().device.type


@pytest.mark.campaign
def test_arms_on_a_cluster_are_the_arms_of_this_machine(cluster: None, text: Path, tmp_path: Path) -> None:
    machine, path = {"device": "cpu", "dtype": "fp32", "compile": False, "threads": 1}, EXPERIMENTS / "leaky_relu.py"
    idea, source = read_recipe_file(path)
    own = toy(text)
    idea = replace(idea, depth=1, data=own.data, text=own.text, model=own.model, train=own.train)
    arms = Arm("baseline", own), Arm("idea", idea, path, source)
    ours, theirs = (
        [trial.bpb for arm in arms for trial in make(tmp_path / "out", machine)(arm, [(1, 1)])]
        for make in (in_process, on_cluster)
    )
    assert ours == theirs and ours[0] != ours[1] and None not in ours
    with pytest.raises(RuntimeError, match="the arm baseline process failed: .*nowhere"):
        list(on_cluster(tmp_path / "out", machine)(Arm("baseline", replace(RECIPE, data="nowhere.txt")), [(1, 1)]))


@pytest.mark.campaign
def test_an_address_without_a_cluster_is_refused() -> None:
    pytest.importorskip("ray", reason="the extra ray is not installed")
    for address in ("127.0.0.1:1", "localhost", "ray://127.0.0.1:10001"):
        with pytest.raises(ValueError, match=f"no Ray cluster at {address} .*ray start --head"):
            connect(address)
    code = "from quern.cluster import connect; connect('auto')"  # a process of its own: Ray reads its waits once
    gone = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"RAY_ADDRESS": "127.0.0.1:1"}, capture_output=True, timeout=60
    )
    assert b"there is no Ray cluster at auto (Failed to connect" in gone.stderr
