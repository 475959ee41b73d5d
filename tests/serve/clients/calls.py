"""Calls of Python programs that speak OpenAI's API: `python calls.py CLIENT URL MODEL` prints {call: what failed}.

Each entry of a client's table is one call, which tells whether the program shows its user what it should.
"""

import json
import logging
import sys
from typing import Annotated, Literal

from pydantic import BaseModel, Field

CLIENT, URL, MODEL = sys.argv[1:]
HELLO = [{"role": "user", "content": "Hello?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Now.", "parameters": CITY}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
ORDERS = {
    "two users": [*HELLO, *HELLO],
    "two assistants": [*HELLO, *[{"role": "assistant", "content": "Hi."}] * 2, *HELLO],
    "system later": [*HELLO, {"role": "system", "content": "Be brief."}],
    "system alone": [{"role": "system", "content": "Be brief."}],
    "assistant last": [*HELLO, {"role": "assistant", "content": "Well, "}],
    "assistant first": [{"role": "assistant", "content": "Ask me."}, *HELLO],
}
NO_ARGUMENTS = {"id": "c", "type": "function", "function": {"name": "now", "arguments": ""}}
RESULT = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [NO_ARGUMENTS]}]
RESULT += [{"role": "tool", "tool_call_id": "c", "content": "12:00"}]


class City(BaseModel):
    city: Annotated[str, Field(max_length=8)]
    unit: Literal["C", "F"]


def weather(city: str) -> str:
    """Weather of a city."""
    return f"Rain in {city}."


def litellm():
    import litellm

    litellm.suppress_debug_info = True
    common = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "max_retries": 0}

    def ask(messages=HELLO, **more):
        return litellm.completion(**common, messages=messages, **{"max_tokens": 20, "temperature": 0, **more})

    def told(messages=HELLO, **more):
        message = ask(messages, **more).choices[0].message
        return message.content or message.tool_calls[0].function.arguments

    def joined():
        return "".join(piece.choices[0].delta.content or "" for piece in ask(stream=True))

    def responses():
        return litellm.responses(**common, input="Hello?", max_output_tokens=20).output[0].content[0].text

    now = [{"type": "function", "function": {"name": "now"}}]
    both = {"tools": [TOOL], "response_format": FORM, "max_tokens": 60}
    return {
        "chat": told,
        "stream": lambda: joined() == told(),
        "tools": lambda: "city" in json.loads(told(tools=[TOOL], tool_choice="required", max_tokens=60)),
        "tool result": lambda: told(RESULT, tools=now),
        "structured with tools": lambda: "city" in json.loads(told(**both)),
        "choices": lambda: len(ask(n=40, max_tokens=2).choices) == 40,
        "top_p of 0": lambda: ask(temperature=1, top_p=0).choices == ask().choices,
        "structured": lambda: City.model_validate_json(told(response_format=City, max_tokens=60)),
        "responses": responses,
    } | {name: lambda given=given: told(given) for name, given in ORDERS.items()}


def langchain_openai():
    from langchain_openai import ChatOpenAI

    def made(**more):
        common = {"model": MODEL, "base_url": URL, "api_key": "none", "max_retries": 0}
        return ChatOpenAI(**common, **{"max_tokens": 60, "temperature": 0, **more})

    def same(model, text):
        return "".join(map(text, model.stream(HELLO))) == text(model.invoke(HELLO)) != ""

    def structured(kind=City, **how):
        return made().with_structured_output(kind, **how).invoke(HELLO)

    # langchain itself refuses empty arguments
    result = json.loads(json.dumps(RESULT).replace('"arguments": ""', '"arguments": "{}"'))
    tools = made().bind_tools([TOOL], tool_choice="any")
    return {
        "chat": lambda: made().invoke(HELLO).content,
        "stream": lambda: same(made(), lambda piece: piece.content),
        "tools": lambda: ["city" in call["args"] for call in tools.invoke(HELLO).tool_calls] == [True],
        "tool result": lambda: made().invoke(result).content,
        "structured": lambda: isinstance(structured(), City),
        "structured by tool": lambda: isinstance(structured(method="function_calling"), City),
        "structured by JSON mode": lambda: isinstance(structured(None, method="json_mode"), dict),
        "responses": lambda: same(made(use_responses_api=True), lambda piece: piece.text),
    } | {name: lambda given=given: made().invoke(given).content for name, given in ORDERS.items()}


def instructor():
    from instructor import Mode, from_openai
    from openai import OpenAI

    plain = OpenAI(base_url=URL, api_key="none", max_retries=0)
    common = {"model": MODEL, "response_model": City, "max_retries": 1}
    chat = {**common, "messages": HELLO, "max_tokens": 60}

    def parts():
        made = from_openai(plain, mode=Mode.TOOLS).chat.completions
        return list(made.create_partial(**{**chat, "max_retries": 0}))

    def responses():
        made = from_openai(plain, mode=Mode.RESPONSES_TOOLS).responses
        return isinstance(made.create(**common, input="Hello?", max_output_tokens=60), City)

    def ask(mode):
        return lambda: isinstance(from_openai(plain, mode=mode).chat.completions.create(**chat), City)

    asked = {"tools": Mode.TOOLS, "tools, strict": Mode.TOOLS_STRICT, "structured": Mode.JSON_SCHEMA}
    return {name: ask(mode) for name, mode in asked.items()} | {
        "responses with tools": responses,
        "stream": lambda: parts()[-1].unit in ("C", "F"),
    }


def pydantic_ai():
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider, settings = OpenAIProvider(base_url=URL, api_key="none"), {"max_tokens": 90, "temperature": 0}

    def agent(kind=OpenAIChatModel, **more):
        return Agent(kind(MODEL, provider=provider), model_settings=settings, retries=0, **more)

    def said(kind=OpenAIChatModel, **more):
        return agent(kind, **more).run_sync("Hello?").output

    def history():
        asked = agent(system_prompt="Be brief.")
        before = asked.run_sync("Hello?").all_messages()
        following = asked.run_sync("And?", message_history=before).output
        return following and asked.run_sync(message_history=before, instructions="Again.").output

    return {
        "chat": lambda: said(instructions="Be brief."),
        "history": history,
        "stream": lambda: list(agent().run_stream_sync("Hello?").stream_text())[-1] == said(),
        "tools": lambda: isinstance(said(output_type=City), City),
        "structured": lambda: isinstance(said(output_type=NativeOutput(City)), City),
        "structured with tools": lambda: isinstance(said(output_type=NativeOutput(City), tools=[weather]), City),
        "responses": lambda: said(OpenAIResponsesModel, instructions="Be brief."),
        "structured responses": lambda: isinstance(said(OpenAIResponsesModel, output_type=NativeOutput(City)), City),
    }


def llm():
    from llm.default_plugins.openai_models import Chat

    model = Chat("quern", model_name=MODEL, api_base=URL, supports_schema=True, supports_tools=True)
    model.key, given = "none", {"max_tokens": 20, "temperature": 0}

    def talk():
        conversation = model.conversation()
        return all(conversation.prompt(text, max_tokens=20).text() for text in ("Hello?", "And?"))

    def joined():
        return "".join(model.prompt("Hello?", **given))

    return {
        "chat": lambda: model.prompt("Hello?", system="Be brief.", stream=False, max_tokens=20).text(),
        "stream": lambda: joined() == model.prompt("Hello?", stream=False, **given).text() != "",
        "conversation": talk,
        "tools": lambda: model.chain("Hello?", tools=[weather], options={"max_tokens": 20}).text(),
        "structured": lambda: City.model_validate_json(model.prompt("Hello?", schema=City, max_tokens=60).text()),
    }


def main():
    logging.disable(logging.CRITICAL)
    results = {}
    for name, call in globals()[CLIENT.replace("-", "_")]().items():
        try:
            results[name] = "" if call() else "not what was expected"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


main()
