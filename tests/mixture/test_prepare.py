"""Mixtures: what each source gives, what is held out, refusals, re-use, and memory that does not grow with the rows."""

import os
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quern.data import packing
from quern.data.loader import Loader
from quern.data.shards import Corpus
from quern.mixture.prepare import Mixture, prepare_mixture
from quern.recipe import ConversationSource, Resolved
from quern.recipes import gpt
from quern.runs import origin
from quern.runs.origin import corpus_fingerprint
from quern.stages.evaluate import chats
from quern.text import sources
from quern.text.chat import render
from quern.text.tinyworld import corpus as tinyworld
from quern.text.tokenizer import Tokenizer
from tests.support.memory_corpus import memory_corpus
from tests.support.rows import write_rows
from tests.support.small_text import read_conversations
from tests.support.waiting import second

TOKENIZER = Tokenizer.train(["hello good day question answer number of eggs", "question answer"], 300)
GSM8K = {"question": "A hen lays 2 eggs on each of 3 days, so how many eggs?", "answer": "<<2*3=6>>6 eggs\n#### 6"}


def write(path: Path, rows: Sequence[Any]) -> str:
    return str(write_rows(path, rows))


def talks(count: int, word: str = "day") -> list[dict[str, str]]:
    return [{"instruction": f"question {number} of {word}", "output": f"answer {number}"} for number in range(count)]


def asking(sources: Any, **changes: Any) -> Resolved:
    text = replace(gpt.RECIPE.text, tinyworld_conversations=120)
    context = {"model": replace(gpt.RECIPE.model, context=512)}
    return Resolved.of(replace(gpt.RECIPE, conversations=sources, text=text, **(context | changes)))


def no_fetch(asked: ConversationSource) -> Any:
    raise AssertionError(f"{asked} is fetched")


def prepared(sources: Any, out: Path, lines: list[str] | None = None, fetch: Any = no_fetch, **changes: Any) -> Mixture:
    said = lines if lines is not None else []
    return prepare_mixture(asking(sources, **changes), TOKENIZER, out, fetch, said.append)


def texts(corpus: Corpus) -> list[str]:
    """The first message of each document."""
    ids = [corpus.gather(document)[2:].tolist() for document in range(corpus.num_documents)]
    ends = TOKENIZER.special("<|user_end|>")
    return [TOKENIZER.decode(one[: one.index(ends)]) for one in ids]


def test_one_file_is_split_as_by_the_plain_reader(tmp_path: Path) -> None:
    """The tokens, masks and fingerprint are those of all conversations in memory, the first fiftieth held out."""
    path = write(tmp_path / "talks.jsonl", talks(130))
    pairs = [render(TOKENIZER, messages) for messages in read_conversations(path)]
    val, train = (memory_corpus(*zip(*some, strict=True)) for some in (pairs[:2], pairs[2:]))
    mixture = prepared(path, tmp_path / "out")
    assert corpus_fingerprint(mixture.train, mixture.val) == corpus_fingerprint(train, val)
    assert mixture.lines() == []
    loaders = [Loader(corpus, 40, 4, 1, "first-fit-decreasing", too_long="crop") for corpus in (mixture.train, train)]
    for step in range(5):
        one, other = (loader.batch(step) for loader in loaders)
        assert (one.tokens == other.tokens).all() and (one.mask == other.mask).all()


def test_several_sources_with_repeats_and_limits(tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", talks(100))
    other = write(tmp_path / "other.jsonl", talks(40, "number"))
    sources = (f"{own},limit=50,repeats=2.5", ConversationSource(other, repeats=0.25), "spelling,limit=20", "tinyworld")
    mixture = prepared(sources, tmp_path / "out")
    rows = [(one["source"], one["conversations"], one["held_out"]) for one in mixture.sources]
    assert rows == [(own, 122, 1), (other, 10, 1), ("spelling", 20, 8), ("tinyworld", 120, 8)]
    assert sum(one["tokens"] for one in mixture.sources) == mixture.train.num_tokens
    assert mixture.train.num_documents == 272 and mixture.val.num_documents == 18
    seen = Counter(texts(mixture.train))
    first = [seen[f"question {number} of day"] for number in range(100)]
    assert first[0] == 0 and set(first[1:50]) == {2, 3} and first[1:50].count(3) == 24 and not any(first[50:])
    second = [seen[f"question {number} of number"] for number in range(40)]
    assert second[0] == 0 and sum(second) == 10 and max(second) == 1
    assert "other.jsonl: 10 conversations" in mixture.lines()[1] and "each 0.25 times" in mixture.lines()[1]
    again = prepared(sources, tmp_path / "elsewhere")
    assert corpus_fingerprint(again.train, again.val) == corpus_fingerprint(mixture.train, mixture.val)
    another = prepared(sources, tmp_path / "out", seed=1)
    assert Counter(texts(another.train)) != seen


def test_a_source_is_prepared_once(tmp_path: Path) -> None:
    own, out = write(tmp_path / "own.jsonl", talks(30)), tmp_path / "out"
    lines: list[str] = []
    prepared(own, out, lines)
    assert lines == [f"conversations: reading own.jsonl ({Path(own).stat().st_size / 1000:.1f} kB)"]
    mixture = prepared((f"{own},repeats=3", "spelling"), out, lines)
    assert len(lines) == 1 and mixture.sources[0]["conversations"] == 87
    write(tmp_path / "own.jsonl", talks(31))
    assert prepared(own, out, lines).sources[0]["conversations"] == 30 and len(lines) == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (talks(1), "talks.jsonl holds 1 conversation, none to hold out: fine-tuning needs a source"),
        ([], "talks.jsonl holds 0 conversations: fine-tuning needs a source"),
        ([*talks(3), {"messages": [{"role": "nobody", "content": "?"}]}], "talks.jsonl, line 4: not a conversation: "),
        ([{"messages": [{"role": "assistant", "tool_calls": [3]}]}], "a part of it has another type .'int' object"),
    ],
)
def test_a_file_that_will_not_do(tmp_path: Path, rows: list[Any], message: str) -> None:
    path, out = write(tmp_path / "talks.jsonl", rows), tmp_path / "out"
    with pytest.raises(ValueError, match=message):
        prepared(path, out)
    assert not any(out.rglob("*.tmp*"))


def test_a_held_out_conversation_is_not_trained_on(tmp_path: Path) -> None:
    """Neither a copy in the same file nor one in another source."""
    own = write(tmp_path / "own.jsonl", [*talks(60), talks(1)[0]])
    other = write(tmp_path / "other.jsonl", [talks(60)[30], *talks(60)[:20]])
    mixture = prepared((own, f"{other},repeats=2", own), tmp_path / "out")
    held_out = set(texts(mixture.val))
    assert held_out == {"question 0 of day", "question 30 of day"} and not held_out & set(texts(mixture.train))
    assert [(one["conversations"], one["copies"]) for one in mixture.sources] == [(58, 2), (38, 1), (58, 2)]
    assert mixture.lines()[1].endswith("; copies of held-out conversations left out: 1")
    lonely = write(tmp_path / "lonely.jsonl", talks(1) * 3)
    with pytest.raises(ValueError, match="holds 1 conversation, none to train on: "):
        prepared(lonely, tmp_path / "out")


def test_conversations_that_fit_are_held_out_and_lost_ones_counted(tmp_path: Path) -> None:
    """The first conversation is longer than the context, the third has no reply in it."""
    long = [{"instruction": "day " * words, "output": "answer " * 99} for words in (9, 99)]
    own = write(tmp_path / "own.jsonl", [long[0], talks(1)[0], long[1], *talks(48)[1:]])
    context: dict[str, Any] = {"model": replace(gpt.RECIPE.model, context=64)}
    mixture = prepared(own, tmp_path / "out", **context)
    assert texts(mixture.val) == ["question 0 of day"]
    (found,) = mixture.sources
    assert (found["conversations"], found["held_out"], found["lost"]) == (49, 1, 1)
    report = Loader(mixture.train, 64, 1, too_long="crop").report()
    assert (report["documents"], report["documents_without_target"], report["documents_too_long"]) == (49, 1, 2)
    dropped = prepared((own, "spelling"), tmp_path / "out", sft=replace(gpt.RECIPE.sft, too_long="drop"), **context)
    assert dropped.sources[0]["lost"] == 2 and "conversations lost: 2" in dropped.lines()[0]
    cropped = write(tmp_path / "cropped.jsonl", [long[0], long[1], long[0] | {"instruction": "day"}])
    assert prepared(cropped, tmp_path / "out", **context).val.num_documents == 1, "none fits, and two have a reply"
    lost = write(tmp_path / "lost.jsonl", [long[1]] * 3)
    none = "3 conversations, 3 of them without a reply in the context of 64 tokens, none"
    with pytest.raises(ValueError, match=none):
        prepared(lost, tmp_path / "out", **context)


def public(name: str, rows: list[dict[str, Any]], test: list[dict[str, Any]], out: Path) -> Any:
    """A fetch function that finds a public set."""
    folder = out / "downloads" / name
    sets = {"train": rows, "val": test}
    found = {split: (write_rows(folder / split / f"{split}.parquet", some),) for split, some in sets.items()}
    return lambda asked: found if asked.source == name else no_fetch(asked)


def test_of_two_processes_with_the_same_conversations_the_second_waits_and_finds_them_prepared(tmp_path: Path) -> None:
    path, out = write(tmp_path / "talks.jsonl", talks(20)), tmp_path / "out"
    first = prepared(path, out)
    (manifest,) = out.rglob("manifest.json")
    found, said = second(partial(prepare_mixture, asking(path), TOKENIZER, out, no_fetch), manifest)
    assert said.startswith(f"waiting for process {os.getpid()} on ")
    assert corpus_fingerprint(found.train, found.val) == corpus_fingerprint(first.train, first.val)


def test_test_rows_in_a_public_set_are_left_out(tmp_path: Path) -> None:
    """Only its training files are read, and of them no row that is also a test row."""
    asked = (f"{number} is a number, and here is a long question about it?" for number in range(9))
    rows = [{**GSM8K, "question": question} for question in asked]
    fetch = public("gsm8k", [*rows, GSM8K, rows[0]], [GSM8K], tmp_path / "out")
    mixture = prepared("gsm8k,repeats=2", tmp_path / "out", fetch=fetch)
    (found,) = mixture.sources
    assert (found["conversations"], found["held_out"], found["copies"], found["left_out"]) == (16, 1, 1, 1)
    assert GSM8K["question"] not in texts(mixture.train) + texts(mixture.val)
    assert "test rows of tasks left out: 1" in mixture.lines()[0]
    again = prepared("gsm8k,repeats=2", tmp_path / "out", fetch=fetch)
    assert again.sources == mixture.sources, "the count is kept with the shards"


def test_a_test_row_in_a_file_of_the_user_is_an_error(tmp_path: Path) -> None:
    own = write(tmp_path / "own.jsonl", [*talks(5), {"instruction": f"Please: {GSM8K['question']}", "output": "6"}])
    out = tmp_path / "out"
    assert prepared(own, out).train.num_documents == 5, "nothing is known of any task yet"
    tests = tmp_path / "tests"
    write(tests / "gsm8k_test.jsonl", [GSM8K])
    named = replace(gpt.RECIPE.sft, tests=str(tests))
    message = r"own.jsonl, line 6: it holds a test question, that of .*gsm8k_test.jsonl, line 1 \(--sft.tests\)"
    with pytest.raises(ValueError, match=message):
        prepared(own, out, sft=named)
    public("gsm8k", [GSM8K], [GSM8K], out)
    with pytest.raises(ValueError, match=r"own.jsonl, line 6: .*val.parquet, record 1 \(gsm8k\), .*: remove it"):
        prepared(own, out)


def test_a_resumed_run_compares_with_the_test_sets_that_it_began_with(tmp_path: Path) -> None:
    """A test set that `quern evaluate` downloads in between would leave out a row, and change the conversations."""
    rows = [{"messages": [{"role": "user", "content": f"{number} and a question of many words: how many eggs?"},
                          {"role": "assistant", "content": "6"}]} for number in range(9)]  # fmt: skip
    out = tmp_path / "out"
    fetch = public("smoltalk", rows, rows[:2], out)
    began = prepared("smoltalk", out, fetch=fetch)
    public("arc_easy", [GSM8K], [{"question": rows[7]["messages"][0]["content"]}], out)
    again = prepare_mixture(asking("smoltalk"), TOKENIZER, out, fetch, print, began.tests)
    assert corpus_fingerprint(again.train, again.val) == corpus_fingerprint(began.train, began.val)
    new = prepared("smoltalk", out, fetch=fetch)
    assert (began.tests, new.tests, new.sources[0]["left_out"]) == ([], ["arc_easy"], 1)


def test_the_built_in_worlds_questions_are_refused_where_it_is_learned(tmp_path: Path) -> None:
    question = tinyworld.questions(0, "word_problems", 3)[2].question
    own, out = write(tmp_path / "own.jsonl", [*talks(5), {"instruction": question, "output": "6"}]), tmp_path / "out"
    with pytest.raises(ValueError, match="own.jsonl, line 6: .* question 3 of tinyworld/word_problems"):
        prepared(own, out)  # the default text is the built-in world
    assert prepared(own, out, data="texts/").train.num_documents == 5
    with pytest.raises(ValueError, match="question 3 of tinyworld/word_problems"):
        prepared((own, "spelling"), out, data="texts/")


def peak_bytes(path: str, out: Path) -> int:
    tracemalloc.start()
    mixture = prepared(path, out, data="texts/")
    corpus_fingerprint(mixture.train, mixture.val)
    Loader(mixture.train, 64, 4, 0, "first-fit-decreasing", too_long="crop").batch(0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has each conversation's place, length and piece, and nothing of its 750 bytes of text."""
    monkeypatch.setattr(sources, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(packing, "MASK_TOKENS", 1 << 12)
    monkeypatch.setattr(origin, "HASHED_DOCUMENTS", 16)
    reply = "answer number day " * 40
    rows = [{"instruction": f"question {number}", "output": reply} for number in range(900)]
    few, many = (write(tmp_path / f"{count}.jsonl", rows[:count]) for count in (100, 900))
    prepared(few, tmp_path / "warm", data="texts/")  # imports and caches
    peaks = [peak_bytes(path, tmp_path / "out") for path in (few, many)]
    assert peaks[1] - peaks[0] < 800 * 150, peaks


def test_a_copy_of_a_public_set_is_read_by_split(tmp_path: Path) -> None:
    for split in ("test", "train_gen", "train_sft"):
        write(tmp_path / "copy" / "data" / f"{split}-00000-of-00001.jsonl", talks(20, split))
    (tmp_path / "copy" / "README.md").write_text("---\ndataset_info: {}\n---\n", encoding="utf-8")
    lines: list[str] = []
    source = ConversationSource(str(tmp_path / "copy"), split="train_sft")
    mixture = prepared((source,), tmp_path / "out", lines)
    found = texts(mixture.val) + texts(mixture.train)
    assert found == [f"question {number} of train_sft" for number in range(20)]
    assert [line for line in lines if "is laid out as a data set of the Hugging Face Hub: 'train_sft' is 1" in line]
    assert chats(asking((source,)), tmp_path)[0] == ("question 0 of train_sft",)


def test_a_folder_that_has_the_outputs_is_read_without_them(tmp_path: Path) -> None:
    write(tmp_path / "talks.jsonl", talks(20))
    write(tmp_path / "out" / "runs" / "r" / "metrics.jsonl", [{"step": 1}] * 3)
    lines: list[str] = []
    mixture = prepared((ConversationSource(str(tmp_path)),), tmp_path / "out", lines)
    assert mixture.sources[0]["conversations"] + mixture.sources[0]["held_out"] == 20
    assert "metrics" not in "".join(lines)


def test_a_split_or_a_column_that_nothing_uses_is_refused(tmp_path: Path) -> None:
    own = ConversationSource(write(tmp_path / "own.jsonl", talks(9)))
    for source, field in (
        (replace(own, split="test"), "split=test is for hf:OWNER/NAME"),
        (ConversationSource("tinyworld", column="talk"), "column=talk is for files"),
    ):
        with pytest.raises(ValueError, match=f"--conversations {source.source}: {field}.*: leave it out"):
            prepared((source,), tmp_path / "out")


def test_the_column_of_the_messages_is_named(tmp_path: Path) -> None:
    rows = [[{"from": "human", "value": f"question {n}"}, {"from": "gpt", "value": "answer"}] for n in range(9)]
    path = write(tmp_path / "talks.jsonl", [{"instruction": "other", "chat": row} for row in rows])
    mixture = prepared(f"{path},column=chat", tmp_path / "out")
    assert texts(mixture.val) + texts(mixture.train) == [f"question {n}" for n in range(9)]
    table = write_rows(tmp_path / "talks.parquet", [{"id": 1, "chat": row} for row in rows])
    assert texts(prepared(f"{table},column=chat", tmp_path / "out").train) == texts(mixture.train)
    with pytest.raises(ValueError, match="talks.parquet, record 1: not a conversation: it has no column or key 'talk'"):
        prepared(f"{table},column=talk", tmp_path / "out")
