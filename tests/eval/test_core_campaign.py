"""CORE on public data, item by item: against lm-evaluation-harness and against a scorer that reads one row at a time.

They need a trained run (`make quickstart`, or QUERN_CORE_RUN), and the files of CORE's tasks (QUERN_CORE_DATA, or a
folder shared/data/core beside the clone). Both print their figures (`pytest -s`). QUERN_CORE_ITEMS bounds the items of
a task.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quern.eval.core import CoreTask, find_tasks, run_core
from quern.eval.run_task import Records
from quern.generate.engine import Engine
from quern.runs.load import LoadedModel, load
from quern.runs.run_dir import RunDir
from quern.text.tokenizer import Tokenizer
from tests.support.core_oracle import Question, questions, verdict
from tests.support.tiny_model import CPU

ROOT = Path(__file__).resolve().parents[2]
TIE = 1e-6
ITEMS = int(os.environ.get("QUERN_CORE_ITEMS", "500"))
TASKS = (
    *("copa", "winograd", "bigbench_repeat_copy_logic", "bigbench_operators"),  # all of their questions
    *("openbook_qa", "winogrande", "lambada_openai", "bigbench_cs_algorithms", "arc_easy", "commonsense_qa"),
)
pytestmark = [pytest.mark.campaign, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def data() -> Path:
    beside = (parent / "shared" / "data" / "core" for parent in Path(__file__).resolve().parents)
    named = os.environ.get("QUERN_CORE_DATA")
    found = [Path(named)] if named else [folder for folder in beside if folder.is_dir()]
    return found[0] if found else pytest.skip("no files of CORE: set QUERN_CORE_DATA to their folder")


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    folder = Path(os.environ.get("QUERN_CORE_RUN", ROOT / "out" / "runs" / "quickstart"))
    if not (folder / "run.json").is_file():
        pytest.skip("no trained run: `make quickstart`, or set QUERN_CORE_RUN to a run's folder")
    return load(RunDir(folder.parent.parent, folder.name), CPU, print, "pretrain")


def document(question: Question, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """A question as texts for lm-eval; None if those texts give other tokens or another span."""
    contexts = [tokenizer.decode(ids[1:start]) for ids, start in zip(question.rows, question.starts, strict=True)]
    endings = [tokenizer.decode(ids[start:]) for ids, start in zip(question.rows, question.starts, strict=True)]
    for ids, start, context, ending in zip(question.rows, question.starts, contexts, endings, strict=True):
        same = tokenizer.encode(context) == ids[1:start] and tokenizer.encode(context + ending) == ids[1:]
        if not same or not context or context != context.rstrip():
            return None
    counts = [len(ids) - start for ids, start in zip(question.rows, question.starts, strict=True)]
    return {
        "item": question.item, "contexts": contexts, "endings": endings, "tokens": counts, "gold": question.gold
    }  # fmt: skip


def mean_per_token(doc: dict[str, Any], results: Any) -> dict[str, float]:
    losses = [-score / count for (score, _), count in zip(results, doc["tokens"], strict=True)]
    return {"acc": float(losses.index(min(losses)) == doc["gold"])}


def definition(task: CoreTask, path: Path, documents: list[dict[str, Any]]) -> dict[str, Any]:
    """The task for lm-eval, over the same file: its rows become the prompts, and lm-eval asks and grades them."""

    def process_docs(dataset: Any) -> Any:
        return type(dataset).from_list(documents)

    shape = {
        "language": {
            "output_type": "loglikelihood",
            "doc_to_text": lambda doc: doc["contexts"][0],
            "doc_to_target": lambda doc: doc["endings"][0],
        },
        "schema": {
            "output_type": "multiple_choice",
            "doc_to_text": lambda doc: doc["gold"],
            "doc_to_choice": lambda doc: doc["contexts"],
            "doc_to_target": lambda doc: doc["endings"][0],
        },
        "choice": {
            "output_type": "multiple_choice",
            "doc_to_text": lambda doc: doc["contexts"][0],
            "doc_to_choice": lambda doc: doc["endings"],
            "doc_to_target": lambda doc: doc["gold"],
            "process_results": mean_per_token,
        },
    }[task.kind]
    return {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "process_docs": process_docs,
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc"}],
    } | shape


def by_lm_eval(
    loaded: LoadedModel, task: CoreTask, path: Path, asked: list[dict[str, Any]], cache: Path
) -> dict[int, tuple[bool, list[float]]]:
    """Of each item: whether lm-eval calls it right, and the mean losses of its options."""
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from quern.eval.harness import LM

    datasets = pytest.importorskip("datasets")
    datasets.config.HF_DATASETS_CACHE = cache
    results = lm_eval.simple_evaluate(
        LM(loaded, CPU),
        tasks=[definition(task, path, asked)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    found = {}
    for sample in results["samples"][task.name]:
        doc = sample["doc"]
        losses = [-float(score) / n for (score, _), n in zip(sample["filtered_resps"], doc["tokens"], strict=False)]
        found[doc["item"]] = bool(sample["acc"]), losses
    return found


@pytest.mark.parametrize("name", TASKS)
def test_every_item_is_as_lm_eval_and_as_one_row_at_a_time(
    loaded: LoadedModel, data: Path, tmp_path: Path, name: str
) -> None:
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    task, path = find_tasks(data, [name])[0]
    context = loaded.recipe.model.context or 0
    engine = Engine(loaded.model, loaded.tokenizer, CPU)
    score = run_core(engine, [(task, path)], Records(tmp_path, {"step": loaded.step}), lambda line: None, limit=ITEMS)[
        0
    ]
    lines = (tmp_path / f"core/{name}.answers.jsonl").read_text(encoding="utf-8").splitlines()[1:]
    ours = {line["item"]: line for line in map(json.loads, lines)}
    all_asked = questions(path, task, loaded.tokenizer, ITEMS)
    alone = {
        question.item: verdict(loaded.model, question, task.kind, context, loaded.tokenizer.vocab_size)
        for question in all_asked
        if question.item in ours
    }
    made = [document(question, loaded.tokenizer) for question in all_asked if question.item in ours]
    theirs = by_lm_eval(loaded, task, path, [doc for doc in made if doc], tmp_path / "cache")
    worst = max(abs(a - b) for item in ours for a, b in zip(ours[item]["losses"], alone[item].losses, strict=True))
    apart = max(abs(a - b) for item in theirs for a, b in zip(ours[item]["losses"], theirs[item][1], strict=True))
    unlike = {item for item in ours if bool(ours[item]["score"]) != alone[item].correct}
    unlike |= {item for item in theirs if bool(ours[item]["score"]) != theirs[item][0]}
    ties = {item: alone[item].margin for item in unlike if alone[item].margin <= TIE}
    print(
        f"\n{name}: {len(ours)} of {len(all_asked)} items asked, {score.cropped} cut to the context, accuracy "
        f"{score.value:.3f}; as one row at a time: {len(ours)} items, losses within {worst:.1e}; as lm-eval: "
        f"{len(theirs)} items, losses within {apart:.1e}; verdicts that differ: {len(unlike)}, of them ties: {ties}"
    )
    assert unlike == set(ties)
    assert len(theirs) >= 0.9 * len(ours) > 0 and max(worst, apart) < 1e-4
