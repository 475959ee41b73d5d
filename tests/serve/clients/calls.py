"""Calls of Python programs that speak OpenAI's API: `python calls.py CLIENT URL MODEL` prints {call: what failed}.

Each function of a client's class is one call. It asserts what the program shows to its user.
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


class LiteLLM:
    def __init__(self):
        import litellm

        litellm.suppress_debug_info = True
        self.litellm = litellm
        self.common = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none", "max_retries": 0}

    def chat(self, messages=HELLO, **more):
        given = {**self.common, "messages": messages, "max_tokens": 20, "temperature": 0} | more
        answer = self.litellm.completion(**given)
        if not more.get("stream"):
            assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
        return answer

    def stream(self):
        text = "".join(piece.choices[0].delta.content or "" for piece in self.chat(stream=True))
        assert text == self.chat().choices[0].message.content

    def tools(self):
        [call] = self.chat(tools=[TOOL], tool_choice="required", max_tokens=60).choices[0].message.tool_calls
        assert "city" in json.loads(call.function.arguments)

    def tool_result(self):
        self.chat(RESULT, tools=[{"type": "function", "function": {"name": "now"}}])

    def structured_with_tools(self):
        message = self.chat(tools=[TOOL], response_format=FORM, max_tokens=60).choices[0].message
        assert "city" in json.loads(message.content or message.tool_calls[0].function.arguments)

    def choices(self):
        assert len(self.chat(n=40, max_tokens=2).choices) == 40

    def top_p_of_0(self):
        assert self.chat(temperature=1, top_p=0).choices == self.chat().choices

    def structured(self):
        City.model_validate_json(self.chat(response_format=City, max_tokens=60).choices[0].message.content)

    def responses(self):
        answer = self.litellm.responses(**self.common, input="Hello?", max_output_tokens=20)
        assert answer.output[0].content[0].text


class LangChain:
    def __init__(self):
        from langchain_openai import ChatOpenAI

        common = {"base_url": URL, "api_key": "none", "max_retries": 0}
        self.make = lambda **more: ChatOpenAI(model=MODEL, **common, **{"max_tokens": 60, "temperature": 0, **more})

    def chat(self, messages=HELLO):
        assert self.make().invoke(messages).content

    def stream(self):
        assert "".join(piece.content for piece in self.make().stream(HELLO)) == self.make().invoke(HELLO).content

    def tools(self):
        [call] = self.make().bind_tools([TOOL], tool_choice="any").invoke(HELLO).tool_calls
        assert "city" in call["args"]

    def tool_result(self):  # langchain itself refuses empty arguments
        result = json.loads(json.dumps(RESULT).replace('"arguments": ""', '"arguments": "{}"'))
        assert self.make().invoke(result).content

    def structured(self):
        assert isinstance(self.make().with_structured_output(City).invoke(HELLO), City)

    def structured_by_tool(self):
        assert isinstance(self.make().with_structured_output(City, method="function_calling").invoke(HELLO), City)

    def structured_by_json_mode(self):
        assert isinstance(self.make().with_structured_output(None, method="json_mode").invoke(HELLO), dict)

    def responses(self):
        made = self.make(use_responses_api=True)
        assert "".join(piece.text for piece in made.stream(HELLO)) == made.invoke(HELLO).text != ""


class Instructor:
    def __init__(self):
        import instructor
        from openai import OpenAI

        self.modes, self.wrap = instructor.Mode, instructor.from_openai
        self.plain = OpenAI(base_url=URL, api_key="none", max_retries=0)

    def _ask(self, mode, **more):
        given = {"model": MODEL, "messages": HELLO, "max_tokens": 60, "max_retries": 1, **more}
        return self.wrap(self.plain, mode=mode).chat.completions.create(response_model=City, **given)

    def tools(self):
        assert isinstance(self._ask(self.modes.TOOLS), City)

    def tools_strict(self):
        assert isinstance(self._ask(self.modes.TOOLS_STRICT), City)

    def structured(self):
        assert isinstance(self._ask(self.modes.JSON_SCHEMA), City)

    def responses_tools(self):
        given = {"model": MODEL, "input": "Hello?", "max_output_tokens": 60, "response_model": City}
        client = self.wrap(self.plain, mode=self.modes.RESPONSES_TOOLS)
        assert isinstance(client.responses.create(**given, max_retries=1), City)

    def stream(self):
        client = self.wrap(self.plain, mode=self.modes.TOOLS)
        parts = client.chat.completions.create_partial(model=MODEL, messages=HELLO, max_tokens=60, response_model=City)
        assert list(parts)[-1].unit in ("C", "F")


class PydanticAI:
    def __init__(self):
        from pydantic_ai import Agent, NativeOutput
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=URL, api_key="none")
        self.native, settings = NativeOutput, {"max_tokens": 90, "temperature": 0}
        self.agent = lambda kind=OpenAIChatModel, **more: Agent(
            kind(MODEL, provider=provider), model_settings=settings, retries=0, **more
        )
        self.responses_model = OpenAIResponsesModel

    def chat(self):
        assert self.agent(instructions="Be brief.").run_sync("Hello?").output

    def history(self):
        agent = self.agent(system_prompt="Be brief.")
        first = agent.run_sync("Hello?")
        assert agent.run_sync("And?", message_history=first.all_messages()).output
        assert agent.run_sync(message_history=first.all_messages(), instructions="Again.").output

    def stream(self):
        streamed = self.agent().run_stream_sync("Hello?")
        assert list(streamed.stream_text())[-1] == self.agent().run_sync("Hello?").output

    def tools(self):
        assert isinstance(self.agent(output_type=City).run_sync("Hello?").output, City)

    def structured(self):
        assert isinstance(self.agent(output_type=self.native(City)).run_sync("Hello?").output, City)

    def structured_with_tools(self):
        made = self.agent(output_type=self.native(City), tools=[weather])
        assert isinstance(made.run_sync("Hello?").output, City)

    def responses(self):
        made = self.agent(self.responses_model, instructions="Be brief.")
        assert made.run_sync("Hello?").output

    def responses_structured(self):
        made = self.agent(self.responses_model, output_type=self.native(City))
        assert isinstance(made.run_sync("Hello?").output, City)


class LLM:
    def __init__(self):
        from llm.default_plugins.openai_models import Chat

        self.model = Chat("quern", model_name=MODEL, api_base=URL, supports_schema=True, supports_tools=True)
        self.model.key = "none"

    def chat(self):
        assert self.model.prompt("Hello?", system="Be brief.", stream=False, max_tokens=20).text()

    def stream(self):
        given = {"max_tokens": 20, "temperature": 0}
        pieces = list(self.model.prompt("Hello?", **given))
        assert "".join(pieces) == self.model.prompt("Hello?", stream=False, **given).text() != ""

    def conversation(self):
        talk = self.model.conversation()
        assert talk.prompt("Hello?", max_tokens=20).text() and talk.prompt("And?", max_tokens=20).text()

    def tools(self):
        assert self.model.chain("Hello?", tools=[weather], options={"max_tokens": 20}).text()

    def structured(self):
        City.model_validate_json(self.model.prompt("Hello?", schema=City, max_tokens=60).text())


def main():
    logging.disable(logging.CRITICAL)
    kind, results = {"langchain-openai": LangChain, "pydantic-ai": PydanticAI}.get(CLIENT), {}
    kind = kind or {"litellm": LiteLLM, "instructor": Instructor, "llm": LLM}[CLIENT]
    calls = {name: getattr(kind, name) for name in vars(kind) if not name.startswith("_")}
    if kind in (LiteLLM, LangChain):
        calls |= {name: lambda client, given=given: client.chat(given) for name, given in ORDERS.items()}
    client = kind()
    for name, call in calls.items():
        try:
            call(client)
            results[name] = ""
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


main()
