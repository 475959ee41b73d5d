"""Every public data set of the catalogue through the stages that use it, from a server on loopback.

The files are small, made here, and have the columns and names of the published ones.
"""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from quern.eval.chat import TASKS, read_items
from quern.mixture.prepare import prepare_mixture
from quern.recipe import Resolved, TextRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.runs.origin import read_saved
from quern.runs.public_data import fetch_conversations, fetch_tests
from quern.runs.run_dir import RunDir
from quern.stages import pretrain
from quern.stages.prepare import prepare, text_fingerprint
from quern.stages.prepare_tokens import is_tokens
from quern.stages.session import Session
from quern.text import repositories
from quern.text.repositories import DATASETS, DataSet
from tests.stages.test_prepare_tokens import TOKENIZER
from tests.support.command import Told
from tests.support.exported import toy_recipe, write_run
from tests.support.hub_server import Hub, hub_server, parquet
from tests.support.memory_corpus import texts_of
from tests.support.small_text import token_shard
from tests.support.toy_training import CPU

pytestmark = pytest.mark.usefixtures("eager")

OF_FINEWEB = {"id": "<urn:1>", "dump": "CC-MAIN-2024-10", "url": "http://a.example", "token_count": 9, "score": 3.1}
PLAIN = "--no-compile --dtype fp32 --threads 1 --device cpu".split()
FILES = 2
"""Training files that are served of each set."""


def texts(file: str) -> list[str]:
    return [f"{file} {i}: the grain {i} and the bread {i * i}" for i in range(40)]


def rows(name: str, dataset: DataSet, file: str) -> list[dict[str, Any]]:
    if name == "gsm8k":
        return [{"question": f"How many eggs, {t}?", "answer": f"<<{n}+1={n + 1}>>{n + 1} eggs\n#### {n + 1}"}
                for n, t in enumerate(texts(file))]  # fmt: skip
    if name == "mmlu":
        return [{"question": f"Which of them, {t}?", "subject": "mills", "choices": ["a", "b", "c", "d"],
                 "answer": n % 4} for n, t in enumerate(texts(file))]  # fmt: skip
    if name.startswith("arc"):
        return [{"id": t, "question": f"Which of them, {t}?", "answerKey": "AB"[n % 2],
                 "choices": {"text": ["a", "b"], "label": ["A", "B"]}} for n, t in enumerate(texts(file))]  # fmt: skip
    if name == "humaneval":
        return [{"task_id": f"HumanEval/{n}", "prompt": "def f():\n", "canonical_solution": f"    return {n}\n",
                 "entry_point": "f", "test": f"def check(f):\n    assert f() == {n}\n"} for n in range(40)]  # fmt: skip
    if dataset.kind == "conversations":
        return [{"messages": [{"content": t, "role": "user"}, {"content": "bread", "role": "assistant"}],
                 "source": "made"} for t in texts(file)]  # fmt: skip
    return [{"text": text, **(OF_FINEWEB if name == "fineweb-edu-10b" else {})} for text in texts(file)]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub with the first files of every set."""
    with hub_server() as hub:
        for name, dataset in DATASETS.items():
            held = hub.sets.setdefault(dataset.repository, {})
            for file in (*dataset.train[:FILES], *dataset.val):
                is_text = dataset.kind != "tokens"
                made = parquet(rows(name, dataset, file)) if is_text else token_shard(TOKENIZER, texts(file))
                held[dataset.path(file)] = made
        tokens = [*(bytes([byte]) for byte in TOKENIZER.single_bytes), *TOKENIZER.merges]
        lines = (base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens))
        hub.others = {"r50k_base.tiktoken": b"".join(lines)}
        yield hub


@pytest.fixture
def served(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"no_proxy": "*", "HF_ENDPOINT": hub.url, "HF_TOKEN_PATH": str(tmp_path / "none")}.items():
        monkeypatch.setenv(name, value)
    (name, vocabulary), *_ = hub.others.items()
    own = (f"{hub.url}/{name}", hashlib.sha256(vocabulary).hexdigest())
    made = {name: replace(dataset, tokenizer=dataset.tokenizer and own) for name, dataset in DATASETS.items()}
    monkeypatch.setattr(repositories, "DATASETS", MappingProxyType(made))


def of_kind(*kinds: str) -> list[str]:
    return [name for name, dataset in DATASETS.items() if dataset.kind in kinds]


def recipe_for(name: str, shards: int | None = FILES) -> Resolved:
    text = TextRecipe(tokenizer_megabytes=0.05, val_megabytes=0.01)
    if not is_tokens(name):
        text = replace(text, vocab_size=300)
    return Resolved.of(resolve(replace(RECIPE, data=name, shards=shards, text=text)))


@pytest.mark.parametrize("name", of_kind("documents", "tokens"))
def test_a_set_to_pretrain_on_is_prepared(served: None, tmp_path: Path, name: str) -> None:
    dataset = DATASETS[name]
    prepared = prepare(recipe_for(name), tmp_path, print)
    assert texts_of(prepared.train, prepared.tokenizer) == [t for file in dataset.train[:FILES] for t in texts(file)]
    assert texts_of(prepared.val, prepared.tokenizer) == [t for file in dataset.val for t in texts(file)]
    assert prepared.facts["data"]["source"] == name
    if dataset.kind == "tokens":
        assert prepared.tokenizer.bos == TOKENIZER.bos and prepared.tokenizer.merges == TOKENIZER.merges
    fewer = prepare(recipe_for(name, shards=1), tmp_path, print)  # with the files of two in the folder
    assert texts_of(fewer.train, fewer.tokenizer) == texts(dataset.train[0])


@pytest.mark.parametrize("name", of_kind("conversations", "questions"))
def test_a_set_to_fine_tune_on_is_prepared(served: None, tmp_path: Path, name: str) -> None:
    """One row in fifty of questions is held out, and the test split of conversations."""
    dataset = DATASETS[name]
    limit = f",limit={FILES * dataset.file_rows}" if dataset.file_rows else ""
    recipe = Resolved.of(RECIPE, model=replace(RECIPE.model, context=4096), conversations=(f"{name}{limit}",))
    mixture = prepare_mixture(recipe, TOKENIZER, tmp_path, partial(fetch_conversations, out=tmp_path), print)
    count = 40 * min(FILES, len(dataset.train))
    assert mixture.sources[0]["left_out"] == 0
    if dataset.kind == "questions":
        assert (mixture.train.num_documents, mixture.val.num_documents) == (count - 1, 1)
        return
    assert mixture.train.num_documents == count
    asked = [TOKENIZER.decode(mixture.val.gather(i)[2:].tolist()) for i in range(mixture.val.num_documents)]
    assert [text.partition("<|user_end|>")[0] for text in asked] == texts(dataset.val[0])


def test_the_files_of_chat_tasks_are_downloaded_by_name(served: None, tmp_path: Path, told: Told) -> None:
    write_run(tmp_path, replace(toy_recipe("llama", context=128), data=str(tmp_path / "text.txt")))
    (tmp_path / "text.txt").write_text("The grain and the bread.\n" * 400, encoding="utf-8")
    names = of_kind("questions", "tests")
    assert sorted(names) == sorted(task.name for task in TASKS if task.read)
    flags = ["--out", tmp_path, *PLAIN, "--stage", "pretrain", "--limit", "3", "--tasks"]
    readable = [name for name in names if name != "humaneval"]  # its programs need a sandbox
    (tmp_path / "downloads/core/eval_data").mkdir(parents=True)
    (tmp_path / "downloads/core/eval_data/arc_easy.jsonl").write_text("{}\n", encoding="utf-8")  # CORE's own
    said = told("evaluate", *flags, *(f"chat/{name}" for name in readable))
    assert all(f"  chat/{name} " in said for name in readable)
    file = fetch_tests(["humaneval"], tmp_path) / "humaneval/val" / DATASETS["humaneval"].val[0]
    assert [item.answer for item in read_items(file, "humaneval")] == [f"    return {n}\n" for n in range(40)]
    assert not list(tmp_path.glob("downloads/*/train"))


def test_by_default_as_many_files_are_fetched_as_the_run_needs(served: None, tmp_path: Path) -> None:
    said: list[str] = []
    recipe = recipe_for("tinystories", shards=None)
    for steps, files in ((1, 1), (110_000_000 // 4096, 1), (110_000_000 // 4096 + 1, 2)):
        long = replace(recipe, train=replace(recipe.train, steps=steps, batch_tokens=4096))
        prepared = prepare(long, tmp_path, said.append)
        first_words = {text.split()[0] for text in texts_of(prepared.train, prepared.tokenizer)}
        assert first_words == set(DATASETS["tinystories"].train[:files])
        assert f"tinystories: {files} of 4 training files are used; --shards N asks for another number" in said
        said.clear()


def test_a_run_keeps_its_files_and_says_why_its_text_repeats(
    served: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TextRecipe(vocab_size=300, tokenizer_megabytes=0.05, val_megabytes=0.001)
    shape, train = replace(RECIPE.model, width=32, head_dim=16, context=64), replace(RECIPE.train, batch_tokens=128)
    recipe = replace(RECIPE, depth=1, data="tinystories", text=text, model=shape, train=replace(train, steps=30))
    run_dir, said = RunDir(tmp_path / "out", "few"), list[str]()
    session = Session(stage="pretrain", machine=CPU, run_dir=run_dir, log=said.append)
    assert pretrain.run(recipe, session) == 0
    why = "the text repeats because 1 of the 4 training files of tinystories were fetched"
    assert any(why in line for line in said)
    saved = read_saved(run_dir, "pretrain")
    assert saved is not None and saved.shards == 1
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing is asked for again, also not for a longer run
    longer = replace(saved, train=replace(saved.train, steps=10**9))
    assert text_fingerprint(resolve(longer), tmp_path / "out") == text_fingerprint(resolve(saved), tmp_path / "out")
