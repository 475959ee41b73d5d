"""All stages side by side: the plot of the scores, their tables, and the curves of reinforcement learning."""

import json
import re
from pathlib import Path

import pytest

from quern.report.build import build
from quern.report.records import read_run
from quern.report.scores import ScorePlot, score_tables
from tests.report.synthetic_run import add_rl, write_run
from tests.support.rows import write_rows


def plot_of(folder: Path) -> ScorePlot | None:
    return next((one for one in score_tables(read_run(folder))[0] if isinstance(one, ScorePlot)), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = write_run(tmp_path_factory.mktemp("reports") / "run")
    add_rl(found)
    build(found)
    return found


def test_base_fine_tuned_and_rl_are_side_by_side(folder: Path) -> None:
    text = (folder / "report.md").read_text(encoding="utf-8").replace("\\", "")
    head = "| task | questions and guessing | Untrained | Pretraining | Fine-tuning | Reinforcement learning |"
    table = text[text.index(head) :].split("\n\n")[0].splitlines()
    names = [line.split(" | ")[0].removeprefix("| ") for line in table[2:]]
    assert names[0] == "tinyworld/facts" and names[-2:] == ["CORE v2, centred accuracy", "ChatCORE, centred accuracy"]
    assert "| 0% (0–1) | 21% (15–27) | 91% (87–95) | 97% (87–100) |" in text
    core = "| CORE v2, centred accuracy | 90,000 questions · worse than guessing | – | 0.05 (0.04 to 0.06) | 0.0"
    assert core in text
    assert "| chat/humaneval, pass@10 | 90,000 questions · guessing 0% | – | – | 7.0% | 7.0% |" in text
    assert "| text | questions and guessing | Untrained | Pretraining | Fine-tuning |" in text
    assert "| train | 90,000 bytes · guessing 3.3 | – | 0.55 | – |" in text


def test_marks_are_where_the_scores_are(folder: Path) -> None:
    plot = plot_of(folder)
    assert plot is not None and [stage for stage, _ in plot.table.stages] == ["untrained", "pretrain", "sft", "rl"]
    assert [text for _, text in plot.ticks()] == ["-25%", "0%", "25%", "50%", "75%", "100%"]
    rows = {row.task: row for row in plot.table.rows}
    facts, core = rows["tinyworld/facts"], rows["CORE v2, centred accuracy"]
    places = [score and plot.at(score.value) for score in facts.scores]
    assert places == pytest.approx([(v + 0.25) / 1.25 for v in (0, 0.21, 0.91, 0.97)])
    assert (facts.chance, core.chance) == (0.08, 0.0) and core.scores[0] is None
    label = plot.label(facts)
    assert label.startswith("tinyworld/facts: Untrained 0% 0–1, Pretraining 21% 15–27, Fine-tuning 91%")
    assert label.endswith("guessing 8.0%") and facts.standing == "" and core.standing == "worse than guessing"


def test_a_kind_at_chance_does_not_count_in_the_tile(tmp_path: Path) -> None:
    write_run(tmp_path)
    asked = {"stage": "sft", "metric": "accuracy", "count": 200}
    counting = {"task": "tinyworld/counting", "value": 0.27, "low": 0.21, "high": 0.33, "chance": 0.25}
    word_problems = {"task": "tinyworld/word_problems", "value": 0.0, "low": 0.0, "high": 0.02, "chance": 0.0}
    with (tmp_path / "evaluate.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asked | kind) + "\n" for kind in (counting, word_problems))
    markdown = build(tmp_path)[0].read_text(encoding="utf-8").replace("\\", "")
    assert "kinds of question above chance: **4 of 6**" in markdown
    assert "guessing 25% · at chance |" in markdown and "CORE" not in markdown


def test_the_page_draws_every_mark_and_interval(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    plot = page[page.index('<figure class="plot"') : page.index("</figure>", page.index('<figure class="plot"'))]
    assert "left:93.00%" not in plot and plot.count('role="img"') == 9
    assert plot.count('class="mark sft" style') == 9 and plot.count('class="range sft" style') == 8
    assert plot.count('class="mark untrained" style') == 6 and 'class="mark rl" style="--at:3;left:97.60%"' in plot
    assert not re.search(r"#[0-9a-f]{6}|rgb\(", plot), "colours are the page's, which has two schemes"


def test_rl_has_its_curves(folder: Path) -> None:
    page = (folder / "report.html").read_text(encoding="utf-8")
    after = page[page.index("<h3>Reinforcement learning</h3>") :]
    for title in ("Reward", "Spread of rewards", "Entropy", "Length of replies", "Divergence from the first model"):
        assert f"<b>{title}</b>" in after
    for title in ("Questions without a difference in reward", "Replies cut at the limit"):
        assert f"<b>{title}</b>" in after
    for unit in ("pass@1, by step", "pass@4, by step", "pass@1, &lt;b&gt;sums, by step"):
        assert f"<span>{unit}</span>" in after
    assert "<b>sums" not in page


def test_scores_without_questions_have_no_plot_and_odd_values_stay_inside(tmp_path: Path) -> None:
    score = {"stage": "pretrain", "task": "validation", "metric": "bpb", "value": 1.0}
    write_rows(tmp_path / "a/evaluate.jsonl", [score])
    assert plot_of(tmp_path / "a") is None
    odd = {"stage": "x", "task": "t", "metric": "accuracy", "value": 1e300, "low": -7, "high": 9e9, "chance": -5}
    write_rows(tmp_path / "b/evaluate.jsonl", [odd])
    plot = plot_of(tmp_path / "b")
    assert plot is not None and list(map(plot.at, (1e300, -7, 9e9, -5))) == [1.0, 0.0, 1.0, 0.0]
    build(tmp_path / "b")
