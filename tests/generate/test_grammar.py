"""Replies in a given form: whatever an untrained model would say, the text has the form and ends in time.

The oracle is jsonschema-rs for schemas, Python's `re` for expressions.
"""

import json
import re
import resource
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from quern import process
from quern.generate import grammar
from quern.generate.grammar import Grammar, Grammars
from quern.generate.reply import Reply
from quern.generate.sampling import Sampling
from quern.text.chat import render_prompt
from quern.text.tokenizer import Tokenizer
from tests.support.toy_engine import toy_engine, toy_tokenizer

TOKENIZER = toy_tokenizer()
END = TOKENIZER.special("<|assistant_end|>")
ROOM = 400
NODE = {"type": "object", "properties": {"child": {"$ref": "#/$defs/n"}, "v": {"type": "number"}}, "required": ["v"]}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "any": {},
    "object": {"type": "object"},
    "person": PERSON,
    "recursive": {"$defs": {"n": NODE}, "$ref": "#/$defs/n"},
    "pattern": {"type": "string", "pattern": "^[}]+x$"},
    "long": {"type": "string", "minLength": 9, "maxLength": 12},
    "booleans": {"type": "array", "items": {"type": "boolean"}, "minItems": 3},
    "date": {"type": "string", "format": "date-time"},
    "range": {"type": "integer", "minimum": 1000, "maximum": 2000},
    "either": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"ä ö": {"const": "x y"}}}]},
}


PATTERNS = [{"type": "string", "pattern": f"a.{{{number}}}b"} for number in range(1, 30)]


@cache
def grammars() -> Grammars:
    return Grammars(TOKENIZER)


def walk(form: Grammar, room: int, seed: int, tokenizer: Tokenizer = TOKENIZER) -> tuple[str, bool]:
    """A reply of a model that finds every allowed token equally likely; whether it ended by itself."""
    end = tokenizer.special("<|assistant_end|>")
    random, constraint, ids = np.random.default_rng(seed), form.start(end), []
    while len(ids) < room:
        allowed_V = constraint.allowed()
        token = constraint.choose(int(random.choice(np.flatnonzero(allowed_V))), room - len(ids))
        if token == end:
            return tokenizer.decode_bytes(ids).decode("utf-8"), True
        constraint.push(token)
        assert not constraint.failed
        ids.append(token)
    return tokenizer.decode_bytes(ids).decode("utf-8", "replace"), False


def read(text: str) -> Any:
    """JSON with every fraction as 0.5: 7E457 is a number of JSON, but none of Python's."""
    return json.loads(text, parse_float=lambda _: 0.5)


@pytest.mark.parametrize("name", SCHEMAS)
def test_json_fits_its_schema_and_ends_in_time(name: str) -> None:
    form = grammars().json(SCHEMAS[name])
    least = form.shortest(ROOM)
    assert least is not None and form.shortest(least) == least and form.shortest(least - 1) is None
    check = jsonschema_rs.validator_for(SCHEMAS[name])
    for seed in range(12):
        text, ended = walk(form, least + 7 * seed, seed)
        assert ended, text
        check.validate(read(text))
    assert walk(form, 120, 1) == walk(grammars().json(SCHEMAS[name]), 120, 1)


def test_an_item_is_not_begun_that_no_longer_fits() -> None:
    """The shortest list is [], and one object takes 94 tokens."""
    record = {"type": "object", "properties": {f"field{n}": {"type": "string"} for n in range(10)}}
    record |= {"required": [*record["properties"]], "additionalProperties": False}
    form = grammars().json({"type": "array", "items": record})
    for room in (40, 80, 100, 120):
        for seed in range(3):
            text, ended = walk(form, room, seed)
            assert ended and isinstance(json.loads(text), list)


def test_a_text_of_long_tokens_fits() -> None:
    own = Grammars(Tokenizer.train(["contradiction classification " * 50], 300))
    word = max(own.tokenizer.merges, key=len).decode()
    assert len(word) > 8 and own.choice([word]).shortest(2) == 2


EXPRESSIONS = [r"[a-z]*[0-9]{3}", r"(ab)*c", r"[A-Z][a-z]+ [0-9]+ (mills|stones)\.", r"é+ü", "[ab]{20}", "[ACGT]{60}"]


@pytest.mark.parametrize("pattern", EXPRESSIONS)
def test_text_that_an_expression_matches(pattern: str) -> None:
    form = grammars().regex(pattern)
    least = form.shortest(ROOM)
    assert least is not None
    for seed in range(12):
        text, ended = walk(form, least + 6 * seed, seed)
        assert ended and re.fullmatch(pattern, text), text


def test_one_of_several_texts() -> None:
    texts = ["yes", "no\n", 'ü"x\\', "👋🏽 no", "<|bos|>"]
    form = grammars().choice(texts)
    assert {walk(form, 40, seed)[0] for seed in range(60)} == set(texts)


def deep() -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: grammars().json({"type": "strin"}), "Invalid type: strin"),
        (lambda: grammars().json({"$ref": "#/none"}), "does not exist"),
        (lambda: grammars().json({"not": {"type": "string"}}), "not"),
        (lambda: grammars().json(deep()), "maximum recursion depth"),
        (lambda: grammars().json({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "overlap: use anyOf$"),
        (lambda: grammars().regex("(a|b"), "unclosed group"),
        (lambda: grammars().regex("(?=x)"), "look-around"),
        (lambda: grammars().regex("a\ud800b"), "surrogates not allowed"),
        (lambda: grammars().calls({"f": deep()}), "maximum recursion depth"),
        (lambda: grammars().choice(["x" * 70_000]), "65,536 at most"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(make: Any, words: str) -> None:
    with pytest.raises((ValueError, RecursionError), match=words):
        make()


def test_one_process_tries_out_the_schemas_until_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[str](), process.start

    def counted(module: str, *others: Any) -> Any:
        started.append(module)
        return start(module, *others)

    monkeypatch.setattr(process, "start", counted)
    forms = Grammars(TOKENIZER)
    for most in range(8):
        forms.json({"type": "integer", "maximum": most})
        with pytest.raises(ValueError, match="Invalid type"):
            forms.json({"type": f"strin{most}"})
    assert len(started) == 1
    with pytest.raises(ValueError, match="too long to compile"):
        forms.calls({"f": {"allOf": PATTERNS}})  # hours, and all memory
    forms.json({"type": "integer", "maximum": 8})
    assert len(started) == 2


def test_a_form_is_asked_for_while_a_reply_of_it_is_computed() -> None:
    """Another thread reads the next request; the matcher of a reply may be asked by one thread at a time."""
    grammars = large_vocabulary()
    constraint = grammars.json(PERSON).start(grammars.tokenizer.special("<|assistant_end|>"))
    ended = threading.Event()

    def compute() -> None:
        for _ in range(1000):
            constraint.allowed()
        ended.set()

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        while not ended.is_set():
            grammars.json(PERSON).shortest(100)
    finally:
        thread.join()


def test_an_untrained_model_answers_in_json() -> None:
    """Every row of one batch has its own form or none; rows without one are the same as alone."""
    engine = toy_engine(context=256)
    prompt = render_prompt(TOKENIZER, [{"role": "user", "content": "Who?"}])
    forms = [grammars().json(SCHEMAS[name]) for name in ("person", "recursive", "date")]
    [[alone]] = toy_engine(context=256).generate([prompt], max_tokens=60, seed=3)
    open_ones = [engine.submit([prompt], max_tokens=90, seed=seed, form=forms[seed]) for seed in range(3)]
    [[beside]] = engine.generate([prompt], max_tokens=60, seed=3)
    assert beside == alone
    while any(one.unfinished for one in open_ones):
        engine.step()
    for one, name in zip(open_ones, ("person", "recursive", "date"), strict=True):
        reply = one.events[-1].value
        assert not isinstance(reply, tuple) and reply.finish_reason == "stop"
        jsonschema_rs.validator_for(SCHEMAS[name]).validate(read(reply.text))
    [[greedy]] = engine.generate([prompt], max_tokens=90, sampling=Sampling(0), form=forms[0])
    jsonschema_rs.validator_for(PERSON).validate(read(greedy.text))
    with pytest.raises(ValueError, match="ends within 12 tokens"):
        engine.submit([prompt], max_tokens=12, form=forms[0])


@cache
def large_vocabulary() -> Grammars:
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("etaoinshrdlu"), size)) for size in random.integers(2, 9, 3000)]
    return Grammars(Tokenizer.train([" ".join(random.choice(words, 60_000)) + '{":, 0."}'], 3000))


TEN_STRINGS = {f"p{number}": {"type": "string", "minLength": 8} for number in range(10)}
COSTLY = {
    "ten stars": lambda grammars: grammars.regex(".*.*.*.*.*.*.*.*.*.*=.*"),
    "ten strings": lambda grammars: grammars.json(
        {"type": "object", "properties": TEN_STRINGS, "required": [*TEN_STRINGS], "additionalProperties": False}
    ),
    "words": lambda grammars: grammars.regex(r"(\w+ ){3,20}\w+\."),
}


@pytest.mark.parametrize("make", COSTLY.values(), ids=COSTLY)
def test_no_form_takes_the_engine_for_long(make: Callable[[Grammars], Grammar]) -> None:
    """The searches of ten stars took 24 s for one reply of 200 tokens."""
    grammars, start = large_vocabulary(), time.process_time()
    walk(make(grammars), 150, 1, grammars.tokenizer)
    assert time.process_time() - start < 2


def test_a_long_forced_text_takes_little_time_and_memory() -> None:
    """Each took half a second, in which no other thread ran, and 80 MB, of which the cache could keep 64."""
    own, start, before = Grammars(TOKENIZER), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for more in range(4):
        assert own.regex(f"a{{{10**6 + more}}}").shortest(40) is None
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 1e8
    assert time.process_time() - start < 1


def test_a_form_that_its_replies_have_worn_out_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replies of a form share the states of its automaton, whose number has a limit."""
    monkeypatch.setattr(grammar, "MOST_STATES", 1000)
    own, random = Grammars(TOKENIZER), np.random.default_rng(0)
    other = own.regex("x")

    def fails() -> bool:
        constraint = own.regex("[ab]*a[ab]{18}").start(END)
        for _ in range(60):
            allowed_V = constraint.allowed()
            allowed_V[END] = False
            if constraint.failed:
                return True
            constraint.push(int(random.choice(np.flatnonzero(allowed_V))))
        return constraint.failed

    early, late = own.regex("[ab]*a[ab]{18}").start(END), None
    for _ in range(3000):  # a reply that began before another one
        late = late or own.regex("[ab]*a[ab]{18}").start(END)
        allowed_V = early.allowed()
        if early.failed:
            break
        early.push(int(random.choice([token for token in np.flatnonzero(allowed_V) if token != END])))
    third = own.regex("[ab]*a[ab]{18}").start(END)
    third.allowed()
    assert early.failed and not third.failed
    found = [fails() for _ in range(20)]
    assert True in found and (True, True) not in zip(found, found[1:], strict=False)
    assert own.regex("x") is other, "other forms stay"


def test_requests_of_many_lengths_search_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 32 prompts of one request took 20 s, in which nothing else ran."""
    searches, search, form = list[int](), grammar._ending, grammars().choice(["x" * 60_000])
    monkeypatch.setattr(grammar, "_ending", lambda *given: searches.append(given[-1]) or search(*given))
    assert {form.shortest(room) for room in range(64, 32, -1)} == {None}
    short = grammars().choice(["yes"])
    assert [short.shortest(room) for room in (3, 9, 4, 5, 3)] == [None, 4, 4, 4, None]
    assert searches == [64, 3, 9]


def test_a_form_that_becomes_too_complex_ends_the_reply_with_an_error() -> None:
    """Whether a mask or a token finds that out: no end token may hide it."""
    grammars, letters = large_vocabulary(), "etaoinshrdlu"
    for seed in range(3):
        form = grammars.regex("|".join(f".*{letter}.{{40}}{letter}.*" for letter in letters))
        reply = Reply(grammars.tokenizer, 1, 60, form=form)
        random = np.random.default_rng(seed)
        while reply.finish_reason is None:
            allowed_V = reply.allowed()
            assert allowed_V is not None
            reply.push(reply.choose(int(random.choice(np.flatnonzero(allowed_V)))))
        assert reply.completion().finish_reason == "error"
