"""Served prompt = trained prompt: the same conversation as a row of a file and as a request to the server.

Fine-tuning reads a row from JSON lines or Parquet. The server reads the messages before a reply as a request for that
reply, as a chat, as `/v1/responses` and as `/tokenize`. Its prompt must be the beginning of the trained tokens, the
tokens that follow must be learned, and a call of a described tool must be one that the server's grammar lets through.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quern.generate.engine import Engine
from quern.mixture.prepare import prepare_mixture
from quern.recipe import Resolved
from quern.recipes.gpt import RECIPE
from quern.serve.prompts import calls_of, read_chat, tokens_of
from quern.serve.responses import ResponsesRequest
from quern.serve.schema import ChatRequest, TokenizeRequest, Tool, parse_request
from quern.text.hugging_face import CHAT_TEMPLATE, tokenizer_config, tokenizer_json
from tests.laws.table import Law
from tests.support.rows import write_rows
from tests.support.toy_engine import toy_engine

Row = dict[str, Any]

SYSTEM = {"role": "system", "content": "Antworte kurz."}
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
WEATHER = {"name": "weather", "description": "Das Wetter für eine Stadt: “sunny”, …", "parameters": CITY}
LINES = {"type": "array", "items": {"type": "object", "properties": {"name": {"type": "string"}}}}
NOTE = {"type": ["string", "null"], "default": None}
ORDERED = {"type": "object", "properties": {"lines": LINES, "note": NOTE}}
ORDER = {"name": "order", "strict": True, "parameters": ORDERED}
TOOLS = [{"type": "function", "function": one} for one in (WEATHER, ORDER, {"name": "now"})]


def said(role: str, content: Any) -> Row:
    return {"role": role, "content": content}


user, reply = partial(said, "user"), partial(said, "assistant")


def parts(*texts: str) -> list[Row]:
    return [{"type": "text", "text": text} for text in texts]


def calling(*calls: tuple[str, str, str], content: str | None = None) -> Row:
    """calls: (id, name, arguments)."""
    found = [{"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls]
    return {"role": "assistant", "content": content, "tool_calls": found}


def output(id: str, content: Any) -> Row:
    return {"role": "tool", "tool_call_id": id, "content": content}


def talk(*messages: Row, tools: Sequence[Row] = ()) -> Row:
    return {"messages": list(messages), **({"tools": list(tools)} if tools else {})}


KOELN = '{"city": "Köln", "days": 2}'
BREAD = '{ "lines": [ {"name": "Brot – 1 kg"}, {"name": "\\u00e4"} ], "note": null }'
CALCULATOR = {"type": "function", "function": {"name": "calculator", "parameters": EXPRESSION}}
CALCULATED = user("6*7?"), calling(("c", "calculator", '{"expression": "6*7"}')), output("c", "42")
TALKS: dict[str, Row] = {
    "held out": talk(user("first"), reply("one")),
    "two turns": talk(user("Hi"), reply("Grüße!"), user("?"), reply("你好")),
    "system": talk(SYSTEM, user("Hi"), reply("Ja.")),
    "developer": talk(said("developer", "Be brief."), user("Hi"), reply("Yes.")),
    "content in parts": talk(
        user(parts("What is 12", "3 + 456?")), reply(parts("It is 5", "79.")), user("So?"), reply("So.")
    ),
    "calculator without tools": talk(*CALCULATED, reply("It is 42.")),
    "calculator of the caller": talk(*CALCULATED, reply("It is 42, again."), tools=[CALCULATOR]),
    "ends in a letter of several tokens": talk(
        user("Hi"),
        calling(("n", "now", ""), content="好 ☀ 好"),
        output("n", parts("好", " ☀")),
        reply("好"),
        tools=TOOLS,
    ),
    "tools, and no call": talk(user("Hi"), reply("Hello."), tools=TOOLS),
    "system and a call": talk(
        SYSTEM,
        user("Wetter in Köln?"),
        calling(("a", "weather", KOELN), content="Moment."),
        output("a", "Sonne ☀"),
        reply("Sonnig."),
        user("Danke"),
        reply("Bitte."),
        tools=TOOLS,
    ),
    "calls answered in another order, twice": talk(
        user("Wetter?"),
        calling(("a", "weather", KOELN), ("b", "weather", '{"city":"Bonn"}'), ("n", "now", "")),
        output("n", "12:00"),
        output("b", "Regen"),
        output("a", "Sonne"),
        calling(("o", "order", BREAD)),
        output("o", "ok"),
        reply("Bestellt."),
        tools=TOOLS,
    ),
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return toy_engine(context=2048)


def trained(engine: Engine, path: Path, out: Path) -> list[tuple[list[int], np.ndarray]]:
    """The ids and the mask of each row of a file, as fine-tuning prepares them."""
    model = replace(RECIPE.model, context=engine.context)
    recipe = Resolved.of(RECIPE, conversations=str(path), data="texts/", model=model)
    mixture = prepare_mixture(recipe, engine.tokenizer, out, lambda asked: pytest.fail("fetched"), lambda line: None)
    found = []
    for corpus in (mixture.val, mixture.train):
        for document in range(corpus.num_documents):
            length = corpus.lengths[document : document + 1]
            mask = np.zeros(length[0], dtype=bool)
            corpus.copy(mask, np.zeros(1, np.int64), corpus.starts[document : document + 1], length, mask=True)
            found.append((corpus.gather(document).tolist(), mask))
    return found


def as_input(messages: list[Row]) -> list[Row]:
    """The messages as the input of /v1/responses."""
    items: list[Row] = []
    for message in messages:
        kind = {"user": "input_text", "assistant": "output_text"}.get(message["role"], "text")
        if message["role"] == "tool":
            call = message["tool_call_id"]
            items.append({"type": "function_call_output", "call_id": call, "output": message["content"]})
        elif isinstance(message["content"], list):
            items.append(said(message["role"], [part | {"type": kind} for part in message["content"]]))
        elif message["content"] is not None:
            items.append(said(message["role"], message["content"]))
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def served(engine: Engine, messages: list[Row], tools: list[Row]) -> dict[str, list[int]]:
    """The prompt for the reply to these messages, by the route of the request."""
    flat = [{"type": "function", **tool["function"]} for tool in tools]
    chat = parse_request(ChatRequest, {"model": "m", "messages": messages, "tools": tools})
    responses = parse_request(ResponsesRequest, {"model": "m", "input": as_input(messages), "tools": flat})
    counted = parse_request(TokenizeRequest, {"messages": messages, "tools": tools})
    found = {"chat": read_chat(engine, chat)[0], "responses": read_chat(engine, responses.chat())[0]}
    return found | {"tokenize": tokens_of(engine.tokenizer, counted)}


def require_callable(engine: Engine, ids: list[int], tools: list[Row]) -> None:
    """Asserts that the grammar of the tools allows the tokens of every call."""
    tokenizer = engine.tokenizer
    begin, end = tokenizer.special("<|tool_start|>"), tokenizer.special("<|tool_end|>")
    grammar = calls_of(engine.grammars, [Tool.model_validate(tool) for tool in tools], None)
    for at in (place for place, token in enumerate(ids) if token == begin):
        state = grammar.start(end)
        for token in ids[at + 1 : ids.index(end, at) + 1]:
            assert state.allowed()[token], tokenizer.decode(ids[at:])
            state.push(token)


def differing(engine: Engine, path: Path, out: Path) -> int:
    """The number of prompts of the server that are not the beginning of what is trained on."""
    wrong = 0
    for (ids, mask), row in zip(trained(engine, path, out), TALKS.values(), strict=True):
        messages, tools = row["messages"], row.get("tools", [])
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            for prompt in served(engine, messages[:at], tools).values():
                wrong += ids[: len(prompt)] != prompt or not mask[len(prompt)]
        last = messages[-1]["content"]
        reply = last if isinstance(last, str) else "".join(part["text"] for part in last)
        end = engine.tokenizer.special("<|assistant_end|>")
        wrong += ids[len(prompt) :] != [*engine.tokenizer.encode(reply), end]
        if tools:
            require_callable(engine, ids, tools)
    return wrong


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_served_prompt_is_the_trained_one(tmp_path: Path, engine: Engine, law: Law, ending: str) -> None:
    path = tmp_path / f"talks.{ending}"
    if ending == "jsonl":
        write_rows(path, TALKS.values())
    else:  # content in parts has another type than content, so Parquet holds one text
        rows = json.loads(json.dumps([{"tools": None, **row} for row in TALKS.values()]))
        for message in (one for row in rows for one in row["messages"] if isinstance(one["content"], list)):
            message["content"] = "".join(part["text"] for part in message["content"])
        for row in rows:
            row["tools"] = row["tools"] and json.dumps(row["tools"], indent=1)
        write_rows(path, rows)
    wrong = differing(engine, path, tmp_path / "out")
    law(f"served prompt = trained prompt: ids of conversations with tools, {ending} (prompts that differ)", wrong)


def test_the_exported_chat_template_gives_the_served_prompt_and_the_trained_mask(
    tmp_path: Path, engine: Engine, law: Law
) -> None:
    transformers = pytest.importorskip("transformers")
    made = pytest.importorskip("tokenizers").Tokenizer.from_str(json.dumps(tokenizer_json(engine.tokenizer)))
    settings = {**tokenizer_config(engine.tokenizer, 2048), "chat_template": CHAT_TEMPLATE}
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **settings)
    path = write_rows(tmp_path / "talks.jsonl", TALKS.values())
    learned = dict(zip(TALKS, trained(engine, path, tmp_path / "out"), strict=True))
    wrong = masks = 0
    for name, row in TALKS.items():
        if name == "calculator without tools":  # quern's own, which other programs cannot compute
            continue
        messages, tools = json.loads(json.dumps([row["messages"], row.get("tools", [])]))
        for tool in tools:
            tool["function"].pop("strict", None)
            tool["function"].get("parameters", {}).get("properties", {}).get("note", {}).pop("default", None)
        for call in (one for message in messages for one in message.get("tool_calls", ())):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        for at in (place for place, message in enumerate(messages) if message["role"] == "assistant"):
            prompt = served(engine, row["messages"][:at], row.get("tools", []))["chat"]
            how = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
            wrong += theirs.apply_chat_template(messages[:at], **how) != prompt
        whole = {"tools": tools, "return_dict": True, "return_assistant_tokens_mask": True}
        found, (ids, mask) = theirs.apply_chat_template(messages, **whole), learned[name]
        masks += found["input_ids"] != ids or found["assistant_masks"] != mask.astype(int).tolist()
        assert not mask[np.array(ids) == theirs.pad_token_id].any()
    law("mask of fine-tuning = exported chat template's in transformers (conversations that differ)", masks)
    law("served prompt = exported chat template in transformers: ids, with tools (prompts that differ)", wrong)
