"""Preparing: every document lands in exactly one split, nothing is made twice, and errors say what would work."""

import itertools
import json
import os
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from quern.flags.recipe_file import read_recipe_file
from quern.recipe import Resolved, TextRecipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.stages.prepare import Prepared, open_source, prepare
from quern.stages.tokenizers import sampled, train_tokenizer
from quern.text.clean.steps import Cleaned, Step, benchmark_questions, exact_duplicates
from quern.text.tinyworld import corpus as tinyworld_corpus
from quern.text.tokenizer import Tokenizer
from tests.support.memory_corpus import texts_of
from tests.support.rows import write_rows
from tests.support.waiting import second


def recipe_for(data: Path | str, **text: Any) -> Resolved:
    settings = {"vocab_size": 300, "tokenizer_megabytes": 0.05, "tinyworld_megabytes": 0.05, "val_megabytes": 0.01}
    return Resolved.of(resolve(replace(RECIPE, data=str(data), text=TextRecipe(**{**settings, **text}))))


def made(recipe: Resolved, out: Path) -> tuple[Prepared, str]:
    said: list[str] = []
    return prepare(recipe, out, said.append), "\n".join(said)


def documents(count: int) -> list[str]:
    rng = random.Random(1)
    words = "mill stone grain flour river köln 世界 😀 baker 17 482 wheel".split()
    return [f"{number}: " + " ".join(rng.choices(words, k=rng.randint(5, 40))) for number in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    return write_rows(path, ({"text": text} for text in texts))


FILTER = """
from dataclasses import replace
from quern.recipes.gpt import RECIPE as BASE
SHARE = {share}

def some(texts, split):
    return (text for text in texts if int(text.split(":")[0]) % SHARE == 1)

RECIPE = replace(BASE, make_documents=some)
"""


def test_a_recipe_filters_its_documents_and_makes_another_text_by_its_constants_too(tmp_path: Path) -> None:
    texts = documents(90)
    plain = recipe_for(write_jsonl(tmp_path / "t.jsonl", texts))
    found = [made(plain, tmp_path / "out")[0].origin]
    for share in (3, 9, 3):
        path = tmp_path / f"idea{share}.py"
        path.write_text(FILTER.format(share=share), encoding="utf-8")
        idea, _ = read_recipe_file(path)
        some, _ = made(replace(plain, make_documents=idea.make_documents), tmp_path / "out")
        kept = texts_of(some.train, some.tokenizer) + texts_of(some.val, some.tokenizer)
        assert sorted(kept) == sorted(text for text in texts if int(text.split(":")[0]) % share == 1)
        found.append(some.origin)
    assert found[1].text == found[3].text
    assert len({one.text for one in found}) == len({one.shards for one in found}) == 3


def test_what_cleaning_removed_is_a_fact_of_the_run_also_when_nothing_is_made_again(tmp_path: Path) -> None:
    def cleaned(texts: Iterator[str], split: str) -> Iterator[str]:
        longer = Step("short documents", lambda text: len(text) > 60)
        return Cleaned(texts, [longer, exact_duplicates()]) if split == "train" else texts

    texts = [text for text in documents(90) for _ in range(2)]
    recipe = replace(recipe_for(write_jsonl(tmp_path / "t.jsonl", texts)), make_documents=cleaned)
    train = [text for number, text in enumerate(texts) if number % 20 != 10]
    long = [text for text in train if len(text) > 60]
    for _ in range(2):
        prepared, _ = made(recipe, tmp_path / "out")
        assert prepared.train.num_documents == len(set(long))
        removed = {"short documents": len(train) - len(long), "exact duplicates": len(long) - len(set(long))}
        assert prepared.facts["data"]["cleaning"] == [
            {"split": "train", "documents": len(train), "step": step, "removed": count}
            for step, count in removed.items()
        ]
        assert min(removed.values()) > 0


def test_other_passages_make_another_text(tmp_path: Path) -> None:
    texts = documents(90)
    plain, found = recipe_for(write_jsonl(tmp_path / "t.jsonl", texts)), list[str]()
    for passage in ("no such words are in it at all", texts[3], texts[3]):
        recipe = replace(plain, make_documents=lambda read, _, one=passage: Cleaned(read, [benchmark_questions([one])]))
        source = open_source(recipe, tmp_path / "out")
        found.append(source.fingerprint)
        assert source.fingerprint == open_source(recipe, tmp_path / "out").fingerprint
        assert (texts[3] in source.read("train")) == (passage != texts[3])
    assert found[0] != found[1] == found[2]


def test_every_document_is_in_exactly_one_split(tmp_path: Path) -> None:
    texts = documents(90)
    prepared, _ = made(recipe_for(write_jsonl(tmp_path / "t.jsonl", texts)), tmp_path / "out")
    train, val = (texts_of(corpus, prepared.tokenizer) for corpus in (prepared.train, prepared.val))
    assert sorted(train + val) == sorted(texts)
    assert val == texts[10::20] and not set(train) & set(val)
    assert prepared.facts["data"]["train"] == {"documents": len(train), "tokens": prepared.train.num_tokens}
    assert prepared.facts["tokenizer"]["compression"][0]["bytes_per_token"] > 1


def test_validation_of_its_own_takes_nothing_from_training(tmp_path: Path) -> None:
    texts = documents(60)
    data, val = (write_jsonl(tmp_path / f"{part}.jsonl", texts[part]) for part in (slice(50), slice(50, None)))
    half = sum(len(text.encode()) for text in texts[50:55]) / 1e6
    for where, most, last in ((data, 1.0, 60), (data, half, 55), (tmp_path, 1.0, 60)):  # the folder has both files
        prepared, _ = made(replace(recipe_for(where, val_megabytes=most), val=str(val)), tmp_path / "out")
        assert texts_of(prepared.train, prepared.tokenizer) == texts[:50]
        assert texts_of(prepared.val, prepared.tokenizer) == texts[50:last]
    with pytest.raises(FileNotFoundError, match="every file of --data is also in --val, so none is left to train on"):
        made(replace(recipe_for(val), val=str(val)), tmp_path / "out")


def files_under(folder: Path) -> dict[str, int]:
    """The time of each file that is made; the cache of digests may change."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "digests.json")
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_nothing_is_made_twice_and_what_changed_is_made_anew(tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "t.jsonl", documents(60)), tmp_path / "out"
    first, said = made(recipe_for(data), out)
    assert "up to date" not in said
    before = files_under(out)
    again, said = made(recipe_for(data), out)
    assert said.count("is up to date") == 2 and files_under(out) == before
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    for change in ({"vocab_size": 310}, {"digits": 1}, {"val_megabytes": 0.002}):
        _, said = made(recipe_for(data, **change), out)
        assert "tokens: train" in said, change
    write_jsonl(data, documents(61))
    other, said = made(recipe_for(data), out)
    assert "tokens: train" in said and other.train.num_documents == first.train.num_documents + 1
    assert before.items() <= files_under(out).items(), "what others may still use was touched"


def test_a_malformed_row_is_skipped_and_told_once(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "t.jsonl", documents(1100))
    lines = data.read_text(encoding="utf-8").splitlines()
    data.write_text("\n".join([*lines[:700], '{"text": 7}', *lines[700:]]), encoding="utf-8")
    found, said = made(recipe_for(data), tmp_path / "out")
    assert said.count(f"the first is {data}, line 701: 'text' holds int") == 1
    assert said.count("text: skipped 1 malformed of 1,101 records") == 1
    assert found.train.num_documents + found.val.num_documents == 1100


def test_a_source_is_known_by_its_content_alone(tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "first" / "texts"
    folder.mkdir(parents=True)
    data = write_jsonl(folder / "t.jsonl", documents(60))
    mark = open_source(recipe_for(folder), out).fingerprint
    os.utime(data, (1, 1))
    data.rename(folder / "renamed.jsonl")
    moved = folder.rename(tmp_path / "moved")
    assert open_source(recipe_for(moved), out).fingerprint == mark
    (moved / "image.png").write_bytes(b"ignored")
    assert open_source(recipe_for(moved), out).fingerprint == mark
    body = {"body": "x" * 5000, "text": "y" * 5000}
    write_jsonl(data := moved / "renamed.jsonl", [])
    data.write_text(json.dumps(body), encoding="utf-8")
    marks = {open_source(recipe_for(moved, column=column), out).fingerprint for column in ("text", "body")}
    data.rename(moved / "renamed.txt")  # the same bytes to another reader
    marks.add(open_source(recipe_for(moved), out).fingerprint)
    (val := tmp_path / "val.txt").write_text(json.dumps(body), encoding="utf-8")
    marks.add(open_source(replace(recipe_for(moved), val=str(val)), out).fingerprint)
    assert len(marks | {mark}) == 5


def test_the_column_that_was_named_is_trained_on(tmp_path: Path) -> None:
    texts = documents(60)
    for name, body in [("t.csv", "id,body\n"), ("v.csv", "body,text\n")]:
        rows = (f'{i},"{text}"\n' if name == "t.csv" else f'"{text}",no\n' for i, text in enumerate(texts))
        (tmp_path / name).write_text(body + "".join(rows), encoding="utf-8")
    recipe = replace(recipe_for(tmp_path / "t.csv", column="body"), val=str(tmp_path / "v.csv"))
    prepared, said = made(recipe, tmp_path / "out")
    for corpus in (prepared.train, prepared.val):
        assert texts_of(corpus, prepared.tokenizer) == texts
    assert "text: reading t.csv (" in said and "validation text: reading v.csv (" in said


def test_what_is_read_and_ignored_is_said_once_and_a_small_validation_is_warned_of(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for i, text in enumerate(documents(50)):
        (folder / f"{i}.md").write_text(text, encoding="utf-8")
    (folder / "stray.bin").write_bytes(bytes(3000))
    prepared, said = made(recipe_for(folder), tmp_path / "out")
    assert prepared.train.num_documents + prepared.val.num_documents == 50
    lines = said.splitlines()
    assert lines[0].startswith("text: reading 50 .md (") and lines[1] == "text: ignoring stray.bin (3.0 kB)"
    assert lines[2].startswith("warning: the validation text has only ")
    assert sum("reading" in line for line in lines) == sum("warning" in line for line in lines) == 1


def test_of_two_processes_with_the_same_text_the_second_waits_and_finds_it_prepared(tmp_path: Path) -> None:
    data, out = write_jsonl(tmp_path / "t.jsonl", documents(60)), tmp_path / "out"
    first, _ = made(recipe_for(data), out)
    folder = out / str(first.origin.shards)
    found, said = second(partial(prepare, recipe_for(data), out), folder / "manifest.json")
    assert said.startswith(f"waiting for process {os.getpid()} on ") and str(folder) in said
    assert found.origin.tokens == first.origin.tokens
    assert texts_of(found.val, found.tokenizer) == texts_of(first.val, first.tokenizer)


@pytest.mark.parametrize("mark", ["<|endoftext|>", "</s>"])
def test_marks_between_documents_are_warned_of_and_separate_when_asked(tmp_path: Path, mark: str) -> None:
    data, stories = tmp_path / "stories.txt", documents(60)
    data.write_text(f"\n{mark}\n".join(stories), encoding="utf-8")
    whole, said = made(recipe_for(data), tmp_path / "out")
    assert said.count("read as text") == 1
    assert f"{data} has {mark}, which is read as text: if it ends documents, give --text.separator '{mark}'" in said
    split, said = made(recipe_for(data, separator=mark), tmp_path / "out")
    assert "read as text" not in said and split.origin.text != whole.origin.text
    assert sorted(texts_of(split.train, split.tokenizer) + texts_of(split.val, split.tokenizer)) == sorted(stories)
    data.write_text("an <s>old</s> mill\nsays end of text, <b>\n" * 400, encoding="utf-8")
    assert "read as text" not in made(recipe_for(data), tmp_path / "out")[1]


def test_a_copy_of_a_hub_repository_is_read_as_the_hubs_own(tmp_path: Path) -> None:
    data = tmp_path / "copy"
    (data / "data").mkdir(parents=True)
    (data / "README.md").write_text("---\ndataset_info: {}\n---\nA card.\n", encoding="utf-8")
    splits = {name: [f"{name} {text}" for text in documents(40)] for name in ("train", "test", "validation")}
    for name, texts in splits.items():
        write_jsonl(data / "data" / f"{name}-00000-of-00001.jsonl", texts)
    found, said = made(recipe_for(data), tmp_path / "out")
    assert texts_of(found.train, found.tokenizer) == splits["train"]
    assert texts_of(found.val, found.tokenizer) == splits["validation"]
    assert "is laid out as a data set of the Hugging Face Hub: 'train' is 1 of its files, validation 1, and 2" in said


def test_a_folder_that_has_the_outputs_is_the_same_text_again(tmp_path: Path) -> None:
    for names in (["train.txt", "val.txt"], ["a.py", "src/b.c"]):
        data = tmp_path / names[0].partition(".")[0]
        for name in names:
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            (data / name).write_text("\n".join(documents(40)), encoding="utf-8")
        first, _ = made(recipe_for(data), data / "out")
        run = data / "out" / "runs" / "r" / "pretrain"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
        again, said = made(recipe_for(data), data / "out")
        assert again.origin == first.origin and "is up to date" in said and "metrics" not in said


def test_the_names_of_all_files_and_of_the_output_folder_are_the_same_text(here: Path) -> None:
    """A shell makes these names of --data *, with `out` at the second run: longer together than a file name may be."""
    names = [f"chapter {number:02d}.txt" for number in range(40)]
    for name, text in zip(names, documents(40), strict=True):
        Path(name).write_text(text, encoding="utf-8")
    found = [made(recipe_for(data), Path("out"))[0] for data in ("\n".join(names), "\n".join([*names, "out"]), ".")]
    assert found[0].origin == found[1].origin == found[2].origin
    train, val = (texts_of(corpus, found[0].tokenizer) for corpus in (found[0].train, found[0].val))
    assert "".join(train + val) == "".join(documents(40))


def test_a_text_that_is_empty_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    message = "^the train text of 'empty' is empty: give more text, or --val for validation$"
    with pytest.raises(ValueError, match=message):
        made(recipe_for(tmp_path / "empty.txt"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tinyworld_is_the_worlds_own_splits(tmp_path: Path) -> None:
    recipe = recipe_for("tinyworld")
    prepared, _ = made(recipe, tmp_path / "out")
    for corpus, split, size in ((prepared.train, "train", 0.05), (prepared.val, "val", 0.01)):
        expected = list(tinyworld_corpus.documents(0, size, split))
        assert texts_of(corpus, prepared.tokenizer) == expected
    other = open_source(replace(recipe, seed=1), tmp_path / "out")
    assert other.fingerprint != open_source(recipe, tmp_path / "out").fingerprint
    assert list(islice(other.read("train"), 3)) != list(islice(tinyworld_corpus.documents(0, 0.05, "train"), 3))


def test_the_tokenizer_is_trained_on_a_sample_of_a_large_text_and_on_all_of_a_small_one(tmp_path: Path) -> None:
    texts = documents(600)
    data, size = write_jsonl(tmp_path / "t.jsonl", texts), sum(len(text.encode()) for text in texts) / 1e6
    recipe = recipe_for(data, tokenizer_megabytes=size / 10)
    made = [
        train_tokenizer(asked, open_source(asked, tmp_path / name), tmp_path / name, lambda line: None)
        for name, asked in (("one", recipe), ("two", replace(recipe, seed=1)))
    ]
    assert made[0].merges == made[1].merges, "the same text, the same sample"
    first = Tokenizer.train(texts, 300, made[0].pattern, max_bytes=int(size / 10 * 1e6))
    assert first.merges != made[0].merges, "not its beginning"
    small = recipe_for(data, tokenizer_megabytes=size)
    source = open_source(small, tmp_path / "three")
    whole = Tokenizer.train(source.read("train"), 300, made[0].pattern)
    assert train_tokenizer(small, source, tmp_path / "three", lambda line: None).merges == whole.merges


# The sample for the tokenizer ----------------------------------------------------------------------------------------


def numbered(count: int, repeats: int = 20) -> Iterator[str]:
    return (f"{number:07d} stone mill " * repeats for number in range(count))


def numbers(texts: Iterator[str]) -> list[int]:
    return [int(text[:7]) for text in texts]


def test_a_large_text_is_sampled_everywhere_by_the_seed() -> None:
    seen: list[int] = []
    found = {seed: numbers(sampled(lambda: numbered(10_000), 1.0, seed, seen.append)) for seed in ("a", "b")}
    assert seen[9_999] == sum(len(text) for text in numbered(10_000)) == 3_800_000
    assert found["a"] == numbers(sampled(lambda: numbered(10_000), 1.0, "a", seen.append)) != found["b"]
    for chosen in found.values():
        assert chosen == sorted(set(chosen))
        for quarter in range(4):
            here = sum(quarter * 2_500 <= number < (quarter + 1) * 2_500 for number in chosen)
            assert abs(here - 2_500 / 3.8) < 50
        steps = {later - number for number, later in itertools.pairwise(chosen)}
        assert steps >= {2, 3, 4, 5}, "not every fourth"


def test_a_single_long_document_is_sampled_in_pieces() -> None:
    text = "".join(f"{number} " for number in range(1_000_000))
    chosen = list(sampled(lambda: iter([text]), 2.0, "seed", lambda done: None))
    assert 1.9e6 < sum(map(len, chosen)) < 2.1e6 and all(piece in text for piece in chosen)
    assert int(chosen[-1].split()[-1]) > 800_000
    assert list(sampled(lambda: iter([text]), 0.01, "seed", lambda done: None)), "at least one piece"


@pytest.mark.parametrize("megabytes", [0.1, 20.0])
def test_memory_does_not_grow_with_text_or_sample(megabytes: float) -> None:
    tracemalloc.start()
    try:
        chosen = sampled(lambda: numbered(5_000, 400), megabytes, "seed", lambda done: None)
        size = sum(map(len, chosen))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(size - megabytes * 1e6) < 2 * 7_600 + 0.02 * megabytes * 1e6 and peak < 1e6
