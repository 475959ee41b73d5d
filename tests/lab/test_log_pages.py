"""The log's pages of sweeps and scaling studies, which are made from the records alone."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from quern.lab.arms import with_verdict
from quern.lab.ladder.study import Comparison
from quern.lab.log import pages
from quern.lab.log.comparison import ComparisonPage
from quern.lab.log.pages import Page, Verdict
from quern.lab.log.publish import FOLDERS, _public_command, idea_files, run
from quern.lab.options import LogOptions
from quern.lab.search.results import summary
from quern.lab.search.sweep import run as run_sweep
from quern.lab.study import start_facts
from quern.recipe import Recipe
from quern.records import read_lines
from quern.report.plots import log_ticks
from quern.terminal import silent
from tests.lab import test_scaling, test_sweep
from tests.lab.sweep_worker import RECIPE
from tests.lab.sweep_worker import FakeTrainer as SweepTrainer
from tests.support.tiny_model import CPU

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def publish(out: Path, project: Path, name: str) -> tuple[str, dict[Path, str]]:
    """Publishes a study; returns its page, and the text of all files of the project."""
    (project / "experiments").mkdir(parents=True, exist_ok=True)
    run(LogOptions(study=(name,), out=out, folder=project), lambda line: None)
    files = texts(project)
    run(LogOptions(folder=project), lambda line: None)
    assert texts(project) == files, "made again, they are the same"
    assert not any("/private/" in text for text in files.values())
    links = re.findall(r"\]\(([^)]+)\)", files[project / "experiments" / "LOG.md"])
    assert links and all((project / "experiments" / link).is_file() for link in links)
    return files[project / "docs" / "experiments" / f"{name}.md"], files


def swept(folder: Path, trainer: SweepTrainer | None = None, **changed: Any) -> tuple[Path, str, dict[Path, str]]:
    """Runs a sweep and publishes it; returns its folder, and as `publish`."""
    given = test_sweep.options(folder / "out", **changed)
    run_sweep(given, lambda line: None, trainer or SweepTrainer(), facts=test_sweep.FACTS)
    return given.folder, *publish(folder / "out", folder / "project", "s")


def texts(project: Path) -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in project.rglob("*") if path.is_file()}


def test_the_pages_of_this_project_are_what_its_records_say_of_todays_baseline(tmp_path: Path) -> None:
    """A number of the default or a field that is added would put every verdict on an old baseline."""
    for folder in ("experiments", "docs/experiments"):
        shutil.copytree(EXPERIMENTS.parent / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.pyc"))
    before = texts(tmp_path)
    run(LogOptions(folder=tmp_path), lambda line: None)
    changed = {path.name for path, text in texts(tmp_path).items() if before.get(path) != text}
    assert not {name for name in changed if not name.endswith(".svg")}  # which differ with the version of Matplotlib


def test_a_scaling_study_has_a_page_with_its_laws(tmp_path: Path) -> None:
    out, project = tmp_path / "out", tmp_path / "project"
    given = test_scaling.options(out, study="flops")
    facts = start_facts(CPU, "quern lab scaling /private/folder/idea.py --data=/private/text.txt")
    test_scaling.run(given, test_scaling.FakeTrainer(), lambda line: None, facts=facts)
    page, files = publish(out, project, "flops")
    assert "](flops-kaplan.svg)" in page and "envelope: N* ∝ C^" in page and "tokens per parameter vary least" in page
    assert "quern lab scaling idea.py --data=text.txt" in page
    figure = files[project / "docs" / "experiments" / "flops-kaplan.svg"]
    assert "parameters (kaplan)" in figure and all(f"{budget:.3g} FLOPs" in figure for budget in test_scaling.BUDGETS)
    fits, drawn = json.loads((given.folder / "fits.json").read_text(encoding="utf-8")), list[str]()
    for low, high in ((0.0, None), (1.0, 1e30), (1e5, 1e5)):
        fits["conventions"]["kaplan"]["envelope"]["optima"][1]["parameters"] |= {"low": low, "high": high}
        drawn.append(pages._figure("kaplan", list(read_lines(given.folder / "cells.jsonl")), fits))
    assert drawn[0] == drawn[1] != drawn[2], "an infinite interval reaches over all sizes"
    places = re.findall(r' (?:d|x|y|transform)="([^"]*)"', figure)  # to 0.01, so that processors agree
    assert len(places) > 100 and not any(re.search(r"\.\d{3}", place) for place in places)
    assert "28 of 28 runs used" in files[project / "experiments" / "LOG.md"]
    cells = given.folder / "cells.jsonl"
    cells.write_text("".join(cells.read_text(encoding="utf-8").splitlines(keepends=True)[2:]), encoding="utf-8")
    with pytest.raises(ValueError, match="cells.jsonl has 2 lines that this study of the same name lacks"):
        publish(out, project, "flops")
    assert texts(project) == files
    (out / "lab" / "begun").mkdir()
    with pytest.raises(FileNotFoundError, match="no finished study in .*begun"):
        publish(out, project, "begun")


def test_a_sweep_has_a_page_with_its_best_trials(tmp_path: Path) -> None:
    folder, page, files = swept(tmp_path, trials=24)
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    best = results["best"]
    rows = [line for line in page.splitlines() if line.startswith(f"| {best['trial']} |")]
    assert len(rows) == 1 and f"| {best['bpb']:.4f} |" in rows[0]
    assert "24 trials" in page and "](s-pairs.svg)" in page and "against the recipe's own values" in page
    assert "## Importances\n" in page and "## Importances\n" not in swept(tmp_path / "few", trials=3)[1]
    results["plan"]["recipe"]["data"] = "/a/a.txt\n/b/texts/"
    assert " on `a.txt, texts`: 24 trials" in summary(results)
    assert f"{best['bpb']:.4f} bits per byte" in files[tmp_path / "project" / "experiments" / "LOG.md"]
    damaged = json.dumps({name: value for name, value in results.items() if name != "plan"})
    (folder / "results.json").write_text(damaged, encoding="utf-8")
    with pytest.raises(ValueError, match="lab/s is damaged .KeyError.'plan'"):
        publish(tmp_path / "out", tmp_path / "project", "s")
    assert texts(tmp_path / "project") == files


def test_a_sweep_without_a_finished_trial_has_a_page(tmp_path: Path) -> None:
    _, page, _ = swept(tmp_path, space=("train.batch-tokens=4097,4098",), sampler="grid")
    assert "(2 refused)" in page and "No trial finished." in page


def test_a_published_command_names_files_of_the_project(tmp_path: Path) -> None:
    """Else the baseline's numbers today would not be found, and it would be called old."""
    file = tmp_path / "experiments" / "deep" / "own.py"
    file.parent.mkdir(parents=True)
    file.touch()
    for given in (str(file), "own.py", "deep/own.py", "experiments/deep/own.py"):
        public = _public_command(f"quern lab compare {given} --data=/a/b.txt", tmp_path)
        assert public == "quern lab compare experiments/deep/own.py --data=b.txt"
    assert _public_command("quern lab compare /a/other.py", tmp_path) == "quern lab compare other.py"


def test_published_records_name_files_and_no_folders(tmp_path: Path) -> None:
    recipe = replace(RECIPE, data="/private/a/x.txt\n/private/a/x.txt.d\nplain.txt", val="/private/v.txt")
    recipe = replace(recipe, text=replace(recipe.text, tokenizer='/private/b/my "own".json'))

    def fits(recipe: Recipe) -> None:
        raise MemoryError("no room:\n/private/c/x.bin, '/private/y.bin', '/private/my own/a b/z.bin' or /private/w.bin")

    _, _, files = swept(tmp_path, SweepTrainer(before=fits), recipe=recipe, trials=2)
    records = tmp_path / "project/experiments/records/s"
    assert r"no room:\nx.bin, 'y.bin', 'z.bin' or w.bin" in files[records / "sweep.jsonl"]
    published = json.loads(files[records / "results.json"])["plan"]["recipe"]
    assert published["data"] == "x.txt\nx.txt.d\nplain.txt" and published["val"] == "v.txt"
    assert published["text"]["tokenizer"] == 'my "own".json'


@pytest.mark.parametrize("before", ['"error": "the arm a process failed: ', '"reason": "'])
def test_the_place_of_an_error_has_no_folder_with_spaces(before: str) -> None:
    message = before + "/home/my own/quern 2/a.py, line 3: KeyError: 'b' is no name in /home/c.toml"
    assert FOLDERS.sub("", message) == before + "a.py, line 3: KeyError: 'b' is no name in c.toml"


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.84, 1.66, ["1", "1.2", "1.4", "1.6"]),
        (0.49, 2.3, ["0.5", "1", "1.5", "2"]),
        (3.5e-4, 1.1e-2, ["0.001", "0.01"]),
    ],
)
def test_a_logarithmic_axis_has_some_labels_and_not_too_many(low: float, high: float, labels: list[str]) -> None:
    figure = Figure()
    axes = figure.add_subplot(xscale="log")
    axes.plot([low, high], [1, 1])
    log_ticks(axes.xaxis, 5)
    figure.draw_without_rendering()
    shown = (label for label in axes.get_xticklabels(which="both") if low <= label.get_position()[0] <= high)
    assert [label.get_text() for label in shown if label.get_text()] == labels


def told(study: str, verdict: str, runs: int, rung: int = 0, baseline: str = "b") -> Page:
    """The page of a study whose name is its time, with one verdict."""
    decided, text = verdict != "undecided", f"{verdict} ({runs} pairs)"
    one = Verdict(study, rung, (baseline,), False, runs, decided, text, verdict)
    return Page(study, study, [], {}, {"swift": [one]})


def project(folder: Path, docstring: str) -> tuple[Path, Path]:
    """The file of an idea, and the index."""
    idea, index = folder / "grug" / "swift.py", folder / "README.md"  # a folder holds the ideas of the JAX twin
    idea.parent.mkdir()
    idea.write_text(f'"""{docstring}"""\n', encoding="utf-8")
    index.write_text("| [swift.py](swift.py) | Title | `seam` | none |\n", encoding="utf-8")
    return idea, index


def test_an_ideas_file_tells_the_newest_baseline_first_and_the_index_it_alone(tmp_path: Path) -> None:
    idea, index = project(tmp_path, "Title.\n\nVerdict: none yet.\n\nA remark.\n")
    studies = [told("1", "better", 8, baseline="small"), told("3", "undecided", 3, baseline="large")]
    found = idea_files([studies[0], Page("2", "2", [], {}), studies[1]], tmp_path)
    verdict = "Verdict: undecided (3 pairs). Study 3. Before: better (8 pairs). Study 1."
    assert found[idea] == f'"""Title.\n\n{verdict}\n\nA remark.\n"""\n'
    assert found[index].endswith("| undecided |\n")
    idea.write_text('"""Title.\n\nChanged: 2, its bound.\nVerdict: none yet.\n"""\n', encoding="utf-8")
    old, both = idea_files(studies[:1], tmp_path), idea_files(studies, tmp_path)
    before = "Before the change: better (8 pairs). Study 1."
    assert f"Verdict: not yet measured. {before}\n" in old[idea] and old[index].endswith("| not yet measured |\n")
    assert f"Verdict: undecided (3 pairs). Study 3. {before}\n" in both[idea]
    assert both[index].endswith("| undecided |\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"""T.\n\nVerdict: a\nb.\n"""\n', '"""T.\n\nVerdict: c\n"""\n'),
        ("'''T.\n\nVerdict: a.\n'''\n", "'''T.\n\nVerdict: c\n'''\n"),
        ('"""T.\n\nVerdict: a."""\n', '"""T.\n\nVerdict: c\n"""\n'),
        ('"""T.\n\nVerdict: a.\nSource: b."""\n', '"""T.\n\nVerdict: c\nSource: b."""\n'),
        ('"""T.\n\nVerdict: a.\n\nB.\n"""\n', '"""T.\n\nVerdict: c\n\nB.\n"""\n'),
        ('"""T."""\nx = """\nVerdict: a.\n"""\n', '"""T."""\nx = """\nVerdict: a.\n"""\n'),
    ],
)
def test_a_new_verdict_changes_nothing_else_of_a_file(before: str, after: str) -> None:
    assert with_verdict(before, "c") == after
    compile(after, "idea.py", "exec")


def test_an_ideas_file_keeps_the_ends_of_its_lines(tmp_path: Path) -> None:
    (tmp_path / "experiments" / "records").mkdir(parents=True)
    idea, _ = project(tmp_path / "experiments", "Title.\n\nVerdict: none yet.\n")
    for end in ("\r\n", "\n"):
        idea.write_bytes('"""Title.\n\nVerdict: none yet.\n"""\n'.replace("\n", end).encode())
        assert run(LogOptions(folder=tmp_path), silent) == 0
        assert idea.read_bytes() == '"""Title.\n\nVerdict: not yet measured.\n"""\n'.replace("\n", end).encode()


def test_files_that_editors_make_are_read_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    idea, index = project(tmp_path, "Title.\n\nVerdict: none yet.\n")
    odd = idea.with_name("my [idea.py")
    odd.write_text("\ufeff" + idea.read_text("utf-8"), "utf-8")  # as Windows' editor marks a file
    (tmp_path / ".#swift.py").symlink_to("user@host.1")  # Emacs' lock
    index.write_text("| [my [idea.py](x.py) | Title | none |\n", encoding="utf-8")
    study = told("1", "better", 5)
    found = idea_files([replace(study, verdicts={"my [idea": study.verdicts["swift"]})], tmp_path)
    assert "Verdict: better" in found[odd] and found[index].endswith("| better |\n")
    for content in ("x = (", b"\xff".decode("latin-1")):
        (tmp_path / "half.py").write_text(content, encoding="latin-1")
        with pytest.raises(ValueError, match=r"half\.py is no Python file .* move it out of"):
            idea_files([], tmp_path)


@pytest.mark.parametrize(
    ("newer", "verdict", "short"),
    [
        (told("2", "undecided", 3), "better (5 pairs). Study 1.", "better"),  # interrupted
        (told("2", "undecided", 5), "better (5 pairs). Study 1.", "better"),
        (told("2", "worse", 5), "worse (5 pairs). Study 2.", "worse"),
        (told("2", "undecided", 8), "undecided (8 pairs). Study 2.", "undecided"),
        (told("2", "worse", 2, 1), "worse (2 pairs). Study 2. Before: better (5 pairs). Study 1.", "worse"),
    ],
)
def test_the_verdict_of_the_most_pairs_on_a_rung_counts(tmp_path: Path, newer: Page, verdict: str, short: str) -> None:
    idea, index = project(tmp_path, "Title.\n\nVerdict: none yet.\n")
    found = idea_files([told("1", "better", 5), newer], tmp_path)
    assert f"Verdict: {verdict}\n" in found[idea] and found[index].endswith(f"| {short} |\n")


@pytest.mark.parametrize(("more", "aside"), [("--text.val-megabytes 0.25", False), ("--text.digits 1", True)])
def test_flags_of_the_text_alone_change_no_baseline(tmp_path: Path, more: str, aside: bool) -> None:
    """The fingerprint of the text tells them."""
    folder = tmp_path / "experiments" / "records" / "ladder"
    shutil.copytree(EXPERIMENTS / "records" / "ladder", folder)
    shutil.copy(EXPERIMENTS / "baseline.py", tmp_path / "experiments")
    plan = json.loads((folder / "study.json").read_text("utf-8"))
    plan["facts"]["command"] += f" {more}"
    (folder / "study.json").write_text(json.dumps(plan), "utf-8")
    assert ComparisonPage(Comparison(folder)).aside == aside


def test_a_baseline_that_flags_changed_gives_no_verdicts_to_ideas() -> None:
    records = EXPERIMENTS / "records"
    assert "double_rate" in (ladder := ComparisonPage(Comparison(records / "ladder")).page()).verdicts
    known = [line for line in ladder.files["ladder.md"].splitlines() if line.startswith("## Known answers")]
    assert known == ["## Known answers on rung 0", "## Known answers on rung 1"], "the rungs that decided one of them"
    page = ComparisonPage(Comparison(records / "ladder-rates")).page()
    assert not page.verdicts and "double_rate" in page.files["ladder-rates.md"]
    assert "Flags of its command" in page.section[0]
    for old in (ladder, page):  # the log has no verdict on a baseline that is not today's
        assert "The study's page has the verdicts" in old.section[0] and "double_rate" not in "".join(old.section)
