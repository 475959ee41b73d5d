"""CORE against a second scorer, which reads one row at a time, uncached; its baselines, files, records and bundle."""

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.bigram import BigramGPT
from quern.eval import core
from quern.eval.likelihood import score_examples
from quern.eval.run_task import Records
from quern.generate.engine import Engine
from quern.model.gpt import GPT
from quern.records import read_lines
from quern.text.tokenizer import Tokenizer
from tests.support.core_oracle import questions, verdict
from tests.support.hub_server import Hub, hub_server
from tests.support.rows import write_rows
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer

TIES = 1e-6
CONTEXT = 160
ONE_OF_EACH = ("arc_easy", "winograd", "bigbench_operators", "copa", "lambada_openai")
WORDS = "miller ground corn baker baked bread valley stone river garden night wheel".split()


def words(draw: random.Random, low: int, high: int) -> str:
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


def rows_of(kind: str, count: int, draw: random.Random) -> list[dict[str, Any]]:
    """Rows of a task: options of unlike lengths, some of which begin alike."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        ending = words(draw, 1, 4)
        options = [ending, f"{ending} {words(draw, 1, 2)}", words(draw, 1, 5), f"{number} {words(draw, 1, 2)}"]
        draw.shuffle(options)
        if kind == "choice":
            rows.append({"query": f"Q{number}: {words(draw, 2, 9)}?", "choices": options, "gold": draw.randrange(4)})
        elif kind == "schema":
            begin = words(draw, 2, 6)
            contexts = [f"{begin} {words(draw, 1, 3)}", f"{begin} the {words(draw, 1, 3)}"]
            rows.append({"context_options": contexts, "continuation": f"{ending}.", "gold": draw.randrange(2)})
        else:
            rows.append({"context": f" {words(draw, 3, 9)} ", "continuation": ending})
    return rows


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """All 22 tasks with 14 rows each, some of them gzipped, in two folders."""
    folder = tmp_path / "bundle"
    for task in core.TASKS:
        name = f"{task.kind}/{task.file}.jsonl{'.gz' if task.file.startswith('b') else ''}"
        write_rows(folder / name, rows_of(task.kind, 14, random.Random(task.file)))
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def model_of(tokenizer: Tokenizer, seed: int = 0, context: int = CONTEXT) -> GPT:
    return tiny_model(tokenizer.vocab_size, context=context, seed=seed).eval()


def engine_of(tokenizer: Tokenizer) -> Engine:
    return Engine(model_of(tokenizer, 4), tokenizer, CPU)


def with_lookback(tokenizer: Tokenizer) -> GPT:
    """A model whose endings need the prefix's last token."""
    model = BigramGPT(model_of(tokenizer, context=1024).shape).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model


@pytest.mark.parametrize("make_model", [model_of, with_lookback])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_prompts_and_scores_are_those_of_one_row_at_a_time(
    bundle: Path, tokenizer: Tokenizer, name: str, make_model: Callable[[Tokenizer], GPT]
) -> None:
    task, model = core.BY_NAME[name], make_model(tokenizer)
    path = next(bundle.rglob(f"{task.file}.jsonl*"))
    rows, context = core.read_rows(path, task), int(model.shape.context or 0)
    made = [core.make_example(task, rows, item, tokenizer, context) for item in range(len(rows))]
    examples = [example for example in made if example]
    assert len(examples) == 14
    if task.shots == 10:
        assert any(example.cropped for example in examples) == (context == CONTEXT)
    if name == "copa":
        assert any(example.shared > 5 for example in examples)
    if make_model is with_lookback and task.kind != "language":
        assert any(example.shared for example in examples)
    answers = score_examples(model, examples, CPU, tokenizer.vocab_size)
    for question, example, answer in zip(questions(path, task, tokenizer), examples, answers, strict=True):
        assert example.rows == tuple(tuple(ids[-(context + 1) :]) for ids in question.rows)
        alone = verdict(model, question, task.kind, context, tokenizer.vocab_size)
        assert answer.losses == pytest.approx(alone.losses, abs=1e-4)
        assert answer.correct == alone.correct or alone.margin < TIES


def test_options_of_equal_length_share_their_beginning_also_when_they_are_cut(tokenizer: Tokenizer) -> None:
    equal = [{"query": "the miller ground", "choices": ["xy", "qz"], "gold": 0}]
    same = core.make_example(core.BY_NAME["copa"], equal, 0, tokenizer, 10_000)
    assert same and len(set(map(len, same.rows))) == 1
    alike = core.make_example(core.BY_NAME["copa"], equal, 0, tokenizer, len(same.rows[0]) - 3)
    assert alike and alike.cropped and alike.shared == same.shared - 2
    long = [{"context": "a", "continuation": "the miller ground the corn " * 20}]
    assert core.make_example(core.BY_NAME["lambada_openai"], long, 0, tokenizer, 16) is None


def test_the_mean_of_all_tasks_has_a_name_and_a_version(bundle: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine, records, said = engine_of(tokenizer), tmp_path / "records", list[str]()
    scores = core.run_core(engine, core.find_tasks(bundle), Records(records, {"step": 3}), said.append)
    assert [score.task for score in scores[-2:]] == ["CORE v1", "CORE v2"]
    for version, mean in zip(core.VERSIONS, scores[-2:], strict=True):
        centred = [
            ((s.value or 0.0) - t.baseline(version)) / (1 - t.baseline(version))
            for s, t in zip(scores, core.TASKS, strict=False)
        ]
        assert mean.value == pytest.approx(sum(centred) / 22)
    assert scores[-1].value != scores[-2].value
    chances = {"choice": 0.25, "schema": 0.5, "language": 0.0}
    assert [score.chance for score in scores[:-2]] == [chances[task.kind] for task in core.TASKS]
    lines = read_lines(records / "core/boolq.answers.jsonl")
    assert len(lines) == 15 and lines[0]["step"] == 3
    assert {"item", "prompt", "answer", "gold", "losses"} <= set(lines[1])
    (next(bundle.rglob("coqa.jsonl"))).unlink()
    scores = core.run_core(engine, core.find_tasks(bundle), Records(records, {"step": 3}), said.append)
    assert [score.task for score in scores[-2:]] == [f"mean of 21 of CORE's 22 tasks, {v}" for v in core.VERSIONS]
    assert "not asked: coqa" in said


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "the key 'query' is missing"),
        ('{"query": "q", "choices": "ab", "gold": 1}', "its options are no list of texts"),
        ('{"query": "q", "choices": ["a", "b"], "gold": "1"}', "gold '1' is none of its 2 options"),
        ('{"query": 7, "choices": ["a", "b"], "gold": 1}', "a text of it is empty, or no text"),
        ('{"query": "q", "choices": ["a"], "gold": 0}', "gold 0 is none of its 1 options"),
        ('{"query": "q", "choices": ["a", "b"], "gold": 2}', "gold 2 is none of its 2 options"),
        ("{", "not a line of JSON"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "copa.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 1}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=f"copa.jsonl, line 2.*{message}"):
        core.read_rows(path, core.BY_NAME["copa"])


def test_too_few_rows_for_the_shots_and_missing_files_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "piqa.jsonl"
    path.write_text('{"query": "q", "choices": ["a", "b"], "gold": 1}\n' * 10, encoding="utf-8")
    with pytest.raises(ValueError, match="has 10 rows, too few for 10 shots of piqa: take the whole file"):
        core.read_rows(path, core.BY_NAME["piqa"])
    with pytest.raises(ValueError, match="has no file for copa: give its folder"):
        core.find_tasks(tmp_path, ["copa", "piqa"])

    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        core.find_tasks(tmp_path / "none")
    assert core.find_tasks(tmp_path, ["piqa", "piqa"]) == [(core.BY_NAME["piqa"], path)]
    for folder in ("api_compatible_gauntlet", "copy"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "piqa.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="piqa has several files, leave one: .*copy/piqa.jsonl, [^,]*piqa.jsonl$"):
        core.find_tasks(tmp_path)


ROWS = "".join(json.dumps({"query": f"{n} and", "choices": ["one", "two"], "gold": n % 2}) + "\n" for n in range(9))
CONFIG = "icl_tasks:\n- label: copa\n  dataset_uri: commonsense/copa.jsonl\n"


def zipped(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with hub_server() as hub:
        yield hub


def offer(hub: Hub, content: bytes) -> tuple[str, str]:
    hub.others = {core.ARCHIVE: content}
    return f"{hub.url}/{core.ARCHIVE}", hashlib.sha256(content).hexdigest()


FILES = {
    "eval_bundle/eval_data/commonsense/copa.jsonl": ROWS,
    "eval_bundle/core.yaml": CONFIG,
    "eval_bundle/other/copa.jsonl": "{}",
    "eval_bundle/a.txt": "a",
}


def test_the_bundle_is_fetched_once_and_its_tasks_are_found(hub: Hub, tmp_path: Path) -> None:
    bundle = offer(hub, zipped(FILES))
    hub.cuts = [100]
    found = core.core_bundle(tmp_path, print, bundle)
    assert len(hub.asked) == 2, "the first answer broke off"
    assert [path.name for path in found.rglob("*") if path.is_file()] == ["copa.jsonl"]
    [(task, path)] = core.find_tasks(found)
    assert task.name == "copa" and len(core.read_rows(path, task)) == 9
    assert core.core_bundle(tmp_path, print, bundle) == found and len(hub.asked) == 2


def test_an_interrupted_unpacking_leaves_nothing(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = offer(hub, zipped(FILES))
    with monkeypatch.context() as patched:
        patched.setattr("quern.eval.core.sync_path", lambda path: (_ for _ in ()).throw(OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full; or name a folder with CORE's files with --bundle"):
            core.core_bundle(tmp_path, print, bundle)
    assert sorted(path.name for path in (tmp_path / "downloads/core").iterdir()) == [".lock", core.ARCHIVE]
    assert core.find_tasks(core.core_bundle(tmp_path, print, bundle))
