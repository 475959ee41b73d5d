"""The form that a request demands of the reply: `response_format`, `structured_outputs`, `tools`, `tool_choice`.

`structured_outputs` (json, regex or choice) is vLLM's addition. The caller's tools are described to the model in the
system message; a call is one JSON object between the model's own tool tokens, and its form is enforced.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from quern.generate.grammar import Grammar, GrammarError, Grammars
from quern.serve.requests.errors import Items, Strict, invalid

MAX_TOOLS = 64
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_Schema = dict[str, Any]
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class JsonSchema(Strict):
    name: Name
    schema_: Annotated[_Schema, Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """Exactly one of these."""

    json_: Annotated[_Schema | None, Field(alias="json")] = None
    regex: Annotated[str | None, Field(min_length=1, max_length=4096)] = None
    choice: Annotated[Items[Annotated[str, Field(min_length=1)]] | None, Field(min_length=1, max_length=1024)] = None


class Function(Strict):
    name: Name
    description: str | None = None
    parameters: _Schema | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def form_of(
    grammars: Grammars, response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> tuple[Grammar, str]:
    """The form of the reply's text, and the field that demands it.

    Raises:
        ApiError: A schema or an expression cannot be followed.
    """
    if structured is not None:
        given = [structured.json_ is not None, structured.regex is not None, structured.choice is not None]
        if sum(given) != 1 or (response_format is not None and response_format.type != "text"):
            raise invalid("structured_outputs", "give exactly one of json, regex and choice, and no response_format")
        param = f"structured_outputs.{('json', 'regex', 'choice')[given.index(True)]}"
    else:
        own = None if response_format is None else response_format.json_schema
        param = "response_format" if own is None else "response_format.json_schema.schema"
        structured = StructuredOutputs.model_validate({"json": {"type": "object"} if own is None else own.schema_})
    try:
        if structured.json_ is not None:
            return grammars.json(structured.json_), param
        form = grammars.regex(structured.regex) if structured.regex else grammars.choice(structured.choice or [])
        return form, param
    except GrammarError as error:
        raise invalid(param, error) from None


def calls_of(grammars: Grammars, tools: Sequence[Tool], choice: ToolChoice | None) -> Grammar:
    """The form of a call. Raises ApiError for a wrong schema or an unknown name."""
    if not tools:
        raise invalid("tool_choice", "there are no tools: send them in 'tools'")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", f"two of them are called '{max(names, key=names.count)}'")
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise invalid("tool_choice", f"'{choice.function.name}' is none of the tools: {', '.join(names)}")
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
    for tool in tools:
        try:
            grammars.json(tool.function.parameters or NO_ARGUMENTS)
        except GrammarError as error:
            raise invalid(f"tools[{names.index(tool.function.name)}].function.parameters", error) from None
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        definitions[place] = _moved(tool.function.parameters or NO_ARGUMENTS, f"#/$defs/{place}")
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": f"#/$defs/{place}"}}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    try:
        return grammars.json({"anyOf": calls, "$defs": definitions})
    except GrammarError as error:
        raise invalid("tools", error) from None


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references point into itself, for a larger schema that holds it at `place`."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{place}{one[1:]}" if key == "$ref" and isinstance(one, str) and one[:1] == "#" else _moved(one, place)
        for key, one in schema.items()
    }
