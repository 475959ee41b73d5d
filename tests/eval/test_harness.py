"""The model for lm-evaluation-harness, on tasks whose files the tests write: nothing is downloaded."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from quern.eval.score import wilson
from quern.model.gpt import GPT
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE
from quern.runs.load import LoadedModel
from tests.support.gguf_run import log_probabilities
from tests.support.rows import write_rows
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its many dependencies
    lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    from quern.eval.harness import LM, find_harness_tasks, run_harness

pytestmark = pytest.mark.filterwarnings("ignore")
CONTEXT = 48


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    tokenizer = tiny_tokenizer()
    model = tiny_model(tokenizer.vocab_size, context=CONTEXT).eval()
    return LoadedModel(model, tokenizer, Resolved.of(RECIPE), "pretrain", 1)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("datasets").config, "HF_DATASETS_CACHE", tmp_path / "cache")


def scores_alone(model: GPT, row: list[int], first: int) -> tuple[float, bool]:
    """The sum of the log-probabilities of row[first:], and whether they are the likeliest: one row, no cache."""
    logs, span = log_probabilities(model, row[:-1]), range(first, len(row))
    return sum(logs[at - 1, row[at]].item() for at in span), all(int(logs[at - 1].argmax()) == row[at] for at in span)


def request(kind: str, *arguments: Any) -> Any:
    return lm_eval.api.instance.Instance(kind, {}, arguments, 0)


def test_log_probabilities_are_those_of_one_request_at_a_time(loaded: LoadedModel) -> None:
    long = "the miller ground the corn and the baker baked the bread " * 9
    pairs = [
        ("the miller ground", " the corn"),
        ("the miller ground", " corn and bread"),
        ("", "the baker"),
        ("the miller ends with spaces  ", "bread"),
        (long, " corn"),
        (long, " corn and the valley and the bread"),
        ("the miller ground", " the corn"),
    ]
    lm, text = LM(loaded, CPU), loaded.tokenizer
    found = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    for (context, continuation), (score, greedy) in zip(pairs, found, strict=True):
        start = 1 + len(text.encode(context.rstrip()))
        row = [text.bos, *text.encode(context + continuation)]
        cut = max(0, len(row) - (CONTEXT + 1))
        expected, likeliest = scores_alone(loaded.model, row[cut:], start - cut)
        assert score == pytest.approx(expected, abs=1e-3) and greedy == likeliest
    assert found[0] == pytest.approx(found[-1])
    bos, ids = [text.bos], text.encode("the baker")
    without, doubled = (lm._loglikelihood_tokens([(None, bos, row)]) for row in (ids, [*bos, *ids]))  # older lm-eval
    assert doubled == without
    assert lm.prefix_token_id == text.bos and lm.tok_encode("<|bos|>")[0] == text.bos
    assert text.bos not in lm.tok_encode("<|bos|>")[1:]
    with pytest.raises(ValueError, match="a continuation has .* tokens, and the context is 48"):
        lm.loglikelihood([request("loglikelihood", "a", long)])
    with pytest.raises(ValueError, match="a continuation is empty"):
        lm.loglikelihood([request("loglikelihood", "a", "")])


def test_rolling_windows_predict_each_token_once(loaded: LoadedModel) -> None:
    texts = ["the baker", "the miller ground the corn and baked the bread in the valley " * 8]
    lm, text = LM(loaded, CPU), loaded.tokenizer
    found = lm.loglikelihood_rolling([request("loglikelihood_rolling", each) for each in texts])
    for each, score in zip(texts, found, strict=True):
        ids = [text.bos, *text.encode(each)]
        expected, at = 0.0, 1
        while at < len(ids):
            end = min(len(ids), at + CONTEXT)
            row = ids[max(0, end - CONTEXT - 1) : end]
            expected += scores_alone(loaded.model, row, len(row) - (end - at))[0]
            at = end
        assert score == pytest.approx(expected, abs=1e-3)
    assert len(text.encode(texts[1])) > 2 * CONTEXT


def test_generation_stops_and_keeps_the_order(loaded: LoadedModel) -> None:
    lm, text = LM(loaded, CPU), loaded.tokenizer
    prompts = ["the miller ground the corn and", "bread", "the valley " * 40, "the baker"]
    options = {"until": [], "max_gen_toks": 12}
    found = lm.generate_until([request("generate_until", prompt, options) for prompt in prompts])
    for prompt, answer in zip(prompts, found, strict=True):
        ids = [text.bos, *text.encode(prompt)][-(CONTEXT - 12) :]
        said: list[int] = []
        for _ in range(12):
            said.append(int(log_probabilities(loaded.model, [*ids, *said])[-1].argmax()))
            if said[-1] >= text.vocab_size - len(text.special_tokens):
                said.pop()
                break
        assert answer == text.decode_bytes(said).decode("utf-8", "ignore")
    whole = max(found, key=len)
    stop = whole[len(whole) // 2 :][:2]
    cut = lm.generate_until([request("generate_until", prompts[found.index(whole)], options | {"until": [stop, ""]})])
    assert cut == [whole[: whole.index(stop)]]
    drawn = {"until": "\n\n", "do_sample": True, "temperature": 5.0, "max_gen_toks": 12}
    assert lm.generate_until([request("generate_until", prompts[0], drawn)]) != found[:1]


def test_a_task_from_a_file_gives_scores(loaded: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"q": f"the miller ground {n} and", "gold": n % 2} for n in range(6)]
    files = {"test": str(write_rows(tmp_path / "mill.jsonl", rows))}
    config = {"task": "mill", "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    config |= {"output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": "gold"}
    path = tmp_path / "mill.yaml"
    config |= {"doc_to_choice": ["corn", "bread"]}
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    other = path.with_name("other.yaml")
    other.write_text(json.dumps(config | {"task": "other"}), encoding="utf-8")
    manager, names = find_harness_tasks([str(path), str(other)])
    assert "overrides existing task" not in caplog.text  # of the folder, read once for each file
    scores = run_harness(loaded, CPU, manager, names[:1], limit=4)
    assert {(score.task, score.metric, score.count) for score in scores} >= {("lm-eval/mill", "acc", 4)}
    for score in scores:
        assert score.value is not None
        assert (score.low, score.high) == wilson(round(4 * score.value), 4), score.metric
    with pytest.raises(ValueError, match="there is no file .*none.yaml"):
        find_harness_tasks(["none.yaml"])
    with pytest.raises(ValueError, match="lm-eval has no task 'mi'"):
        find_harness_tasks(["mi"])
