"""The ladder against laws that are known: runs drawn from a loss over compute, ideas that save a share of it."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.field_types import Share
from quern.lab.arms import Arm, Seeds, Train
from quern.lab.ladder import command, report
from quern.lab.ladder import study as ladder
from quern.lab.ladder.report import Curve, course, multiplier, predictions, rows, told
from quern.lab.ladder.study import BASELINES, RUNGS, TRIALS, Comparison, at_rung, code_fingerprint, numbers
from quern.lab.ladder.work import LOOKS, TUNE_SEEDS, Worker, chosen, judged, proxy_line
from quern.lab.log.comparison import ComparisonPage
from quern.lab.options import CompareOptions
from quern.lab.trainer import Trial
from quern.lab.verdict import Finding
from quern.recipe import PARTS, Recipe, TrainRecipe
from quern.recipes.gpt import RECIPE
from quern.records import read_lines
from tests.support.rows import write_rows

SIZES = {0: 1e13, 1: 4e13, 2: 1.6e14}
"""FLOPs of the baseline by rung."""


def loss(compute: float) -> float:
    return 1.2 + 300.0 * compute**-0.19


RUNG_OF = {rung.width: number for number, rung in RUNGS.items()}


class Drawn:
    """Draws the runs of arms that save a share of the compute, with paired noise; counts the trials."""

    def __init__(self, savings: dict[str, dict[int, float]], noise: float = 0.002) -> None:
        self.savings, self.noise = savings, noise
        self.trained: list[tuple[str, int, int]] = []

    def __call__(self, arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        rung = RUNG_OF[arm.recipe.model.width]
        for seed, data_seed in seeds:
            time.sleep(0.001)  # other workers look for jobs meanwhile
            self.trained.append((arm.name, rung, seed))
            name = "base" if arm.name == "twin" else arm.name
            own = np.random.default_rng([seed, len(name), rung]).normal() * self.noise
            shared = np.random.default_rng([seed, rung]).normal() * self.noise
            bpb = loss(SIZES[rung] * self.savings.get(arm.name, {}).get(rung, 1.0)) + shared + own
            seconds = SIZES[rung] / 1e11
            yield Trial(arm.name, 10, seed, data_seed, 10, SIZES[rung], seconds, bpb, 1.0, {}, ())


def make(folder: Path, arms: list[str], most_pairs: int = 8, tune: str = "") -> tuple[Comparison, dict[str, Arm]]:
    recipes = {name: Arm(name, replace(RECIPE, name=name)) for name in arms}
    rules: dict[str, Any] = {"delta": 0.005, "alpha": 0.05, "most_pairs": most_pairs, "tune": tune, "ladder": True}
    rungs = {str(rung): RUNGS[rung] for rung in SIZES}
    plan = ladder.Plan(base=arms[0], rungs=rungs, numbers=dict.fromkeys(rungs, ""), text="", data="", facts={}, **rules)
    study = Comparison.of(folder, plan, [ladder.ArmRecord(name, "", None, "", {}, "") for name in arms])
    for rung in SIZES:
        if rung not in study.ngrams:
            study.add(BASELINES, {"rung": rung, "1": 3.0, "2": 2.9, "3": 2.8})
    return study, recipes


SAVINGS = {
    "grows": {0: 1.05, 1: 1.25, 2: 1.5},
    "fades": {0: 1.6, 1: 1.3, 2: 1.05},
    "steady": {0: 1.3, 1: 1.3, 2: 1.3},
    "wrecks": {0: 0.5, 1: 0.5, 2: 0.5},
    "idles": {},
}


def start(study: Comparison, arms: dict[str, Arm], train: Train, ideas: Sequence[str], **more: Any) -> list[str]:
    """Works until nothing is wanted. Returns what is said."""
    said, about = list[str](), more.pop("about", "")
    own = {name: arms[name] for name in (study.plan.base, *ideas)}
    Worker(study, own, train, about, said.append).run(CompareOptions(RECIPE, **more))
    return said


def climb(folder: Path, **more: Any) -> tuple[Comparison, Drawn]:
    study, arms = make(folder, ["base", *SAVINGS])
    drawn = Drawn(SAVINGS)
    start(study, arms, drawn, list(SAVINGS), **{"rungs": (0, 1, 2), **more})
    return study, drawn


@pytest.fixture
def climbed(tmp_path: Path) -> Comparison:
    return climb(tmp_path / "study", every=True)[0]


def test_multipliers_are_those_that_the_runs_were_drawn_with(climbed: Comparison) -> None:
    study, found = climbed, {row.idea: row for row in rows(climbed)}
    for idea, savings in SAVINGS.items():
        for rung in SIZES:
            true, one = savings.get(rung, 1.0), told(found[idea].flops[rung])
            assert one.value == pytest.approx(true, rel=0.1), (idea, rung, one)
    trends = {idea: row.course and row.course[1] for idea, row in found.items()}
    assert (trends["grows"], trends["fades"]) == ("grows", "fades")
    assert trends["steady"] in ("holds", "unclear") and trends["idles"] in ("holds", "unclear")
    assert judged(study, 0).findings["wrecks"].verdict == "worse"
    text = "\n".join(report.study_lines(study))
    assert "predicted" in text and "multiplier" in text
    for runs in (runs for (idea, rung, _), runs in study.trials.items() if (idea, rung) == ("grows", 2)):
        for seed in sorted(runs)[2:]:
            del runs[seed]
    (grows,) = (row for row in rows(study) if row.idea == "grows")
    assert grows.findings[2].pairs == 2 and set(grows.flops) == {0, 1}, "two pairs say nothing"
    for key in [key for key in study.trials if key[0] == "idles"]:
        del study.trials[key]
    _, told_, _, body = report.study_tables(study)[0]
    assert told_ == ["too few pairs so far: idles"] and "idles" not in {cells[0] for cells in body}


def test_a_page_tells_the_verdict_and_the_multiplier_of_the_highest_rung_that_is_judged(tmp_path: Path) -> None:
    study, _ = climb(tmp_path / "experiments" / "records" / "study", every=True)
    study.plan.facts.update(command="quern lab compare base.py", registered="")
    for seed in sorted(runs := study.trials["grows", 2, None])[1:]:
        del runs[seed]
    for seed, one in (fading := study.trials["fades", 2, None]).items():
        fading[seed] = replace(one, bpb=None)
    page = ComparisonPage(study).page()
    assert page.verdicts["fades"][-1].short == "fails on rung 2", "without the multiplier of a lower rung"
    assert [one.rung for one in page.verdicts["grows"]] == [0, 1]
    top = page.verdicts["grows"][-1]
    assert top.decided and top.short.startswith("better on rung 1, × 1.2"), "one pair on rung 2 says nothing"
    judged_on = report.judgements_of(study)
    said = {rung: [one.verdict for one in found.findings.values()] for rung, found in judged_on.items()}
    assert f"Decided: {5 - said[0].count('undecided')} of 5 ideas on rung 0, " in page.files["study.md"]
    assert f", {5 - said[2].count('undecided')} of 4 ideas on rung 2." in page.files["study.md"]
    study.trials = {key: {seed: one} for key, found in study.trials.items() for seed, one in list(found.items())[:1]}
    assert ComparisonPage(study).page().verdicts["grows"][-1].short == "undecided on rung 2"


def test_worse_and_null_ideas_do_not_go_up(tmp_path: Path) -> None:
    study, drawn = climb(tmp_path / "study")
    up = {arm for arm, rung, _ in drawn.trained if rung > 0}
    assert {"base", "steady"} <= up and not {"wrecks", "idles"} & up
    assert len(drawn.trained) == len(set(drawn.trained))
    trial = study.runs("base", 0)[0]
    assert trial.commit and trial.time and trial.flops and trial.parameters == {}
    assert len(study.runs("base", 0)) >= 6, "the baseline has further seeds for the A/A floor"
    looks = [seed >= LOOKS[0] for arm, rung, seed in drawn.trained if rung == 0 and arm != "base"]
    assert looks == sorted(looks) and any(looks), "all ideas have their first look before one has its second"


def test_a_rung_that_gets_known_answers_wrong_is_not_to_be_used(climbed: Comparison, tmp_path: Path) -> None:
    answers = {"steady": ["better"], "fades": ["better", "no difference"], "wrecks": ["worse"], "absent": ["worse"]}
    text = "\n".join(report.calibration(climbed, 0, answers))
    assert "3 of 4 known answers are right, 1 not measured: measure the others before it judges" in text
    assert "not measured" in next(line for line in text.splitlines() if "absent" in line) and "wrong" not in text
    assert "noise: SD of 6 seeds 0.00" in text and "8 pairs find an effect of 0.0" in text
    del answers["absent"]
    assert "3 of 3 known answers are right: it may judge" in "\n".join(report.calibration(climbed, 0, answers))
    study, arms = make(tmp_path / "small", ["base", "slows"])
    start(study, arms, Drawn({"slows": {0: 0.98}}, noise=1e-4), ["slows"])
    for known, right in {"worse": 1, "worse, small": 1, "better, small": 0}.items():
        text = "\n".join(report.calibration(study, 0, {"slows": [known]}))
        advice = ": it may judge" if right else ": do not use it"
        assert f"{right} of 1 known answers" in text and advice in text, known


def test_a_measured_speed_gives_a_multiplier_by_seconds_with_its_error(climbed: Comparison) -> None:
    for idea, error in (("steady", 0.001), ("idles", 0.05)):
        measured = {"ratio": 1.25, "error": error, "seconds": 0.1, "pairs": 9}
        climbed.add(ladder.SPEEDS, {"recipe": idea, "rung": 1, **measured})
    found = {row.idea: (told(row.flops[1]), told(row.seconds[1])) for row in rows(climbed) if row.seconds}
    assert found.keys() == {"steady", "idles"}
    for idea, (flops, seconds) in found.items():
        assert seconds.value == pytest.approx(flops.value / 1.25)
        width = math.log(seconds.high / seconds.low) / math.log(flops.high / flops.low)
        assert 0.9 < width < 1.1 if idea == "steady" else width > 1.2


def test_the_top_rungs_multiplier_is_predicted_for_85_percent_of_ideas(tmp_path: Path) -> None:
    """From the two rungs below: 120 ideas whose multipliers hold, grow or fade, 5 pairs, a noise of 0.002."""
    held: list[bool] = []
    for seed in range(4):
        rng, lines = np.random.default_rng(seed), list[dict[str, Any]]()
        start, slope = rng.normal(0, 0.25, 30), rng.normal(0, 0.12, 30)
        study, _ = make(tmp_path / str(seed), ["base", *map(str, range(30))])
        for rung, compute in SIZES.items():
            savings = {"base": 1.0} | {str(k): float(np.exp(start[k] + slope[k] * rung)) for k in range(30)}
            shared = 0.002 * rng.standard_normal(10)
            lines += [
                {"recipe": name, "rung": rung, "seed": at, "steps": 10, "flops": compute, "seconds": compute / 1e11}
                | {"bpb": loss(compute * saved) + shared[at] + 0.002 * rng.standard_normal()}
                for name, saved in savings.items()
                for at in range(10 if name == "base" else 5)
            ]
        write_rows(study.folder / ladder.TRIALS, lines)
        study.refresh()
        held += [holds for *_, holds in predictions(study, rows(study))]
    assert len(held) == 120 and np.mean(held) >= 0.85


def test_two_workers_share_a_study_and_it_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    study, arms = make(folder, ["base", *SAVINGS])
    drawn = Drawn(SAVINGS)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: start(Comparison(folder), arms, drawn, list(SAVINGS)), range(2)))
    assert len(drawn.trained) == len(set(drawn.trained)), "no trial is trained twice"
    lines = (folder / "trials.jsonl").read_text().splitlines()
    assert len(lines) == len(drawn.trained)
    (folder / "trials.jsonl").write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # a kill tears the last line
    study, arms = make(folder, ["base", *SAVINGS])
    again = Drawn(SAVINGS)
    start(study, arms, again, list(SAVINGS))
    assert len(again.trained) == 1
    assert json.loads((folder / "trials.jsonl").read_text().splitlines()[-1])["bpb"]


def test_one_rung_is_of_one_kind_of_machine(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "grows"])
    start(study, arms, Drawn({}), [], about="cpu bfloat16, 1 threads")
    with pytest.raises(ValueError, match="another machine"):
        start(study, arms, Drawn({}), ["grows"], about="cpu float32, 1 threads")
    start(study, arms, Drawn({}), ["grows"], about="cpu bfloat16, 2 threads")


def test_both_runs_of_a_pair_are_trained_on_one_kind_of_processor(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "grows", "fades"], most_pairs=5)
    start(study, arms, drawn := Drawn({}, noise=0.02), ["grows"], about="cpu bfloat16, an old one", any_delta=True)
    assert len(study.runs("grows", 0)) == 5, "undecided"
    start(study, arms, more := Drawn({}, noise=0.02), ["grows"], about="cpu bfloat16, a new one", any_delta=True)
    assert not more.trained, "a whole study needs nothing of another machine"
    start(study, arms, more, ["grows", "fades"], about="cpu bfloat16, a new one", any_delta=True)
    assert [name for name, *_ in more.trained] == ["base"] * 3 + ["fades"] * 3 + ["base"] * 2 + ["fades"] * 2
    machines = {seed: one.machine for seed, one in study.runs("base", 0).items()}
    for name in ("grows", "fades"):
        runs = study.runs(name, 0)
        assert len(runs) == 5 and {seed: one.machine for seed, one in runs.items()}.items() <= machines.items()
    assert all(name != "grows" for name, *_ in more.trained) and not set(drawn.trained) & set(more.trained)


def test_a_twin_changes_nothing_and_hides_no_noise(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "twin", "idles"])
    start(study, arms, Drawn({}), ["twin", "idles"], rungs=(0, 1))
    found = judged(study, 0)
    assert (found.findings["twin"].verdict, found.findings["twin"].interval) == ("no difference", (0.0, 0.0))
    assert len(study.runs("twin", 0)) == 3 and not study.runs("twin", 1)
    assert found.sd > 1e-4
    assert {str(told(row.flops[0])) for row in rows(study) if row.idea == "twin"} == {"1.000 [1.000, 1.000]"}
    report.write_verdicts(study)  # the board shows these fields
    shown = {"axis": "steps, rung 0", "n": 3, "mean": 0, "low": 0, "high": 0, "verdict": "no difference"}
    assert {"idea": "twin", **shown} in json.loads((study.folder / "verdicts.json").read_text(encoding="utf-8"))


def test_runs_that_fail_are_no_numbers_anywhere(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "experiments" / "records" / "study", ["base", "fails", "both"])
    study.plan.facts.update(command="quern lab compare base.py", registered="")
    drawn = Drawn({})

    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        for one in drawn(arm, seeds):
            bad = arm.name == "fails" or (one.seed == 0 and arm.name != "fails")
            yield replace(one, bpb=(None, 9.0)[one.seed % 2] if bad else one.bpb)

    start(study, arms, train, ["fails", "both"])
    found = judged(study, 0).findings
    assert (found["fails"].verdict, found["fails"].pairs) == ("fails", 0)
    assert (found["both"].failed, found["both"].pairs) == (1, len(study.runs("both", 0)) - 1)
    assert f"{len(study.runs('base', 0)) - 1} seeds" in proxy_line(study, 0), "the failed run is no score"
    study.arms["base"].recipe["data"] = "a.txt\ntexts"
    page = ComparisonPage(study).page()
    assert "Baseline `base` on `a.txt, texts` (" in page.files["study.md"]
    assert "| fails | 0 | … | […, …] | fails |" in page.files["study.md"]
    assert page.verdicts["fails"][0].text == "fails on rung 0 (… bits per byte, 0 pairs)"
    assert "## Known answers" not in page.files["study.md"]
    study.plan.facts["command"] = "quern lab calibrate base.py experiments/mine.json"
    (tmp_path / "experiments" / "mine.json").write_text('{"fails": ["worse"]}', encoding="utf-8")
    assert "## Known answers on rung 0" in ComparisonPage(study).page().files["study.md"]
    for name in study.arms:  # every run of both diverges
        for seed, one in study.trials[name, 0, None].items():
            study.trials[name, 0, None][seed] = replace(one, bpb=None)
    assert {one.verdict for one in judged(study, 0).findings.values()} == {"undecided"}
    lines = [*report.study_lines(study), *report.calibration(study, 0, {"both": ["worse"]})]
    assert "SD of a pair's difference not measured, correlation of pairs not measured" in lines[-1]
    assert "SD of a pair's difference not measured; A/A floor: not measured" in lines


@pytest.mark.parametrize(
    ("tune", "why"),
    [
        ("matrix_lr", "it ended with code -9"),
        ("", "OSError: [Errno 28] No space left on device"),
        ("", "ValueError: killed.py has changed since the study began"),
        ("", "the cluster has had no room for a worker"),
        ("", "the cluster has failed: its node died"),
    ],
)
def test_a_failure_is_a_record_and_one_from_outside_is_tried_at_the_next_start(
    tmp_path: Path, tune: str, why: str
) -> None:
    study, arms = make(tmp_path / "study", ["base", "odd", "killed", "idles"], tune=tune)
    drawn, ideas = Drawn({}), ["odd", "killed", "idles"]
    killed = why if why.startswith("the cluster") else f"the arm killed process failed: {why}"
    errors = {"odd": "its process\nfailed", "killed": killed}

    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        if arm.name in errors and list(seeds)[0][0] not in TUNE_SEEDS:
            raise RuntimeError(errors[arm.name])
        return drawn(arm, seeds)

    start(study, arms, train, ideas)
    kept = {one.error for one in study.runs("odd", 0, chosen(study, "odd")).values() if one.error}
    assert kept == {"its process failed"}, "in one line"
    assert "could not be trained: odd" in "\n".join(report.study_lines(study))
    assert judged(study, 0).findings.keys() == {"idles"}
    start(study, arms, drawn, ideas)
    assert judged(study, 0).findings.keys() == {"idles", "killed"}
    if not tune:  # else it has finished trials of the code before
        study = Comparison.of(study.folder, study.plan, [replace(study.arms["odd"], code="repaired")])
        start(study, arms, drawn, ideas)
        assert judged(study, 0).findings.keys() == {"idles", "killed", "odd"}
    with pytest.raises(ValueError, match="save the idea under another name"):
        Comparison.of(study.folder, study.plan, [replace(study.arms["odd"], code="other")])


def test_a_failing_baseline_is_trained_when_its_file_is_repaired(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "idles"])
    before, drawn = Comparison(study.folder), Drawn({})

    def fails(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        raise RuntimeError("its process failed")
        yield

    with pytest.raises(RuntimeError, match="its process failed"):
        start(study, arms, fails, ["idles"])
    study = Comparison.of(study.folder, study.plan, [replace(study.arms["base"], code="repaired")])
    late = Worker(before, arms, drawn, "", print)  # another process, which has the file as it was
    late._keep(replace(ladder.TrialRecord("base", seed=0, rung=0), bpb=9.0))  # pyright: ignore[reportPrivateUsage]
    start(study, arms, drawn, ["idles"])
    assert judged(study, 0).findings.keys() == {"idles"}
    assert all(one.code == "repaired" and one.bpb != 9 for one in study.runs("base", 0).values())


def test_a_process_that_has_the_former_file_of_an_idea_records_its_trials_under_that_files_code(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "idles"])
    drawn = Drawn({})

    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        if arm.name == "idles":
            Comparison.of(study.folder, study.plan, [replace(study.arms["idles"], code="repaired")])
        return drawn(arm, seeds)

    start(study, arms, train, ["idles"])
    assert Comparison(study.folder).runs("idles", 0) == {}
    assert {one.code for one in read_lines(study.folder / TRIALS, ladder.TrialRecord)} == {""}


def test_a_baseline_alone_has_its_scores_in_the_report_and_no_empty_table(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base"])
    start(study, arms, Drawn({}), [], rungs=(0, 1))
    study.ngrams.pop(2)  # as where rung 2 is trained for the curve alone
    lines = report.study_lines(study)
    assert [line for line in lines if line.startswith("Rung")] == ["Rung 0", "Rung 1"]
    assert sum("; base " in line and "over 6 seeds" in line for line in lines) == 2, lines
    study.plan.facts.update(command="quern lab ladder base.py", registered="")
    page = ComparisonPage(study).page()
    assert "## Rung 1" in page.files["study.md"] and "| idea" not in page.files["study.md"] + str(page.section)


def test_a_baseline_above_the_trigram_is_refused(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "grows"])
    (tmp_path / "study" / BASELINES).write_text('{"rung": 0, "1": 3.0, "2": 2.9, "3": 2.0}\n')
    with pytest.raises(ValueError, match="no proxy"):
        start(study, arms, Drawn(SAVINGS), ["grows"])
    assert not study.runs("grows", 0), "no idea is trained on it"
    assert "trigram 2.000" in proxy_line(study, 0)


@pytest.mark.parametrize("tune", ["", "matrix_lr"])
def test_a_margin_out_of_reach_is_refused_before_an_idea_is_trained(tmp_path: Path, tune: str) -> None:
    def told_with(name: str, noise: float, **more: Any) -> list[str]:
        study, arms = make(tmp_path / name, ["base", "grows"], tune=tune)
        return [line for line in start(study, arms, Drawn({}, noise), ["grows"], **more) if "pairs find" in line]

    for name, more in (("quiet", {"noise": 0.001}), ("loud", {"noise": 0.02, "any_delta": True})):
        (line,) = told_with(name, **more)
        assert "8 pairs find an effect of 0.0" in line
    reason = r"cannot show that an idea changes less than 0\.005 .* give --any-delta.* --delta 0\.0"
    with pytest.raises(ValueError, match=reason):
        told_with("refused", 0.02)
    study = Comparison(tmp_path / "refused")
    assert study.runs("base", 0, chosen(study, "base")) and not judged(study, 0).findings


def test_a_study_refuses_other_rules_and_other_code(tmp_path: Path) -> None:
    make(tmp_path / "study", ["base", "grows"])
    with pytest.raises(ValueError, match="another most_pairs"):
        make(tmp_path / "study", ["base", "grows"], most_pairs=9)
    study = Comparison(tmp_path / "study")
    study.add(ladder.TRIALS, {"recipe": "grows", "rung": 0, "seed": 0, "data_seed": 0, "bpb": 1.0})
    with pytest.raises(ValueError, match="code that grows trains with has changed"):
        Comparison.of(study.folder, study.plan, [replace(study.arms["grows"], code="other")])
    Comparison.of(study.folder, study.plan, [replace(study.arms["grows"], arm="new")])
    assert "new" in Comparison(study.folder).arms, "ideas may join"


def test_code_counts_and_docstrings_do_not() -> None:
    source = '"""One."""\nfrom quern.model.gpt import GPT\n\nclass Mine(GPT):\n    """Two."""\n    x = 1\n'
    code = code_fingerprint(source, RECIPE)
    assert code == code_fingerprint(source.replace("One", "Three").replace("Two", "Four") + "# end\n", RECIPE)
    assert code != code_fingerprint(source.replace("x = 1", "x = 2"), RECIPE)
    text, _ = ladder._parsed("class A:\n    def b(self): ...\n")
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "d78800d7e8476638"  # under every version of Python
    assert code != code_fingerprint(source.replace("gpt import GPT", "llama import Llama as GPT"), RECIPE)


@pytest.mark.parametrize("module", ["model.gpt", "train.step"])
def test_the_model_that_a_recipe_names_as_text_and_the_step_count(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, read = code_fingerprint(None, RECIPE), ladder._module
    changed = lambda name: ("other", []) if name == f"quern.{module}" else read(name)  # noqa: E731
    monkeypatch.setattr(ladder, "_module", changed)
    assert code_fingerprint(None, RECIPE) != before


def test_a_rung_sets_what_an_idea_leaves_open() -> None:
    rung = ladder.Rung(depth=2, width=64, head_dim=32, context=128, vocab_size=512, batch_tokens=1024, steps=80)
    recipe = at_rung(RECIPE, rung)
    assert (recipe.depth, recipe.model.width, recipe.train.steps, recipe.text.vocab_size) == (2, 64, 80, 512)
    larger = at_rung(replace(RECIPE, train=TrainRecipe(batch_tokens=4096)), rung)
    assert (larger.train.steps, larger.train.batch_tokens) == (20, 4096), "equal tokens"
    with pytest.raises(ValueError, match=r"sets model\.width"):
        at_rung(replace(RECIPE, model=replace(RECIPE.model, width=128)), rung)
    same = replace(RECIPE, name="other", train=replace(RECIPE.train, log_every=3))
    assert numbers(at_rung(same, rung)) == numbers(recipe)
    read = replace(RECIPE, include="*.txt", text=replace(RECIPE.text, encoding="cp1252"))
    assert numbers(at_rung(read, rung)) == numbers(recipe), "the record names the text"
    changed = replace(RECIPE, optim=replace(RECIPE.optim, head_lr=0.5))
    assert numbers(at_rung(changed, rung)) != numbers(recipe)
    offset = replace(RECIPE, model=replace(RECIPE.model, key_offset=False))
    assert numbers(at_rung(offset, rung)) != numbers(recipe)


def test_a_field_that_a_later_version_adds_changes_no_fingerprint_while_it_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Later(TrainRecipe):
        idea: Share = 0.0

    before = numbers(RECIPE)
    monkeypatch.setattr("quern.validate.PARTS", {**PARTS, "train": Later})
    later = replace(RECIPE, train=Later(**vars(RECIPE.train)), unused=(*RECIPE.unused, "train.idea"))
    assert numbers(later) == before
    used = replace(later, train=replace(later.train, idea=0.5), unused=RECIPE.unused)
    assert numbers(used) != before


OWN = replace(RECIPE, train=TrainRecipe(batch_tokens=4096, log_every=3), text=replace(RECIPE.text, vocab_size=512))


@pytest.mark.parametrize(
    ("idea", "named", "ladder", "said"),
    [
        (
            OWN,
            ["train.batch_tokens"],
            False,
            r"idea\.py sets train\.batch_tokens, which --train\.batch-to",
        ),
        (OWN, ["train.log_every", "depth"], False, None),
        (
            replace(RECIPE, train=TrainRecipe(steps=9)),
            [],
            False,
            r"sets train\.steps, which the study sets for all",
        ),
        (replace(RECIPE, depth=RECIPE.depth + 1), [], True, "sets depth, which the study sets"),
        (replace(RECIPE, depth=RECIPE.depth + 1), [], False, None),
        (replace(RECIPE, data="a.txt"), [], False, "sets data, and so another validation text"),
        (replace(RECIPE, data="a.txt"), ["data", "val"], False, "sets data, which --data sets"),
        (replace(RECIPE, data="a.txt"), ["val"], False, None),
    ],
)
def test_an_idea_that_all_arms_share_is_refused(idea: Recipe, named: list[str], ladder: bool, said: str | None) -> None:
    """Such an idea would be the baseline itself, and its verdict `no difference`."""
    with pytest.raises(ValueError, match=said) if said else nullcontext():
        command.refuse_lost(RECIPE, {"idea.py": idea}, named, ladder)


def finding(difference: float, error: float, degrees: float) -> Finding:
    return Finding("undecided", 5, 0, difference, error, degrees, (-math.inf, math.inf), math.nan)


def test_a_curve_inverts_itself_and_needs_two_rungs() -> None:
    means = [(c, loss(c), 1e-4) for c in (1e13, 4e13, 1.6e14, 6.4e14)]
    curve = Curve(means)
    assert curve.loss(2e13)[0] == pytest.approx(loss(2e13), abs=2e-3)
    saves = finding(loss(1.3 * 4e13) - loss(4e13), 1e-4, 10.0)
    found = told(multiplier(curve, 4e13, 4e13, saves))
    assert found.value == pytest.approx(1.3, rel=0.02) and found.low < found.value < found.high
    twice = told(multiplier(curve, 4e13, 8e13, saves))
    assert twice.value == pytest.approx(found.value / 2), "an idea that costs twice as much saves half as much"
    assert course([4e13], [multiplier(curve, 4e13, 4e13, saves)]) is None


def test_the_trend_of_a_multiplier_that_holds_is_rarely_called_another() -> None:
    """Multipliers of 1.1 at three rungs, measured with an error: the factor's interval covers 1 as often as it says."""
    curve, rng, covered = Curve([(c, loss(c), 1e-3) for c in SIZES.values()]), np.random.default_rng(0), []
    for study in range(200):
        logs = []
        for compute in SIZES.values():
            seen = loss(1.1 * compute) - loss(compute) + 2e-3 * rng.normal()
            logs.append(multiplier(curve, compute, compute, finding(seen, 2e-3, 1e6), f"{study} {compute}"))
        found = course(list(SIZES.values()), logs)
        assert found is not None
        covered.append(found[0].low <= 1.0 <= found[0].high)
    assert 0.9 < np.mean(covered) < 0.99


def test_every_arm_tunes_the_same_multiples_on_seeds_of_their_own(tmp_path: Path) -> None:
    study, arms = make(tmp_path / "study", ["base", "idea"], tune="matrix_lr")
    best = {"base": 0.02, "idea": 0.04}
    trained: dict[tuple[str, float], set[int]] = {}

    def train(arm: Arm, seeds: Iterable[Seeds]) -> Iterator[Trial]:
        rate = arm.recipe.optim.matrix_lr
        for seed, data_seed in seeds:
            trained.setdefault((arm.name, rate), set()).add(seed)
            bpb = 2.0 + np.log(rate / best[arm.name]) ** 2 + 0.001 * np.sin(9 * seed + len(arm.name))
            size = SIZES[RUNG_OF[arm.recipe.model.width]]
            yield Trial(arm.name, 10, seed, data_seed, 10, size, size / 1e11, bpb)

    start(study, arms, train, ["idea"])
    assert {arm: chosen(study, arm) for arm in best} == best
    assert "matrix_lr, chosen for each arm: base 0.02, idea 0.04" in report.study_lines(study)
    assert {rate for arm, rate in trained if arm == "idea"} == {0.01, 0.014, 0.02, 0.028, 0.04}
    assert trained["idea", 0.01] == set(TUNE_SEEDS) and set(range(3)) <= trained["idea", 0.04]
    # Seeds that chose the value would favour the arm that they chose it for.
    assert judged(study, 0).findings["idea"].pairs == len(study.runs("idea", 0, 0.04)) - len(TUNE_SEEDS) == 3
    study, arms = make(tmp_path / "above", ["base", "idea"], tune="matrix_lr")
    start(study, arms, train, ["idea"], rungs=(1,))
    assert report.judgements_of(study).keys() == {1}, "trials that tune are on rung 0, which is not judged"
