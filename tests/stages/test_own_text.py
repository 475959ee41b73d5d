"""A text of one's own: the size of model that fits it, what is expected of it, and what of it is held out: every
document is in one split, and few or odd documents leave a sensible validation, too."""

import io
import math
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quern.cli import lab
from quern.estimate import own_text
from quern.estimate.own_text import best_depth, bits_per_byte, expectation, most_readings, parameters_of, vocabulary
from quern.flags.recipe_flags import Arguments
from quern.lab.options import CompareOptions
from quern.recipes import llama, load_recipe
from quern.recipes.gpt import RECIPE
from quern.resolve import resolve
from quern.stages import pretrain as fitted
from quern.stages.prepare import fit_vocabulary, hold_out, own_megabytes
from quern.stages.session import past_its_best
from tests.support.command import Told
from tests.support.rows import write_rows


def test_the_vocabulary_follows_from_the_text_unless_it_is_given(tmp_path: Path) -> None:
    sizes = {0.0001: 320, 0.1: 512, 1: 2048, 10: 4096, 1000: 8192}
    assert {megabytes: vocabulary(megabytes) for megabytes in sizes} == sizes
    (tmp_path / "a.txt").write_text("x" * 100_000, encoding="utf-8")
    own = replace(RECIPE, data=str(tmp_path))
    given = replace(own, text=replace(own.text, vocab_size=700))
    out = tmp_path / "out"
    assert own_megabytes(own, out) == 0.1 and own_megabytes(RECIPE, out) is None
    assert own_megabytes(replace(own, data="nowhere"), out) is None
    assert fit_vocabulary(own, 0.1) == replace(own, text=replace(own.text, vocab_size=512))
    assert fit_vocabulary(given, 0.1) is given and fit_vocabulary(RECIPE, None) is RECIPE  # the built-in world's stays


def test_the_law_is_the_published_one_and_repeated_text_counts_less() -> None:
    assert bits_per_byte(1e6, 1e9, 1e7) == pytest.approx(1.0 + 18.4 * 1e6**-0.34 + 54.2 * 1e7**-0.28)
    page = Path("docs/your-own-text.md").read_text(encoding="utf-8")
    assert " = {E} + {A} / N^{N_EXPONENT} + {B} / D^{D_EXPONENT}, where".format(**vars(own_text)) in page
    twice = 1e6 + 1e6 * 2 * (1 - math.exp(-1 / 2))
    assert bits_per_byte(1e6, 1e6, 2e6) == pytest.approx(1.0 + 18.4 * 1e6**-0.34 + 54.2 * twice**-0.28)
    assert bits_per_byte(1e9, 1e6, 1e6) == bits_per_byte(own_text.PARAMETERS_PER_BYTE * 1e6, 1e6, 1e6)
    brought = dict(own_text.more(1e6, 1e6, 2e6, 2.0))
    assert all(value <= 2.0 for value in brought.values()) and "ten times the time" not in brought  # learned by heart
    assert brought["ten times the text and the time"] < brought["twice the time"]


def test_a_text_is_read_less_often_by_a_model_that_can_learn_it_by_heart() -> None:
    assert most_readings(4e6, 1e6) == most_readings(1e6, 1e6) == 5 and most_readings(1e6, 4e6) == 10
    assert most_readings(1e6, 1e5) == most_readings(1e6, 1e4) == 10
    shallow, deep = (replace(RECIPE, depth=depth) for depth in (2, 4))
    assert most_readings(parameters_of(shallow, 8192), 1e7) > 1.5 * most_readings(parameters_of(deep, 8192), 1e7)


def speed(peak_flops: float, device: str = "cpu") -> float:
    """Two threads, or one GPU."""
    machine = SimpleNamespace(device=SimpleNamespace(type=device), threads=2)
    mesh = SimpleNamespace(world=SimpleNamespace(size=1))
    return fitted.training_speed(cast(Any, SimpleNamespace(machine=machine, mesh=mesh)), peak_flops)


def test_the_speed_of_training_is_that_of_three_cpus_about() -> None:
    """Measured: half of a usual CPU's matrix products, two thirds of a slow one's, a fifth of an AMX unit's."""
    for peak_flops, reached in ((0.43e12, 0.28e12), (0.9e12, 0.45e12), (2.5e12, 0.53e12)):
        assert speed(peak_flops) == pytest.approx(reached, rel=0.17)
    assert speed(1e15, "cuda") == 0.5e15


def test_more_time_and_more_text_make_a_deeper_model() -> None:
    depths = [best_depth(RECIPE, 2048, 1e7, 3.2, flops) for flops in (1e11, 1e13, 1e15, 1e17)]
    assert depths == sorted(depths) and depths[0] == 2 and depths[-1] == 4
    assert best_depth(RECIPE, 2048, 1e5, 3.2, 1e15) < best_depth(RECIPE, 2048, 1e7, 3.2, 1e15)
    for vocabulary_size, text_bytes, bytes_per_token in ((8192, 6.2e7, 3.58), (4096, 1.56e7, 3.64)):  # as measured
        assert best_depth(RECIPE, vocabulary_size, text_bytes, bytes_per_token, 600 * speed(0.9e12)) == 3
    little, enough = (expectation(1e6, size, 1e6, untrained=4) for size in (5e4, 1e6))
    assert "warning: the model will repeat so little text" in little[-1] and len(enough) == 2
    assert "about 5.2 bits per byte" in expectation(1e5, 2.5e3, 2e4, untrained=5.2)[1]  # the law alone says 6.5


def test_a_text_that_is_missing_or_too_short_is_refused_at_once_and_leaves_no_run(
    here: Path, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.txt").write_text("this is thirty three bytes of tx\n", encoding="utf-8")
    flags = f"--data {tmp_path}/tiny.txt --out {tmp_path}/out --no-compile --dtype fp32 --threads 1".split()
    monkeypatch.setattr("quern.machine.detect", None)  # refused before the compiler is tried, which takes seconds
    for verb in ("run", "pretrain"):
        for data, expected in (("none.txt", "there is no such file, folder or"), ("", "data is empty: name a")):
            assert expected in told(verb, "--data", data, *flags[2:], code=1)
        said = told(verb, *flags, code=1).splitlines()[-1]
        assert said.startswith(f"quern {verb}: the text has 33 bytes: training needs 2,000 at least, about a page, and")
    assert not list((tmp_path / "out").rglob("*.json"))


def test_after_a_text_from_standard_input_the_next_command_names_its_file_and_so_does_every_arm(
    tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"The miller has {number} sacks.\n" for number in range(400))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    flags = f"--data - --out {tmp_path} --text.vocab-size 300 --workers 1".split()
    following = told("prepare", *flags).splitlines()[-1]
    found = re.fullmatch(rf"next: `quern pretrain --data (\S+) {' '.join(flags[2:])}`", following)
    assert found and Path(found[1]).read_text(encoding="utf-8") == text
    for arm in ("gpt", "llama"):  # of a study: all of them read it
        options, _ = lab._options(CompareOptions, "lab compare", Arguments(flags[:4]), "", load_recipe(arm))
        assert options.recipe.data == found[1]


def test_size_and_time_follow_from_the_text_where_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted, "measure_peak_flops", lambda machine: 1e12)
    world = SimpleNamespace(size=2, broadcast_object=lambda value: value)
    machine = SimpleNamespace(device=SimpleNamespace(type="cuda"))

    def session(*named: str, source: str | None = None) -> Any:
        mesh = SimpleNamespace(tp=1, dp=1, world=world)
        return SimpleNamespace(named=named, source=source, mesh=mesh, machine=machine, log=said.append)

    said: list[str] = []
    tokenizer, train = SimpleNamespace(vocab_size=1024), SimpleNamespace(num_tokens=100_000)
    prepared: Any = SimpleNamespace(tokenizer=tokenizer, train=train, bytes_per_token=3.0)
    left = fitted.fit_time(RECIPE, session(), 0.3)
    assert left.train.minutes == own_text.MINUTES and left.text.vocab_size == vocabulary(0.3)
    for closed in (session("train.horizon_ratio"), session("depth"), session(source="recipe.py")):
        assert fitted.fit_time(RECIPE, closed, 0.3).train.minutes is None
    assert fitted.fit_time(llama.RECIPE, session(), 0.3).train.minutes == own_text.MINUTES, "as --for ollama takes"
    short = replace(RECIPE, train=replace(RECIPE.train, steps=6))
    assert fitted.fit_time(short, session(), 0.3).train == short.train, "a length that code asks for counts, too"
    flops = fitted.TYPICAL_MFU * 2e12 * 60 * own_text.MINUTES
    deeper = replace(left, depth=best_depth(left, 1024, 3e5, 3.0, flops))
    assert fitted.fit_depth(left, session(), prepared) == deeper
    assert fitted.fit_depth(left, session("depth"), prepared) is left
    timed = replace(left, train=replace(left.train, steps=1000, batch_tokens=8192))
    most = int(100_000 * most_readings(parameters_of(timed, 1024), 3e5))
    fewer = fitted.fit_readings(timed, session(), prepared).train
    assert (fewer.steps, fewer.batch_tokens, fewer.minutes) == (most // 4096, 4096, None)  # a short run's batch
    asked = fitted.fit_readings(timed, session("train.batch_tokens"), prepared).train
    assert (asked.steps, asked.batch_tokens) == (most // 8192, 8192)
    assert fitted.fit_readings(timed, session("train.minutes"), prepared) is timed
    assert resolve(short).train.batch_tokens == 32_768, "for a whole horizon"
    assert fitted.fit_batch(short, session(), prepared).train == replace(short.train, batch_tokens=4096)
    asked = replace(short, train=replace(short.train, batch_tokens=8192))
    assert fitted.fit_batch(asked, session(), prepared) is asked and fitted.fit_batch(left, session(), prepared) is left
    train.num_tokens = 10**9
    assert fitted.fit_batch(short, session(), prepared) is short
    assert ["fitted to 300 kB" in said[0], "learned by heart" in said[1], len(said)] == [True, True, 3]
    tokenizer.vocab_size = 50_257  # of a tokenizer that was there
    assert fitted.fit_depth(left, session(), prepared).depth == 2 < best_depth(left, 8192, 3e9, 3.0, flops)


def test_a_run_whose_validation_got_worse_says_when_it_was_best(tmp_path: Path) -> None:
    def told(*losses: float) -> list[str]:
        lines = ({"step": 9 * number, "val_loss": loss} for number, loss in enumerate(losses, 1))
        write_rows(tmp_path / "metrics.jsonl", lines)
        return past_its_best(tmp_path)

    (line,) = told(4.0, 3.0, 3.5)
    assert line.startswith("warning: the validation loss was lowest at step 18 (3.000)") and "about 18 steps" in line
    assert "or its rates were too high" in line  # as after --from: a text that was not read once is not known by heart
    assert told(4.0, 3.0, 3.05) == [] and told(4.0) == [] and told() == []
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "val_loss": null}\n{"val_loss": 2.0}\n')  # of a model that diverged; a damaged line
    assert past_its_best(tmp_path) == []


# What is held out -----------------------------------------------------------------------------------------------------


def split(texts: list[str], megabytes: float = 0.5) -> tuple[list[str], list[str]]:
    held_out = hold_out(lambda: iter(texts), megabytes)
    train, val = list(held_out("train")), list(held_out("val"))
    assert sum(map(len, [*train, *val])) == sum(map(len, texts))
    return train, val


def size(texts: list[str]) -> int:
    return len("".join(texts).encode())


@pytest.mark.parametrize(("count", "megabytes"), [(60, 0.01), (5000, 0.5)])
def test_a_large_corpus_holds_out_every_twentieth_document(count: int, megabytes: float) -> None:
    rng = random.Random(count)
    texts = [f"{i} " + "wörd " * rng.randint(50, 400) for i in range(count)]
    train, val = split(texts, megabytes)
    every = texts[10::20]
    assert val == [text for number, text in enumerate(every) if size(every[:number]) < megabytes * 1e6]
    assert set(train) == set(texts) - set(val)


def test_a_large_corpus_is_not_read_to_its_end() -> None:
    def texts() -> Iterator[str]:
        for index in range(10**6):
            assert index < 5200
            yield f"{index} " + "x" * 2000

    held_out = list(hold_out(texts, 0.5)("val"))
    assert held_out[0].startswith("10 ") and 0.5e6 <= size(held_out) < 0.51e6


@pytest.mark.parametrize(
    ("texts", "least", "most"),
    [
        *(([f"{i} " + "some words " * 3000 for i in range(count)], 0.09, 0.101) for count in (1, 3, 10)),
        ([f"note {i}\n" for i in range(200)], 512 / 1690, 520 / 1690),
        (["a longer note " * 200, "another note\n" * 200, "ok"], 492 / 5402, 600 / 5402),
    ],
)
def test_few_or_tiny_documents_hold_out_the_end_of_the_text(texts: list[str], least: float, most: float) -> None:
    train, val = split(texts)
    assert "".join([*train, *val]) == "".join(texts)
    assert least <= size(val) / size(texts) <= most


@pytest.mark.parametrize("odd", ["ok", "much " * 100_000])
def test_one_odd_document_among_25_is_not_all_that_validates(odd: str) -> None:
    texts = [f"{i} " + "some words " * 100 for i in range(25)]
    texts[10] = odd
    train, val = split(texts)
    share = size(val) / size(texts)
    assert 0.02 < share < 0.16 and size(val) >= 512 and size(train) > size(val)
    assert "".join([*train, *val]) == "".join(texts)


@pytest.mark.parametrize("text", ["ab", "x" * 100, "世" * 400, "one two", "a\nb\nc\nd"])
def test_hardly_any_text_keeps_most_of_it_for_training(text: str) -> None:
    (train,), (val,) = split([text])
    assert train + val == text and len(train) >= len(val) >= 1


def test_it_is_at_most_what_was_asked_for() -> None:
    _, val = split(["some words " * 1000], megabytes=0.0001)
    assert 90 <= size(val) <= 100
