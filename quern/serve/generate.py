"""From a request to the job that answers it: prompts, limits, and the errors that they can have."""

import asyncio
import codecs
import math
import secrets
from collections.abc import Sequence
from typing import Any

from quern.generate.engine import Engine
from quern.generate.grammar import Grammar
from quern.generate.reply import Completion, Token
from quern.generate.rows import Event, Generation
from quern.serve.answers import UNKNOWN, Chat, Text
from quern.serve.models import Model
from quern.serve.requests.errors import ApiError, invalid
from quern.serve.requests.forms import NamedTool, Tool, calls_of, form_of
from quern.serve.requests.messages import ChatMessage, turns
from quern.serve.requests.schema import ChatRequest, CompletionRequest, TokenizeRequest, bound
from quern.text.chat import render_prompt, render_text
from quern.text.tokenizer import Tokenizer

DEFAULT_TEXT_TOKENS = 16
"""Tokens of a completion whose request does not say, as in OpenAI's API."""


async def chat(model: Model, request: ChatRequest) -> Chat:
    """Queues a chat. Raises ApiError if it cannot be served."""
    engine, worker = model.engine, model.worker
    prompt, options = await asyncio.to_thread(_read_chat, engine, request)
    top = request.top()
    logprobs = False if top is None else top
    job = worker.submit(lambda: engine.submit([prompt], logprobs=logprobs, **options), request.n or 1)
    return Chat(job, model.tokenizer, model.name, [prompt], request.n or 1, top is not None, calls="calls" in options)


def _read_chat(engine: Engine, request: ChatRequest) -> tuple[list[int], dict[str, Any]]:
    """The prompt of a chat, and the arguments of `Engine.submit`."""
    tokenizer, choice = engine.tokenizer, request.tool_choice
    tools = [] if choice == "none" else request.tools or []
    prompt = _chat_tokens(tokenizer, request.messages, tools)
    _require_room(prompt, engine.context, "messages")
    wanted = request.limit(engine.context)
    options: dict[str, Any] = {"max_tokens": wanted, **_options(engine, request, prompt, wanted)}
    if choice == "none":
        options["bias"][tokenizer.special("<|tool_start|>")] = -math.inf
    if tools or choice not in (None, "auto", "none"):
        calls = calls_of(engine.grammars, tools, choice)
        must_call = choice == "required" or isinstance(choice, NamedTool)
        if must_call:
            _require_ending(calls, min(wanted, engine.context - len(prompt)) - 1, "tools")
        options |= {"calls": calls, "must_call": must_call}
    return prompt, options


async def texts(model: Model, request: CompletionRequest) -> Text:
    """Queues the continuation of texts. Raises ApiError if it cannot be served."""
    engine, worker = model.engine, model.worker
    prompts = await asyncio.to_thread(_text_tokens, model.tokenizer, request.prompts())
    wanted = DEFAULT_TEXT_TOKENS if request.max_tokens is None else request.max_tokens
    for prompt in prompts:
        _require_room(prompt, engine.context + (wanted == 0), "prompt")
    shared = await asyncio.to_thread(_options, engine, request, max(prompts, key=len), wanted)
    options = shared | {"max_tokens": min(wanted, engine.context), "plain": True}
    logprobs = False if request.logprobs is None else request.logprobs
    sent = zip(prompts, request.prompts(), strict=True)
    echo = [await _echo(model, ids, logprobs, own != ids) for ids, own in sent] if request.echo else None

    def begin() -> Generation:
        if wanted:
            return engine.submit(prompts, logprobs=logprobs, **options)
        done = Generation(0)
        for number, prompt in enumerate(prompts):
            for sample in range(request.n or 1):
                done.events.append(Event(number, sample, Completion([], "", "length", [], len(prompt))))
        return done

    job = worker.submit(begin, len(prompts) * (request.n or 1))
    return Text(job, model.tokenizer, model.name, prompts, request.n or 1, logprobs is not False, echo=echo)


async def _echo(model: Model, prompt: Sequence[int], logprobs: bool | int, from_text: bool) -> tuple[str, list[Token]]:
    """The text of a prompt and, if they are asked for, its tokens' log-probabilities.

    The BOS in front of a text is no part of it; ids are echoed as they were sent. A part of the prompt is read between
    two tokens of the replies that are running.
    """
    tokenizer = model.tokenizer
    own = prompt[1:] if from_text else prompt
    scored: list[Token] = []
    if logprobs is not False:
        parts = model.engine.read(prompt, logprobs)
        while (part := await model.worker.call(lambda: next(parts, None))) is not None:
            scored += part
    if not from_text and logprobs is not False:  # nothing stands before its first token
        scored.insert(0, Token(prompt[0], UNKNOWN, [], 0))
    text, decoder, placed = "", codecs.getincrementaldecoder("utf-8")("replace"), []
    for token in scored:
        placed.append(token._replace(start=len(text)))
        text += decoder.decode(tokenizer.decode_bytes([token.id]))
    return tokenizer.decode(own), placed


def tokens_of(tokenizer: Tokenizer, request: TokenizeRequest) -> list[int]:
    """The tokens of a text or of a chat. Raises ApiError unless exactly one of them is given."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("Send either 'prompt' or 'messages'.", param="prompt", code="invalid_value")
    if request.messages is not None:
        return _chat_tokens(tokenizer, request.messages, request.tools or [])
    text = request.prompt or ""
    return tokenizer.encode(text) if request.add_special_tokens is False else render_text(tokenizer, text)


def require_tokens(tokenizer: Tokenizer, ids: Sequence[int], param: str) -> None:
    """Raises ApiError if an id is no token."""
    wrong = [token for token in ids if not 0 <= token < tokenizer.vocab_size]
    if wrong:
        raise invalid(param, f"{wrong[0]} is no token; ids are 0 to {tokenizer.vocab_size - 1}")


def _options(
    engine: Engine, request: ChatRequest | CompletionRequest, longest: Sequence[int], wanted: int
) -> dict[str, Any]:
    """The arguments of `Engine.submit` that both kinds of requests have.

    longest: the longest prompt; wanted: the most tokens of a reply.
    """
    tokenizer = engine.tokenizer
    form = None
    if bound(request) and wanted:
        form, param = form_of(engine.grammars, request.response_format, request.structured_outputs)
        _require_ending(form, min(wanted, engine.context - len(longest)), param)
    bias = request.bias()
    require_tokens(tokenizer, list(bias), "logit_bias")
    require_tokens(tokenizer, request.stop_token_ids or [], "stop_token_ids")
    return {
        "samples": request.n or 1,
        "sampling": request.sampling,
        "seed": secrets.randbits(63) if request.seed is None else request.seed,
        "stop": request.stops(),
        "stop_ids": request.stop_token_ids or [],
        "bias": bias,
        "form": form,
    }


def _require_ending(form: Grammar, room: int, param: str) -> None:
    """Raises ApiError unless a text of the form that ends within `room` tokens is found."""
    if form.shortest(room) is None:
        raise invalid(param, f"no such text that ends within {room} tokens was found: allow more, or demand less")


def _chat_tokens(tokenizer: Tokenizer, messages: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[int]:
    try:
        return render_prompt(tokenizer, turns(messages, tools))
    except (ValueError, RecursionError) as error:
        raise invalid("messages", error) from None


def _text_tokens(tokenizer: Tokenizer, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    """Token ids of each prompt. Ids are taken as they are; a text is the beginning of a document."""
    found = []
    for prompt in prompts:
        if not isinstance(prompt, str):
            require_tokens(tokenizer, prompt, "prompt")
        found.append(render_text(tokenizer, prompt) if isinstance(prompt, str) else prompt)
    return found


def _require_room(prompt: Sequence[int], context: int, param: str) -> None:
    if len(prompt) >= context:
        raise ApiError(
            f"This model's context holds {context} tokens; '{param}' already takes {len(prompt)}: shorten it.",
            param=param,
            code="context_length_exceeded",
            extra={"n_prompt_tokens": len(prompt), "n_ctx": context},
        )
