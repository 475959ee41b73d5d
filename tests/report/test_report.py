"""The report: complete, self-contained, safe with whatever a model wrote, made from partial records too."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from quern.report.build import build, fenced, inline, sparkline
from quern.report.plots import running_mean, thin
from quern.report.records import duration, human, human_flops, number, percent, read_run
from quern.runs.run_dir import RunDir
from quern.stages.run_all import sample_chat
from quern.terminal import CONTROL
from tests.report.synthetic_run import write_run
from tests.support.rows import write_rows

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Collects tags, attributes, text and ids, and insists that what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in VOID or self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data


def report(folder: Path) -> tuple[str, Page]:
    markdown, html = build(folder)
    assert (markdown, html) == (folder / "report.md", folder / "report.html")
    assert not list(folder.glob(".*.tmp-*"))
    return markdown.read_text(encoding="utf-8"), Page(html.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A run with all records; its report."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "full")
    return folder, *report(folder)


def test_everything_is_there(full):
    _, markdown, page = full
    for text in (markdown.replace("\\", ""), page.text):
        for expected in (
            "9,437,184", "464 TFLOP", "12,288,000", "99.9%", "2.3%", "24 MB", "4.629", "a94a8fe5",
            "architecture", "last validation loss",  # trained, on what
            "Pretraining", "Fine-tuning", "16K", "the gradient is not finite", "SIGTERM",
            "Model FLOPs utilisation", "resume", "save ×4", "tinyworld/word_problems", "1,001,346", "9b74c9897bac770f",
            "Mira the otter", "27+48", "Odo is a heron.",
            "quern run --data tinyworld --depth 4 --seed 7", "3f9c2d1", "Intel(R) Xeon(R)", "2.2.1",
        ):  # fmt: skip
            assert expected in text, expected
    assert page.tags.count("svg") == 8 + 6
    row = "| tinyworld/facts | 200 questions · guessing 8.0% | 0% (0–1) | 21% (15–27) | 91% (87–95) |"
    assert row in markdown.replace("\\", "")
    places = [page.text.index(part) for part in ("Training curves", "Odo is a heron.", "attention windows")]
    assert places == sorted(places)


def test_the_page_needs_nothing_from_outside_and_runs_nothing(full):
    folder, _, page = full
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.\w|@import|javascript:", text)
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert name != "src" and not name.startswith("on"), (tag, name)
        if name == "href":
            assert value.startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {value[1:] for _, name, value in page.attributes if name == "href"}
    targets |= set(re.findall(r"url\(#([^)]*)\)", text))
    assert targets <= set(ids)
    assert "prefers-color-scheme: dark" in text and "var(--accent)" in text
    assert not re.search(r"<svg.*?#[0-9a-f]{6}.*?</svg>", text, re.DOTALL)


HOSTILE = "</pre></style><script>alert(1)</script><img src=x onerror=alert(1)>\"'`javascript:&lt; \x00\x1b ``` |"


def hostile_run(folder: Path) -> Path:
    """Hostile text in every place that holds text."""
    write_run(folder)
    evil = HOSTILE
    recipe = {"data": evil, "seed": evil, "model": {evil: evil, "depth": evil}, "train": {"packing": evil}}
    (folder / "pretrain" / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    run = {
        "command": evil, "git": evil, "machine": {evil: evil},
        "data": {"t": [{evil: evil}], "u": {evil: [evil]}},
        "versions": {evil: evil}, "tokenizer": evil, "model": {"parameters": evil},
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    part = [{"type": kind, "text": evil} for kind in ("text", "tool", "output", evil)]
    write_rows(
        folder / "samples.jsonl",
        [
            {"stage": evil, "kind": "completion", "prompt": evil, "text": evil},
            {"stage": "sft", "kind": "chat", "messages": [{"role": evil, "content": evil}, {"content": part}]},
            {"stage": "sft", "kind": "chat", "messages": [{"role": "user", "content": part}, {"content": "\ud800"}]},
            {"stage": "sft", "kind": "chat", "messages": evil},
        ],
    )
    write_rows(
        folder / "evaluate.jsonl",
        [
            {"stage": evil, "task": evil, "metric": evil, "value": 0.5, "prompt_hash": evil, "shots": evil},
            {"stage": "sft", "task": evil, "metric": "accuracy", "value": 0.5, "low": evil, "count": evil},
        ],
    )
    write_rows(folder / "pretrain" / "events.jsonl", [{"kind": evil, "time": evil, "step": evil, evil: evil}])
    return folder


def test_hostile_text_stays_text(tmp_path, full):
    markdown, page = report(hostile_run(tmp_path))
    assert set(page.tags) <= set(full[2].tags)
    assert not any(name.startswith("on") or name == "src" for _, name, _ in page.attributes)
    assert page.text.count("<script>alert(1)</script>") > 20
    assert not re.search(CONTROL, page.text + markdown)
    outside = re.sub(r"(?ms)^(`{3,})\w*\n.*?^\1$", "", markdown)
    assert "script" in outside and "<" not in outside


def test_chats_printed_after_a_run_cannot_steer_the_terminal(tmp_path):
    run_dir = RunDir(tmp_path, "r")
    reply = {"role": "assistant", "content": [{"type": "text", "text": "\x9b"}]}
    messages = [{"role": "user", "content": "\x1b[2J?"}, reply]
    run_dir.append("samples.jsonl", [{"stage": "sft", "kind": "chat", "messages": messages}])
    assert sample_chat(run_dir) == ["you   │ \ufffd[2J?", "quern │ \ufffd", ""]


def test_a_single_record_is_enough(tmp_path, full):
    with pytest.raises(FileNotFoundError, match="holds no records of a run"):
        build(tmp_path)
    for name in ("run.json", "pretrain/metrics.jsonl", "pretrain/events.jsonl", "evaluate.jsonl", "samples.jsonl"):
        target = tmp_path / name.replace(".", "-") / name
        target.parent.mkdir(parents=True)
        target.write_bytes((full[0] / name).read_bytes())
        markdown, page = report(tmp_path / name.replace(".", "-"))
        assert len(markdown) > 100
        assert ("Evaluation" in page.text) == ("## Evaluation" in markdown) == (name == "evaluate.jsonl")


def test_a_torn_end_is_left_out_and_a_damaged_record_is_named(tmp_path):
    write_run(tmp_path)
    with (tmp_path / "pretrain" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 1510, "loss": 1.')
    assert read_run(tmp_path).stages[0].last("step") == 1500
    (tmp_path / "run.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"run.json is damaged \(Expected `object`, got `array`"):
        build(tmp_path)


def test_rewards_below_zero_are_in_the_plot(tmp_path):
    rewards = [{"step": step, "reward": -0.8 + 0.06 * step} for step in range(11)]
    write_rows(tmp_path / "rl" / "metrics.jsonl", rewards)
    assert "-0.75" in report(tmp_path)[1].text.split()  # at the axis


def test_a_run_of_the_twin_shows_its_settings(tmp_path):
    folder = tmp_path / "twin" / "grug"
    write_rows(folder / "metrics.jsonl", [{"step": 2, "tokens": 40, "loss": 3.0}])
    (folder / "recipe.json").write_text(json.dumps({"train": {"batch_tokens": 4096}}), encoding="utf-8")
    markdown, _ = report(folder.parent)
    assert "Pretraining in JAX" in markdown and "batch: **4,096 tokens**" in markdown


def test_odd_numbers_do_not_break_the_curves(tmp_path):
    records = [{"step": step, "loss": value, "lr_multiplier": 1} for step, value in enumerate(
        [math.nan, 9.0, None, math.inf, "x", 10**400, True, 3.0, 3.0], start=1
    )]  # fmt: skip
    write_rows(tmp_path / "pretrain" / "metrics.jsonl", [*records, {"step": None, "val_bpb": 1.0}])
    report(tmp_path)
    assert read_run(tmp_path).stages[0].column("loss") == ([2.0, 8.0, 9.0], [9.0, 3.0, 3.0])
    flat = [{"step": step, "loss": 0.0, "val_bpb": 2.0, "seconds": 0.0, "tokens": 0} for step in range(3)]
    write_rows(tmp_path / "sft" / "metrics.jsonl", flat)
    report(tmp_path)


def test_only_the_latest_evaluation_and_answer_to_a_prompt_are_shown(tmp_path):
    line = {"stage": "sft", "task": "t", "metric": "accuracy", "value": 0.25, "count": 8}
    write_rows(tmp_path / "evaluate.jsonl", [line, line | {"value": 0.75}])
    asked = {"role": "user", "content": "Who are you?"}
    samples = [
        {"stage": "sft", "kind": "chat", "messages": [asked, {"role": "assistant", "content": answer}]}
        for answer in ("An older answer.", "A newer answer.")
    ]
    write_rows(tmp_path / "samples.jsonl", [*samples, samples[1] | {"stage": "pretrain"}, {"messages": [1]}])
    markdown, page = report(tmp_path)
    assert page.text.count("A newer answer.") == 2 and "older" not in page.text
    assert "75%" in markdown and "25%" not in markdown and "75%" in page.text


def test_how_long_it_was_is_what_was_done_not_what_the_recipe_asked_for(tmp_path):
    folder = write_run(tmp_path / "short")
    (folder / "run.json").write_text(json.dumps({"model": {"parameters": {"kaplan": 1000}}}), encoding="utf-8")
    recipe = {"model": {"context": 128}, "train": {"horizon_ratio": 12.0}}
    (folder / "pretrain" / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    write_rows(folder / "pretrain" / "metrics.jsonl", [{"step": 2, "tokens": 40, "loss": 3.0}])
    recipe["sft"] = {"batch_tokens": 1024, "epochs": 2.0, "too_long": "drop"}
    (folder / "sft" / "recipe.json").write_text(json.dumps(recipe), encoding="utf-8")
    write_rows(folder / "sft" / "metrics.jsonl", [{"step": 3, "tokens": 400, "loss": 3.0}])
    data = {"documents": 250, "documents_without_target": 50, "documents_too_long": 40, "rows": 100, "pieces": 200}
    write_rows(folder / "sft" / "events.jsonl", [{"kind": "data", **data}])
    markdown, page = report(folder)
    # 3 steps of 8 rows with 2 conversations each, of the 200 that can be learned from
    per_parameter = "tokens per parameter of matrices and head: **0.04**"
    for fact in (per_parameter, "conversations, about: **48**", "epochs: **0.24**"):
        assert fact in markdown
    assert "epochs0.24" in page.text and "0.04" in page.text
    assert "**12**" not in markdown and "**2**" not in re.sub("(?s).*### Fine-tuning", "", markdown, count=1)[:200]


def test_each_source_of_conversations_has_a_row(tmp_path):
    folder = write_run(tmp_path / "mixed")
    one = {"source": "gsm8k", "repeats": 4.0, "conversations": 29296, "tokens": 5123456, "held_out": 149, "left_out": 0}
    write_rows(folder / "sft" / "events.jsonl", [{"kind": "data", "sources": [one, one | {"source": "<b>own"}]}])
    markdown, page = report(folder)
    assert "Fine-tuning: conversations of an epoch" in markdown and "| gsm8k | 4 |" in markdown
    assert "5,123,456" in markdown and "gsm8k4" in page.text and "<b>own4" in page.text


@pytest.mark.parametrize(
    ("run", "summary"),
    [
        ({"imported": "models/hf"}, "of 1 layer, 8 wide, imported from hf."),
        ({}, "of 1 layer, 8 wide, not trained yet."),
    ],
)
def test_a_model_that_quern_has_not_trained_learned_from_no_data(tmp_path, run, summary):
    (tmp_path / "run.json").write_text(json.dumps(run), encoding="utf-8")
    write_rows(tmp_path / "pretrain" / "events.jsonl", [{"kind": "import"}])
    (tmp_path / "pretrain" / "recipe.json").write_text('{"data": "tinyworld", "model": {"depth": 1, "width": 8}}')
    markdown, page = report(tmp_path)
    assert summary in markdown and summary in page.text


def test_a_stage_without_questions_gets_no_column_of_dashes(tmp_path):
    score = {"stage": "sft", "task": "t", "metric": "accuracy", "value": 0.25, "count": 200}
    bpb = {"stage": "pretrain", "task": "validation", "metric": "bpb", "value": 1.5, "count": 10}
    write_rows(tmp_path / "evaluate.jsonl", [bpb, score, score | {"stage": "untrained", "count": 50}])
    _, page = report(tmp_path)
    assert "–" not in page.text[page.text.index("Task") : page.text.index("Evaluation settings")]
    assert "of 50" in page.text


def test_only_a_resumption_that_trained_is_marked(tmp_path):
    write_rows(tmp_path / "pretrain" / "metrics.jsonl", [{"step": 9, "loss": 1.0}])
    write_rows(tmp_path / "pretrain" / "events.jsonl", [{"kind": "resume", "step": step} for step in (4, 9)])
    assert read_run(tmp_path).stages[0].resumed_at() == [4]


def test_a_second_report_has_the_same_bytes_and_one_that_cannot_be_written_leaves_the_old_one(tmp_path):
    folder = write_run(tmp_path)
    before, page = (path.read_bytes() for path in build(folder))
    assert [path.read_bytes() for path in build(folder)] == [before, page]
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    with pytest.raises(OSError, match="cannot write .*report.html"):
        build(folder)
    assert not list(folder.glob(".*.tmp-*")) and (folder / "report.md").read_bytes() == before


def test_markdown_escapes():
    assert inline("a|b\n<b>*x*_y_`z`[l](u) & #") == ("a\\|b &lt;b&gt;\\*x\\*\\_y\\_\\`z\\`\\[l\\](u) &amp; \\#")
    assert fenced("x ```` y").startswith("`````text\n")


def test_curves_keep_their_ends_and_are_thinned():
    ys = [float(i % 7) for i in range(5000)]
    xs, thinned = thin([float(i) for i in range(5000)], ys)
    assert len(xs) <= 802 and (xs[0], xs[-1]) == (0.0, 4999.0) and thinned[-1] == ys[-1]
    means = running_mean(ys)
    assert (means[0], means[-1]) == (ys[0], ys[-1])
    assert means[2500] == pytest.approx(sum(ys[2500 - 83 : 2500 + 84]) / 167)
    assert sparkline([1, 2, 3, 4]) == "▁▃▆█" and sparkline([2, 2]) == "▁▁" and len(sparkline(ys)) == 48


def test_numbers_read_well():
    millions = [human(value) for value in (999_999, 1_234_567, 16)]
    assert [*millions, human_flops(500)] == ["1M", "1.23M", "16", "500 FLOP"]
    assert [duration(value) for value in (59.94, 59.96, 7261)] == ["59.9 s", "1 min 0 s", "2 h 1 min"]
    assert [percent(value) for value in (0.0994, 0.0996, 1)] == ["9.9%", "10%", "100%"]
    assert [number(value) for value in (1234567, 0.12345, 12345.67)] == ["1,234,567", "0.1235", "12,345.7"]
