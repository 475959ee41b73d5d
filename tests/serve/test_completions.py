"""Completions of texts, log-probabilities, tokenizing and metrics, as OpenAI's own client sees them."""

import json
from collections import defaultdict
from typing import Any

import openai
import pytest
import torch

from quern.generate.engine import Engine
from quern.generate.sampling import Sampling
from quern.serve.prompts import read_texts, tokens_of
from quern.serve.schema import ApiError, CompletionRequest, TokenizeRequest
from quern.text.chat import render_prompt, render_text
from quern.text.tokenizer import GPT2_SPLIT_PATTERN, Tokenizer
from tests.serve.conftest import CONTEXT, HELLO, NAME, NO_END, post
from tests.support.http_server import counters
from tests.support.toy_engine import CPU, toy_model, toy_tokenizer, toy_unet

TOKENIZER = toy_tokenizer()
TEXT = "The miller grinds"
FORMS: dict[str, Any] = {
    "text": TEXT,
    "texts": [TEXT, "What is 12?"],
    "ids": render_text(TOKENIZER, TEXT),
    "lists of ids": [render_text(TOKENIZER, TEXT), [5, 6, 7]],
}


def test_a_text_that_the_vocabulary_cannot_split_is_refused_by_name() -> None:
    tokenizer, text = Tokenizer(TOKENIZER.merges, GPT2_SPLIT_PATTERN), " " * 1_000_000 + "a"
    engine = Engine(toy_model(vocab_size=tokenizer.vocab_size), tokenizer, CPU)
    for read in (
        lambda: tokens_of(tokenizer, TokenizeRequest(prompt=text)),
        lambda: read_texts(engine, CompletionRequest(model=NAME, prompt=text)),
    ):
        with pytest.raises(ApiError, match="for 'prompt': .*(pattern cannot split a text|Max stack size exceeded)"):
            read()


def test_documents_that_a_model_hides_from_each_other_are_refused_together() -> None:
    """A cache shows the first to the second, which whole rows do not."""
    bos = TOKENIZER.bos
    engine = Engine(toy_unet(context=CONTEXT, vocab_size=TOKENIZER.vocab_size, bos=bos), TOKENIZER, CPU)
    assert not list(engine.read([]))
    two = [bos, 5, bos, 6]
    for read in (
        lambda prompt: engine.submit([prompt]),
        lambda prompt: next(engine.read(prompt)),
        lambda prompt: read_texts(engine, CompletionRequest(model=NAME, prompt=prompt)),
    ):
        read(two[:2])
        with pytest.raises((ValueError, ApiError), match="send them one by one"):
            read(two)


def ids_of(form: Any) -> list[list[int]]:
    prompts = [form] if isinstance(form, str) or isinstance(form[0], int) else form
    return [render_text(TOKENIZER, one) if isinstance(one, str) else one for one in prompts]


@pytest.mark.parametrize(
    ("form", "echo", "logprobs", "n"),
    [("text", False, None, 1), *((form, echo, 5, 2) for form in FORMS for echo in (False, True))],
)
def test_completions(client: openai.OpenAI, engine: Engine, form: str, echo: int, logprobs: int | None, n: int) -> None:
    """Every form: whole = streamed = the engine's; tokens and offsets spell the text."""
    prompts = ids_of(FORMS[form])
    body: dict[str, Any] = {"model": NAME, "prompt": FORMS[form], "max_tokens": 12, "seed": 3, "n": n}
    body |= {"temperature": 0.8, "echo": bool(echo)} | ({} if logprobs is None else {"logprobs": logprobs})
    answer: Any = client.completions.create(**body)
    options: dict[str, Any] = {"samples": n, "max_tokens": 12, "seed": 3, "sampling": Sampling(0.8), "plain": True}
    expected = engine.generate(prompts, **options, logprobs=0)
    front = [TOKENIZER.decode(ids[1:] if "text" in form else ids) if echo else "" for ids in prompts]
    wanted = [(front[p] + reply.text, reply.finish_reason) for p, replies in enumerate(expected) for reply in replies]
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == wanted
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(reply.ids) for replies in expected for reply in replies)
    texts, ends = [""] * len(wanted), [""] * len(wanted)
    tokens, offsets = defaultdict[int, list[str]](list), defaultdict[int, list[int]](list)
    for chunk in client.completions.create(**body, stream=True):
        for choice in chunk.choices:
            assert not ends[choice.index], "a piece after the end"
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ""
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
                offsets[choice.index] += choice.logprobs.text_offset or []
    assert list(zip(texts, ends, strict=True)) == wanted
    for choice in answer.choices:
        if logprobs is None:
            assert choice.logprobs is None
            continue
        told = choice.logprobs
        assert tokens[choice.index] == told.tokens and offsets[choice.index] == told.text_offset
        content: Any = told.content  # the same in a chat's shape, with ids
        inside = slice(-1 if choice.finish_reason == "stop" else None)  # the last one ends the text
        assert [one["logprob"] for one in content] == told.token_logprobs[inside]
        assert [one["token"] for one in content] == told.tokens[inside]
        for one in [*content, *(top for token in content for top in token["top_logprobs"])]:
            assert bytes(one["bytes"]) == TOKENIZER.decode_bytes([one["id"]])
        placed = list(zip(told.tokens, told.text_offset, strict=True))[inside]
        spelled = [(text, at) for text, at in placed if "bytes:" not in text]
        assert all(choice.text[at:].startswith(text) for text, at in spelled if "bytes:" not in "".join(told.tokens))
        for value, top in zip(told.token_logprobs, told.top_logprobs, strict=True):
            assert (value is None) == (top is None) and (top is None or 1 <= len(top) <= 5)
            assert value is None or (top is not None and value <= max(top.values()) + 1e-6)
        reply = expected[choice.index // n][choice.index % n]
        assert told.token_logprobs[-len(reply.ids) :] == pytest.approx(reply.logprobs, abs=1e-5)
        assert echo or len(told.tokens) == len(reply.ids)


def test_the_log_probabilities_of_a_prompt_are_the_models(client: openai.OpenAI, engine: Engine) -> None:
    """echo with max_tokens 0 scores a text. lm-evaluation-harness asks for one token and leaves out the last entry."""
    [ids] = ids_of(TEXT)

    def scored(prompt: Any, **more: Any) -> Any:
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, **more}
        return client.completions.create(model=NAME, **body).choices[0]

    answer = scored(ids)
    told = answer.logprobs
    assert answer.text == "<|bos|>" + TEXT and answer.finish_reason == "length"
    tokens_BT = torch.tensor([ids])
    with torch.no_grad():
        logits_TV = engine.model.logits(engine.model(tokens_BT, engine.model.context(tokens_BT))[0])
    plain = logits_TV[:-1, : TOKENIZER.vocab_size].log_softmax(-1).gather(1, tokens_BT[0, 1:, None])[:, 0].tolist()
    assert len(told.tokens) == len(ids) and told.token_logprobs[0] is None
    assert told.token_logprobs[1:] == pytest.approx(plain, abs=1e-5)
    parts = list(engine.read(ids, part=3))
    assert max(map(len, parts)) == 3 and [token.id for part in parts for token in part] == ids[1:]
    assert [token.logprob for part in parts for token in part] == pytest.approx(plain, abs=1e-5)
    assert "".join(told.tokens) == "<|bos|>" + TEXT
    as_text = scored(TEXT)
    assert as_text.text == TEXT and as_text.logprobs.tokens == told.tokens[1:]
    ended = scored(ids, max_tokens=1, logit_bias={TOKENIZER.bos: 100})
    assert ended.text == answer.text and ended.logprobs.tokens == [*told.tokens, "<|bos|>"]
    assert ended.logprobs.text_offset == [*told.text_offset, len(answer.text)]
    assert scored(ids[:4]).logprobs.token_logprobs == pytest.approx(told.token_logprobs[:4], abs=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_the_log_probabilities_of_a_chat_spell_its_text(client: openai.OpenAI, engine: Engine, seed: int) -> None:
    body: dict[str, Any] = {"model": NAME, "messages": HELLO, "seed": seed, "max_tokens": 30}
    body |= {"logprobs": True, "top_logprobs": 3, "stop": ["e"]}
    whole: Any = client.chat.completions.create(**body)
    [choice] = whole.choices
    told = choice.logprobs.content
    spelled = b"".join(bytes(token.bytes or []) for token in told).decode("utf-8", "ignore")
    assert spelled.startswith(choice.message.content or "") and len(told) > 2
    for token in told:
        assert len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob >= token.logprob - 1e-6
        assert token.token in (bytes(token.bytes or []).decode("utf-8", "ignore"), token.token)
    streamed = []
    for chunk in client.chat.completions.create(**body, stream=True):
        for one in chunk.choices:
            streamed += (one.logprobs.content or []) if one.logprobs is not None else []
    assert streamed == told
    [[reply]] = engine.generate([render_prompt(TOKENIZER, HELLO)], seed=seed, max_tokens=30, stop=["e"], logprobs=3)
    assert told[0].logprob == pytest.approx(reply.logprobs[0], abs=1e-5)


def test_bias_penalties_and_stop_tokens_reach_the_engine(client: openai.OpenAI) -> None:
    letter = TOKENIZER.encode("q")[0]

    def text(q: float, **more: Any) -> str:
        body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 20, "temperature": 0, "logit_bias": NO_END | {letter: q}}
        return client.completions.create(model=NAME, **body, **more).choices[0].text

    assert text(100) == "q" * 20 == text(100, frequency_penalty=2)
    assert text(8) == "q" * 20 != text(8, frequency_penalty=2)
    assert text(1, presence_penalty=2) != text(1) != text(1, extra_body={"repetition_penalty": 5.0})
    ask: dict[str, Any] = {"prompt": TEXT, "max_tokens": 20, "logit_bias": {str(letter): 100}}
    stopped = client.completions.create(model=NAME, **ask, extra_body={"stop_token_ids": [letter]})
    assert stopped.choices[0].finish_reason == "stop" and stopped.usage and stopped.usage.completion_tokens == 1


def test_tokenize_and_detokenize(url: str) -> None:
    text = "Grüße <|bos|> 👋🏽"
    ids, bare = render_text(TOKENIZER, text), TOKENIZER.encode(text)
    found = post(url, "/tokenize", {"prompt": text}).json()
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}
    assert post(url, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == bare
    assert post(url, "/detokenize", {"tokens": bare}).json() == {"prompt": text}
    assert post(url, "/tokenize", {"messages": HELLO}).json()["tokens"] == render_prompt(TOKENIZER, HELLO)


def test_metrics_and_the_prefix_cache(client: openai.OpenAI, url: str) -> None:
    """Counters move by what was asked; the second turn of a chat reads only what is new."""
    before = counters(url)
    messages: list[Any] = [{"role": "user", "content": "a question that nobody asked before, of some length"}]
    body: dict[str, Any] = {"model": NAME, "max_tokens": 5, "temperature": 0}
    turns: Any = [client.chat.completions.create(**body, messages=messages) for _ in range(2)]
    first, again = turns
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens
    assert again.choices == first.choices
    after = counters(url)
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == 2 * first.usage.prompt_tokens
    hits = "prefix_cache_hits_total"
    assert after[hits] - before[hits] == first.usage.prompt_tokens < after["prefix_cache_queries_total"]
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    assert generated == 2 * first.usage.completion_tokens
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert after[f"{name}_count"] - before[f"{name}_count"] == 2
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    client.completions.create(model=NAME, prompt="an echo alone", echo=True, max_tokens=0)
    looked_up = "prefix_cache_queries_total"
    assert counters(url)[looked_up] == after[looked_up]
    assert json.dumps(after)  # all finite
