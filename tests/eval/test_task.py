"""Tasks through the real engine with a small random model: generated answers, choices by their losses. Questions that
share a passage with the training text."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from quern.eval.likelihood import choice_example, score_examples
from quern.eval.run_task import run_task
from quern.eval.task import TINYWORLD, Item, Task, contains_answer, find_contaminated, question
from quern.generate.engine import Engine
from quern.generate.sampling import GREEDY
from quern.text.chat import render_prompt, render_text
from quern.text.clean.steps import SHORTEST, WORDS
from quern.text.tinyworld.corpus import QUESTION_KINDS
from tests.support.gguf_run import log_probabilities
from tests.support.tiny_model import CPU, tiny_model, tiny_tokenizer

CONTEXT = 320


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = tiny_tokenizer()
    return Engine(tiny_model(tokenizer.vocab_size, CONTEXT), tokenizer, CPU)


def short(item: Item, reply: str) -> bool:
    """A grade that depends on every character of the reply and on the item."""
    return (sum(map(ord, reply)) + len(item.answer)) % 2 == 0


def asked(count: int = 5, *kinds: str) -> list[Item]:
    return [item for item in TINYWORLD.items(3, count) if item.kind in (kinds or ("facts", "sums"))]


def toy(items: list[Item], max_tokens: int = 12) -> Task:
    return Task("toy", lambda seed, count: items, short, max_tokens=max_tokens)


def test_scores_follow_the_grades_and_the_kinds(engine):
    scores, replies = run_task(engine, toy(asked()))
    assert [score.task for score in scores] == ["toy/facts", "toy/sums"]
    assert [reply.item for reply in replies] == asked()
    prompts = [render_prompt(engine.tokenizer, item.messages) for item in asked()]
    greedy = engine.generate(prompts, max_tokens=12, sampling=GREEDY)
    assert [reply.text for reply in replies] == [one.text for (one,) in greedy]
    for score, own in zip(scores, (replies[:5], replies[5:]), strict=True):
        assert [reply.correct for reply in own] == [short(reply.item, reply.text) for reply in own]
        assert score.value == sum(reply.correct for reply in own) / 5
        assert (score.count, score.bos, score.shots) == (5, True, 0)
        assert score.low is not None and score.value is not None and score.high is not None
        assert score.low <= score.value <= score.high
    assert scores[0].prompt_hash != scores[1].prompt_hash
    mean = np.mean([item.chance for item in asked()[:5]])
    assert scores[0].chance == pytest.approx(mean, rel=1e-15)  # Python rounds a sum once from 3.12 on
    with pytest.raises(ValueError, match="no questions"):
        run_task(engine, toy([]))
    [score], _ = run_task(engine, replace(toy([]), items=lambda seed, count: iter(asked(2, "facts"))))
    assert score.count == 2, "a generator is read once"


def test_a_base_reply_ends_where_the_task_says(engine):
    prompts = [render_text(engine.tokenizer, f"Question: {item.messages[0]['content']}\nAnswer:") for item in asked()]
    greedy = engine.generate(prompts, max_tokens=12, sampling=GREEDY, stop=("\n",), plain=True)
    replies = [reply.text for reply in run_task(engine, toy(asked()), base=True)[1]]
    assert replies == [one.text for (one,) in greedy]
    whole = max(replies, key=len)
    stop = whole[len(whole) // 2 :][:2]
    task = replace(toy(asked()), base_stop=(stop,))
    assert whole[: whole.index(stop)] in [reply.text for reply in run_task(engine, task, base=True)[1]]
    assert task.base_stop != Task.base_stop == ("\n",)


def test_tinyworld_asks_every_kind_the_same_way_every_time(engine):
    task = replace(TINYWORLD, max_tokens=4)
    scores, replies = run_task(engine, task, count=2)
    assert [score.task for score in scores] == [f"tinyworld/{kind}" for kind in QUESTION_KINDS]
    assert all(score.count == 2 and score.prompt_hash for score in scores)
    assert run_task(engine, task, count=2) == (scores, replies)
    other, _ = run_task(engine, toy(TINYWORLD.items(2, 2)[:2], max_tokens=4))  # type: ignore[arg-type]
    assert other[0].prompt_hash != scores[0].prompt_hash


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("choices", [("A", "B", "C", "D"), ("corn", "the miller of the valley", "B"), ("日本語", "B")])
def test_the_choice_picked_has_the_least_loss_per_byte(engine, base, choices):
    items = [question(f"Which of the {number}?", "B", choices) for number in range(6)]
    [score], replies = run_task(engine, replace(TINYWORLD, items=lambda seed, count: items), base=base)
    assert score.chance == pytest.approx(1 / len(choices))
    tokenizer = engine.tokenizer
    for item, reply in zip(items, replies, strict=True):
        own = render_text(tokenizer, TINYWORLD.base_prompt(item)) if base else render_prompt(tokenizer, item.messages)
        ids = [tokenizer.encode(" " * base + choice) for choice in choices]
        examples = [made for one in ids if (made := choice_example(own, [one], 0, CONTEXT)) is not None]
        answers = score_examples(engine.model, examples, CPU, tokenizer.vocab_size)
        nats = np.concatenate([one.nats(example) for one, example in zip(answers, examples, strict=True)])
        assert reply.text == choices[int(np.argmin(nats / np.array([len(choice.encode()) for choice in choices])))]
        assert reply.correct == (reply.text == "B")
    assert score.value == sum(reply.text == "B" for reply in replies) / 6


def test_an_item_with_an_option_that_is_longer_than_the_context_is_left_out(engine):
    items = [question("Which?", "a", ("a", "b")), question("Which?", "a", ("a", "b" * 2000))]
    [score], _ = run_task(engine, toy(items))
    assert (score.count, score.skipped) == (1, 1)


def test_items_that_contradict_each_other_are_refused(engine):
    with pytest.raises(ValueError, match="give them different kinds"):
        run_task(engine, toy([question("Who?", "a"), question("Who?", "a", ("a", "b"))]))
    with pytest.raises(ValueError, match="'c' is not one of a, b"):
        run_task(engine, toy([question("Who?", "c", ("a", "b"))]))
    with pytest.raises(ValueError, match="toy/questions: a choice of the item with the answer 'a' is empty"):
        run_task(engine, toy([question("Who?", "a", ("a", ""))]))


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        ({"items": lambda seed, count: 1 / 0}, r"items\(\) OF ZeroDivisionError: .*; correct it and evaluate again$"),
        (
            {"items": lambda seed, count: [Item("k", [{"role": "assistant", "content": ""}], "")]},
            r"items\(\) OF ValueError: message 1",
        ),
        ({"grade": lambda item, reply: {}["x"]}, r"grade\(\) OF KeyError: 'x'"),
        ({"grade_all": lambda items, replies: []}, r"grade_all\(\) of task 'toy' gave 0 grades for 1 reply: "),
        ({"grade_all": lambda items, replies: [1.0] * 9}, r"grade_all\(\) of task 'toy' gave 9 grades for 1 reply: "),
        ({"base_prompt": lambda item: item.text}, r"base_prompt\(\) OF AttributeError: "),
    ],
)
def test_a_slip_in_a_file_of_a_task_is_named(engine, slip, message):
    broken = replace(toy([question("Who?", "a")]), **slip)
    with pytest.raises(ValueError, match=message.replace("OF", "of task 'toy' fails with")):
        run_task(engine, broken, base="base_prompt" in slip)


def test_an_answer_is_found_as_whole_words():
    paris = question("Where?", "Paris")
    for reply, right in (("It is paris.", True), ("Parish", False), ("", False), ("St-Paris!", True)):
        assert contains_answer(paris, reply) is right


BOS = 99
READ = 32


@pytest.fixture(scope="module")
def model():
    return tiny_model(100, READ)


def plain_nats(model, prompt, continuation) -> float:
    logprobs_TV = log_probabilities(model, [*prompt, *continuation][:-1])
    return -sum(float(logprobs_TV[at, id]) for at, id in enumerate(continuation, start=len(prompt) - 1))


def nats_of(model, asked: Sequence[tuple[list[int], Sequence[list[int]]]]) -> list[np.ndarray]:
    made = [choice_example(prompt, ids, 0, READ) for prompt, ids in asked]
    examples = [one for one in made if one is not None]
    answers = score_examples(model, examples, CPU, 100)
    return [answer.nats(example) for answer, example in zip(answers, examples, strict=True)]


def test_a_long_prompt_keeps_its_bos_and_its_end(model):
    prompt, continuations = [BOS, *range(60)], ([7, 8], [9], [1, 2, 3])
    measured = nats_of(model, [(prompt, continuations)])[0]
    for ids, nats in zip(continuations, measured, strict=True):
        cropped = [BOS, *prompt[-(READ - len(ids)) :]]
        assert len(cropped) + len(ids) == READ + 1
        assert nats == pytest.approx(plain_nats(model, cropped, ids), rel=2e-6)


def test_what_cannot_be_scored_is_refused(model):
    assert nats_of(model, [([BOS], [list(range(33))])]) == []
    assert nats_of(model, [([BOS], [list(range(32))])])[0] > 0
    for pair in (([], [[1]]), ([BOS], [[]])):
        with pytest.raises(ValueError, match="at least one token"):
            nats_of(model, [pair])


# Contamination ----------------------------------------------------------------------------------------------


WORD_LIST = [f"word{number}" for number in range(500)]
ONCE = " ".join(WORD_LIST[:WORDS])


def test_planted_passages_are_found_and_only_they() -> None:
    rng = random.Random(0)
    documents = [rng.choices(WORD_LIST, k=400) for _ in range(20)]
    asked = [rng.choices(WORD_LIST, k=30) for _ in range(40)]
    for number in range(40):
        same = WORDS - number % 4  # one word less is no passage
        if same >= WORDS - 1:
            at = rng.randrange(300)
            asked[number][5 : 5 + WORDS] = [*documents[number % 20][at : at + same], *["other"] * (number % 4)]
    found = find_contaminated([" ".join(words) for words in asked], (" ".join(words) for words in documents))
    assert [number for number, flag in enumerate(found) if flag] == list(range(0, 40, 4))


@pytest.mark.parametrize(
    ("text", "documents", "shared"),
    [
        ("How many legs does a spider have?", ["… HOW many legs, does a spider have! Eight."], True),
        ("How many legs does a spider have?", ["How many legs does a fly have?"], False),
        ("Who? Me.", ["who me who me who me"], False),
        ("", ["anything"], False),
        ("Ça va bien, 你好 世界 et toi aujourd'hui", ["ça va bien 你好 世界 et toi aujourd'hui encore"], True),
        (ONCE, [ONCE], True),
        (ONCE, [" ".join(WORD_LIST[:7]), " ".join(WORD_LIST[7:WORDS])], False),
    ],
)
def test_a_passage_or_a_short_question_is_in_one_document(text: str, documents: list[str], shared: bool) -> None:
    assert find_contaminated([text], documents) == [shared]
    assert SHORTEST <= WORDS
