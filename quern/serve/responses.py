"""`/v1/responses`, for text and calls of functions: the answer of its chat, in the shape of this path.

The server keeps no responses: a request brings its whole conversation, and `previous_response_id` is refused. Source:
https://platform.openai.com/docs/api-reference/responses and /responses-streaming.
"""

import uuid
from collections.abc import AsyncIterator
from typing import Any

from quern.generate.reply import Completion
from quern.serve.answers import Chat, as_api_error, encode, server_sent
from quern.serve.requests.responses import ResponsesRequest


class Responses:
    """The response to one request, made from the answer of its chat."""

    def __init__(self, request: ResponsesRequest, answer: Chat) -> None:
        self.job, self._request, self._answer = answer.job, request, answer
        self._id, self._message_id, self._call_id = (f"{kind}_{uuid.uuid4().hex}" for kind in ("resp", "msg", "fc"))

    async def whole(self) -> str:
        """The complete response as JSON. Raises ApiError if the job fails."""
        await self._answer.finish()
        return encode(self._body(self._finished()))

    async def stream(self) -> AsyncIterator[str]:
        """The events of a stream; the last one is response.completed, response.incomplete or response.failed."""
        number = -1

        def event(kind: str, **content: Any) -> str:
            nonlocal number
            number += 1
            return f"event: {kind}\n" + server_sent({"type": kind, "sequence_number": number, **content})

        place: dict[str, Any] = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        text = None
        try:
            started = self._body([], "in_progress")
            yield event("response.created", response=started) + event("response.in_progress", response=started)
            async for events in self.job.batches():
                for own in events:
                    delta, _ = self._answer.choices[0].take(own)
                    if delta is None or delta.kind != "text":
                        continue
                    if text is None:
                        text, item = "", self._message("", "in_progress")
                        yield event("response.output_item.added", output_index=0, item={**item, "content": []})
                        yield event("response.content_part.added", **place, part=item["content"][0])
                    text += delta.text
                    yield event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
            for index, item in enumerate(items := self._finished()):
                if item["type"] == "function_call":
                    where = {"item_id": self._call_id, "output_index": index}
                    begun = {**item, "arguments": "", "status": "in_progress"}
                    yield event("response.output_item.added", output_index=index, item=begun)
                    yield event("response.function_call_arguments.delta", **where, delta=item["arguments"])
                    yield event(
                        "response.function_call_arguments.done", **where, name=item["name"], arguments=item["arguments"]
                    )
                else:
                    if text is None:  # an empty reply
                        begun = {**item, "content": [], "status": "in_progress"}
                        yield event("response.output_item.added", output_index=0, item=begun)
                        yield event("response.content_part.added", **place, part=item["content"][0])
                    yield event("response.output_text.done", **place, text=item["content"][0]["text"], logprobs=[])
                    yield event("response.content_part.done", **place, part=item["content"][0])
                yield event("response.output_item.done", output_index=index, item=item)
            body = self._body(items)
            yield event(f"response.{body['status']}", response=body)
        except Exception as error:
            failed = {"code": "server_error", "message": as_api_error(error).body["error"]["message"]}
            yield event("response.failed", response=self._body([], "failed") | {"error": failed})

    def _finished(self) -> list[dict[str, Any]]:
        choice = self._answer.choices[0]
        calls = [
            {**call["function"], "type": "function_call", "id": self._call_id, "call_id": call["id"]}
            | {"status": "completed"}
            for call in choice.called
        ]
        status = "incomplete" if self._cut(choice.completion) else "completed"
        return ([self._message(choice.text, status)] if choice.text or not calls else []) + calls

    def _message(self, text: str, status: str) -> dict[str, Any]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "message", "id": self._message_id, "role": "assistant", "status": status, "content": [part]}

    @staticmethod
    def _cut(completion: Completion | None) -> bool:
        return completion is not None and completion.finish_reason == "length"

    def _body(self, output: list[dict[str, Any]], status: str | None = None) -> dict[str, Any]:
        request, completion = self._request, self._answer.choices[0].completion
        cut = self._cut(completion)
        usage = None
        if completion is not None:
            counts = self._answer.usage()
            usage = {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": counts["prompt_tokens_details"],
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            }
        given = request.model_dump(
            include={"instructions", "max_output_tokens", "metadata", "temperature", "top_p", "tools"}, by_alias=True
        )
        return {
            **given,
            "id": self._id,
            "object": "response",
            "created_at": self._answer.created,
            "model": self._answer.model,
            "status": status or ("incomplete" if cut else "completed"),
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output,
            "usage": usage,
            "tools": given["tools"] or [],
            "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else "auto",
            "parallel_tool_calls": False,
            "store": False,
        }
