"""The responses of the API, whole or as server-sent events: `Chat` for chats, `Text` for completions of texts.

Both are made from the events of a job. Log-probabilities are told for the tokens of the assistant's text, with the
chunk in which the text of a token begins. Their bytes, joined, are the text and the bytes that are not valid UTF-8.
OpenAI's lists of a completion also have the token that ended it: programs that score texts leave out the last entry.
"""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from quern.generate.reply import Completion, Delta, Event, Token
from quern.serve.schema import ApiError, failure
from quern.serve.worker import Job
from quern.text.tokenizer import Tokenizer

encode = json.JSONEncoder(allow_nan=False).encode
Front = tuple[str, Sequence[Token]]
"""The text that a choice begins with, such as an echoed prompt, and its scored tokens."""
NO_FRONT: Front = ("", ())
Piece = tuple[int, Delta | None, list[Token]]
"""A new piece of a choice: its index, the text or None for the end, and the tokens that begin in it."""


class JSON(Response):
    """A response in ASCII, which can carry any text of a client, including unpaired surrogates."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode(content).encode("ascii")


class EventStream(StreamingResponse):
    """Server-sent events of a job. The job ends with the response, even if no byte was sent."""

    def __init__(self, job: Job, content: AsyncIterator[str]):
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._job = job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._job.cancel()


class Choice:
    """One reply in the making. calls: tool parts are calls of the caller's tools, which are told complete; ends: the
    token that ends a text is told, without a `start`."""

    def __init__(self, calls: bool, front: Front = NO_FRONT, ends: bool = False) -> None:
        self._calls, self._ends = calls, ends
        self.front, self.tokens = front[0], list(front[1])
        self.completion: Completion | None = None
        self.kinds: list[str] = []  # kinds of the parts that a chat's stream has told
        self._waiting: list[Token] = []  # their text is still to come
        self._written = len(self.front)  # characters of text

    @property
    def text(self) -> str:
        return self.front + ("" if self.completion is None else self.completion.text)

    @property
    def finish_reason(self) -> str | None:
        return self.completion and self.completion.finish_reason

    def take(self, value: Delta | Token | Completion) -> tuple[Delta | None, list[Token]] | None:
        """Takes an event; returns the piece that it adds, if it adds one, and the tokens that begin in it."""
        if isinstance(value, Token):
            if value.start is not None:
                self._waiting.append(value._replace(start=len(self.front) + value.start))
            elif self._ends:
                self._waiting.append(value)
            return None
        if isinstance(value, Completion):
            if value.finish_reason == "error":
                raise ApiError("The form of the reply became too complex to follow: simplify its schema or expression.")
            self.completion = value
            # What a stop string cut off is not told; bytes that are no characters are.
            last = self._waiting[-1] if self._waiting and value.finish_reason == "stop" else None
            cut = last is not None and last.start is not None and value.ids[-1] == last.id
            return None, [] if cut else self._told(len(self._waiting))
        if value.kind == "tool" and self._calls:
            return None
        self._written += len(value.text) if value.kind == "text" else 0
        return value, self._told(sum(token.start < self._written for token in self._waiting if token.start is not None))

    @cached_property
    def called(self) -> list[dict[str, Any]]:
        """The finished reply's call of one of the caller's tools, if it ends with one."""
        if self.completion is None or self.finish_reason != "tool_calls":
            return []
        call = self.completion.parts[-1]["text"]  # {"name":"…","arguments":{…}}: numbers stay as the model wrote them
        name, _, arguments = call.removeprefix('{"name":"').removesuffix("}").partition('","arguments":')
        function = {"name": name, "arguments": arguments}
        return [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}]

    def _told(self, count: int) -> list[Token]:
        told, self._waiting = self._waiting[:count], self._waiting[count:]
        self.tokens += told
        return told


class Answer(ABC):
    """The response to one request: subclasses say how its choices look.

    samples: choices of each prompt; fronts: the `front` of the choices of each prompt.
    """

    whole_kind = chunk_kind = prefix = ""
    ends = False  # as in `Choice`

    def __init__(
        self,
        job: Job,
        prompts: Sequence[Sequence[int]],
        samples: int,
        logprobs: bool,
        calls: bool = False,
        fronts: Sequence[Front] | None = None,
    ) -> None:
        self.job, self.tokenizer, self.model = job, job.worker.tokenizer, job.worker.name
        self.prompts, self.samples, self.logprobs = prompts, samples, logprobs
        self.choices = [
            Choice(calls, front, self.ends) for front in fronts or [NO_FRONT] * len(prompts) for _ in range(samples)
        ]
        self._identifier, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())

    @abstractmethod
    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The content of the chunk before a choice's first piece, if there is one."""

    @abstractmethod
    def piece(self, choice: Choice, delta: Delta | None) -> dict[str, Any]:
        """The content of a chunk that adds a piece, or ends a choice."""

    @abstractmethod
    def content(self, choice: Choice) -> dict[str, Any]:
        """The content of a finished choice."""

    @abstractmethod
    def told(self, choice: Choice, tokens: Sequence[Token]) -> Any:
        """The log-probabilities of tokens of a choice."""

    def take(self, events: Sequence[Event]) -> list[Piece]:
        """Takes events; returns what they add. Neighbouring pieces of one kind become one."""
        made: list[Piece] = []
        last: dict[int, int] = {}
        for event in events:
            index = event.prompt * self.samples + event.sample
            if (added := self.choices[index].take(event.value)) is None:
                continue
            delta, tokens = added
            at = last.get(index, -1)
            old = made[at][1] if at >= 0 else None
            if delta is not None and old is not None and old.kind == delta.kind:
                made[at] = (index, Delta(old.kind, old.text + delta.text), made[at][2] + tokens)
            else:
                last[index] = len(made)
                made.append((index, delta, tokens))
        return made

    async def finish(self) -> None:
        """Takes all events of the job. Raises ApiError if it fails."""
        try:
            async for events in self.job.batches():
                self.take(events)
        except Exception as error:
            raise failure(error) from error

    async def whole(self) -> str:
        """The complete response as JSON. Raises ApiError if the job fails."""
        await self.finish()
        made = [partial(self._finished, index) for index in range(len(self.choices))]
        choices = [await self.job.worker.call(make) if self.logprobs else make() for make in made]
        rest = encode(self._head(self.whole_kind) | {"usage": self.usage()})
        return f'{rest[:-1]}, "choices": [{", ".join(choices)}]}}'

    def _finished(self, index: int) -> str:
        """A choice of the complete response as JSON."""
        choice = self.choices[index]
        told = self.told(choice, choice.tokens) if self.logprobs else None
        return encode(_choice(index, self.content(choice), told, choice.finish_reason))

    async def stream(self, include_usage: bool) -> AsyncIterator[str]:
        """The events of a stream; it always ends with [DONE], after an error event if the job failed."""
        usage = {"usage": None} if include_usage else {}
        head = encode(self._head(self.chunk_kind) | usage)[:-1]  # the chunks of a stream differ in their choice alone

        def chunk(index: int, content: dict[str, Any], tokens: Sequence[Token], finish_reason: str | None) -> str:
            told = self.told(self.choices[index], tokens) if self.logprobs and tokens else None
            return f'data: {head}, "choices": [{encode(_choice(index, content, told, finish_reason))}]}}\n\n'

        try:
            for index, choice in enumerate(self.choices):
                if (content := self.opening(choice)) is not None:
                    begin = partial(chunk, index, content, choice.tokens, None)
                    yield await self.job.worker.call(begin) if self.logprobs else begin()
            async for events in self.job.batches():
                written = ""
                for index, delta, tokens in self.take(events):
                    choice = self.choices[index]
                    ended = choice.finish_reason if delta is None else None
                    written += chunk(index, self.piece(choice, delta), tokens, ended)
                if written:
                    yield written
            if include_usage:
                yield server_sent({**self._head(self.chunk_kind), "choices": [], "usage": self.usage()})
        except Exception as error:
            yield server_sent(failure(error).body)
        yield "data: [DONE]\n\n"

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts, each counted once, and of all replies together; cached tokens of the first prompt."""
        read = sum(len(prompt) for prompt in self.prompts)
        done = [choice.completion for choice in self.choices if choice.completion is not None]
        written = sum(len(completion.ids) for completion in done)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": next((one.cached_tokens or 0 for one in done), 0)},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._identifier, "object": kind, "created": self.created, "model": self.model}


class Chat(Answer):
    """`/v1/chat/completions`."""

    whole_kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self, choice: Choice) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, choice: Choice, delta: Delta | None) -> dict[str, Any]:
        if delta is None:
            called = [{"index": number, **call} for number, call in enumerate(choice.called)]
            return {"delta": {"tool_calls": called} if called else {}}
        kinds = choice.kinds
        if kinds[-1:] != [delta.kind]:
            kinds.append(delta.kind)
        if delta.kind == "text":
            return {"delta": {"content": delta.text}}
        number = len(kinds) - kinds.count("text") - 1  # as of calls: OpenAI's clients join the pieces of one number
        return {"delta": {"parts": [{"index": number, "type": delta.kind, "text": delta.text}]}}

    def content(self, choice: Choice) -> dict[str, Any]:
        """The message; it has `parts` only if the calculator was called."""
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.called:
            message |= {"content": choice.text or None, "tool_calls": choice.called}
        elif choice.completion is not None and any(part["type"] != "text" for part in choice.completion.parts):
            message["parts"] = choice.completion.parts
        return {"message": message}

    def told(self, choice: Choice, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"content": _content(self.tokenizer, tokens), "refusal": None}


class Text(Answer):
    """`/v1/completions`."""

    whole_kind, chunk_kind, prefix, ends = "text_completion", "text_completion", "cmpl-", True

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return {"text": choice.front} if choice.front else None

    def piece(self, choice: Choice, delta: Delta | None) -> dict[str, Any]:
        return {"text": "" if delta is None else delta.text}

    def content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text}

    def told(self, choice: Choice, tokens: Sequence[Token]) -> dict[str, Any]:
        own = [token for token in tokens if token.start is not None]
        return {
            "tokens": [_spelled(self.tokenizer, token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {_spelled(self.tokenizer, id): value for id, value in reversed(token.top)} or None for token in tokens
            ],
            "text_offset": [len(choice.text) if token.start is None else token.start for token in tokens],
            "content": _content(self.tokenizer, own),  # as in a chat: OpenAI's shape has neither ids nor bytes
        }


@lru_cache(1 << 16)
def _spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token's text; its bytes in hexadecimal, as OpenAI writes them, if they are no whole characters."""
    own = tokenizer.decode_bytes([id])
    try:
        return own.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def _content(tokenizer: Tokenizer, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """Tokens with their likeliest alternatives: OpenAI's fields, and the tokens' ids."""

    def scored(id: int, logprob: float | None) -> dict[str, Any]:
        own = list(tokenizer.decode_bytes([id]))
        return {"token": _spelled(tokenizer, id), "logprob": logprob, "bytes": own, "id": id}

    return [
        {**scored(token.id, token.logprob), "top_logprobs": [scored(id, value) for id, value in token.top]}
        for token in tokens
    ]


def _choice(index: int, content: dict[str, Any], told: Any = None, finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": told, "finish_reason": finish_reason}


def server_sent(data: dict[str, Any]) -> str:
    return f"data: {encode(data)}\n\n"


def error_response(error: ApiError) -> Response:
    headers = {"retry-after": str(error.retry_after)} if error.status in (429, 503) else None
    return JSON(error.body, error.status, headers=headers)
